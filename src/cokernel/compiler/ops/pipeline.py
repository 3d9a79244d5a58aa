"""The body of a pipeline where `emit_pipeline` is a primitive: a call given blocks of Refs."""

from typing import Any

import jax
import numpy as np

from cokernel import _jax
from cokernel.compiler import nests
from cokernel.compiler.context import Context
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.refs import AnyRef, BoundRef, root_of
from cokernel.compiler.values import Value, store_element


@rule(_jax.pipeline_body_p)
def _pipeline_body(context: Context, eqn: Any, *operands: Any) -> list[Value]:
    step, constants, refs = eqn.params["in_tree"].unflatten(operands)
    body = _jax.partial_eval.convert_constvars_jaxpr(eqn.params["jaxpr"])
    # Behind the constants of the body stand the extents of the grid (see `pipelines.py`).
    own = len(eqn.params["jaxpr"].constvars)
    constants, extents = list(constants[:own]), constants[own:]
    arguments = constants
    if eqn.params["_explicit_indices"]:
        arguments += jax.tree.leaves(step)
    avals = [variable.aval for variable in body.invars[len(arguments) :]]
    arguments += [_bound(ref, aval) for ref, aval in zip(_flat(refs), avals, strict=True)]
    outer = context.pipeline_position
    # In memory, because the body may ask for its position inside a loop that is a function of its
    # own.
    position = nests.dense_buffer(context, (2, len(step.index)), np.dtype(np.int32))
    for row, numbers in enumerate((step.index, extents)):
        for axis, number in enumerate(numbers):
            address = position.element_address(context.function, [row, axis])
            store_element(context.function, context.scalar(number), address, position.dtype)
    context.pipeline_position = position
    try:
        return lower_jaxpr(context, body, arguments)
    finally:
        context.pipeline_position = outer


def _flat(refs: Any) -> list[Any]:
    return jax.tree.leaves(refs, is_leaf=lambda item: isinstance(item, AnyRef))


def _bound(ref: Any, aval: Any) -> Any:
    root, transforms = root_of(ref)
    if not transforms:
        return root
    return BoundRef(tuple(aval.shape), np.dtype(aval.dtype), root, transforms)
