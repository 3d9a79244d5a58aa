"""Mathematical functions of float32 as straight-line code, which LLVM vectorises: reductions of the
argument and polynomials.

Each function takes a FloatArithmetic of float and registers of it. Polynomials are minimax fits of
relative error made for this module (weighted least squares at Chebyshev nodes, Lawson's iteration),
each with what it approximates, where, and how well; the reductions are the textbook ones (Cody and
Waite; Muller, "Elementary Functions"). Where a float32 computation would lose more than an ulp or
two, the function works in double and rounds once. The errors in ulps of float32 that each function
reaches, measured against float64, are kept in tests/compiler/ops/test_math.py.

NaN gives NaN, and the results at infinities, at zeros of either sign and outside the domain are
those of the C library.
"""

import math

from llvmlite import ir

from cokernel.compiler.ops.arithmetic import FloatArithmetic

INFINITY = float("inf")
NAN = float("nan")

LN2_HIGH = 0.693359375  # Ten bits, so that its product with an exponent is exact.
LN2_LOW = math.log(2) - LN2_HIGH
LOG2_E = 1 / math.log(2)

# Adding and subtracting it rounds to an integer, which the low bits of the sum hold.
ROUND_FLOAT = 1.5 * 2.0**23
ROUND_DOUBLE = 1.5 * 2.0**52

SQRT_HALF_FLOAT = 0x3F3504F3

# (exp(r) - 1 - r) / r**2 for |r| <= log(2) / 2; of exp the error is 2**-28, of expm1 2**-32.
EXP = (0.49999994, 0.1666652, 0.041668408, 0.008368914, 0.001381419)
EXPM1 = (0.5, 0.16666666, 0.04166636, 0.00833339, 0.0013940915, 0.000198459)
# ((exp(2 * r) - 1) / 2 - r) / r**2 for |r| <= log(2) / 4; of its tanh: 2**-26.
HALF_EXPM1_OF_TWICE = (1.0, 0.66666156, 0.33333606, 0.13387185, 0.044423282)
# (2**r - 1) / r for |r| <= 1/2: 2**-29.
EXP2 = (0.6931472, 0.24022648, 0.05550332, 0.00961844, 0.0013399132, 0.00015353153)
# (log(1 + f) - f + f**2 / 2) / f**3 for sqrt(1/2) <= 1 + f <= sqrt(2): 2**-30.
LOG = (
    0.33333313, -0.25000009, 0.20002124, -0.16668006, 0.14219452,
    -0.1240534, 0.11888697, -0.116775155, 0.06747731,
)  # fmt: skip
# (sin(r) - r) / r**3 and (cos(r) - 1 + r**2 / 2) / r**4 in r**2 for |r| <= pi / 4: 2**-37 and
# 2**-33.
SIN = (-0.16666667, 0.008333329, -0.00019839311, 2.718112e-06)
COS = (0.041666646, -0.0013887316, 2.4433062e-05)
# (atan(t) - t) / t**3 in t**2 for 0 <= t <= 1: 2**-28.
ATAN = (
    -0.33333299, 0.19998549, -0.14264242, 0.10952186, -0.08403451,
    0.057957601, -0.031177854, 0.01091461, -0.0017936226,
)  # fmt: skip
# erf(x) / x as a quotient of polynomials in x**2 for |x| <= 3.93, from where erf is 1: 2**-25.
ERF_ABOVE = (1.4655246, 0.24778633, 0.06856316, 0.004908848, 0.0003699037, 2.6520856e-06)
ERF_BELOW = (1.2987874, 0.6525232, 0.14839567, 0.01947836, 0.0015133475, 4.93591e-05)

# For each window of magnitudes: where it starts, by which power of two an argument in it is
# multiplied so that it stays an integer below 2**51, and the inverse of that power times 2 / pi,
# modulo 4, in three parts: 29 bits, 29 bits, and the rest.
TWO_OVER_PI = (
    (0.0, 0, (0.6366197690367699, 3.3308114738561656e-09, 2.276010073078396e-18)),
    (2.0**50, 27, (3.447053946554661, 2.168126039814311e-09, 1.0330342399379403e-17)),
    (2.0**77, 54, (1.291000947356224, 5.111805381763368e-09, 3.0053182646326145e-18)),
    (2.0**104, 81, (2.6860949024558067, 2.2660121279383105e-09, 1.0688538751642284e-17)),
)

