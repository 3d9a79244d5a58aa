"""Comparison, selection, logic and shifts, element by element, with the results of XLA on a CPU.

With NaN only "not equal" holds; a shift past the width gives zero, or copies of the sign.
"""

from typing import Any

import numpy as np
from jax import lax
from llvmlite import ir

from cokernel.compiler.dtypes import Kind, bit_width, i1, i8, i16, kind, register_type
from cokernel.compiler.function import ElementBuilder
from cokernel.compiler.ops import floats
from cokernel.compiler.ops.arithmetic import FloatArithmetic
from cokernel.compiler.ops.convert import NARROW_INTEGERS, to_bits, wrap
from cokernel.compiler.ops.registry import Operation, elementwise

# Comparison and selection.

# For each comparison: LLVM's operator.
COMPARISONS: dict[Any, str] = {
    lax.eq_p: "==",
    lax.ne_p: "!=",
    lax.lt_p: "<",
    lax.le_p: "<=",
    lax.gt_p: ">",
    lax.ge_p: ">=",
}


def compare(
    builder: ElementBuilder, dtype: Any, operator: str, left: ir.Value, right: ir.Value
) -> ir.Value:
    """Compares two registers of a dtype. With NaN only "!=" holds."""
    emit = builder.builder
    if floats.is_float(dtype):
        left, right = (floats.widen(builder, dtype, item) for item in (left, right))
        return (emit.fcmp_unordered if operator == "!=" else emit.fcmp_ordered)(
            operator, left, right
        )
    return (emit.icmp_signed if kind(dtype) is Kind.SIGNED else emit.icmp_unsigned)(
        operator, left, right
    )


def _register_comparison(primitive: Any, operator: str) -> None:
    @elementwise(primitive)
    def rule_of_comparison(
        builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
    ) -> ir.Value:
        return compare(builder, operation.operand_dtypes[0], operator, left, right)


for _primitive, _operator in COMPARISONS.items():
    _register_comparison(_primitive, _operator)


def _register_total_order(primitive: Any, operator: str) -> None:
    @elementwise(primitive)
    def rule_of_total_order(
        builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
    ) -> ir.Value:
        dtype = operation.operand_dtypes[0]
        if not floats.is_float(dtype):
            return compare(builder, dtype, operator, left, right)
        keys = [total_order_key(builder, dtype, item) for item in (left, right)]
        return builder.builder.icmp_signed(operator, *keys)


for _primitive, _operator in {lax.eq_to_p: "==", lax.lt_to_p: "<", lax.le_to_p: "<="}.items():
    _register_total_order(_primitive, _operator)


def total_order_key(builder: ElementBuilder, dtype: Any, register: ir.Value) -> ir.Value:
    """A signed integer that orders floats as IEEE 754's totalOrder does: -NaN, -inf, ..., -0, +0,
    ..., inf, NaN."""
    a = FloatArithmetic(builder, floats.compute_type(dtype))
    if np.dtype(dtype) == np.float16:
        # Its own bits: processors make a signalling NaN quiet when they convert it.
        own = builder.builder.bitcast(register, builder.type(i16))
        bits = a.shift_left(builder.builder.zext(own, a.integer_type), 16)
    else:
        wide = floats.widen(builder, dtype, register)
        if floats.has_negative_nan(dtype):
            wide = a.select(a.is_nan(wide), a.negate(wide), wide)
        bits = a.bits(wide)
    width = a.integer.width
    flip = a.shift_right(a.shift_right_signed(bits, width - 1), 1)
    return builder.builder.xor(bits, flip)


@elementwise(lax.select_n_p)
def select(
    builder: ElementBuilder, operation: Operation, which: ir.Value, *cases: ir.Value
) -> ir.Value:
    """The case that a bool or an int32 picks; out of range, the nearest case."""
    if len(cases) == 1:
        return cases[0]
    if kind(operation.operand_dtypes[0]) is Kind.BOOL:
        return builder.builder.select(which, cases[1], cases[0])
    chosen = cases[0]
    for number, case in enumerate(cases[1:], 1):
        limit = builder.constant(register_type(operation.operand_dtypes[0]), number)
        chosen = builder.builder.select(
            builder.builder.icmp_signed(">=", which, limit), case, chosen
        )
    return chosen


