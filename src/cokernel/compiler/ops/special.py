"""The error function and its relatives, and the logarithm of gamma with its derivative.

The other functions of jax.scipy.special that are primitives (igamma, zeta, Bessel functions,
betainc) have no rule here.
"""

import math

from jax import lax
from llvmlite import ir

from cokernel.compiler.dtypes import f64
from cokernel.compiler.ops import float32_math
from cokernel.compiler.ops.arithmetic import FloatArithmetic, call_per_lane
from cokernel.compiler.ops.float32_math import INFINITY, LOG2_E, NAN
from cokernel.compiler.ops.math import Function, library, register_function
from cokernel.compiler.ops.powers import exp2_double, log2_double

# erfc(x) * exp(x**2) in t = 1 / (1 + 0.4 x) for 0 <= x <= 10.2: 2**-35.
ERFC = (
    6.378047527899611e-07, 0.2256539403781283, 0.22601309723175944, 0.20453638702709961,
    0.19019632393590571, 0.04274940304141395, 0.305427983404049, -0.501235851534508,
    0.7897669303731767, -0.8746850619346332, 0.5468752934282376, -0.18007555989634627,
    0.024776476769964025,
)  # fmt: skip
# erf_inv(x) / x, where w = -log(1 - x**2): in w for w <= 5, 2**-28;
ERF_INV_CENTRE = (
    0.886226927451877, 0.23201355601526946, 0.011550335461609109, -0.00233854040306899,
    -0.00012200289067294782, 4.04869824843068e-05, 5.83554727942104e-06,
    -2.497861522074654e-06, 3.0979412955989393e-07, -1.7161116845033246e-08,
    3.35531883349451e-10,
)  # fmt: skip
# in sqrt(w) for 5 <= w <= 16, past which there is no float32, 2**-29;
ERF_INV_TAIL = (
    -3.7935804825894377, 15.56706394542688, -22.51258673002017, 19.14300412981622,
    -10.23848608332591, 3.65349119367381, -0.8879978472111649, 0.14584482808756652,
    -0.015535418346067677, 0.0009709031007838708, -2.706340795178452e-05,
)  # fmt: skip
# and in sqrt(w) for 5 <= w <= 37, past which there is no float64, 2**-19.
ERF_INV_FAR_TAIL = (
    2.7827707319618455, -4.244542908513559, 4.088263121704236, -1.824528610300432,
    0.5087421228469123, -0.09051093838274625, 0.010016894504888314,
    -0.0006298583412288423, 1.7218316797390157e-05,
)  # fmt: skip
# The terms of digamma's asymptotic series in 1 / y**2: the Bernoulli numbers B(2k) / 2k.
DIGAMMA = (
    1 / 12, -1 / 120, 1 / 252, -1 / 240, 1 / 132, -691 / 32760, 1 / 12, -3617 / 8160,
)  # fmt: skip
DIGAMMA_FROM = 10