HALF_PI_LOW = math.pi / 2 - 1.57079637050628662109375
PI_LOW = math.pi - 3.1415927410125732421875


def limited(a: FloatArithmetic, x: ir.Value, low: float | None, high: float | None) -> ir.Value:
    """x between two limits; NaN stays NaN."""
    if high is not None:
        x = a.select(a.compare(">", x, high), high, x)
    if low is not None:
        x = a.select(a.compare("<", x, low), low, x)
    return x


# Exponentials.


def _round_to_exponent(
    a: FloatArithmetic, x: ir.Value, factor: float, bias: int
) -> tuple[ir.Value, ir.Value]:
    """x * factor rounded to an integer n: as a float, and as an integer whose low ten bits are
    n + bias, for a sum that is not negative."""
    shifted = a.multiply_add(x, factor, ROUND_FLOAT + bias)
    return a.subtract(shifted, ROUND_FLOAT + bias), a.bits(shifted)


def _reduce_exp(a: FloatArithmetic, x: ir.Value, bias: int) -> tuple[ir.Value, ir.Value]:
    """r with x = n * log(2) + r and |r| <= log(2) / 2, and n + bias as `_round_to_exponent` has
    it."""
    number, biased = _round_to_exponent(a, x, LOG2_E, bias)
    rest = a.multiply_add(number, -LN2_HIGH, x)
    return a.multiply_add(number, -LN2_LOW, rest), biased


def _beyond_linear(a: FloatArithmetic, x: ir.Value, coefficients: tuple[float, ...]) -> ir.Value:
    """x + x**2 * polynomial(x)."""
    return a.multiply_add(a.multiply(x, x), a.polynomial(x, coefficients), x)


def _one_more_scaled(a: FloatArithmetic, value: ir.Value, biased: ir.Value) -> ir.Value:
    """(1 + value) * 2**n in two steps, so that results that overflow or are denormal come out
    right. The low bits of `biased` are n + 254: the exponent fields of two powers of two."""
    first = a.int_and(a.shift_left(biased, 22), 0x7F800000)
    second = a.int_subtract(a.shift_left(biased, 23), first)
    power = a.from_bits(first)
    return a.multiply(a.multiply_add(power, value, power), a.from_bits(second))


def exp(a: FloatArithmetic, x: ir.Value, doublings: int = 0) -> ir.Value:
    """exp(x) * 2**doublings, where only the product may overflow."""
    x = limited(a, x, -104.0, 90.0)
    rest, biased = _reduce_exp(a, x, 254 + doublings)
    # Not fused: by chance of the roundings, the largest error is then 0.98 ulp, and not 1.01.
    tail = a.multiply(a.multiply(rest, rest), a.polynomial(rest, EXP))
    return _one_more_scaled(a, a.add(rest, tail), biased)


