"""Arithmetic, extremes and rounding, element by element, with the results of XLA on a CPU.

Integers wrap; division by zero gives all ones and its remainder the dividend; the smallest integer
divided by -1 gives itself. Floats round each operation to their own dtype; max and min return NaN
if either operand is NaN, and hold -0 to be less than +0. Whether denormals are flushed is a state
of the processor, which XLA sets on its threads; nothing here depends on it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax import lax
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import Kind, bit_width, f32, f64, i8, kind, register_type
from cokernel.compiler.function import ElementBuilder
from cokernel.compiler.ops import floats
from cokernel.compiler.ops.arithmetic import FloatArithmetic
from cokernel.compiler.ops.convert import convert, from_bits, to_bits, wrap
from cokernel.compiler.ops.registry import Operation, elementwise, rule
from cokernel.compiler.values import Value


def in_float(
    builder: ElementBuilder,
    dtype: Any,
    compute: Callable[..., ir.Value],
    *registers: ir.Value,
) -> ir.Value:
    """Computes with float registers in the compute type of their dtype, and rounds the result to
    the dtype once. `compute` takes the FloatArithmetic of that type and the registers."""
    arithmetic = FloatArithmetic(builder, floats.compute_type(dtype))
    wide = [floats.widen(builder, dtype, register) for register in registers]
    return floats.narrow(builder, dtype, compute(arithmetic, *wide))


def _is_float(operation: Operation) -> bool:
    return floats.is_float(operation.operand_dtypes[0])


def _is_signed(dtype: Any) -> bool:
    return kind(dtype) is Kind.SIGNED


# Sums and products.


@elementwise(lax.add_p, _jax.add_jaxvals_p)
def add(builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value) -> ir.Value:
    """The sum; of bools, whether either is true."""
    dtype = operation.result_dtype
    if _is_float(operation):
        return in_float(builder, dtype, FloatArithmetic.add, left, right)
    if kind(dtype) is Kind.BOOL:
        return builder.builder.or_(left, right)
    return wrap(builder, dtype, builder.builder.add(left, right))


@elementwise(lax.sub_p)
def subtract(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """The difference."""
    dtype = operation.result_dtype
    if _is_float(operation):
        return in_float(builder, dtype, FloatArithmetic.subtract, left, right)
    return wrap(builder, dtype, builder.builder.sub(left, right))


def product(builder: ElementBuilder, dtype: Any, left: ir.Value, right: ir.Value) -> ir.Value:
    """The product of two registers of a dtype; of bools, whether both are true."""
    if floats.is_float(dtype):
        return in_float(builder, dtype, FloatArithmetic.multiply, left, right)
    if kind(dtype) is Kind.BOOL:
        return builder.builder.and_(left, right)
    return wrap(builder, dtype, builder.builder.mul(left, right))


@elementwise(lax.mul_p)
def multiply(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """The product, of operands that are converted to the dtype of the result first
    (`out_dtype`)."""
    dtype = operation.result_dtype
    left, right = (
        convert(builder, source, dtype, register)
        for source, register in zip(operation.operand_dtypes, (left, right), strict=True)
    )
    return product(builder, dtype, left, right)


@elementwise(lax.mulhi_p)
def multiply_high(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """The upper half of the product of two integers."""
    dtype = operation.result_dtype
    width = register_type(dtype).width
    double = ir.IntType(2 * width)
    extend = builder.builder.sext if _is_signed(dtype) else builder.builder.zext
    whole = builder.builder.mul(*(extend(item, builder.type(double)) for item in (left, right)))
    # Of int4 it is the upper byte of a product of bytes, and of int2 the upper half, as in XLA.
    distance = 2 if bit_width(dtype) == 2 else width
    upper = builder.builder.lshr(whole, builder.constant(double, distance))
    return wrap(builder, dtype, builder.builder.trunc(upper, builder.type(register_type(dtype))))


@elementwise(lax.square_p)
def square(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """The square."""
    return product(builder, operation.result_dtype, register, register)


@elementwise(lax.one_minus_square_p)
def one_minus_square(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """(1 + x) * (1 - x), each operation rounded to the dtype."""
    dtype = operation.result_dtype
    one = constant(builder, dtype, 1)
    binary = Operation({}, (dtype, dtype), dtype)
    above, below = add(builder, binary, one, register), subtract(builder, binary, one, register)
    return product(builder, dtype, above, below)


@elementwise(lax.polynomial_p)
def polynomial(builder: ElementBuilder, operation: Operation, *registers: ir.Value) -> ir.Value:
    """Horner's rule; the operands are x and the coefficients from the lowest power up. Product and
    sum of float32 and float64 are one operation where the processor has it, as in XLA."""
    x, *coefficients = registers
    dtype = operation.result_dtype
    binary = Operation({}, (dtype, dtype), dtype)
    total = coefficients[-1]
    for coefficient in reversed(coefficients[:-1]):
        if register_type(dtype) in (f32, f64):
            total = in_float(builder, dtype, FloatArithmetic.multiply_add, total, x, coefficient)
        else:
            total = add(builder, binary, product(builder, dtype, total, x), coefficient)
    return total


@elementwise(lax.integer_pow_p)
def integer_power(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """x to a constant integer power, by repeated squaring."""
    dtype, exponent = operation.result_dtype, operation.params["y"]
    power, remaining = register, abs(exponent)
    result: ir.Value | None = None
    while remaining:
        if remaining & 1:
            result = power if result is None else product(builder, dtype, result, power)
        remaining >>= 1
        if remaining:
            power = product(builder, dtype, power, power)
    one = constant(builder, dtype, 1)
    if result is None:
        return one
    return (
        divide(builder, Operation({}, (dtype, dtype), dtype), one, result)
        if exponent < 0
        else result
    )


def constant(builder: ElementBuilder, dtype: Any, value: int) -> ir.Value:
    """A small integer as a register of any dtype."""
    if floats.is_float(dtype):
        wide = builder.constant(floats.compute_type(dtype), float(value))
        return floats.narrow(builder, dtype, wide)
    return builder.constant(register_type(dtype), value)


# Division.


@elementwise(lax.div_p)
def divide(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """The quotient, of integers rounded toward zero."""
    dtype = operation.result_dtype
    if _is_float(operation):
        return in_float(builder, dtype, FloatArithmetic.divide, left, right)
    safe, is_zero = _safe_divisor(builder, dtype, left, right)
    emit = builder.builder
    quotient = (emit.sdiv if _is_signed(dtype) else emit.udiv)(left, safe)
    ones = builder.constant(register_type(dtype), -1)
    return wrap(builder, dtype, emit.select(is_zero, ones, quotient))


@elementwise(lax.rem_p)
def remainder(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """The remainder, with the sign of the dividend."""
    dtype = operation.result_dtype
    emit = builder.builder
    if _is_float(operation):
        return in_float(builder, dtype, lambda a, x, y: a.builder.frem(x, y), left, right)
    safe, is_zero = _safe_divisor(builder, dtype, left, right)
    rest = (emit.srem if _is_signed(dtype) else emit.urem)(left, safe)
    return emit.select(is_zero, left, rest)


def _safe_divisor(
    builder: ElementBuilder, dtype: Any, left: ir.Value, right: ir.Value
) -> tuple[ir.Value, ir.Value]:
    """The divisor, or 1 where dividing would trap: by zero, and the smallest integer by -1, of
    which 1 gives the right quotient and remainder anyway. Second, where it is zero."""
    emit = builder.builder
    scalar = register_type(dtype)
    is_zero = emit.icmp_unsigned("==", right, builder.constant(scalar, 0))
    unsafe = is_zero
    if _is_signed(dtype):
        is_smallest = emit.icmp_signed(
            "==", left, builder.constant(scalar, -(1 << (scalar.width - 1)))
        )
        is_minus_one = emit.icmp_signed("==", right, builder.constant(scalar, -1))
        unsafe = emit.or_(is_zero, emit.and_(is_smallest, is_minus_one))
    return emit.select(unsafe, builder.constant(scalar, 1), right), is_zero


# Signs and extremes.


@elementwise(lax.neg_p)
def negate(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """The negative."""
    dtype = operation.result_dtype
    if _is_float(operation):
        return in_float(builder, dtype, FloatArithmetic.negate, register)
    zero = builder.constant(register_type(dtype), 0)
    return wrap(builder, dtype, builder.builder.sub(zero, register))


@elementwise(lax.abs_p)
def absolute(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """The absolute value; that of the smallest integer is itself."""
    dtype = operation.result_dtype
    if _is_float(operation):
        return in_float(builder, dtype, FloatArithmetic.absolute, register)
    if not _is_signed(dtype):
        return register
    emit = builder.builder
    zero = builder.constant(register_type(dtype), 0)
    is_negative = emit.icmp_signed("<", register, zero)
    return wrap(builder, dtype, emit.select(is_negative, emit.sub(zero, register), register))


@elementwise(lax.sign_p)
def sign(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """-1, 0 or 1; NaN and zeros of either sign as they are."""
    dtype = operation.result_dtype
    emit = builder.builder
    if _is_float(operation):

        def compute(a: FloatArithmetic, x: ir.Value) -> ir.Value:
            is_zero = a.compare("==", x, 0.0)
            unit = a.copy_sign(a.select(is_zero, 0.0, 1.0), x)
            return a.select(a.is_nan(x), x, unit)

        return in_float(builder, dtype, compute, register)
    scalar = register_type(dtype)
    zero = builder.constant(scalar, 0)
    if not _is_signed(dtype):
        return emit.zext(emit.icmp_unsigned("!=", register, zero), builder.type(scalar))
    positive = emit.zext(emit.icmp_signed(">", register, zero), builder.type(scalar))
    negative = emit.ashr(register, builder.constant(scalar, scalar.width - 1))
    return emit.or_(positive, negative)


def extreme(
    builder: ElementBuilder, dtype: Any, name: str, left: ir.Value, right: ir.Value
) -> ir.Value:
    """The greater ("max") or the lesser ("min") of two registers of a dtype."""
    match kind(dtype):
        case Kind.FLOAT | Kind.BITS_FLOAT:
            intrinsic = {"max": "llvm.maximum", "min": "llvm.minimum"}[name]
            return in_float(builder, dtype, lambda a, x, y: a.call(intrinsic, x, y), left, right)
        case Kind.BOOL:
            return (builder.builder.or_ if name == "max" else builder.builder.and_)(left, right)
        case Kind.SIGNED:
            return builder.intrinsic(f"llvm.s{name}", left.type, [left, right])
        case _:
            return builder.intrinsic(f"llvm.u{name}", left.type, [left, right])


@elementwise(lax.max_p)
def maximum(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """The greater operand, or NaN."""
    return extreme(builder, operation.result_dtype, "max", left, right)


@elementwise(lax.min_p)
def minimum(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    """The lesser operand, or NaN."""
    return extreme(builder, operation.result_dtype, "min", left, right)


@elementwise(lax.clamp_p)
def clamp(
    builder: ElementBuilder, operation: Operation, low: ir.Value, register: ir.Value, high: ir.Value
) -> ir.Value:
    """max(low, x), and then min with high: high wins where the limits cross."""
    dtype = operation.result_dtype
    return extreme(builder, dtype, "min", extreme(builder, dtype, "max", low, register), high)


# Rounding and the like.


def _register_rounding(primitive: Any, name: str) -> None:
    @elementwise(primitive)
    def rule_of_rounding(
        builder: ElementBuilder, operation: Operation, register: ir.Value
    ) -> ir.Value:
        return in_float(builder, operation.result_dtype, lambda a, x: a.call(name, x), register)


for _primitive, _name in {lax.floor_p: "llvm.floor", lax.ceil_p: "llvm.ceil"}.items():
    _register_rounding(_primitive, _name)


@elementwise(lax.round_p)
def round_to_integer(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """The nearest integer; halves to even or away from zero, as the equation says."""
    to_even = operation.params["rounding_method"] is lax.RoundingMethod.TO_NEAREST_EVEN
    name = "llvm.roundeven" if to_even else "llvm.round"
    return in_float(builder, operation.result_dtype, lambda a, x: a.call(name, x), register)


@elementwise(lax.is_finite_p)
def is_finite(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    """Neither infinite nor NaN."""
    dtype = operation.operand_dtypes[0]
    a = FloatArithmetic(builder, floats.compute_type(dtype))
    wide = floats.widen(builder, dtype, register)
    return a.compare("<", a.absolute(wide), float("inf"))


@elementwise(lax.nextafter_p)
def next_after(
    builder: ElementBuilder, operation: Operation, start: ir.Value, end: ir.Value
) -> ir.Value:
    """The neighbour of the first operand on the way to the second, among the numbers of the
    dtype."""
    dtype = operation.result_dtype
    emit = builder.builder
    if dtype == floats.POWERS_OF_TWO:
        return _next_power_of_two(builder, start, end)
    scalar = ir.IntType(8 * dtype.itemsize)
    top = 1 << (bit_width(dtype) - 1)

    def number(value: int) -> ir.Value:
        return builder.constant(scalar, value)

    wide = [floats.widen(builder, dtype, item) for item in (start, end)]
    bits = [to_bits(builder, dtype, item) for item in (start, end)]
    magnitudes = [emit.and_(item, number(top - 1)) for item in bits]
    start_is_zero = emit.icmp_unsigned("==", magnitudes[0], number(0))
    signs_differ = emit.icmp_unsigned("!=", emit.and_(emit.xor(*bits), number(top)), number(0))
    grows = emit.not_(emit.or_(signs_differ, emit.icmp_unsigned(">", *magnitudes)))
    moved = emit.add(bits[0], emit.select(grows, number(1), number(-1)))
    least = emit.or_(emit.and_(bits[1], number(top)), number(1))
    moved = emit.select(start_is_zero, least, moved)
    a = FloatArithmetic(builder, floats.compute_type(dtype))
    result = from_bits(builder, dtype, emit.select(a.compare("==", *wide), bits[1], moved))
    is_nan = a.either(a.is_nan(wide[0]), a.is_nan(wide[1]))
    nan = floats.narrow(builder, dtype, a.real(float("nan")))
    return emit.select(is_nan, nan, result)


def _next_power_of_two(builder: ElementBuilder, start: ir.Value, end: ir.Value) -> ir.Value:
    """The neighbour among floats that have nothing but an exponent, where XLA takes the topmost bit
    for a sign."""
    emit = builder.builder
    up = emit.select(
        emit.icmp_unsigned(">", end, start), builder.constant(i8, 1), builder.constant(i8, -1)
    )
    moved = emit.select(emit.icmp_unsigned("==", end, start), start, emit.add(start, up))
    nan = builder.constant(i8, 0xFF)
    is_nan = emit.or_(emit.icmp_unsigned("==", start, nan), emit.icmp_unsigned("==", end, nan))
    return emit.select(is_nan, nan, moved)


# What leaves its operand as it is.


@rule(
    lax.copy_p,
    lax.optimization_barrier_p,
    _jax.pvary_p,
    _jax.reduced_vary_cast_p,
    _jax.stop_gradient_p,
    _jax.name_p,
    _jax.device_put_p,
    _jax.reshard_p,
    _jax.sharding_constraint_p,
    _jax.xla_metadata_value_p,
)
def identity(context: Context, eqn: Any, *operands: Value) -> Sequence[Value]:
    """The operands: a promise or a hint, or a copy that values, which nobody writes to, do not
    need."""
    return operands


@rule(_jax.tie_p)
def tie(context: Context, eqn: Any, first: Value, second: Value) -> Value:
    """The second operand."""
    return second


@rule(_jax.dce_sink_p)
def discard(context: Context, eqn: Any, *operands: Value) -> None:
    """Nothing: it only marks a value as used."""
