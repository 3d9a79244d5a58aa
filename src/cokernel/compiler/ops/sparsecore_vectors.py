"""Operations on a SparseCore's vectors: masked prefix scans, sorting, counting, packing.

Vectors of up to 64 elements stay in registers; longer ones, which the hardware does not have, go
through the same definition written in JAX.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu_sc as plsc
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, nests
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import Kind, i1, i32
from cokernel.compiler.function import ElementBuilder
from cokernel.compiler.ops.apply import convert
from cokernel.compiler.ops.combine import Combiner, Fold
from cokernel.compiler.ops.cumulative import prefix_scan
from cokernel.compiler.ops.masks import lanes_of, mask_bits, resize
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.ops.traced import lower_traced
from cokernel.compiler.values import (
    Value,
    concatenate_vectors,
    is_small,
    make_packed,
    shuffle,
)

SC = _jax.sc_primitives


def _constant_mask(lanes: Sequence[bool]) -> ir.Constant:
    return ir.Constant(ir.VectorType(i1, len(lanes)), [int(lane) for lane in lanes])


def _rotate(context: Context, register: ir.Value, distance: int) -> ir.Value:
    """Lane i of the result is lane i - distance."""
    count = register.type.count
    lanes = [(lane - distance) % count for lane in range(count)]
    return shuffle(context.function, register, lanes)


# Prefix scans.


def _register_scan(primitive: Any, fold: Fold) -> None:
    @rule(primitive)
    def scan(context: Context, eqn: Any, operand: Value, mask: Value) -> Value:
        axis = len(operand.shape) - 1
        combine = Combiner(fold, operand.dtype)
        is_extreme = fold is not Fold.ADD
        if not is_small(operand.shape, operand.dtype):
            return lower_traced(context, _SCANS[fold], operand, mask)[0]
        register, taken = context.pack(operand), context.pack(mask)
        builder = ElementBuilder(context.function, operand.size)
        identity = combine.identity()
        filled = context.builder.select(taken, register, builder.splat(identity))
        scanned = prefix_scan(
            context,
            combine,
            identity,
            make_packed(operand.shape, operand.dtype, filled),
            axis=axis,
            reverse=False,
        )
        if not is_extreme:
            return scanned
        # Elements in front of the first valid one pass through.
        either = Combiner(Fold.OR, np.dtype(np.bool_))
        begun = prefix_scan(
            context,
            either,
            either.identity(),
            make_packed(mask.shape, mask.dtype, taken),
            axis=axis,
            reverse=False,
        )
        result = context.builder.select(context.pack(begun), context.pack(scanned), register)
        return make_packed(operand.shape, operand.dtype, result)


def _long_sum(x: Any, mask: Any) -> Any:
    return lax.cumsum(jnp.where(mask, x, jnp.zeros_like(x)), axis=x.ndim - 1)


def _long_extreme(scan: Any, fold: Fold) -> Any:
    def function(x: Any, mask: Any) -> Any:
        nothing = jnp.asarray(Combiner(fold, x.dtype).identity().constant).astype(x.dtype)
        scanned = scan(jnp.where(mask, x, nothing), axis=x.ndim - 1)
        begun = lax.cummax(mask.astype(jnp.int32), axis=x.ndim - 1) > 0
        return jnp.where(begun, scanned, x)

    return function


_SCANS = {
    Fold.ADD: _long_sum,
    Fold.MAXIMUM: _long_extreme(lax.cummax, Fold.MAXIMUM),
    Fold.MINIMUM: _long_extreme(lax.cummin, Fold.MINIMUM),
}

_register_scan(SC.masked_cumsum_p, Fold.ADD)
_register_scan(SC.masked_cummax_p, Fold.MAXIMUM)
_register_scan(SC.masked_cummin_p, Fold.MINIMUM)


# Occurrences.


@rule(SC.scan_count_p)
def _scan_count(context: Context, eqn: Any, operand: Value, mask: Value) -> list[Value]:
    if not is_small(operand.shape, np.int32) or operand.size == 1:
        return lower_traced(context, _long_scan_count, operand, mask)
    register, taken = context.pack(operand), context.pack(mask)
    count = operand.size
    builder, lanes = context.builder, ElementBuilder(context.function, count)
    total = builder.zext(taken, lanes.type(i32))
    later = lanes.constant(i1, 0)
    for distance in range(1, count):
        # Whether the lane so far to the left holds the same and counts, and the other way round.
        same = _is_equal(context, register, _rotate(context, register, distance), operand.dtype)
        exists = _constant_mask([lane >= distance for lane in range(count)])
        same = builder.and_(same, exists)
        before = builder.and_(same, _rotate(context, taken, distance))
        total = builder.add(total, builder.zext(before, lanes.type(i32)))
        after = builder.and_(same, taken)
        later = builder.or_(later, _rotate(context, after, -distance))
    last = builder.and_(taken, builder.not_(later))
    counts = make_packed(operand.shape, np.int32, total)
    return [counts, make_packed(operand.shape, np.bool_, last)]


def _is_equal(context: Context, left: ir.Value, right: ir.Value, dtype: np.dtype) -> ir.Value:
    if dtypes.kind(dtype) is Kind.FLOAT:
        return context.builder.fcmp_ordered("==", left, right)
    return context.builder.icmp_unsigned("==", left, right)


def _long_scan_count(x: Any, mask: Any) -> Any:
    flat, taken = x.ravel(), mask.ravel()
    same = flat[:, None] == flat[None, :]
    position = jnp.arange(flat.size)
    earlier = position[:, None] >= position[None, :]
    count = jnp.sum(same & earlier & taken[None, :], axis=1, dtype=jnp.int32)
    again = jnp.any(same & ~earlier & taken[None, :], axis=1)
    return count.reshape(x.shape), (taken & ~again).reshape(x.shape)


# Sorting.


@rule(SC.masked_sort_p)
def _masked_sort(
    context: Context, eqn: Any, keys: Value, values: Value, *maybe_mask: Value
) -> list[Value]:
    """A stable sort: each lane counts the lanes that go before it, and moves to that place."""
    count = keys.size
    builder, lanes = context.builder, ElementBuilder(context.function, count)
    order = _order(context, keys, eqn.params["descending"])
    taken = context.pack(maybe_mask[0]) if maybe_mask else None
    rank = lanes.constant(i32, 0)
    for distance in range(1, count):
        other = _rotate(context, order, distance)
        is_left = _constant_mask([lane >= distance for lane in range(count)])
        first = builder.select(
            is_left,
            builder.icmp_signed("<=", other, order),
            builder.icmp_signed("<", other, order),
        )
        if taken is not None:
            # Invalid lanes go behind all valid ones, in the order they are in.
            valid = _rotate(context, taken, distance)
            among_invalid = builder.or_(valid, is_left)
            first = builder.select(taken, builder.and_(valid, first), among_invalid)
        rank = builder.add(rank, builder.zext(first, lanes.type(i32)))
    results = [_place(context, value, rank) for value in (keys, values)]
    if taken is not None:
        results.append(_front_lanes(context, maybe_mask[0]))
    return results


def _order(context: Context, keys: Value, descending: bool) -> ir.Value:
    """Signed integers in the order of the keys. NaNs come last, zeros of both signs are equal, as
    in `lax.sort`.
    """
    builder, lanes = context.builder, ElementBuilder(context.function, keys.size)
    register = context.pack(keys)
    kind = dtypes.kind(keys.dtype)
    bits = lanes.type(i32)
    if kind is Kind.UNSIGNED:
        register = builder.xor(register, lanes.constant(i32, -(1 << 31)))
    elif kind is Kind.FLOAT:
        zero = lanes.constant(dtypes.f32, 0.0)
        is_zero = builder.fcmp_ordered("==", register, zero)
        is_nan = builder.fcmp_unordered("uno", register, register)
        raw = builder.bitcast(builder.select(is_zero, zero, register), bits)
        # The bits of negative floats ascend as their values descend.
        flipped = builder.xor(raw, lanes.constant(i32, (1 << 31) - 1))
        negative = builder.icmp_signed("<", raw, lanes.constant(i32, 0))
        ordered = builder.select(negative, flipped, raw)
        register = builder.select(is_nan, lanes.constant(i32, (1 << 31) - 1), ordered)
    return builder.not_(register) if descending else register


def _place(context: Context, value: Value, rank: ir.Value) -> Value:
    """Moves each lane to the place that `rank` gives."""
    room = nests.dense_buffer(context, value.shape, value.dtype)
    register = context.pack(value)
    kind = dtypes.memory_type(value.dtype)
    for lane in range(value.size):
        place = ir.Constant(i32, lane)
        index = context.builder.zext(context.builder.extract_element(rank, place), dtypes.i64)
        address = context.builder.gep(room.address, [index], inbounds=True, source_etype=kind)
        context.builder.store(
            context.builder.extract_element(register, place), address, align=value.dtype.itemsize
        )
    return make_packed(value.shape, value.dtype, context.pack(room))


def _front_lanes(context: Context, mask: Value) -> Value:
    """As many true elements as the mask has, all at the front."""
    builder, lanes = context.builder, ElementBuilder(context.function, mask.size)
    bits = mask_bits(context, lanes_of(context, mask))
    count = resize(builder, context.function.intrinsic("llvm.ctpop", bits.type, [bits]), i32)
    position = ir.Constant(lanes.type(i32), list(range(mask.size)))
    front = builder.icmp_signed("<", position, lanes.splat(count))
    return make_packed(mask.shape, np.bool_, front)


# Masks as numbers.


@rule(SC.all_reduce_population_count_p)
def _population_count(context: Context, eqn: Any, mask: Value) -> Value:
    reduced = tuple(eqn.outvars[0].aval.shape)
    if not is_small(mask.shape, mask.dtype):
        return lower_traced(
            context, lambda m: jnp.full(reduced, jnp.sum(m, dtype=jnp.int32)), mask
        )[0]
    bits = mask_bits(context, lanes_of(context, mask))
    count = context.function.intrinsic("llvm.ctpop", bits.type, [bits])
    return _everywhere(context, count, reduced)


@rule(SC.all_reduce_ffs_p)
def _find_first_set(context: Context, eqn: Any, mask: Value) -> Value:
    reduced = tuple(eqn.outvars[0].aval.shape)
    if not is_small(mask.shape, mask.dtype):

        def first(m: Any) -> Any:
            position = jnp.where(m, jnp.arange(m.size, dtype=jnp.int32), m.size)
            return jnp.full(reduced, jnp.min(position, initial=m.size))

        return lower_traced(context, first, mask)[0]
    bits = mask_bits(context, lanes_of(context, mask))
    # Without a true lane the count of trailing zeros is the width.
    arguments = [bits, ir.Constant(i1, 0)]
    place = context.function.intrinsic("llvm.cttz", bits.type, arguments, overloads=[bits.type])
    return _everywhere(context, place, reduced)


def _everywhere(context: Context, number: ir.Value, shape: tuple[int, ...]) -> Value:
    number = resize(context.builder, number, i32)
    splat = ElementBuilder(context.function, shape[0]).splat(number)
    return make_packed(shape, np.int32, splat)


# Packing.


@rule(SC.pack_p)
def _pack(context: Context, eqn: Any, left: Value, right: Value) -> Value:
    aval = eqn.outvars[0].aval
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    is_interleaved = eqn.params["format"] is plsc.PackFormat.INTERLEAVED
    if not is_small(shape, dtype):

        def long(a: Any, b: Any) -> Any:
            axis = 1 if is_interleaved else 0
            return jnp.stack([a.astype(dtype), b.astype(dtype)], axis).reshape(shape)

        return lower_traced(context, long, left, right)[0]
    halves = [context.pack(convert(context, half, dtype)) for half in (left, right)]
    both = concatenate_vectors(context.function, halves)
    if is_interleaved:
        both = shuffle(context.function, both, _interleaved(left.size))
    return make_packed(shape, dtype, both)


def _interleaved(count: int) -> list[int]:
    return np.arange(2 * count).reshape(2, count).T.ravel().tolist()


@rule(SC.unpack_p)
def _unpack(context: Context, eqn: Any, operand: Value) -> list[Value]:
    aval = eqn.outvars[0].aval
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    is_interleaved = eqn.params["format"] is plsc.PackFormat.INTERLEAVED
    if not is_small(operand.shape, operand.dtype) or not is_small(shape, dtype):

        def long(ab: Any) -> Any:
            wide = ab.ravel().astype(dtype)
            return (wide[0::2], wide[1::2]) if is_interleaved else tuple(jnp.split(wide, 2))

        return lower_traced(context, long, operand)
    register, half = context.pack(operand), operand.size // 2
    if is_interleaved:
        lanes = [range(0, operand.size, 2), range(1, operand.size, 2)]
    else:
        lanes = [range(half), range(half, operand.size)]
    parts = [shuffle(context.function, register, list(part)) for part in lanes]
    return [convert(context, make_packed(shape, operand.dtype, part), dtype) for part in parts]
