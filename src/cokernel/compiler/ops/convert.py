"""convert_element_type, bitcast_convert_type and reduce_precision, with XLA's results.

Float to integer truncates, saturates, and makes NaN zero. Integers wrap. A conversion to a float
narrower than float32 rounds to float32 first and then once more, as XLA does.
"""

from typing import Any

import ml_dtypes
import numpy as np
from jax import lax
from llvmlite import ir

from cokernel.compiler.dtypes import Kind, bit_width, f32, f64, half, i8, i16, kind, register_type
from cokernel.compiler.function import ElementBuilder
from cokernel.compiler.ops import floats
from cokernel.compiler.ops.arithmetic import FLOAT_BITS, FloatArithmetic
from cokernel.compiler.ops.registry import Operation, elementwise

NARROW_INTEGERS = frozenset(
    map(np.dtype, (ml_dtypes.int4, ml_dtypes.uint4, ml_dtypes.int2, ml_dtypes.uint2))
)


def wrap(builder: ElementBuilder, dtype: Any, register: ir.Value) -> ir.Value:
    """Makes the upper bits of a narrow integer's register agree with the lower ones again, after
    arithmetic."""
    if np.dtype(dtype) not in NARROW_INTEGERS:
        return register
    spare = builder.constant(i8, 8 - bit_width(dtype))
    shifted = builder.builder.shl(register, spare)
    if kind(dtype) is Kind.SIGNED:
        return builder.builder.ashr(shifted, spare)
    return builder.builder.lshr(shifted, spare)


def convert(builder: ElementBuilder, source: Any, target: Any, register: ir.Value) -> ir.Value:
    """A register of dtype `source` as one of dtype `target`."""
    source, target = np.dtype(source), np.dtype(target)
    if source == target:
        return register
    if kind(target) is Kind.BOOL:
        return _is_nonzero(builder, source, register)
    if floats.is_float(source):
        if floats.is_float(target):
            return _float_to_float(builder, source, target, register)
        return _float_to_integer(builder, source, target, register)
    if floats.is_float(target):
        return _integer_to_float(builder, source, target, register)
    return _integer_to_integer(builder, source, target, register)


def _is_nonzero(builder: ElementBuilder, source: np.dtype, register: ir.Value) -> ir.Value:
    if floats.is_float(source):
        wide = floats.widen(builder, source, register)
        zero = builder.constant(floats.compute_type(source), 0.0)
        return builder.builder.fcmp_unordered("!=", wide, zero)
    return builder.builder.icmp_unsigned("!=", register, builder.constant(register_type(source), 0))


def _integer_to_integer(
    builder: ElementBuilder, source: np.dtype, target: np.dtype, register: ir.Value
) -> ir.Value:
    before, after = register_type(source).width, register_type(target).width
    if before > after:
        register = builder.builder.trunc(register, builder.type(register_type(target)))
    elif before < after:
        extend = builder.builder.sext if kind(source) is Kind.SIGNED else builder.builder.zext
        register = extend(register, builder.type(register_type(target)))
    return wrap(builder, target, register)


def _integer_to_float(
    builder: ElementBuilder, source: np.dtype, target: np.dtype, register: ir.Value
) -> ir.Value:
    wide = builder.type(floats.compute_type(target))
    if kind(source) is Kind.SIGNED:
        value = builder.builder.sitofp(register, wide)
    else:
        value = builder.builder.uitofp(register, wide)
    return floats.narrow(builder, target, value)


def _float_to_integer(
    builder: ElementBuilder, source: np.dtype, target: np.dtype, register: ir.Value
) -> ir.Value:
    a = FloatArithmetic(builder, floats.compute_type(source))
    value = floats.widen(builder, source, register)
    width = bit_width(target)
    is_signed = kind(target) is Kind.SIGNED
    low, high = (
        (-(1 << (width - 1)), (1 << (width - 1)) - 1) if is_signed else (0, (1 << width) - 1)
    )
    # Through 32 bits at least, because processors convert vectors to no fewer. LLVM's saturating
    # conversions would do all this, but a loop with one in it is not vectorised.
    scalar = ir.IntType(max(width, 32))
    wide = builder.type(scalar)
    too_high = a.compare(">=", value, float(high + 1))
    # Where low - 1 is no float it rounds to low, whose result is the same.
    too_low = a.compare("<=", value, float(low - 1))
    fits = a.is_not(a.either(a.either(too_high, too_low), a.is_nan(value)))
    safe = a.select(fits, value, 0.0)
    convert_float = builder.builder.fptosi if is_signed else builder.builder.fptoui
    number = convert_float(safe, wide)
    number = builder.builder.select(too_high, builder.constant(scalar, high), number)
    number = builder.builder.select(too_low, builder.constant(scalar, low), number)
    final = builder.type(register_type(target))
    return number if final == wide else builder.builder.trunc(number, final)