def erfc_float32(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """1 - erf(x), accurate in the tail; in double."""
    d, wide = a.widened(x)
    size = float32_math.limited(d, d.absolute(wide), None, 10.2)
    t = d.divide(1.0, d.multiply_add(size, 0.4, 1.0))
    falling = exp2_double(d, d.multiply(d.multiply(size, size), -LOG2_E))
    value = d.multiply(falling, d.polynomial(t, ERFC))
    value = d.select(d.compare("<", wide, 0.0), d.subtract(2.0, value), value)
    return a.narrowed(value)


def _erf_inv_guess(
    d: FloatArithmetic, x: ir.Value, w: ir.Value, tail: tuple[float, ...]
) -> ir.Value:
    centre = d.polynomial(w, ERF_INV_CENTRE)
    outer = d.polynomial(d.square_root(w), tail)
    return d.multiply(x, d.select(d.compare("<", w, 5.0), centre, outer))


def _erf_inv_special(d: FloatArithmetic, x: ir.Value, value: ir.Value) -> ir.Value:
    size = d.absolute(x)
    value = d.select(d.compare("==", size, 1.0), d.copy_sign(INFINITY, x), value)
    return d.select(d.compare("<=", size, 1.0), value, NAN)


def erf_inv_float32(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The inverse of erf, by polynomials in double."""
    d, wide = a.widened(x)
    # Exact enough: a product of two float32 numbers.
    rest = d.multiply(d.subtract(1.0, wide), d.add(wide, 1.0))
    w = d.multiply(log2_double(d, rest), -math.log(2))
    value = _erf_inv_guess(d, wide, w, ERF_INV_TAIL)
    return a.narrowed(_erf_inv_special(d, wide, value))


def erf_inv_float64(d: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The inverse of erf, by polynomials and two of Halley's steps with the C library's erf and
    erfc."""
    rest = d.multiply(d.subtract(1.0, x), d.add(x, 1.0))
    size = d.absolute(x)
    y = _erf_inv_guess(d, size, d.negate(d.call("llvm.log", rest)), ERF_INV_FAR_TAIL)
    is_inner = d.compare("<", size, 0.5)
    for _ in range(2):
        inner = d.subtract(call_per_lane(d.elements, "erf", f64, y), size)
        outer = d.subtract(d.subtract(1.0, size), call_per_lane(d.elements, "erfc", f64, y))
        slope = d.multiply(d.call("llvm.exp", d.negate(d.multiply(y, y))), 2 / math.sqrt(math.pi))
        step = d.divide(d.select(is_inner, inner, outer), slope)
        y = d.subtract(y, d.divide(step, d.multiply_add(y, step, 1.0)))
    return _erf_inv_special(d, x, d.copy_sign(y, x))


def in_double(function: Function) -> Function:
    """A function of doubles as one of float32, rounded once."""

    def compute(a: FloatArithmetic, x: ir.Value) -> ir.Value:
        d, wide = a.widened(x)
        return a.narrowed(function(d, wide))

    return compute


def digamma(d: FloatArithmetic, x: ir.Value) -> ir.Value:
    """The derivative of the logarithm of gamma, in double: reflected to x >= 1/2, moved past 10,
    where an asymptotic series serves. Minus infinity at zero, NaN at negative integers and at minus
    infinity."""
    is_reflected = d.compare("<", x, 0.5)
    y = d.select(is_reflected, d.subtract(1.0, x), x)
    is_small = d.compare("<", y, float(DIGAMMA_FROM))
    moved = d.real(0.0)
    for step in range(DIGAMMA_FROM):
        moved = d.add(moved, d.divide(1.0, d.add(y, float(step))))
    far = d.select(is_small, d.add(y, float(DIGAMMA_FROM)), y)
    inverse = d.divide(1.0, far)
    square = d.multiply(inverse, inverse)
    series = d.multiply(square, d.polynomial(square, DIGAMMA))
    value = d.subtract(d.call("llvm.log", far), d.multiply_add(inverse, 0.5, series))
    value = d.subtract(value, d.select(is_small, moved, 0.0))
    fraction = d.subtract(x, d.call("llvm.rint", x))
    tangent = call_per_lane(d.elements, "tan", f64, d.multiply(fraction, math.pi))
    reflection = d.divide(math.pi, tangent)
    value = d.subtract(value, d.select(is_reflected, reflection, 0.0))
    is_pole = d.both(d.compare("<=", x, 0.0), d.compare("==", d.call("llvm.floor", x), x))
    value = d.select(is_pole, NAN, value)
    return d.select(d.compare("==", x, 0.0), -INFINITY, value)


register_function(lax.erf_p, (float32_math.erf, library("erf")))
register_function(lax.erfc_p, (erfc_float32, library("erfc")))
register_function(lax.erf_inv_p, (erf_inv_float32, erf_inv_float64))
register_function(lax.lgamma_p, (in_double(library("lgamma")), library("lgamma")))
register_function(lax.digamma_p, (in_double(digamma), digamma))
