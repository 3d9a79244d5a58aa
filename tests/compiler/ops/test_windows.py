"""Reductions over windows give XLA's results, and select the same element of each window."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.compiler import tolerance
from tests.compiler.harness import expect_close, expect_same

DTYPES = [np.float32, np.float16, jnp.bfloat16, np.int32, np.int8, np.uint8, np.uint16]


def lowest(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(-np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).min, dtype)


def highest(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return np.asarray(np.inf, dtype)
    return np.asarray(jnp.iinfo(dtype).max, dtype)


@st.composite
def windows(draw):
    """A shape and the parameters of windows over it."""
    rank = draw(st.integers(1, 3))

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    padding = tuple(draw(st.sampled_from([(0, 0), (1, 2), (2, 0)])) for _ in range(rank))
    return each(1, 8), {
        "window_dimensions": each(1, 3),
        "window_strides": each(1, 3),
        "padding": padding,
        "base_dilation": each(1, 2),
        "window_dilation": each(1, 2),
    }


def whole_numbers(shape, dtype, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 9, shape)
    return jnp.asarray(numbers).astype(dtype)


@settings(max_examples=15)
@given(windows(), st.sampled_from(DTYPES), st.sampled_from(["sum", "max", "min"]))
def test_sums_and_extremes(case, dtype, name):
    shape, params = case
    start, fold = {
        "sum": (np.zeros((), dtype), lax.add),
        "max": (lowest(dtype), lax.max),
        "min": (highest(dtype), lax.min),
    }[name]
    x = whole_numbers(shape, dtype)
    expect_same(lambda x: lax.reduce_window(x, start, fold, **params), x)


@settings(max_examples=5)
@given(windows())
def test_a_function_of_the_users_folds_several_arrays_together(case):
    shape, params = case

    def function(x, y):
        def fold(left, right):
            return left[0] * right[0], lax.max(left[1], right[1])

        starts = (np.float32(1), np.int32(-100))
        return lax.reduce_window((x, y), starts, fold, **params)

    expect_same(function, whole_numbers(shape, np.float32), whole_numbers(shape, np.int32, seed=1))


def test_large_arrays_and_what_is_not_a_number():
    x = np.random.default_rng(3).normal(size=(3, 40, 50)).astype(np.float32)
    x[0, 3, 4], x[1, 2, 3], x[2, 5, 6] = np.nan, np.inf, -np.inf

    def largest(x):
        return lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3), (1, 2, 2), "SAME")

    def total(x):
        return lax.reduce_window(x, 0.0, lax.add, (1, 3, 3), (1, 1, 1), "VALID")

    expect_same(largest, x)
    # Sums of nine numbers of one sign in another order.
    expect_close(total, np.abs(x), ulps=8)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("fold", ["max", "min"])
@pytest.mark.parametrize("padding", ["SAME", "VALID"])
def test_derivatives_of_pooling_go_to_the_element_that_is_selected(dtype, fold, padding):
    # Without ties, of which XLA may select any.
    x = jnp.asarray(np.random.default_rng(4).permutation(2 * 9 * 8).reshape(2, 9, 8)).astype(dtype)
    tangent = whole_numbers(x.shape, dtype, seed=5)
    start, function = {"max": (-np.inf, lax.max), "min": (np.inf, lax.min)}[fold]

    def pool(x):
        return lax.reduce_window(
            x, np.asarray(start, dtype), function, (1, 3, 2), (1, 2, 1), padding
        )

    def loss(x):
        y = pool(x)
        return (y * jnp.arange(y.shape[-1]).astype(dtype)).sum().astype(jnp.float32)

    expect_same(jax.grad(loss), x)
    expect_same(lambda x, t: jax.jvp(pool, (x,), (t,)), x, tangent)
    tolerance.note(lax.select_and_gather_add_p, dtype, 0.0)
