"""Powers and cube roots of float32, by way of a logarithm and an exponential in double that
vectorise.

Polynomials are fitted as float32_math says.
"""

from llvmlite import ir

from cokernel.compiler.dtypes import i32
from cokernel.compiler.ops.arithmetic import FloatArithmetic
from cokernel.compiler.ops.float32_math import (
    INFINITY,
    LOG2_E,
    NAN,
    ROUND_DOUBLE,
    limited,
    split_significand,
)

SQRT_HALF_DOUBLE = 0x3FE6A09E667F3BCD

# (2**r - 1) / r for |r| <= 1/2: 2**-45.
EXP2_DOUBLE = (
    0.693147180559883, 0.2402265069571949, 0.05550410866852474, 0.009618129182129483,
    0.001333355760833613, 0.00015403440125324596, 1.525299945896223e-05,
    1.3258512193778701e-06, 1.0146700734854571e-07,
)  # fmt: skip
# atanh(s) / s in s**2 for |s| <= (sqrt(2) - 1) / (sqrt(2) + 1): 2**-47.
ATANH_DOUBLE = (
    0.9999999999999994, 0.33333333333417847, 0.19999999942543054, 0.14285722276152113,
    0.11110751588665482, 0.0909053134101613, 0.08080994813807212,
)  # fmt: skip


def log2_double(d: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The logarithm to base 2 of a normal positive double, with an error of 2**-46."""
    significand, exponent = split_significand(d, x, SQRT_HALF_DOUBLE)
    s = d.divide(d.subtract(significand, 1.0), d.add(significand, 1.0))
    fraction = d.multiply(s, d.polynomial(d.multiply(s, s), ATANH_DOUBLE))
    # Through 32 bits, from which more processors convert vectors.
    number = d.builder.trunc(exponent, d.elements.type(i32))
    return d.multiply_add(fraction, 2 * LOG2_E, d.builder.sitofp(number, d.type))


def exp2_double(d: FloatArithmetic, x: ir.Value) -> ir.Value:
    """2**x in double, with a relative error of 2**-44; beyond the range of float32 it is held at a
    power out of that range."""
    x = limited(d, x, -200.0, 200.0)
    shifted = d.add(x, ROUND_DOUBLE)
    rest = d.subtract(x, d.subtract(shifted, ROUND_DOUBLE))
    value = d.multiply_add(rest, d.polynomial(rest, EXP2_DOUBLE), 1.0)
    number = d.int_subtract(d.bits(shifted), d.bits(ROUND_DOUBLE))
    return d.multiply(value, d.power_of_two(number))


def power(a: FloatArithmetic, x: ir.Value, y: ir.Value) -> ir.Value:
    """x**y, with the C library's results where one of them is zero, infinite, NaN or x is
    negative."""
    size = a.absolute(x)
    d, wide = a.widened_exactly(size)
    logarithm = log2_double(d, wide)
    logarithm = d.select(d.compare("==", wide, 0.0), -INFINITY, logarithm)
    # Infinity and NaN are their own logarithms.
    logarithm = d.select(d.compare("<", wide, INFINITY), logarithm, wide)
    _, wide_y = a.widened_exactly(y)
    value = a.narrowed(exp2_double(d, d.multiply(wide_y, logarithm)))
    # Of an infinite y, where the logarithm is zero.
    is_unit = a.both(a.compare("==", size, 1.0), a.compare("==", y, y))
    value = a.select(is_unit, 1.0, value)
    half = a.multiply(y, 0.5)
    y_is_zero = a.int_equal(a.bits(a.absolute(y)), 0)
    # A processor that takes denormals for zeros would take them for integers too.
    is_whole = a.compare("==", a.call("llvm.floor", y), y)
    is_integer = a.both(is_whole, a.either(y_is_zero, a.is_not(a.is_denormal(y))))
    is_even = a.compare("==", a.call("llvm.floor", half), half)
    is_negative = a.builder.icmp_signed("<", a.bits(x), a.whole(0))
    is_odd = a.both(is_integer, a.is_not(is_even))
    value = a.select(a.both(is_negative, is_odd), a.negate(value), value)
    is_regular = a.both(a.is_not(a.int_equal(a.bits(size), 0)), a.compare("<", size, INFINITY))
    is_finite_negative = a.both(is_negative, is_regular)
    value = a.select(a.both(is_finite_negative, a.is_not(is_integer)), NAN, value)
    # Even of NaN.
    return a.select(a.either(a.compare("==", x, 1.0), y_is_zero), 1.0, value)


def cbrt(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The cube root: a third of the exponent, and two of Halley's steps in double."""
    size = a.absolute(x)
    is_small = a.compare("<", size, 2.0**-126)
    normal = a.select(is_small, a.multiply(size, 2.0**24), size)
    third = a.builder.udiv(a.bits(normal), a.whole(3))
    d, root = a.widened(a.from_bits(a.int_add(third, 709958130)))
    _, wide = a.widened(normal)
    for _ in range(2):
        cube = d.multiply(root, d.multiply(root, root))
        above = d.add(cube, d.add(wide, wide))
        below = d.add(d.add(cube, cube), wide)
        root = d.multiply(root, d.divide(above, below))
    root = d.multiply(root, d.select(is_small, 2.0**-8, 1.0))
    is_regular = a.both(a.compare(">", size, 0.0), a.compare("<", size, INFINITY))
    return a.select(is_regular, a.copy_sign(a.narrowed(root), x), x)
