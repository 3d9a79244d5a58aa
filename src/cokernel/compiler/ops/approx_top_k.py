"""`approx_top_k`, which on a processor is exact: the first of all elements in order."""

from typing import Any

import numpy as np
from jax import lax

from cokernel.compiler import views
from cokernel.compiler.context import Context
from cokernel.compiler.ops.apply import convert
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.ops.shape import positions
from cokernel.compiler.ops.sort import sort_by, sort_key
from cokernel.compiler.values import Value


@rule(lax.approx_top_k_p)
def approx_top_k(context: Context, eqn: Any, operand: Value) -> list[Value]:
    """The greatest elements along a dimension, or the least, in order, and where they were."""
    axis = eqn.params["reduction_dimension"] % len(operand.shape)
    key = sort_key(context, operand, is_descending=eqn.params["is_max_k"])
    places = positions(context, operand.shape, axis, np.int32)
    shape = eqn.outvars[0].aval.shape
    view = views.sliced([0] * len(shape), shape)
    values, places = (
        views.take_view(context, result, view)
        for result in sort_by(context, [key], [operand, places], axis)
    )
    return [values, convert(context, places, eqn.outvars[1].aval.dtype)]
