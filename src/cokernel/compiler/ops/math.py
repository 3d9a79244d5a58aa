"""Exponentials, logarithms, circular and hyperbolic functions, powers and roots.

float32, and the narrower floats through it, have code of our own, which vectorises (float32_math).
float64 calls the C library, as XLA does for most of these. What `accuracy` asks for is met in any
case.
"""

from collections.abc import Callable
from typing import Any

from jax import lax
from llvmlite import ir

from cokernel.compiler.dtypes import f64, register_type
from cokernel.compiler.function import ElementBuilder
from cokernel.compiler.ops import float32_math, powers
from cokernel.compiler.ops.arithmetic import FloatArithmetic, call_per_lane
from cokernel.compiler.ops.convert import convert
from cokernel.compiler.ops.elementwise import in_float
from cokernel.compiler.ops.registry import Operation, elementwise

Function = Callable[..., ir.Value]


def library(name: str) -> Function:
    """A function of doubles: an LLVM intrinsic, or a function of the C library called on each
    lane."""

    def compute(d: FloatArithmetic, *arguments: ir.Value) -> ir.Value:
        if name.startswith("llvm."):
            return d.call(name, *arguments)
        return call_per_lane(d.elements, name, f64, *arguments)

    return compute


def _logistic(d: FloatArithmetic, x: ir.Value) -> ir.Value:
    return d.divide(1.0, d.add(d.call("llvm.exp", d.negate(x)), 1.0))


def square_root(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """Correctly rounded, in any type."""
    return a.square_root(x)


def reciprocal_square_root(a: FloatArithmetic, x: ir.Value) -> ir.Value:
    """1 / sqrt(x)."""
    return a.divide(1.0, a.square_root(x))


# For each primitive: its function of float32, and of float64.
FUNCTIONS: dict[Any, tuple[Function, Function]] = {
    lax.exp_p: (float32_math.exp, library("llvm.exp")),
    lax.exp2_p: (float32_math.exp2, library("llvm.exp2")),
    lax.expm1_p: (float32_math.expm1, library("expm1")),
    lax.log_p: (float32_math.log, library("llvm.log")),
    lax.log2_p: (float32_math.log2, library("llvm.log2")),
    lax.log1p_p: (float32_math.log1p, library("log1p")),
    lax.logistic_p: (float32_math.logistic, _logistic),
    lax.sin_p: (float32_math.sin, library("llvm.sin")),
    lax.cos_p: (float32_math.cos, library("llvm.cos")),
    lax.tan_p: (float32_math.tan, library("tan")),
    lax.asin_p: (float32_math.asin, library("asin")),
    lax.acos_p: (float32_math.acos, library("acos")),
    lax.atan_p: (float32_math.atan, library("atan")),
    lax.atan2_p: (float32_math.atan2, library("atan2")),
    lax.sinh_p: (float32_math.sinh, library("sinh")),
    lax.cosh_p: (float32_math.cosh, library("cosh")),
    lax.tanh_p: (float32_math.tanh, library("tanh")),
    lax.asinh_p: (float32_math.asinh, library("asinh")),
    lax.acosh_p: (float32_math.acosh, library("acosh")),
    lax.atanh_p: (float32_math.atanh, library("atanh")),
    lax.sqrt_p: (square_root, square_root),
    lax.rsqrt_p: (reciprocal_square_root, reciprocal_square_root),
    lax.cbrt_p: (powers.cbrt, library("cbrt")),
}


def function_of(dtype: Any, functions: tuple[Function, Function]) -> Function:
    """The one of two functions that computes for a dtype."""
    return functions[1] if register_type(dtype) == f64 else functions[0]


def register_function(primitive: Any, functions: tuple[Function, Function]) -> None:
    """Makes a pair of functions, of float32 and of float64, the rule of a primitive."""

    @elementwise(primitive)
    def rule_of_function(
        builder: ElementBuilder, operation: Operation, *registers: ir.Value
    ) -> ir.Value:
        dtype = operation.result_dtype
        return in_float(builder, dtype, function_of(dtype, functions), *registers)


for _primitive, _functions in FUNCTIONS.items():
    register_function(_primitive, _functions)


@elementwise(lax.pow_p)
def power(
    builder: ElementBuilder, operation: Operation, base: ir.Value, exponent: ir.Value
) -> ir.Value:
    """The base to the power of a float of its dtype, or of an integer, which becomes one."""
    dtype = operation.result_dtype
    exponent = convert(builder, operation.operand_dtypes[1], dtype, exponent)
    pair = (powers.power, library("llvm.pow"))
    return in_float(builder, dtype, function_of(dtype, pair), base, exponent)
