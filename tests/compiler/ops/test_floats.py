"""Floats of few bits: every code, and every pair of codes, gives XLA's results."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from tests.compiler.harness import expect_same, run
from tests.compiler.ops.forms import FLOAT8, name_of

# XLA compiles nothing for the two floats of six bits on a CPU.
FEW = [ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu]
FEW_AND_8 = [*FEW, *FLOAT8]
ORDINARY = [jnp.float32, jnp.bfloat16, jnp.float16]

SPECIAL = np.array(
    [
        *[0.0, -0.0, 0.25, 0.5, 0.75, 1, 1.5, 2.5, 3.5, 5, 6, 7, 100, -3, -100, 1.4, 1.6, 3.0],
        *[np.inf, -np.inf, np.nan, 2.0**-126, 2.0**127, 1.5 * 2.0**127, 1e-30, -1e30],
    ],
    np.float32,
)


def codes(dtype):
    count = 1 << ml_dtypes.finfo(dtype).bits
    return jnp.asarray(np.arange(count, dtype=np.uint8).view(dtype))


def pairs(dtype):
    each = codes(dtype)
    return jnp.repeat(each, each.size), jnp.tile(each, each.size)


@pytest.mark.parametrize("dtype", FEW, ids=name_of)
def test_every_code_converts_to_every_float_as_in_xla(dtype):
    targets = [*ORDINARY, *FEW_AND_8]
    expect_same(lambda x: [x.astype(target) for target in targets], codes(dtype))


def test_every_code_of_a_float_of_four_bits_converts_to_its_integer():
    # Where XLA takes the greatest code for one out of range.
    x = codes(ml_dtypes.float4_e2m1fn)
    targets = [jnp.int32, jnp.int8, jnp.uint8, jnp.int4]
    for got in run(lambda x: [x.astype(target) for target in targets], x):
        least = 0 if got.dtype == np.uint8 else -8
        expected = np.maximum(np.trunc(np.asarray(x).astype(np.float32)), least)
        np.testing.assert_array_equal(got.astype(np.float32), expected + 0.0)


@pytest.mark.parametrize("dtype", FEW, ids=name_of)
def test_numbers_of_every_dtype_convert_to_floats_of_few_bits_as_in_xla(dtype):
    with np.errstate(over="ignore"):
        operands = [SPECIAL.astype(source) for source in ORDINARY]
    operands += [np.arange(-8, 8).astype(source) for source in (np.int32, np.int8, jnp.int4)]
    operands += [np.arange(16) % 2 == 0, *(codes(source) for source in FEW_AND_8)]
    expect_same(lambda *items: [item.astype(dtype) for item in items], *operands)


@pytest.mark.parametrize("dtype", FEW, ids=name_of)
def test_arithmetic_and_comparisons_of_every_pair_of_codes(dtype):
    operations = [lax.add, lax.sub, lax.mul, lax.div, lax.max, lax.min, lax.eq, lax.lt, lax.ge]
    expect_same(lambda x, y: [operation(x, y) for operation in operations], *pairs(dtype))


@pytest.mark.parametrize("dtype", FEW, ids=name_of)
def test_functions_of_one_operand_sorting_and_constants(dtype):
    def function(x):
        named = [lax.neg, lax.abs, lax.sign, lax.floor, lax.is_finite, lax.square, lax.sort]
        return [*(each(x) for each in named), jnp.full((40,), 1.5, dtype), x[::3]]

    expect_same(function, codes(dtype)[::-1])


@pytest.mark.parametrize("dtype", [ml_dtypes.float4_e2m1fn, *FLOAT8], ids=name_of)
def test_the_neighbour_of_every_code_on_the_way_to_every_other(dtype):
    expect_same(lax.nextafter, *pairs(dtype))


@pytest.mark.parametrize("dtype", FEW_AND_8, ids=name_of)
def test_every_code_with_its_precision_reduced(dtype):
    bits = [(3, 1), (2, 3), (5, 2), (1, 0), (8, 23), (4, 3)]
    expect_same(lambda x: [lax.reduce_precision(x, *each) for each in bits], codes(dtype))


@pytest.mark.parametrize("shape", [(5,), (3, 7), (8, 130)])
def test_packed_arrays_of_four_bits_pass_through_a_kernel(shape):
    x = (np.arange(np.prod(shape)) % 16).astype(np.uint8).reshape(shape)
    x = jnp.asarray(x.view(ml_dtypes.float4_e2m1fn))
    [got] = run(lambda x: x, x)
    np.testing.assert_array_equal(np.asarray(got).view(np.uint8), np.asarray(x).view(np.uint8))
