"""Random numbers: the hash behind JAX's keys, bit by bit as JAX has it, and each core's own
generator.

The generator of a core is SplitMix64 (Steele, Lea and Flood, 2014): its state is one number, which
seeding mixes from the seeds, and the n-th number after it is a hash of the state plus n times a
constant. So drawing many numbers is a loop without a chain, and equal seeds give equal numbers.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, views
from cokernel.compiler.context import Context
from cokernel.compiler.core_state import state_address
from cokernel.compiler.dtypes import i32, i64
from cokernel.compiler.function import ElementBuilder, Index
from cokernel.compiler.ops.apply import emit_elementwise
from cokernel.compiler.ops.registry import Operation, rule
from cokernel.compiler.values import (
    Expression,
    Scalar,
    Value,
    array_constant,
    is_small,
    make_packed,
    row_major,
)

# Threefry-2x32 with 20 rounds (Salmon et al., 2011): the rotations of each four rounds, by turns.
ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
PARITY = 0x1BD11BDA


@rule(_jax.threefry2x32_p)
def _threefry2x32(context: Context, eqn: Any, *operands: Value) -> list[Value]:
    shape = tuple(eqn.outvars[0].aval.shape)
    spread = [_broadcast(context, operand, shape) for operand in operands]
    # Both words of a hash are computed together, and travel as one number of 64 bits.
    both = emit_elementwise(context, _hash, shape, np.uint64, *spread)
    return [emit_elementwise(context, part, shape, np.uint32, both) for part in (_high, _low)]


def _broadcast(context: Context, operand: Value, shape: Sequence[int]) -> Value:
    if not operand.shape or operand.shape == tuple(shape):
        return operand
    first = len(shape) - len(operand.shape)
    view = views.broadcast(operand.shape, shape, range(first, len(shape)))
    return views.take_view(context, operand, view)


def _hash(
    builder: ElementBuilder,
    operation: Operation,
    key0: ir.Value,
    key1: ir.Value,
    x0: ir.Value,
    x1: ir.Value,
) -> ir.Value:
    ops = builder.builder

    def constant(value: int) -> ir.Value:
        return builder.constant(i32, value)

    keys = [key0, key1, ops.xor(ops.xor(key0, key1), constant(PARITY))]
    x0, x1 = ops.add(x0, keys[0]), ops.add(x1, keys[1])
    for block in range(5):
        for rotation in ROTATIONS[block % 2]:
            x0 = ops.add(x0, x1)
            x1 = ops.or_(ops.shl(x1, constant(rotation)), ops.lshr(x1, constant(32 - rotation)))
            x1 = ops.xor(x0, x1)
        x0 = ops.add(x0, keys[(block + 1) % 3])
        x1 = ops.add(ops.add(x1, keys[(block + 2) % 3]), constant(block + 1))
    wide = builder.type(i64)
    high = ops.shl(ops.zext(x0, wide), builder.constant(i64, 32))
    return ops.or_(high, ops.zext(x1, wide))


def _high(builder: ElementBuilder, operation: Operation, both: ir.Value) -> ir.Value:
    shifted = builder.builder.lshr(both, builder.constant(i64, 32))
    return builder.builder.trunc(shifted, builder.type(i32))


def _low(builder: ElementBuilder, operation: Operation, both: ir.Value) -> ir.Value:
    return builder.builder.trunc(both, builder.type(i32))


@rule(_jax.prng.iota_2x32_shape_p)
def _iota_2x32_shape(context: Context, eqn: Any) -> list[Value]:
    shape = tuple(eqn.outvars[0].aval.shape)
    if is_small(shape, np.uint32):
        count = np.arange(math.prod(shape), dtype=np.uint32).reshape(shape)
        parts = (np.zeros_like(count), count)
        return [array_constant(context.function, part) for part in parts]

    def part(shift: int) -> Value:
        def emit(
            builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
        ) -> ir.Value:
            flat = builder.function.linear_index(index, row_major(shape))
            register = builder.function.index(flat)
            if shift:
                register = builder.builder.lshr(register, ir.Constant(i64, shift))
            return builder.builder.trunc(register, i32)

        return Expression(shape, np.dtype(np.uint32), (), emit, is_cheap=True)

    return [part(32), part(0)]


# The generator of a core.

GAMMA = 0x9E3779B97F4A7C15


def _mix(builder: ElementBuilder, value: ir.Value) -> ir.Value:
    """SplitMix64's hash of 64 bits."""
    ops = builder.builder
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        value = ops.xor(value, ops.lshr(value, builder.constant(i64, shift)))
        value = ops.mul(value, builder.constant(i64, factor))
    return ops.xor(value, ops.lshr(value, builder.constant(i64, 31)))


def _state(context: Context) -> ir.Value:
    return state_address(context, "random number generator", 8)


@rule(_jax.tpu_primitives.prng_seed_p)
def _prng_seed(context: Context, eqn: Any, *seeds: Value) -> None:
    builder = context.builder
    one = ElementBuilder(context.function)
    state: ir.Value = ir.Constant(i64, 0)
    for seed in seeds:
        for number in range(seed.size):
            word = seed.element(one, context.function.unravel(number, seed.shape))
            if word.type.width < 64:
                word = builder.zext(word, i64)
            # The position of a seed counts: the same numbers in another order are another seed.
            state = _mix(one, builder.xor(builder.add(state, ir.Constant(i64, GAMMA)), word))
    builder.store(state, _state(context))


@rule(_jax.tpu_primitives.prng_random_bits_p)
def _prng_random_bits(context: Context, eqn: Any) -> Value:
    shape = tuple(eqn.params["shape"])
    size = math.prod(shape)
    builder, address = context.builder, _state(context)
    state = builder.load(address, typ=i64)
    step = (size * GAMMA) % (1 << 64)
    builder.store(builder.add(state, ir.Constant(i64, step)), address)
    if not shape or is_small(shape, np.int32):
        lanes = ElementBuilder(context.function, max(size, 1))
        steps = [((number + 1) * GAMMA) % (1 << 64) for number in range(max(size, 1))]
        offset = ir.Constant(lanes.type(i64), steps[0] if lanes.count == 1 else steps)
        return make_packed(shape, np.int32, _draw(lanes, lanes.splat(state), offset))

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        function = builder.function
        number = function.index(function.linear_index(index, row_major(shape)))
        number = builder.builder.add(number, ir.Constant(i64, 1))
        offset = builder.builder.mul(number, ir.Constant(i64, GAMMA))
        return _draw(builder, operands[0].element(builder, ()), offset)

    return Expression(shape, np.dtype(np.int32), (Scalar((), np.dtype(np.int64), state),), emit)


def _draw(builder: ElementBuilder, state: ir.Value, offset: ir.Value) -> ir.Value:
    """The upper half of the hash of the state and an offset."""
    mixed = _mix(builder, builder.builder.add(state, offset))
    high = builder.builder.lshr(mixed, builder.constant(i64, 32))
    return builder.builder.trunc(high, builder.type(dtypes.i32))