# Bits.


@elementwise(lax.and_p)
def bitwise_and(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """Bitwise, and logical of bools."""
    return builder.builder.and_(left, right)


@elementwise(lax.or_p)
def bitwise_or(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """Bitwise, and logical of bools."""
    return builder.builder.or_(left, right)


@elementwise(lax.xor_p)
def bitwise_xor(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """Bitwise, and logical of bools."""
    return builder.builder.xor(left, right)


@elementwise(lax.not_p)
def bitwise_not(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """Bitwise, and logical of bools."""
    dtype = operation.result_dtype
    ones = builder.constant(register_type(dtype), 1 if register_type(dtype) == i1 else -1)
    return wrap(builder, dtype, builder.builder.xor(register, ones))


def _shift_count(builder: ElementBuilder, dtype: Any, count: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The count, limited to what LLVM defines, and whether it was within the width; negative counts
    are beyond it."""
    scalar = register_type(dtype)
    width = builder.constant(scalar, bit_width(dtype))
    is_inside = builder.builder.icmp_unsigned("<", count, width)
    last = builder.constant(scalar, bit_width(dtype) - 1)
    return builder.builder.select(is_inside, count, last), is_inside


@elementwise(lax.shift_left_p)
def shift_left(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """Zero past the width."""
    dtype = operation.result_dtype
    count, is_inside = _shift_count(builder, dtype, right)
    shifted = builder.builder.shl(left, count)
    zero = builder.constant(register_type(dtype), 0)
    return wrap(builder, dtype, builder.builder.select(is_inside, shifted, zero))


@elementwise(lax.shift_right_logical_p)
def shift_right_logical(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """Zero past the width."""
    dtype = operation.result_dtype
    count, is_inside = _shift_count(builder, dtype, right)
    shifted = builder.builder.lshr(to_bits(builder, dtype, left), count)
    zero = builder.constant(register_type(dtype), 0)
    return wrap(builder, dtype, builder.builder.select(is_inside, shifted, zero))


@elementwise(lax.shift_right_arithmetic_p)
def shift_right_arithmetic(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """Copies of the topmost bit past the width, of unsigned integers too."""
    dtype = operation.result_dtype
    count, _ = _shift_count(builder, dtype, right)
    if np.dtype(dtype) in NARROW_INTEGERS and kind(dtype) is not Kind.SIGNED:
        spare = builder.constant(i8, 8 - bit_width(dtype))
        left = builder.builder.ashr(builder.builder.shl(left, spare), spare)
    return wrap(builder, dtype, builder.builder.ashr(left, count))


@elementwise(lax.population_count_p)
def population_count(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """The number of bits that are one."""
    dtype = operation.result_dtype
    # XLA counts the bits of the byte that holds an int4, but only the own bits of an int2.
    bits = to_bits(builder, dtype, register) if bit_width(dtype) == 2 else register
    counted = builder.intrinsic("llvm.ctpop", register.type, [bits])
    return wrap(builder, dtype, counted)


@elementwise(lax.clz_p)
def count_leading_zeros(
    builder: ElementBuilder, operation: Operation, register: ir.Value
) -> ir.Value:
    """The number of zero bits above the highest one; the width for zero."""
    dtype = operation.result_dtype
    scalar = register_type(dtype)
    bits = to_bits(builder, dtype, register)
    arguments = [bits, ir.Constant(i1, 0)]
    counted = builder.intrinsic("llvm.ctlz", register.type, arguments)
    unused = builder.constant(scalar, scalar.width - bit_width(dtype))
    return wrap(builder, dtype, builder.builder.sub(counted, unused))
