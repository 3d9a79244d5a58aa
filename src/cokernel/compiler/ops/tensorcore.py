"""What Pallas adds for a TensorCore's vectors: roll, bitcast, packing, rounding, convolution."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, nests, views
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import bit_width, i64
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops import bitcast
from cokernel.compiler.ops.apply import apply
from cokernel.compiler.ops.control import outlined
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.ops.traced import traced
from cokernel.compiler.refs import Place, RefValue
from cokernel.compiler.values import (
    Buffer,
    Scalar,
    Value,
    array_constant,
    is_small,
    make_packed,
    shuffle,
    store_element,
)

TPU = _jax.tpu_primitives


# Rolling.


@rule(TPU.roll_p)
def _roll(context: Context, eqn: Any, operand: Value, shift: Value) -> Value:
    axis, extent = eqn.params["axis"], operand.shape[eqn.params["axis"]]
    stride, along = eqn.params["stride"] or 0, eqn.params["stride_axis"]
    if operand.size == 0:
        return operand
    distance = context.index(shift)
    if isinstance(distance, int) and is_small(operand.shape, operand.dtype):
        lanes = np.arange(operand.size).reshape(operand.shape)
        for index in np.ndindex(*operand.shape):
            source = list(index)
            steps = distance + (index[along] * stride if along is not None else 0)
            source[axis] = (index[axis] - steps) % extent
            lanes[index] = np.ravel_multi_index(source, operand.shape)
        register = shuffle(context.function, context.pack(operand), lanes.ravel().tolist())
        return make_packed(operand.shape, operand.dtype, register)
    target = nests.dense_buffer(context, operand.shape, operand.dtype)
    by = Scalar((), np.dtype(np.int64), context.function.index(distance))

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        out, source, first = inside
        function = context.function
        before, after = operand.shape[:axis], operand.shape[axis + 1 :]
        others = [*before, 1, *after]
        # What does not depend on the axis that moves decides how far it moves.
        inner = [] if along is not None and along > axis else list(after)
        outer = [1 if number > axis and inner else n for number, n in enumerate(others)]
        with function.nest(outer) as index:
            amount: Index = first.register
            if along is not None:
                amount = function.add(amount, function.multiply(index[along], stride))
            moved = _positive_remainder(function, function.index(amount), extent)
            rest = function.subtract(extent, moved)
            for start, stop, offset in (
                (0, moved, rest),
                (moved, extent, function.subtract(0, moved)),
            ):
                with function.loop(start, stop) as loop, function.nest(inner) as tail:
                    place = [*index[: axis + 1], *(tail if inner else index[axis + 1 :])]
                    place[axis] = loop.counter
                    origin = list(place)
                    origin[axis] = function.add(loop.counter, offset)
                    register = source.element(ElementBuilder(function), origin)
                    address = out.element_address(function, place)
                    store_element(function, register, address, out.dtype)
        return []

    # The operand is read while the result is written, so it may not be computed on the way twice.
    outlined(context, "roll", [target, context.materialise(operand), by], [], build)
    return _settled(context, target)


def _positive_remainder(function: FunctionBuilder, value: ir.Value, extent: int) -> ir.Value:
    builder = function.builder
    size = ir.Constant(i64, extent)
    remainder = builder.srem(value, size)
    negative = builder.icmp_signed("<", remainder, ir.Constant(i64, 0))
    return builder.select(negative, builder.add(remainder, size), remainder)


def _settled(context: Context, buffer: Buffer) -> Value:
    if buffer.shape and not is_small(buffer.shape, buffer.dtype):
        return buffer
    return make_packed(buffer.shape, buffer.dtype, context.pack(buffer))


# Bits under another dtype.


@rule(TPU.bitcast_p)
def _bitcast(context: Context, eqn: Any, operand: Value) -> Value:
    aval = eqn.outvars[0].aval
    shape, dtype, dimension = tuple(aval.shape), np.dtype(aval.dtype), eqn.params["dim"]
    before, after = bit_width(operand.dtype), bit_width(dtype)
    if before == after:
        return apply(context, lax.bitcast_convert_type_p, shape, dtype, operand, new_dtype=dtype)
    if 0 in shape:
        return views.empty(shape, dtype)
    is_minor = dimension == len(shape) - 1
    if is_minor and min(before, after) >= 8 and is_small(shape, dtype):
        kind = dtypes.lanes(dtypes.register_type(dtype), int(np.prod(shape)))
        return make_packed(shape, dtype, context.builder.bitcast(context.pack(operand), kind))
    source = context.materialise(operand)

    def part(function: FunctionBuilder, index: Sequence[Index]) -> tuple[list[Index], Index]:
        count = before // after
        place = list(index)
        place[dimension] = function.divide(index[dimension], count)
        return place, function.remainder(index[dimension], count)

    def place_of_part(function: FunctionBuilder, index: Sequence[Index], part: int) -> list[Index]:
        place = list(index)
        place[dimension] = function.add(function.multiply(index[dimension], after // before), part)
        return place

    if before > after:
        return context.settle(bitcast.divided(source, shape, dtype, part))
    return context.settle(bitcast.joined(source, shape, dtype, place_of_part))


@traced(TPU.pack_elementwise_p)
def pack_elementwise(*arrays: jax.Array, packed_dtype: Any) -> jax.Array:
    """The arrays narrowed, side by side in one unsigned word each, the first in the lowest bits."""
    word = jnp.dtype(f"uint{8 * arrays[0].dtype.itemsize}")
    width = bit_width(packed_dtype)
    mask = word.type((1 << width) - 1)
    packed = jnp.zeros(arrays[0].shape, word)
    for number, array in enumerate(arrays):
        if packed_dtype == jnp.bfloat16:
            bits = lax.bitcast_convert_type(array.astype(packed_dtype), jnp.uint16).astype(word)
        else:
            bits = array.astype(word) & mask
        packed |= bits << word.type(number * width)
    return packed


@traced(TPU.unpack_elementwise_p)
def unpack_elementwise(
    x: jax.Array, *, index: int, packed_dtype: Any, unpacked_dtype: Any
) -> jax.Array:
    """One of the narrow numbers in each word of `x`, widened."""
    total, width = 8 * x.dtype.itemsize, bit_width(packed_dtype)
    unsigned, signed = jnp.dtype(f"uint{total}"), jnp.dtype(f"int{total}")
    top = lax.bitcast_convert_type(x, unsigned) << unsigned.type(total - width * (index + 1))
    if jnp.issubdtype(packed_dtype, jnp.floating):
        bits = (top >> unsigned.type(total - width)).astype(jnp.dtype(f"uint{width}"))
        return lax.bitcast_convert_type(bits, packed_dtype).astype(unpacked_dtype)
    if jnp.issubdtype(packed_dtype, jnp.unsignedinteger):
        return (top >> unsigned.type(total - width)).astype(unpacked_dtype)
    number = lax.bitcast_convert_type(top, signed) >> signed.type(total - width)
    return number.astype(unpacked_dtype)


# Rounding.


@traced(TPU.stochastic_round_p)
def stochastic_round(x: jax.Array, random_bits: jax.Array, *, target_dtype: Any) -> jax.Array:
    """Rounds each number to one of its two neighbours in a narrower float dtype, to the nearer one
    with the higher probability: the lowest of the random bits are added below the last place that
    is kept, and what is below that is cut off.
    """
    info = ml_dtypes.finfo(target_dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    exponent = ((bits >> 23) & 0xFF).astype(jnp.int32) - 127
    # Below the smallest normal number of the target fewer places are kept.
    lost = jnp.minimum(23 - info.nmant + jnp.maximum(int(info.minexp) - exponent, 0), 31)
    lost = lost.astype(jnp.uint32)
    below = (jnp.uint32(1) << lost) - jnp.uint32(1)
    implicit = jnp.where(exponent > -127, jnp.uint32(1 << 23), jnp.uint32(0))
    significand = (bits & 0x7FFFFF) | implicit
    rounded = (significand + (random_bits & below)) & ~below
    # The significand counts multiples of 2^(exponent - 23), in two factors that are normal numbers.
    scale = jnp.maximum(exponent, -126)
    half = scale >> 1
    magnitude = rounded.astype(jnp.float32) * _power_of_two(half) * _power_of_two(scale - half - 23)
    result = jnp.where(bits >> 31 != 0, -magnitude, magnitude)
    return jnp.where(jnp.isfinite(x), result, x).astype(target_dtype)


def _power_of_two(exponent: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


@traced(_jax.pallas_primitives.reciprocal_p)
def reciprocal(x: jax.Array, *, approx: bool, full_range: bool) -> jax.Array:
    """One divided by x. An approximate one may be less accurate, which here would save nothing."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise NotImplementedError(f"primitive 'reciprocal' takes floats, and not {x.dtype}")
    return jnp.reciprocal(x)


