"""Floats narrower than float32: how they become float32 for arithmetic, and how a float32 is
rounded to them.

bfloat16 and the floats of 8 and 4 bits live in integer registers. All of them, and float16, are
exact in float32, and rounding a float32 to them once, to nearest even, is what XLA does, for
conversions and after each operation alike.
"""

from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir

from cokernel.compiler.dtypes import Kind, f32, f64, half, i8, i16, kind, register_type
from cokernel.compiler.function import ElementBuilder
from cokernel.compiler.ops.arithmetic import FloatArithmetic
from cokernel.records import record


@record(frozen=True)
class Format:
    """A float of few bits: one sign bit, `exponent_bits`, `significand_bits`.

    `has_infinity` formats follow IEEE 754. The others have no infinity: a result too large becomes
    NaN, which is the all-ones code or, where `nan_is_negative_zero`, the code of the zero they have
    only one of. A format that `is_finite` has no NaN either: too large becomes the largest, and NaN
    negative zero.
    """

    exponent_bits: int
    significand_bits: int
    bias: int
    has_infinity: bool = False
    nan_is_negative_zero: bool = False
    is_finite: bool = False

    @property
    def sign(self) -> int:
        """The bit that is set in the code of a negative number."""
        return 1 << (self.exponent_bits + self.significand_bits)

    @property
    def infinity(self) -> int:
        """The code that follows the largest finite number of an IEEE format."""
        return ((1 << self.exponent_bits) - 1) << self.significand_bits

    @property
    def largest(self) -> int:
        """The code of the largest finite number."""
        if self.has_infinity:
            return self.infinity - 1
        return self.sign - 1 if self.nan_is_negative_zero or self.is_finite else self.sign - 2

    @property
    def nan(self) -> int:
        """The code of NaN."""
        if self.nan_is_negative_zero or self.is_finite:
            return self.sign
        return self.infinity | (1 << (self.significand_bits - 1)) if self.has_infinity else 0x7F

    @property
    def overflow(self) -> int:
        """The code of a result that is too large."""
        if self.is_finite:
            return self.largest
        return self.infinity if self.has_infinity else self.nan


FORMATS: dict[np.dtype, Format] = {
    np.dtype(ml_dtypes.float8_e5m2): Format(5, 2, 15, has_infinity=True),
    np.dtype(ml_dtypes.float8_e4m3): Format(4, 3, 7, has_infinity=True),
    np.dtype(ml_dtypes.float8_e3m4): Format(3, 4, 3, has_infinity=True),
    np.dtype(ml_dtypes.float8_e4m3fn): Format(4, 3, 7),
    np.dtype(ml_dtypes.float8_e4m3fnuz): Format(4, 3, 8, nan_is_negative_zero=True),
    np.dtype(ml_dtypes.float8_e4m3b11fnuz): Format(4, 3, 11, nan_is_negative_zero=True),
    np.dtype(ml_dtypes.float8_e5m2fnuz): Format(5, 2, 16, nan_is_negative_zero=True),
    np.dtype(ml_dtypes.float4_e2m1fn): Format(2, 1, 1, is_finite=True),
}

# Powers of two alone: no sign, no zero, and NaN is the last code.
POWERS_OF_TWO = np.dtype(ml_dtypes.float8_e8m0fnu)

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _format(dtype: Any) -> Format:
    dtype = np.dtype(dtype)
    if dtype not in FORMATS:
        raise NotImplementedError(f"the CPU compiler has no arithmetic for dtype {dtype}")
    return FORMATS[dtype]


def has_negative_nan(dtype: Any) -> bool:
    """Whether the NaN of the dtype stands where negative zero would."""
    return np.dtype(dtype) in FORMATS and FORMATS[np.dtype(dtype)].nan_is_negative_zero


def compute_type(dtype: Any) -> ir.Type:
    """The LLVM type in which functions of a float dtype are computed: double for float64, else
    float."""
    return f64 if register_type(dtype) == f64 else f32


def widen(builder: ElementBuilder, dtype: Any, register: ir.Value) -> ir.Value:
    """A register of a float dtype in its compute type. Exact."""
    dtype = np.dtype(dtype)
    emit = builder.builder
    match register_type(dtype):
        case t if t in (f32, f64):
            return register
        case t if t == half:
            return emit.fpext(register, builder.type(f32))
    arithmetic = FloatArithmetic(builder, f32)
    bits = emit.zext(register, arithmetic.integer_type)
    if dtype == BFLOAT16:
        return arithmetic.from_bits(arithmetic.shift_left(bits, 16))
    if dtype == POWERS_OF_TWO:
        return _widen_power(arithmetic, bits)
    return _widen_few_bits(arithmetic, _format(dtype), bits)


def _widen_power(a: FloatArithmetic, code: ir.Value) -> ir.Value:
    # The least power is a denormal float32.
    value = a.from_bits(a.int_select(a.int_equal(code, 0), 1 << 22, a.shift_left(code, 23)))
    return a.select(a.int_equal(code, 0xFF), a.from_bits(0x7FC00000), value)


