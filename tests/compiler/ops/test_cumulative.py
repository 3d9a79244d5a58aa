"""Prefix scans give XLA's results in both directions along every axis."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.compiler.harness import expect_close, expect_same

SHAPES = [(5,), (16,), (4, 4, 4), (40, 60), (2, 300), (300, 2), (1, 1), (0, 4)]


def along_all_axes(shape, *scans):
    def function(x):
        return [
            scan(x, axis, reverse=reverse)
            for scan in scans
            for axis in range(len(shape))
            for reverse in (False, True)
        ]

    return function


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_scans_of_integers(shape, dtype):
    x = np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)
    expect_same(along_all_axes(shape, lax.cumsum, lax.cumprod, lax.cummax, lax.cummin), x)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_running_extremes_of_floats(shape, dtype):
    x = np.random.default_rng(1).integers(-9, 9, shape).astype(dtype)
    x = np.where(np.random.default_rng(2).random(shape) < 0.02, np.array(np.nan, dtype), x)
    expect_same(along_all_axes(shape, lax.cummax, lax.cummin), x)


@pytest.mark.parametrize("shape", SHAPES)
def test_running_sums_of_floats_differ_by_rounding_only(shape):
    whole = np.random.default_rng(3).integers(-9, 9, shape).astype(np.float32)
    expect_same(along_all_axes(shape, lax.cumsum), whole)
    x = np.random.default_rng(3).random(shape).astype(np.float32)
    expect_close(along_all_axes(shape, lax.cumsum), x, ulps=200)
    expect_close(along_all_axes(shape, lax.cumprod), 1 + (x - 0.5) / 100, ulps=1000)


@pytest.mark.parametrize("shape", [(5,), (16,), (3, 5), (40, 60), (2, 300)])
def test_cumlogsumexp_with_infinities(shape):
    x = 10 + np.random.default_rng(4).random(shape).astype(np.float32)
    x = np.where(np.random.default_rng(5).random(shape) < 0.3, np.float32(-np.inf), x)
    expect_close(along_all_axes(shape, lax.cumlogsumexp), x, ulps=100)
