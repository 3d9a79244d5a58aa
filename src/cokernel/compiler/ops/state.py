"""Reads, writes and sums through Refs."""

from typing import Any

import jax
import numpy as np
from jax import lax

from cokernel import _jax
from cokernel.compiler import views
from cokernel.compiler.access import accumulate, read, write
from cokernel.compiler.context import Context
from cokernel.compiler.definedness import unwritten_p
from cokernel.compiler.ops.registry import added_rule, apply_elementwise, element_rule, rule
from cokernel.compiler.ops.scopes import scoped_until_the_end
from cokernel.compiler.probes import Access, Answer, probe
from cokernel.compiler.refs import RefValue
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import Value, array_constant


@rule(_jax.get_p)
def _get(context: Context, eqn: Any, ref: RefValue, *indices: Any) -> Value:
    transforms = jax.tree.unflatten(eqn.params["tree"], indices)
    view = resolve(context, ref, transforms, "read", access=Access.NONE)
    answer = probe(context, view, Access.READ, "read")
    context.answer = None if answer is None else Answer(eqn.invars, view, answer)
    return read(context, view)


@rule(_jax.swap_p)
def _swap(context: Context, eqn: Any, ref: RefValue, value: Value, *indices: Any) -> Value | None:
    transforms = jax.tree.unflatten(eqn.params["tree"], indices)
    is_dropped = isinstance(eqn.outvars[0], _jax.DropVar)
    access = Access.WRITE if is_dropped else Access.UPDATE
    view = resolve(context, ref, transforms, "write", access=access)
    old = None if is_dropped else context.keep(read(context, view))
    write(context, view, value)
    # A dropped result still takes its place in the list of results.
    return value if old is None else old


@rule(_jax.addupdate_p)
def _addupdate(context: Context, eqn: Any, ref: RefValue, value: Value, *indices: Any) -> None:
    transforms = jax.tree.unflatten(eqn.params["tree"], indices)
    view = resolve(context, ref, transforms, "addupdate", access=Access.UPDATE)
    accumulate(context, view, value, lambda left, right: add_values(context, left, right))


def add_values(context: Context, left: Value, right: Value) -> Value:
    """The sum of two values of one shape and dtype, by the rule of `lax.add`."""
    aval = _jax.ShapedArray(left.shape, np.dtype(left.dtype))
    return apply_elementwise(context, element_rule(lax.add_p), {}, aval, [left, right])


@rule(_jax.broadcast_to_p)
def _broadcast_to(context: Context, eqn: Any, operand: Value) -> Value:
    shape = tuple(eqn.params["shape"])
    first = len(shape) - len(operand.shape)
    return views.take_view(
        context, operand, views.broadcast(operand.shape, shape, range(first, len(shape)))
    )


@rule(_jax.empty_p)
def _empty(context: Context, eqn: Any) -> Value:
    # As XLA has it on a CPU, so that a kernel that does not fill it gives the same bits each time.
    aval = eqn.outvars[0].aval
    zero = array_constant(context.function, np.zeros((), aval.dtype))
    return views.take_view(context, zero, views.broadcast((), tuple(aval.shape), ()))


@added_rule(unwritten_p)
def _unwritten(context: Context, eqn: Any) -> RefValue:
    return scoped_until_the_end(context, eqn.outvars[0].aval, "lax.empty")
