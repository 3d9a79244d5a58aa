"""Memory that a program allocates while it runs, and Refs of its own."""

from typing import Any

import numpy as np

from cokernel import _jax
from cokernel.compiler.access import read, write
from cokernel.compiler.context import Context
from cokernel.compiler.few_bits import copied_part_p
from cokernel.compiler.ops.registry import added_rule, rule
from cokernel.compiler.probes import Access
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.refs import AnyRef, BoundRef, RefValue, root_of
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import Expression, Value, make_packed
from cokernel.compiler.window_names import NamedRef, Slots, scope_names, scope_slots


@rule(_jax.pallas_primitives.run_scoped_p)
def _run_scoped(context: Context, eqn: Any, *operands: Any) -> list[Value]:
    body = eqn.params["jaxpr"]
    outer = {
        var: NamedRef(root.memory, root.name)
        for var, operand in zip(body.constvars, operands, strict=True)
        if isinstance(operand, AnyRef)
        for root, _ in [root_of(operand)]
    }
    names = scope_names(body, outer)
    axes = eqn.params["collective_axes"]
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    refs = [
        context.kernel.layout.borrow(context, variable, name)
        if variable in context.program.borrowed
        else context.kernel.layout.in_place(
            context, variable, _scoped(context, variable.aval, name, axes, slots)
        )
        for variable, name, slots in zip(body.invars, names, scope_slots(body), strict=True)
    ]
    results = lower_jaxpr(context, body, refs, constants=operands)
    results = [
        context.keep(context.materialise(r) if isinstance(r, Expression) else r) for r in results
    ]
    for ref in refs:
        context.kernel.layout.release_scoped(context, root_of(ref)[0], "run_scoped")
    return results


def _scoped(
    context: Context, aval: Any, name: str, axes: tuple[str, ...], slots: Slots | None
) -> AnyRef:
    """Memory for one Ref of a scope, which the cores that differ only along `axes` share."""
    sizes = context.program.mesh.shape
    unknown = [axis for axis in axes if axis not in sizes]
    if unknown:
        raise ValueError(
            f"{context.describe()}: run_scoped with collective_axes={axes}: the mesh has no axis "
            f"{unknown[0]!r}, only {', '.join(map(repr, sizes))}"
        )
    own_axes = [axis for axis in sizes if axis not in axes]
    layout = context.kernel.layout
    if not axes:
        return layout.allocate_scoped(context, aval, name, "run_scoped", slots)
    ref = layout.allocate_collective(context, aval, name, [sizes[axis] for axis in own_axes])
    if not own_axes:
        return ref
    # One instance for each position on the other axes; a core sees that of its own.
    index = tuple(
        make_packed((), np.dtype(np.int32), context.axis_coordinate(axis)) for axis in own_axes
    )
    whole = tuple(_jax.Slice(0, extent) for extent in aval.shape)
    indexer = _jax.NDIndexer((*index, *whole), ref.shape, ())
    return BoundRef(tuple(aval.shape), aval.dtype, ref, (indexer,))


@rule(_jax.empty_ref_p)
def _empty_ref(context: Context, eqn: Any) -> RefValue:
    [result] = eqn.outvars
    return scoped_until_the_end(context, result.aval, "empty_ref")


@rule(_jax.ref_p)
def _new_ref(context: Context, eqn: Any, initial: Value) -> RefValue:
    [result] = eqn.outvars
    ref = scoped_until_the_end(context, result.aval, "new_ref")
    write(context, resolve(context, ref, (), "write", access=Access.WRITE), initial)
    return ref


@added_rule(copied_part_p)
def _copied_part(context: Context, eqn: Any, original: RefValue, contents: Value) -> RefValue:
    [result] = eqn.outvars
    ref = scoped_until_the_end(context, result.aval, "bitcast", original.name)
    write(context, resolve(context, ref, (), "write", access=Access.WRITE), contents)
    return ref


def scoped_until_the_end(
    context: Context, aval: Any, operation: str, name: str | None = None
) -> RefValue:
    """Memory whose scope is the rest of the jaxpr that asks for it."""
    ref = context.kernel.layout.allocate_scoped(context, aval, name or operation, operation)
    if context.is_checked:
        # A copy that has not been waited for may still be on its way when nobody uses the Ref.
        context.open_scopes[-1].append((ref, operation))
    return ref


@rule(_jax.freeze_p)
def _freeze(context: Context, eqn: Any, ref: RefValue) -> Value:
    return context.keep(read(context, resolve(context, ref, (), "read", access=Access.READ)))