def exp2(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """2**x."""
    x = limited(a, x, -151.0, 129.0)
    number, biased = _round_to_exponent(a, x, 1.0, 254)
    rest = a.subtract(x, number)
    return _one_more_scaled(a, a.multiply(rest, a.polynomial(rest, EXP2)), biased)


def expm1(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """exp(x) - 1, accurate near zero."""
    near = limited(a, x, -20.0, 88.8)
    # Half of it, because 2**n may be just too large for a float.
    rest, biased = _reduce_exp(a, near, 126)
    half = a.from_bits(a.shift_left(biased, 23))
    minus_one = _beyond_linear(a, rest, EXPM1)
    value = a.multiply(a.multiply_add(half, minus_one, a.subtract(half, 0.5)), 2.0)
    return a.select(a.compare("<", a.absolute(x), 2.0**-25), x, value)


def logistic(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """1 / (1 + exp(-x))."""
    return a.divide(1.0, a.add(exp(a, a.negate(x)), 1.0))


def tanh(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """By g = (exp(2 * y) - 1) / 2 of the magnitude y, as g / (g + 1)."""
    magnitude = limited(a, a.absolute(x), None, 10.0)
    number, biased = _round_to_exponent(a, magnitude, 2 * LOG2_E, 127)
    # Without a low part of log(2), which moves the rest by n * 2**-30: the more n is, the flatter
    # is tanh.
    rest = a.multiply_add(number, -math.log(2) / 2, magnitude)
    scale = a.from_bits(a.shift_left(biased, 23))
    grown = a.multiply_add(
        scale, _beyond_linear(a, rest, HALF_EXPM1_OF_TWICE), a.multiply_add(scale, 0.5, -0.5)
    )
    value = a.divide(grown, a.add(grown, 1.0))
    sign = a.int_and(a.bits(x), -(1 << 31))
    return a.from_bits(a.int_or(a.bits(value), sign))


def sinh(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """By expm1 below 1, by exp above."""
    magnitude = a.absolute(x)
    grown = expm1(a, limited(a, magnitude, None, 1.0))
    small = a.multiply(a.add(grown, a.divide(grown, a.add(grown, 1.0))), 0.5)
    half = exp(a, magnitude, -1)
    large = a.subtract(half, a.divide(0.25, half))
    return a.copy_sign(a.select(a.compare("<", magnitude, 1.0), small, large), x)


def cosh(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """Half of exp(x) + exp(-x)."""
    half = exp(a, a.absolute(x), -1)
    return a.add(half, a.divide(0.25, half))


# Logarithms.


def _log_special(a: FloatArithmetic, x: ir.Value, value: ir.Value) -> ir.Value:
    """What a logarithm of x is at zero and infinity, below zero and for NaN; elsewhere `value`."""
    value = a.select(a.compare("==", x, INFINITY), x, value)
    value = a.select(a.compare("==", x, 0.0), -INFINITY, value)
    # Written so that NaN, of which no comparison holds, is caught too.
    return a.select(a.compare(">=", x, 0.0), value, NAN)


def split_significand(a: FloatArithmetic, x: ir.Value, sqrt_half: int) -> tuple[ir.Value, ir.Value]:
    """m and the integer e with x = m * 2**e and sqrt(1/2) <= m < sqrt(2), for a normal positive
    x."""
    bits = a.int_subtract(a.bits(x), sqrt_half)
    exponent = a.shift_right_signed(bits, a.significand_bits)
    low = a.int_and(bits, (1 << a.significand_bits) - 1)
    return a.from_bits(a.int_add(low, sqrt_half)), exponent


def _split_any(a: FloatArithmetic, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The same for denormals too; the exponent comes as a float."""
    is_small = a.compare("<", x, 2.0**-126)
    significand, exponent = split_significand(
        a, a.select(is_small, a.multiply(x, 2.0**23), x), SQRT_HALF_FLOAT
    )
    exponent = a.builder.sitofp(exponent, a.type)
    return significand, a.subtract(exponent, a.select(is_small, 23.0, 0.0))


def _log_sum(a: FloatArithmetic, f: ir.Value, exponent: ir.Value) -> ir.Value:
    """log(1 + f) + exponent * log(2)."""
    square = a.multiply(f, f)
    tail = a.multiply(a.multiply(f, square), a.polynomial(f, LOG))
    tail = a.multiply_add(exponent, LN2_LOW, tail)
    tail = a.multiply_add(square, -0.5, tail)
    return a.multiply_add(exponent, LN2_HIGH, a.add(f, tail))


def log(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The natural logarithm."""
    significand, exponent = _split_any(a, x)
    return _log_special(a, x, _log_sum(a, a.subtract(significand, 1.0), exponent))


def log2(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The logarithm to base 2, exact for powers of two."""
    significand, exponent = _split_any(a, x)
    fraction = _log_sum(a, a.subtract(significand, 1.0), a.real(0.0))
    return _log_special(a, x, a.multiply_add(fraction, LOG2_E, exponent))


def log1p(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """log(1 + x), accurate near zero."""
    whole = a.add(x, 1.0)
    significand, exponent = split_significand(a, whole, SQRT_HALF_FLOAT)
    # (1 + x) / 2**e - 1 with one rounding: `whole` has lost what matters when x is small.
    scale = a.power_of_two(a.int_subtract(0, exponent))
    f = a.multiply_add(x, scale, a.subtract(scale, 1.0))
    f = a.select(a.compare(">", x, 2.0**24), a.subtract(significand, 1.0), f)
    value = _log_sum(a, f, a.builder.sitofp(exponent, a.type))
    value = _log_special(a, whole, value)
    return a.select(a.compare("==", x, 0.0), x, value)


def asinh(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """By log1p of the magnitude."""
    magnitude = a.absolute(x)
    square = a.multiply(magnitude, magnitude)
    root = a.square_root(a.add(square, 1.0))
    grown = a.add(magnitude, a.divide(square, a.add(root, 1.0)))
    # Past 2**30 the root is the magnitude itself, whose square would overflow later on.
    is_large = a.compare(">", magnitude, 2.0**30)
    value = log1p(a, a.select(is_large, magnitude, grown))
    value = a.add(value, a.select(is_large, math.log(2), 0.0))
    return a.copy_sign(value, x)


def acosh(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """By log1p of x - 1 and a root."""
    above = a.subtract(x, 1.0)
    grown = a.add(above, a.square_root(a.multiply(above, a.add(x, 1.0))))
    is_large = a.compare(">", x, 2.0**30)
    value = log1p(a, a.select(is_large, x, grown))
    value = a.add(value, a.select(is_large, math.log(2), 0.0))
    return a.select(a.compare(">=", x, 1.0), value, NAN)


def atanh(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """log1p(2x / (1 - x)) / 2."""
    magnitude = a.absolute(x)
    ratio = a.divide(a.add(magnitude, magnitude), a.subtract(1.0, magnitude))
    return a.copy_sign(a.multiply(log1p(a, ratio), 0.5), x)


# Circular functions.


def _reduce_angle(a: FloatArithmetic, magnitude: ir.Value) -> tuple[ir.Value, ir.Value]:
    """r and an integer n with magnitude = n * pi / 2 + r and |r| <= pi / 4, n modulo 4, for any
    finite magnitude.

    In double, with 2 / pi modulo 4 from TWO_OVER_PI: the products with its first two parts are
    exact, and taking multiples of 4 from them is too. The error of r / (pi / 2) is below 2**-56; no
    float32 is so close to a multiple of pi / 2 that this shows.
    """
    d, x = a.widened(magnitude)
    high, middle, low = (d.real(part) for part in TWO_OVER_PI[0][2])
    scale = d.real(1.0)
    for start, power, parts in TWO_OVER_PI[1:]:
        is_inside = d.compare(">=", x, start)
        high, middle, low, scale = (
            d.select(is_inside, new, old)
            for new, old in zip((*parts, 2.0**-power), (high, middle, low, scale), strict=True)
        )
    x = d.multiply(x, scale)

    def without_fours(value: ir.Value) -> ir.Value:
        fours = d.subtract(d.add(d.multiply(value, 0.25), ROUND_DOUBLE), ROUND_DOUBLE)
        return d.subtract(value, d.multiply(fours, 4.0))

    first, second = (without_fours(d.multiply(x, part)) for part in (high, middle))
    third = d.multiply(x, low)
    shifted = d.add(d.add(first, second), ROUND_DOUBLE)
    quarters = d.subtract(shifted, ROUND_DOUBLE)
    fraction = d.add(d.add(d.subtract(first, quarters), second), third)
    number = a.builder.trunc(d.bits(shifted), a.integer_type)
    return a.narrowed(d.multiply(fraction, math.pi / 2)), number


def _sine_and_cosine(a: FloatArithmetic, r: ir.Value) -> tuple[ir.Value, ir.Value]:
    square = a.multiply(r, r)
    sine = a.multiply_add(a.multiply(r, square), a.polynomial(square, SIN), r)
    cosine = a.multiply(a.multiply(square, square), a.polynomial(square, COS))
    return sine, a.add(a.multiply_add(square, -0.5, cosine), 1.0)


def _flipped(a: FloatArithmetic, value: ir.Value, sign_bit: ir.Value) -> ir.Value:
    """The value with its sign changed where the topmost bit of an integer is set."""
    sign = a.int_and(sign_bit, -(1 << (a.integer.width - 1)))
    return a.from_bits(a.builder.xor(a.bits(value), sign))


def sin(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The sine, of any finite angle."""
    r, number = _reduce_angle(a, a.absolute(x))
    sine, cosine = _sine_and_cosine(a, r)
    value = a.select(a.int_equal(a.int_and(number, 1), 0), sine, cosine)
    return _flipped(a, value, a.builder.xor(a.shift_left(number, 30), a.bits(x)))


def cos(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The cosine, of any finite angle."""
    r, number = _reduce_angle(a, a.absolute(x))
    sine, cosine = _sine_and_cosine(a, r)
    value = a.select(a.int_equal(a.int_and(number, 1), 0), cosine, sine)
    return _flipped(a, value, a.shift_left(a.int_add(number, 1), 30))


def tan(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """Sine over cosine, of any finite angle."""
    r, number = _reduce_angle(a, a.absolute(x))
    sine, cosine = _sine_and_cosine(a, r)
    is_even = a.int_equal(a.int_and(number, 1), 0)
    above = a.select(is_even, sine, cosine)
    below = a.select(is_even, cosine, a.negate(sine))
    return _flipped(a, a.divide(above, below), a.bits(x))


def atan2(a: FloatArithmetic, y: ir.Value, x: ir.Value) -> ir.Value:
    """The angle of the point (x, y)."""
    y_size, x_size = a.absolute(y), a.absolute(x)
    # By their bits, since the processor may take denormals for zeros.
    is_steep = a.builder.icmp_unsigned(">", a.bits(y_size), a.bits(x_size))
    above, below = a.select(is_steep, x_size, y_size), a.select(is_steep, y_size, x_size)
    # Two denormals are to each other as the integers that have their bits.
    are_denormal = a.is_denormal(below)
    above, below = (
        a.select(are_denormal, a.builder.sitofp(a.bits(size), a.type), size)
        for size in (above, below)
    )
    ratio = a.divide(above, below)
    both_infinite = a.both(a.compare("==", x_size, INFINITY), a.compare("==", y_size, INFINITY))
    ratio = a.select(both_infinite, 1.0, ratio)
    ratio = a.select(a.compare("==", below, 0.0), 0.0, ratio)
    square = a.multiply(ratio, ratio)
    angle = a.multiply_add(a.multiply(ratio, square), a.polynomial(square, ATAN), ratio)
    steep = a.add(a.subtract(math.pi / 2, angle), HALF_PI_LOW)
    angle = a.select(is_steep, steep, angle)
    is_left = a.builder.icmp_signed("<", a.bits(x), a.whole(0))
    angle = a.select(is_left, a.add(a.subtract(math.pi, angle), PI_LOW), angle)
    angle = a.copy_sign(angle, y)
    return a.select(a.either(a.is_nan(x), a.is_nan(y)), NAN, angle)


def atan(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The angle whose tangent is x."""
    return atan2(a, x, a.real(1.0))


def asin(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The angle whose sine is x."""
    leg = a.square_root(a.multiply(a.subtract(1.0, x), a.add(x, 1.0)))
    return atan2(a, x, leg)


def acos(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The angle whose cosine is x, by that of half of it."""
    half = atan2(a, a.square_root(a.subtract(1.0, x)), a.square_root(a.add(x, 1.0)))
    return a.add(half, half)


# The error function.


def erf(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """A quotient of polynomials."""
    x = limited(a, x, -3.93, 3.93)
    square = a.multiply(x, x)
    above = a.multiply(x, a.polynomial(square, ERF_ABOVE))
    return a.divide(above, a.polynomial(square, ERF_BELOW))
