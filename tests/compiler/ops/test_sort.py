"""Sorting gives XLA's order: stable, with both zeros equal and NaNs last."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.compiler.harness import expect_same

SHAPES = [(5,), (16,), (3, 5), (4, 4, 4), (40, 60), (2, 300), (300, 2), (1, 1), (0, 3)]
DTYPES = [np.float32, np.int32, jnp.bfloat16, np.bool_, np.uint32]


def sample(shape, dtype):
    """Many equals, and for floats NaNs of both signs, infinities, and zeros of both signs."""
    x = np.random.default_rng(0).integers(-6, 7, shape).astype(dtype)
    if np.dtype(dtype).kind in "iub":
        return x
    odds = np.random.default_rng(1).random(shape)
    for low, special in enumerate([np.nan, -np.inf, np.inf, -0.0, -np.nan]):
        chosen = (odds > low / 12) & (odds < (low + 1) / 12)
        x = np.where(chosen, np.array(special).astype(dtype), x)
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_sort_along_every_axis_with_one_key_and_with_two(shape, dtype):
    x, z = sample(shape, dtype), sample(shape, np.float32)
    y = np.arange(x.size, dtype=np.int32).reshape(shape)

    def function(x, y, z):
        results = []
        for axis in range(len(shape)):
            results.append(lax.sort(x, dimension=axis))
            results += lax.sort((x, y), dimension=axis, num_keys=1)
            results += lax.sort((x, z, y), dimension=axis, num_keys=2)
        return results

    expect_same(function, x, y, z)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5,), (16,), (3, 5), (40, 60), (300,)])
def test_top_k_with_the_first_of_equals_first(shape, dtype):
    def function(x):
        return [
            lax.top_k(x, k, axis=axis)
            for axis in range(len(shape))
            for k in (1, 3, shape[axis])
            if k <= shape[axis]
        ]

    expect_same(function, sample(shape, dtype))


def test_an_expression_is_sorted():
    x = sample((30, 40), np.int32)
    expect_same(lambda x: [lax.sort(x * 3 - x, dimension=0), lax.sort(x.T + 1)], x)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16, np.int8, np.uint32])
@pytest.mark.parametrize("count", [64, 5000])
def test_long_rows_with_and_without_something_that_moves_along(dtype, count):
    # Every bit pattern may occur: all digits differ, and there are NaNs of many kinds.
    dtype = np.dtype(dtype)
    integers = np.random.default_rng(0).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    x = np.stack([integers.view(dtype), sample((count,), dtype)])
    y = np.arange(x.size, dtype=np.int32).reshape(x.shape)
    expect_same(lambda x, y: [lax.sort(x), *lax.sort((x, y), num_keys=1), lax.top_k(x[1], 7)], x, y)


def test_a_long_row_of_equals_keeps_its_order():
    x = np.where(np.arange(300) % 3 == 0, -0.0, 0.0).astype(np.float32)
    y = np.arange(300, dtype=np.int32)
    expect_same(lambda x, y: [lax.sort(x), *lax.sort((x, y), num_keys=1)], x, y)


def test_long_rows_of_sixty_four_bits():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).standard_normal(300)
        y = np.random.default_rng(0).integers(-(2**63), 2**63, 300)
        expect_same(lambda x, y: [lax.sort(x), lax.sort(y), *lax.sort((y, x), num_keys=1)], x, y)


@pytest.mark.parametrize("count", [1, 3, 12])
def test_many_sorts_of_one_kind_and_of_several_each_give_their_own_result(count):
    """They share functions, which are inlined where there are few calls."""
    x = np.random.default_rng(count).integers(-50, 50, (count, 16)).astype(np.int32)

    def sorts(x):
        rows = [lax.sort(x[row]) for row in range(count)]
        pairs = [lax.sort((x[row], rows[0]), num_keys=1) for row in range(count)]
        floats = [lax.sort(-x[row].astype(np.float32)) for row in range(count)]
        columns = [lax.sort(x[row].reshape(4, 4), dimension=0) for row in range(count)]
        return rows, pairs, floats, columns

    expect_same(sorts, x)