def _float_to_float(
    builder: ElementBuilder, source: np.dtype, target: np.dtype, register: ir.Value
) -> ir.Value:
    value = floats.widen(builder, source, register)
    before, after = floats.compute_type(source), floats.compute_type(target)
    if before == f64 and after == f32:
        value = builder.builder.fptrunc(value, builder.type(f32))
    elif before == f32 and after == f64:
        value = builder.builder.fpext(value, builder.type(f64))
    return floats.narrow(builder, target, value)


@elementwise(lax.convert_element_type_p)
def convert_element_type(
    builder: ElementBuilder, operation: Operation, register: ir.Value
) -> ir.Value:
    """Between any two of bool, integers (int4 and int2 too) and floats (float8 too)."""
    return convert(builder, operation.operand_dtypes[0], operation.result_dtype, register)


@elementwise(lax.reduce_precision_p)
def reduce_precision(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """Rounds to fewer bits of exponent and significand, keeping the dtype. Too large becomes
    infinite; what would be subnormal becomes zero; NaN stays."""
    dtype = operation.result_dtype
    if kind(dtype) is Kind.BITS_FLOAT and dtype != floats.BFLOAT16:
        # As a float16, which holds all of these but the powers of two; then rounded again.
        middle = np.dtype(np.float32 if dtype == floats.POWERS_OF_TWO else np.float16)
        wide = floats.narrow(builder, middle, floats.widen(builder, dtype, register))
        reduced = _reduced(builder, middle, operation, wide)
        return floats.narrow(builder, dtype, floats.widen(builder, middle, reduced))
    return _reduced(builder, dtype, operation, register)


def _reduced(
    builder: ElementBuilder, dtype: np.dtype, operation: Operation, register: ir.Value
) -> ir.Value:
    exponent_bits, significand_bits = (
        operation.params[name] for name in ("exponent_bits", "mantissa_bits")
    )
    emit = builder.builder
    if dtype == floats.BFLOAT16:
        scalar, explicit, integer = f32, 7, i16
    else:
        scalar = register_type(dtype)
        integer, explicit = FLOAT_BITS[scalar]
    width = integer.width
    own_exponent_bits = width - 1 - explicit
    bits = emit.bitcast(register, builder.type(integer))

    def constant(value: int) -> ir.Value:
        return builder.constant(integer, value)

    result = bits
    if significand_bits < explicit:
        drop = explicit - significand_bits
        is_odd = emit.and_(emit.lshr(bits, constant(drop)), constant(1))
        bias = emit.add(is_odd, constant((1 << (drop - 1)) - 1))
        result = emit.and_(emit.add(bits, bias), constant(-(1 << drop)))
    if exponent_bits < own_exponent_bits:
        bias, reduced = ((1 << (n - 1)) - 1 for n in (own_exponent_bits, exponent_bits))
        infinity = ((1 << own_exponent_bits) - 1) << explicit
        sign = emit.and_(bits, constant(1 << (width - 1)))
        exponent = emit.and_(result, constant(infinity))
        overflows = emit.icmp_unsigned(">", exponent, constant((bias + reduced) << explicit))
        underflows = emit.icmp_unsigned("<=", exponent, constant((bias - reduced) << explicit))
        result = emit.select(overflows, emit.or_(sign, constant(infinity)), result)
        result = emit.select(underflows, sign, result)
    wide = floats.widen(builder, dtype, register)
    is_nan = emit.fcmp_unordered("uno", wide, wide)
    result = emit.select(is_nan, bits, result)
    return emit.bitcast(result, builder.type(register_type(dtype)))


def to_bits(builder: ElementBuilder, dtype: Any, register: ir.Value) -> ir.Value:
    """The register's bits as an integer; of a narrow integer only its own bits may be set."""
    dtype = np.dtype(dtype)
    if register_type(dtype) in (half, f32, f64):
        return builder.builder.bitcast(register, builder.type(ir.IntType(8 * dtype.itemsize)))
    if dtype in NARROW_INTEGERS:
        return builder.builder.and_(register, builder.constant(i8, (1 << bit_width(dtype)) - 1))
    return register


def from_bits(builder: ElementBuilder, dtype: Any, bits: ir.Value) -> ir.Value:
    """The register of a dtype whose bits an integer holds."""
    if register_type(dtype) in (half, f32, f64):
        return builder.builder.bitcast(bits, builder.type(register_type(dtype)))
    if kind(dtype) is Kind.BITS_FLOAT and bit_width(dtype) < 8:
        return builder.builder.and_(bits, builder.constant(i8, (1 << bit_width(dtype)) - 1))
    return wrap(builder, dtype, bits)
