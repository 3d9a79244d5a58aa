"""`load` and `store` with a mask: the elements that the mask leaves out are not touched, and may be
out of bounds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import nests, views
from cokernel.compiler.access import picked_spot, read, write
from cokernel.compiler.context import Context
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops.apply import apply
from cokernel.compiler.ops.control import outlined
from cokernel.compiler.ops.masks import fail_index, fits_a_register, lanes_of, masked_store
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.probes import (
    Access,
    access_site,
    is_probed,
    probe_masked,
    probe_run,
    telling,
)
from cokernel.compiler.refs import View
from cokernel.compiler.spots import Spot, Spots
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import (
    Scalar,
    Value,
    is_small,
    load_element,
    make_packed,
    store_element,
)

PL = _jax.pallas_primitives


class Place:
    """Where the elements of a masked access are: a view, with an offset that is known only when the
    program runs in some of its dimensions.
    """

    def __init__(self, context: Context, ref: Any, transforms: Sequence[Any], operation: str):
        self.operation = operation
        last: Any = transforms[-1] if transforms else None
        self.indexer = last
        self.starts: list[tuple[int, Value]] = []
        if isinstance(last, _jax.NDIndexer) and _is_box(last):
            self.starts = [
                (dimension, index.start)
                for dimension, index in enumerate(last.indices)
                if isinstance(index, _jax.Slice) and not _is_known(context, index.start)
            ]
        if not self.starts:
            self.view = resolve(context, ref, transforms, operation, access=Access.NONE)
            self.shape = tuple(self.view.shape)
            return
        self.view = resolve(context, ref, transforms[:-1], operation, access=Access.NONE)
        self.shape = tuple(index.size for index in last.indices if isinstance(index, _jax.Slice))

    @property
    def is_checked(self) -> bool:
        """Whether all elements are known to be in bounds."""
        return not self.starts


def _is_box(indexer: Any) -> bool:
    return all(
        isinstance(index, _jax.Slice) or not getattr(index, "shape", ())
        for index in indexer.indices
    )


def _is_known(context: Context, start: Any) -> bool:
    return not isinstance(start, Value) or isinstance(context.index(start), int)


def broadcast(context: Context, value: Value, shape: Sequence[int]) -> Value:
    """The value repeated along dimensions in front of its own, up to a shape."""
    if value.shape == tuple(shape):
        return value
    first = len(shape) - len(value.shape)
    return views.take_view(
        context, value, views.broadcast(value.shape, shape, range(first, len(shape)))
    )


def walk(
    context: Context,
    place: Place,
    mask: Value,
    operands: Sequence[Value],
    step: Any,
    access: Access,
) -> None:
    """Runs `step(function, index, spot, operands)` for each element that the mask selects. `access`
    is what that does to places that are checked only here.
    """
    if 0 in place.shape:
        return
    positions: list[Value] = []
    if not place.is_checked:
        for index in place.indexer.indices:
            start = index.start if isinstance(index, _jax.Slice) else index
            number = start if not isinstance(start, Value) else context.index(start)
            register = context.function.index(
                number if isinstance(number, ir.Value) else int(number)
            )
            positions.append(Scalar((), np.dtype(np.int64), register))
    spots = Spots(context, place.view)
    fixed = [place.view.buffer(), context.materialise(mask), *positions, *spots.operands]

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        function = context.function
        base, mask_in, *rest = inside
        starts = [start.register for start in rest[: len(positions)]]
        rest = rest[len(positions) :]
        origin, rest = rest[: len(spots.operands)], rest[len(spots.operands) :]
        with function.nest(place.shape) as index:
            taken = mask_in.element(ElementBuilder(function), index)
            with function.builder.if_then(taken):
                where = _where(context, function, place, starts, index)
                address = base.element_address(function, where)
                spot = spots.at(function, origin, address, where)
                if not place.is_checked and access is not Access.NONE and is_probed(context):
                    site = access_site(context, place.view, place.operation)
                    itemsize = base.dtype.itemsize
                    with telling(context, place.view, access):
                        probe_run(context, site, access, spot.address, itemsize, itemsize)
                step(function, index, spot, rest)
        return []

    outlined(context, place.operation, [*fixed, *operands], [], build)


def _where(
    context: Context,
    function: FunctionBuilder,
    place: Place,
    starts: Sequence[ir.Value],
    index: Sequence[Index],
) -> list[Index]:
    """The index into the view of an element of the access, checked."""
    if place.is_checked:
        return list(index)
    remaining = iter(index)
    where: list[Index] = []
    for dimension, (kind, start) in enumerate(zip(place.indexer.indices, starts, strict=True)):
        position: Index = start
        if isinstance(kind, _jax.Slice):
            position = function.add(start, function.multiply(next(remaining), kind.stride))
        if context.kernel.bounds_checks:
            _check(context, place, dimension, function.index(position))
        where.append(position)
    return where


def _check(context: Context, place: Place, dimension: int, position: ir.Value) -> None:
    extent = place.view.limit(dimension)
    good = context.builder.icmp_unsigned("<", position, context.function.index(extent))

    def record() -> None:
        fail_index(context, place.view, dimension, position, extent, place.operation)

    context.check(good, record)


@rule(PL.load_p)
def _masked_load(context: Context, eqn: Any, *operands: Any) -> Value:
    ref, transforms, mask, other = eqn.params["args_tree"].unflatten(operands)
    if mask is None:
        view = resolve(context, ref, transforms, "load", access=Access.READ)
        return read(context, view)
    return _load(context, Place(context, ref, transforms, "load"), mask, other)


def _load(context: Context, place: Place, mask: Value, other: Value | None) -> Value:
    mask = broadcast(context, mask, place.shape)
    dtype = np.dtype(place.view.dtype)
    other = None if other is None else broadcast(context, other, place.shape)
    if place.is_checked:
        probe_masked(context, place.view, mask, Access.READ, place.operation)
        value = read(context, place.view)
        # Without `other` the elements that are left out are undefined.
        return value if other is None else _select(context, mask, value, other)
    target = nests.dense_buffer(context, place.shape, dtype)
    if other is None:
        nests.fill_zero(context, target.address, target.size * dtype.itemsize)
    else:
        context.store(target, other, is_fresh=True)

    def step(function: FunctionBuilder, index: list[Index], spot: Spot, inside: list[Any]) -> None:
        register = load_element(function, spot.address, dtype)
        store_element(function, register, inside[0].element_address(function, index), dtype)

    walk(context, place, mask, [target], step, Access.READ)
    if place.shape and not is_small(place.shape, dtype):
        return target
    return make_packed(place.shape, dtype, context.pack(target))


def _select(context: Context, mask: Value, value: Value, other: Value) -> Value:
    # The cases of select_n come in the order of the truth value.
    return apply(context, lax.select_n_p, value.shape, value.dtype, mask, other, value)


@rule(PL.swap_p)
def _masked_swap(context: Context, eqn: Any, *operands: Any) -> Value:
    ref, transforms, value, mask = eqn.params["args_tree"].unflatten(operands)
    is_used = not isinstance(eqn.outvars[0], _jax.DropVar)
    if mask is None:
        access = Access.UPDATE if is_used else Access.WRITE
        view = resolve(context, ref, transforms, "store", access=access)
        old = context.keep(read(context, view)) if is_used else value
        write(context, view, value)
        return old
    place = Place(context, ref, transforms, "store")
    mask = broadcast(context, mask, place.shape)
    old = value
    if is_used:
        value, mask = context.keep(value), context.keep(mask)
        old = context.keep(_load(context, place, mask, value))
    _store(context, place, mask, value)
    return old


def _store(context: Context, place: Place, mask: Value, value: Value) -> None:
    if place.is_checked:
        probe_masked(context, place.view, mask, Access.WRITE, place.operation)
    if place.is_checked and place.view.indices is None:
        buffer = place.view.buffer()
        if fits_a_register(buffer) and not place.view.hangs:
            taken = lanes_of(context, mask)
            masked_store(context, context.pack(value), buffer.address, taken, buffer.dtype)
            return
    elif place.is_checked:
        _store_picked(context, place.view, mask, value)
        return
    dtype = np.dtype(place.view.dtype)

    def step(function: FunctionBuilder, index: list[Index], spot: Spot, inside: list[Any]) -> None:
        register = inside[0].element(ElementBuilder(function), index)
        with spot.written(function):
            store_element(function, register, spot.address, dtype)

    walk(context, place, mask, [context.materialise(value)], step, Access.WRITE)


def _store_picked(context: Context, view: View, mask: Value, value: Value) -> None:
    """Stores through arrays of indices, in order, so that of equal indices the last one wins."""
    indices = view.indices
    assert indices is not None
    dtype = np.dtype(view.dtype)
    operands = [value, mask, *indices.arrays]

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        base, value_in, mask_in, *arrays = inside
        function = context.function
        with function.nest(view.shape) as index:
            builder = ElementBuilder(function)
            with function.builder.if_then(mask_in.element(builder, index)):
                spot = picked_spot(context, builder, indices, base, arrays, index)
                register = value_in.element(builder, index)
                with spot.written(function):
                    store_element(function, register, spot.address, dtype)
        return []

    prepared = [context.materialise(item) if item.shape else item for item in operands]
    outlined(context, "store", [view.strided_part(), *prepared], [], build)