# Convolution.


@traced(TPU.conv_p)
def conv(
    left: jax.Array,
    right: jax.Array,
    accumulator: jax.Array | None = None,
    *,
    dimension_numbers: Any,
    window_reversal: Sequence[bool] | None,
    preferred_element_type: Any,
    **params: Any,
) -> jax.Array:
    """A convolution, added to an accumulator if there is one."""
    if window_reversal is not None and any(window_reversal):
        spatial = dimension_numbers.rhs_spec[2:]
        right = lax.rev(right, list(itertools.compress(spatial, window_reversal)))
    if accumulator is not None:
        preferred_element_type = accumulator.dtype
    result = lax.conv_general_dilated(
        left,
        right,
        dimension_numbers=dimension_numbers,
        preferred_element_type=preferred_element_type,
        **params,
    )
    return result if accumulator is None else accumulator + result


# Memory spaces.


@rule(TPU.has_memory_space_p)
def _has_memory_space(context: Context, eqn: Any, ref: RefValue) -> Value:
    # A Ref in no space of its own is an operand or a result, and those are in HBM.
    is_unplaced = ref.place in (Place.OPERAND, Place.DEVICE)
    space = _jax.TpuMemorySpace.HBM if is_unplaced else ref.space
    answer = str(space) == str(eqn.params["memory_space"])
    return array_constant(context.function, np.asarray(answer))
