"""Rules that move elements about without computing anything: broadcast, reshape, transpose, slice,
concatenate, pad, ..."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from llvmlite import ir

from cokernel.compiler import dtypes, nests, views
from cokernel.compiler.context import Context
from cokernel.compiler.function import ElementBuilder, Index
from cokernel.compiler.ops.apply import convert
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Value,
    array_constant,
    concatenate_vectors,
    is_small,
    make_packed,
    shuffle,
)


@rule(lax.broadcast_in_dim_p)
def broadcast_in_dim(context: Context, eqn: Any, operand: Value) -> Value:
    """The operand repeated along new dimensions and along those of extent one."""
    view = views.broadcast(operand.shape, eqn.params["shape"], eqn.params["broadcast_dimensions"])
    return views.take_view(context, operand, view)


@rule(lax.reshape_p)
def reshape(context: Context, eqn: Any, operand: Value) -> Value:
    """The elements in row-major order, or in the order of `dimensions`, under a new shape."""
    permutation = eqn.params["dimensions"]
    if permutation is not None:
        operand = views.take_view(context, operand, views.transposed(operand.shape, permutation))
    return views.reshape(context, operand, eqn.params["new_sizes"])


@rule(lax.squeeze_p)
def squeeze(context: Context, eqn: Any, operand: Value) -> Value:
    """The operand without some of its dimensions of extent one."""
    dropped = [dimension % len(operand.shape) for dimension in eqn.params["dimensions"]]
    return views.take_view(context, operand, _without(operand.shape, dropped))


def _without(
    shape: Sequence[int], dropped: Sequence[int], first: Sequence[Index] | None = None
) -> views.View:
    kept = [dimension for dimension in range(len(shape)) if dimension not in dropped]
    return views.View(
        tuple(shape[dimension] for dimension in kept),
        tuple(first or [0] * len(shape)),
        tuple((dimension, 1) for dimension in kept),
    )


@rule(lax.transpose_p)
def transpose(context: Context, eqn: Any, operand: Value) -> Value:
    """The operand with its dimensions in another order."""
    return views.take_view(
        context, operand, views.transposed(operand.shape, eqn.params["permutation"])
    )


@rule(lax.slice_p)
def slice_(context: Context, eqn: Any, operand: Value) -> Value:
    """A box of the operand with static bounds, and a step per dimension."""
    view = views.sliced(
        list(map(int, eqn.params["start_indices"])),
        eqn.outvars[0].aval.shape,
        list(map(int, eqn.params["strides"] or [1] * len(operand.shape))),
    )
    return views.take_view(context, operand, view)


@rule(lax.rev_p)
def rev(context: Context, eqn: Any, operand: Value) -> Value:
    """The operand with the order turned round along some dimensions."""
    view = views.reversed_along(operand.shape, eqn.params["dimensions"])
    return views.take_view(context, operand, view)


@rule(lax.split_p)
def split(context: Context, eqn: Any, operand: Value) -> list[Value]:
    """Consecutive pieces along one axis."""
    axis = eqn.params["axis"]
    pieces, start = [], 0
    # The sizes may be numpy integers.
    for size in map(int, eqn.params["sizes"]):
        starts = [0] * len(operand.shape)
        starts[axis] = start
        shape = list(operand.shape)
        shape[axis] = size
        pieces.append(views.take_view(context, operand, views.sliced(starts, shape)))
        start += size
    return pieces


@rule(lax.unstack_p)
def unstack(context: Context, eqn: Any, operand: Value) -> list[Value]:
    """The slices along one axis, without that axis."""
    axis = eqn.params["axis"] % len(operand.shape)
    pieces = []
    for position in range(operand.shape[axis]):
        first = [0] * len(operand.shape)
        first[axis] = position
        pieces.append(views.take_view(context, operand, _without(operand.shape, [axis], first)))
    return pieces


@rule(lax.stack_p)
def stack(context: Context, eqn: Any, *operands: Value) -> Value:
    """The operands side by side along a new axis."""
    rank = len(eqn.outvars[0].aval.shape)
    axis = eqn.params["axis"] % rank
    kept = [dimension for dimension in range(rank) if dimension != axis]
    rows = []
    for operand in operands:
        shape = [*operand.shape[:axis], 1, *operand.shape[axis:]]
        rows.append(views.take_view(context, operand, views.broadcast(operand.shape, shape, kept)))
    return concatenate_values(context, rows, axis)


@rule(lax.tile_p)
def tile(context: Context, eqn: Any, operand: Value) -> Value:
    """The operand repeated as a whole along its dimensions."""
    reps = eqn.params["reps"]
    shape = [1] * (len(reps) - len(operand.shape)) + list(operand.shape)
    operand = views.reshape(context, operand, shape)
    doubled = [extent for pair in zip(reps, shape, strict=True) for extent in pair]
    positions = range(1, 2 * len(shape), 2)
    repeated = views.take_view(context, operand, views.broadcast(shape, doubled, positions))
    return views.reshape(context, repeated, eqn.outvars[0].aval.shape)


@rule(lax.concatenate_p)
def concatenate(context: Context, eqn: Any, *operands: Value) -> Value:
    """The operands one after the other along an existing axis."""
    return concatenate_values(context, operands, eqn.params["dimension"])


def concatenate_values(context: Context, operands: Sequence[Value], axis: int) -> Value:
    """The operands, which agree in dtype and in all other extents, one after the other along
    `axis`."""
    operands = [operand for operand in operands if operand.shape[axis]] or list(operands[:1])
    if len(operands) == 1:
        return operands[0]
    dtype = operands[0].dtype
    shape = list(operands[0].shape)
    shape[axis] = sum(operand.shape[axis] for operand in operands)
    if 0 in shape:
        return views.empty(shape, dtype)
    if is_small(shape, dtype):
        return _concatenate_registers(context, operands, axis, shape)
    target = nests.dense_buffer(context, shape, dtype)
    start = 0
    for operand in operands:
        context.store(
            _box(context, target, axis, start, operand.shape[axis]), operand, is_fresh=True
        )
        start += operand.shape[axis]
    return target


def _concatenate_registers(
    context: Context, operands: Sequence[Value], axis: int, shape: Sequence[int]
) -> Value:
    register = concatenate_vectors(
        context.function, [context.pack(operand) for operand in operands]
    )
    # In which lane of the register each element of each operand is, put side by side as the result
    # wants them.
    lanes, start = [], 0
    for operand in operands:
        lanes.append(np.arange(start, start + operand.size).reshape(operand.shape))
        start += operand.size
    picks = np.concatenate(lanes, axis).ravel().tolist()
    return make_packed(shape, operands[0].dtype, shuffle(context.function, register, picks))


def _box(context: Context, target: Buffer, axis: int, start: int, size: int) -> Buffer:
    """The part of a buffer from `start` to `start + size` along `axis`."""
    index = [0] * len(target.shape)
    index[axis] = start
    shape = list(target.shape)
    shape[axis] = size
    return target.view(
        tuple(shape), target.strides, target.element_address(context.function, index)
    )


@rule(lax.pad_p)
def pad(context: Context, eqn: Any, operand: Value, padding: Value) -> Value:
    """The operand with a value put around it and between its elements; negative padding takes
    elements away."""
    # jax.numpy passes NumPy's integers here and in the slice below.
    config = [tuple(map(int, amounts)) for amounts in eqn.params["padding_config"]]
    shape = tuple(eqn.outvars[0].aval.shape)
    fill = context.scalar(padding)
    if 0 in shape:
        return views.empty(shape, operand.dtype)
    # Per dimension the elements that survive: the first of them, how many, and where the first one
    # lands.
    kept = [
        _surviving(extent, size, *amounts)
        for extent, size, amounts in zip(operand.shape, shape, config, strict=True)
    ]
    if any(count == 0 for _, count, _ in kept):
        return views.broadcast_scalar(context, fill, shape, operand.dtype)
    steps = [interior + 1 for _, _, interior in config]
    inner = views.take_view(
        context,
        operand,
        views.sliced([first for first, _, _ in kept], [count for _, count, _ in kept]),
    )
    if is_small(shape, operand.dtype):
        register = concatenate_vectors(context.function, [context.pack(inner), fill])
        lanes = np.full(shape, inner.size)
        where = tuple(
            slice(place, place + (count - 1) * step + 1, step)
            for (_, count, place), step in zip(kept, steps, strict=True)
        )
        lanes[where] = np.arange(inner.size).reshape(inner.shape)
        return make_packed(
            shape, operand.dtype, shuffle(context.function, register, lanes.ravel().tolist())
        )
    target = nests.dense_buffer(context, shape, operand.dtype)
    _fill_around(context, target, fill, kept, steps)
    first = target.element_address(context.function, [place for _, _, place in kept])
    strides = tuple(stride * step for stride, step in zip(target.strides, steps, strict=True))
    context.store(target.view(inner.shape, strides, first), inner, is_fresh=True)
    return target


def _surviving(extent: int, size: int, low: int, high: int, interior: int) -> tuple[int, int, int]:
    """Of `extent` elements placed at low, low + step, ...: the first inside [0, size), how many
    are, and its place."""
    step = interior + 1
    first = max(0, -(low // step))
    last = min(extent - 1, (size - 1 - low) // step)
    return first, max(0, last - first + 1), low + first * step


def _fill_around(
    context: Context,
    target: Buffer,
    fill: ir.Value,
    kept: Sequence[tuple[int, int, int]],
    steps: Sequence[int],
) -> None:
    """Writes the padding: everywhere if there is some between the elements, else only around the
    box they fill."""

    def write(region: Buffer) -> None:
        context.store(
            region, views.broadcast_scalar(context, fill, region.shape, target.dtype), is_fresh=True
        )

    if any(step > 1 and count > 1 for (_, count, _), step in zip(kept, steps, strict=True)):
        return write(target)
    # Dimension by dimension: what lies before and after the box, and then go on inside of it.
    for axis, (_, count, place) in enumerate(kept):
        end = place + count
        if place:
            write(_box(context, target, axis, 0, place))
        if end < target.shape[axis]:
            write(_box(context, target, axis, end, target.shape[axis] - end))
        target = _box(context, target, axis, place, count)


@rule(lax.iota_p)
def iota(context: Context, eqn: Any, *dynamic_shape: Value) -> Value:
    """Each element is its own position along one dimension."""
    if dynamic_shape:
        raise NotImplementedError(f"iota of a dynamic shape, in {context.describe()}")
    return positions(context, eqn.params["shape"], eqn.params["dimension"], eqn.params["dtype"])


def positions(context: Context, shape: Sequence[int], dimension: int, dtype: Any) -> Value:
    """An array in which each element is its index along `dimension`."""
    shape, dtype = tuple(shape), np.dtype(dtype)
    if is_small(shape, dtype):
        along = np.arange(shape[dimension]).reshape(
            [-1 if d == dimension else 1 for d in range(len(shape))]
        )
        return array_constant(context.function, np.broadcast_to(along, shape).astype(dtype))
    # Counting in 32 bits is what processors can turn into floats, many at a time.
    if dtypes.is_float(dtype):
        return convert(context, positions(context, shape, dimension, np.int32), dtype)
    register = dtypes.register_type(dtype)

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        position = builder.function.index(index[dimension])
        return position if register.width == 64 else builder.builder.trunc(position, register)

    return Expression(shape, dtype, (), emit, is_cheap=True)


def reinterpret(context: Context, operand: Value, shape: Sequence[int], dtype: Any) -> Value:
    """The bits of the operand as elements of another width: a narrower dtype adds a last dimension,
    a wider one takes it away."""
    shape, dtype = tuple(shape), np.dtype(dtype)
    if 0 in shape:
        return views.empty(shape, dtype)
    if is_small(shape, dtype) or not shape:
        register = context.pack(operand)
        kind = dtypes.lanes(dtypes.register_type(dtype), math.prod(shape))
        return make_packed(shape, dtype, context.builder.bitcast(register, kind))
    if dtype.itemsize > operand.dtype.itemsize:
        # The elements must lie side by side and start where the wider ones may.
        buffer = context.copy(operand)
        strides = tuple(stride // operand.shape[-1] for stride in buffer.strides[:-1])
    else:
        buffer = context.materialise(operand)
        strides = (*(stride * shape[-1] for stride in buffer.strides), 1)
    return Buffer(shape, dtype, buffer.address, strides, root=buffer.root, owner=buffer.owner)
