"""bitcast_convert_type, and elements divided into narrower ones or put together from them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from llvmlite import ir

from cokernel.compiler import views
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import bit_width
from cokernel.compiler.few_bits import bitcast_rows, copied_bits_p
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops.convert import from_bits, to_bits
from cokernel.compiler.ops.registry import Operation, added_rule, apply_elementwise, rule
from cokernel.compiler.ops.shape import reinterpret
from cokernel.compiler.ops.traced import lower_traced
from cokernel.compiler.values import Buffer, Expression, Value


@rule(lax.bitcast_convert_type_p)
def bitcast_convert_type(context: Context, eqn: Any, operand: Value) -> Value:
    """The same bits under another dtype. Between widths a dimension is added or removed at the end,
    whose elements are the parts of one wide element, lowest first."""
    aval = eqn.outvars[0].aval
    shape, source, target = tuple(aval.shape), np.dtype(operand.dtype), np.dtype(aval.dtype)
    before, after = bit_width(source), bit_width(target)
    if before == after:
        return apply_elementwise(context, _same_width, eqn.params, aval, [operand])
    if min(before, after) >= 8:
        return reinterpret(context, operand, shape, target)
    if 0 in shape:
        return views.empty(shape, target)
    # In memory an element of few bits has a byte of its own.
    buffer = context.materialise(operand)
    if before > after:
        whole = divided(buffer, shape, target, lambda _, index: (index[:-1], index[-1]))
    else:
        whole = joined(buffer, shape, target, lambda _, index, part: (*index, part))
    return context.settle(whole)


@added_rule(copied_bits_p)
def _copied_bits(context: Context, eqn: Any, operand: Value) -> list[Value]:
    return lower_traced(
        context, functools.partial(bitcast_rows, dtype=eqn.params["dtype"]), operand
    )


def _same_width(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    source, target = operation.operand_dtypes[0], operation.result_dtype
    return from_bits(builder, target, to_bits(builder, source, register))


def divided(
    source: Buffer,
    shape: Sequence[int],
    dtype: np.dtype,
    locate: Callable[[FunctionBuilder, Sequence[Index]], tuple[Sequence[Index], Index]],
) -> Expression:
    """An array whose elements are parts of the source's. `locate` tells for an index of the result
    which element of the source it is a part of, and which part; part 0 has the lowest bits.
    """
    width = bit_width(dtype)

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        function = builder.function
        place, part = locate(function, index)
        bits = to_bits(builder, source.dtype, operands[0].element(builder, place))
        amount = _resized(builder, function.index(function.multiply(part, width)), bits.type.width)
        bits = _resized(builder, builder.builder.lshr(bits, amount), max(width, 8))
        return from_bits(builder, dtype, bits)

    return Expression(tuple(shape), dtype, (source,), emit)


def joined(
    source: Buffer,
    shape: Sequence[int],
    dtype: np.dtype,
    locate: Callable[[FunctionBuilder, Sequence[Index], int], Sequence[Index]],
) -> Expression:
    """An array each of whose elements is put together from elements of the source. `locate` tells
    for an index of the result and the number of a part where the source has it; part 0 becomes the
    lowest bits.
    """
    width = bit_width(source.dtype)
    total = 8 * dtype.itemsize

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        result: ir.Value | None = None
        for part in range(bit_width(dtype) // width):
            place = locate(builder.function, index, part)
            bits = to_bits(builder, source.dtype, operands[0].element(builder, place))
            bits = _resized(builder, bits, total)
            bits = builder.builder.shl(bits, ir.Constant(bits.type, part * width))
            result = bits if result is None else builder.builder.or_(result, bits)
        assert result is not None
        return from_bits(builder, dtype, result)

    return Expression(tuple(shape), dtype, (source,), emit)


def _resized(builder: ElementBuilder, bits: ir.Value, width: int) -> ir.Value:
    kind = builder.type(ir.IntType(width))
    if bits.type.width > width:
        return builder.builder.trunc(bits, kind)
    return bits if bits.type.width == width else builder.builder.zext(bits, kind)
