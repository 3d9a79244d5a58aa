"""Elementwise primitives give XLA's results for every dtype that they take."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

from cokernel import _jax
from tests.compiler.ops.every_dtype import (
    ANY,
    BITS,
    FLOATING,
    INTS,
    NUMBERS,
    SIGNED_INTS,
    Case,
    expect_like_xla,
    expect_refused,
    without,
)
from tests.compiler.ops.forms import NARROW_INTEGERS, name_of

PL = _jax.pallas_primitives

AWAY = lax.RoundingMethod.AWAY_FROM_ZERO
TO_EVEN = lax.RoundingMethod.TO_NEAREST_EVEN


def binary(primitive, dtypes, **params):
    return Case(primitive, lambda x: primitive.bind(x.a, x.b, **params), dtypes)


def unary(primitive, dtypes, **params):
    return Case(primitive, lambda x: primitive.bind(x.a, **params), dtypes)


def next_power_of_two(x):
    """By the codes of a float that has no sign, which XLA takes to have one."""
    start, end = (lax.bitcast_convert_type(item, jnp.uint8) for item in (x.a, x.b))
    moved = jnp.where(start == end, start, jnp.where(start < end, start + 1, start - 1))
    is_nan = (start == 255) | (end == 255)
    return lax.bitcast_convert_type(jnp.where(is_nan, jnp.uint8(255), moved), x.a.dtype)


def without_denormals(x):
    """Whether denormals are zeros is a setting of the processor, which LLVM does not know."""
    if x.dtype != jnp.bfloat16:
        return x
    return jnp.where(lax.abs(x) < jnp.finfo(x.dtype).tiny, jnp.zeros_like(x), x)


def few_bits(dtype):
    return jnp.uint2 if dtype in (jnp.int2, jnp.uint2) else jnp.uint4


def gathered(x):
    """Rows, and single elements whose places are pairs; some lie outside."""
    rows = lax.GatherDimensionNumbers((1,), (0,), (0,))
    single = lax.GatherDimensionNumbers((), (0, 1), (0, 1))
    return [
        result
        for mode in (lax.GatherScatterMode.CLIP, lax.GatherScatterMode.FILL_OR_DROP)
        for result in (
            lax.gather(x.a, x.places[:, None], rows, (1, x.a.shape[1]), mode=mode),
            lax.gather(x.a, x.places.reshape(-1, 2), single, (1, 1), mode=mode),
        )
    ]


CASES = (
    # What it fills in depends on the dtype.
    Case(lax.gather_p, gathered),
    Case(lax.iota_p, lambda x: lax.broadcasted_iota(x.a.dtype, (3, 4), 1), NUMBERS),
    Case(lax.add_p, lambda x: lax.add(x.a, x.b), NUMBERS),
    Case(lax.sub_p, lambda x: lax.sub(x.a, x.b), NUMBERS),
    Case(lax.mul_p, lambda x: lax.mul(x.a, x.b), NUMBERS),
    Case(lax.div_p, lambda x: lax.div(x.a, x.b), NUMBERS),
    Case(lax.rem_p, lambda x: lax.rem(x.a, x.b), NUMBERS),
    Case(lax.max_p, lambda x: lax.max(x.a, x.b)),
    Case(lax.min_p, lambda x: lax.min(x.a, x.b)),
    Case(lax.eq_p, lambda x: lax.eq(x.a, x.b)),
    Case(lax.ne_p, lambda x: lax.ne(x.a, x.b)),
    Case(lax.lt_p, lambda x: lax.lt(x.a, x.b)),
    Case(lax.le_p, lambda x: lax.le(x.a, x.b)),
    Case(lax.gt_p, lambda x: lax.gt(x.a, x.b)),
    Case(lax.ge_p, lambda x: lax.ge(x.a, x.b)),
    binary(lax.eq_to_p, ANY),
    binary(lax.lt_to_p, ANY),
    binary(lax.le_to_p, ANY),
    Case(lax.shift_left_p, lambda x: lax.shift_left(x.a, x.b), INTS),
    Case(lax.shift_right_logical_p, lambda x: lax.shift_right_logical(x.a, x.b), INTS),
    Case(lax.shift_right_arithmetic_p, lambda x: lax.shift_right_arithmetic(x.a, x.b), INTS),
    binary(lax.mulhi_p, INTS),
    Case(lax.and_p, lambda x: lax.bitwise_and(x.a, x.b), BITS),
    Case(lax.or_p, lambda x: lax.bitwise_or(x.a, x.b), BITS),
    Case(lax.xor_p, lambda x: lax.bitwise_xor(x.a, x.b), BITS),
    Case(lax.not_p, lambda x: lax.bitwise_not(x.a), BITS),
    unary(lax.population_count_p, INTS),
    unary(lax.clz_p, INTS),
    Case(lax.neg_p, lambda x: lax.neg(x.a), NUMBERS),
    Case(lax.abs_p, lambda x: lax.abs(x.a), (*SIGNED_INTS, *FLOATING)),
    Case(lax.sign_p, lambda x: lax.sign(x.a), NUMBERS),
    Case(lax.square_p, lambda x: lax.square(x.a), NUMBERS),
    unary(lax.one_minus_square_p, NUMBERS),
    Case(lax.integer_pow_p, lambda x: [lax.integer_pow(x.a, y) for y in (0, 3, 6)], NUMBERS),
    Case(lax.integer_pow_p, lambda x: lax.integer_pow(x.a, -2), FLOATING),
    Case(lax.clamp_p, lambda x: lax.clamp(x.b, x.a, x.c)),
    # Of whole numbers, because XLA may make one rounding of a product and a sum.
    Case(
        lax.polynomial_p, lambda x: lax.polynomial(lax.sign(x.a), [*map(lax.sign, x[:3])]), NUMBERS
    ),
    Case(lax.floor_p, lambda x: lax.floor(x.a), FLOATING),
    Case(lax.ceil_p, lambda x: lax.ceil(x.a), FLOATING),
    Case(lax.round_p, lambda x: [lax.round(x.a, way) for way in (AWAY, TO_EVEN)], FLOATING),
    Case(lax.is_finite_p, lambda x: lax.is_finite(x.a), FLOATING),
    Case(lax.nextafter_p, lambda x: lax.nextafter(x.a, x.b), without(FLOATING, jnp.float8_e8m0fnu)),
    Case(
        lax.nextafter_p,
        lambda x: lax.nextafter(x.a, x.b),
        (jnp.float8_e8m0fnu,),
        reference=next_power_of_two,
    ),
    Case(
        lax.reduce_precision_p,
        lambda x: [lax.reduce_precision(x.a, *bits) for bits in ((4, 3), (8, 7), (5, 10))],
        FLOATING,
    ),
    Case(lax.select_n_p, lambda x: lax.select_n(lax.ne(x.a, x.b), x.b, x.a)),
    Case(
        lax.bitcast_convert_type_p,
        lambda x: lax.bitcast_convert_type(x.a, f"uint{8 * x.a.dtype.itemsize}"),
        without(NUMBERS, *NARROW_INTEGERS, jnp.float4_e2m1fn),
    ),
    Case(
        lax.bitcast_convert_type_p,
        lambda x: lax.bitcast_convert_type(x.a, few_bits(x.a.dtype)),
        (*NARROW_INTEGERS, jnp.float4_e2m1fn),
    ),
    Case(PL.reciprocal_p, lambda x: pl.reciprocal(x.a), FLOATING, reference=lambda x: 1 / x.a),
    unary(lax.copy_p, ANY),
    Case(lax.optimization_barrier_p, lambda x: lax.optimization_barrier(x.a)),
    Case(_jax.stop_gradient_p, lambda x: _jax.stop_gradient_p.bind(x.a)),
    binary(_jax.add_jaxvals_p, ANY),
    binary(_jax.tie_p, ANY),
    Case(
        lax.convert_element_type_p,
        lambda x: [x.a.astype(dtype) for dtype in NUMBERS],
        without(ANY, jnp.float4_e2m1fn),
    ),
    # XLA takes the greatest float of four bits for one out of the range of every integer.
    Case(
        lax.convert_element_type_p,
        lambda x: [x.a.astype(dtype) for dtype in NUMBERS],
        (jnp.float4_e2m1fn,),
        reference=lambda x: [
            (x.a.astype(jnp.float32) if dtype in INTS else x.a).astype(dtype) for dtype in NUMBERS
        ],
    ),
    Case(
        lax.convert_element_type_p,
        lambda x: without_denormals(x.a).astype(jnp.bool_),
    ),
)


@pytest.fixture(autouse=True, scope="module")
def wide_types():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("dtype", ANY, ids=name_of)
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_primitives_give_the_results_of_xla(dtype, seed):
    expect_like_xla(CASES, dtype, seed)


@pytest.mark.parametrize("dtype", ANY, ids=name_of)
def test_what_no_case_compares_is_refused(dtype):
    takers = {case.primitive for case in CASES if dtype in case.dtypes}
    for case in CASES:
        if case.primitive not in takers:
            expect_refused(case, dtype)