def _widen_few_bits(a: FloatArithmetic, form: Format, bits: ir.Value) -> ir.Value:
    width = form.exponent_bits + form.significand_bits
    sign = a.shift_left(a.int_and(bits, form.sign), 31 - width)
    magnitude = a.int_and(bits, form.sign - 1)
    shifted = a.shift_left(magnitude, 23 - form.significand_bits)
    normal = a.from_bits(a.int_add(shifted, (127 - form.bias) << 23))
    # Built by a conversion and a product, because as bits they would be a float32 denormal, which
    # the processor may flush.
    least = 2.0 ** (1 - form.bias - form.significand_bits)
    subnormal = a.multiply(a.builder.uitofp(magnitude, a.type), least)
    is_subnormal = a.builder.icmp_unsigned("<", magnitude, a.whole(1 << form.significand_bits))
    value = a.select(is_subnormal, subnormal, normal)
    if form.has_infinity:
        top = a.from_bits(a.int_or(shifted, 0x7F800000))
        value = a.select(
            a.builder.icmp_unsigned(">=", magnitude, a.whole(form.infinity)), top, value
        )
    elif not form.nan_is_negative_zero and not form.is_finite:
        value = a.select(a.int_equal(magnitude, form.nan), a.from_bits(0x7FC00000), value)
    signed = a.from_bits(a.int_or(a.bits(value), sign))
    if form.nan_is_negative_zero:
        return a.select(a.int_equal(bits, form.nan), a.from_bits(0x7FC00000), signed)
    return signed


def narrow(builder: ElementBuilder, dtype: Any, register: ir.Value) -> ir.Value:
    """A register of the compute type rounded to a float dtype, to nearest even."""
    dtype = np.dtype(dtype)
    emit = builder.builder
    match register_type(dtype):
        case t if t in (f32, f64):
            return register
        case t if t == half:
            return emit.fptrunc(register, builder.type(half))
    arithmetic = FloatArithmetic(builder, f32)
    if dtype == BFLOAT16:
        return emit.trunc(_narrow_bfloat16(arithmetic, register), builder.type(i16))
    if dtype == POWERS_OF_TWO:
        return emit.trunc(_narrow_power(arithmetic, register), builder.type(i8))
    return emit.trunc(_narrow_few_bits(arithmetic, _format(dtype), register), builder.type(i8))


def _narrow_power(a: FloatArithmetic, value: ir.Value) -> ir.Value:
    """The nearest power of two, of two as near the greater. What is not positive is NaN."""
    bits = a.bits(value)
    code = a.shift_right(a.int_add(bits, 1 << 22), 23)
    # Denormal numbers: the least power is one, and half as much again is nearer to the next.
    emit = a.builder
    small = emit.zext(emit.icmp_unsigned(">=", bits, a.whole(3 << 21)), a.integer_type)
    code = a.int_select(emit.icmp_unsigned("<", bits, a.whole(1 << 23)), small, code)
    # Zero, negative numbers, infinities and NaN.
    is_positive = emit.icmp_unsigned("<", a.int_subtract(bits, 1), a.whole(0x7F7FFFFF))
    return a.int_select(is_positive, code, 0xFF)


def _narrow_bfloat16(a: FloatArithmetic, value: ir.Value) -> ir.Value:
    bits = a.bits(value)
    is_odd = a.int_and(a.shift_right(bits, 16), 1)
    rounded = a.shift_right(a.int_add(bits, a.int_add(is_odd, 0x7FFF)), 16)
    nan = a.int_or(a.int_and(a.shift_right(bits, 16), 0x8000), 0x7FC0)
    return a.int_select(a.is_nan(value), nan, rounded)


def _narrow_few_bits(a: FloatArithmetic, form: Format, value: ir.Value) -> ir.Value:
    drop = 23 - form.significand_bits
    magnitude = a.absolute(value)
    bits = a.bits(magnitude)
    is_odd = a.int_and(a.shift_right(bits, drop), 1)
    rounded = a.shift_right(a.int_add(bits, a.int_add(is_odd, (1 << (drop - 1)) - 1)), drop)
    normal = a.int_subtract(rounded, (127 - form.bias) << form.significand_bits)
    # Adding a number whose last place is the smallest subnormal leaves the rounded code in the low
    # bits.
    magic = 2.0 ** (1 - form.bias - form.significand_bits + 23)
    subnormal = a.int_subtract(a.bits(a.add(magnitude, magic)), a.bits(magic))
    is_subnormal = a.compare("<", magnitude, 2.0 ** (1 - form.bias))
    code = a.int_select(is_subnormal, subnormal, normal)
    too_large = a.builder.icmp_unsigned(">", code, a.whole(form.largest))
    width = form.exponent_bits + form.significand_bits
    sign = a.shift_right(a.int_and(a.bits(value), 0x80000000), 31 - width)
    if form.nan_is_negative_zero:
        # Neither zero nor NaN has a sign.
        sign = a.int_select(a.int_equal(code, 0), 0, sign)
        signed = a.int_or(code, sign)
        return a.int_select(a.either(too_large, a.is_nan(value)), form.nan, signed)
    code = a.int_select(too_large, form.overflow, code)
    if form.is_finite:
        return a.int_select(a.is_nan(value), form.nan, a.int_or(code, sign))
    code = a.int_select(a.is_nan(value), form.nan, code)
    return a.int_or(code, sign)


def is_float(dtype: Any) -> bool:
    """Whether the dtype holds real floats of any width."""
    return kind(dtype) in (Kind.FLOAT, Kind.BITS_FLOAT)
