"""Convolutions of every kind give XLA's results: exactly for whole numbers, whose sums are exact,
but for the sign of a zero, of which XLA gives either.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tests.compiler.harness import expect_close, run

DTYPES = [np.float32, jnp.bfloat16, np.float16, jnp.float8_e5m2, np.int32, np.int8, np.uint8]


def whole_numbers(seed, shape, dtype=np.float32):
    numbers = np.random.default_rng(seed).integers(0 if dtype == np.uint8 else -2, 3, shape)
    return jnp.asarray(numbers).astype(dtype)


def expect_same(function, *arrays):
    """Asserts that the kernel's results are equal to XLA's."""
    [got] = run(function, *arrays)
    expected = np.asarray(jax.jit(function)(*arrays))
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got.astype(np.float64), expected.astype(np.float64))


@st.composite
def convolutions(draw):
    """The shapes of both operands and the parameters of a convolution."""
    rank = draw(st.integers(0, 3))
    kind = draw(st.sampled_from(["plain", "features", "batch"]))
    groups = draw(st.sampled_from([2, 3])) if kind != "plain" else 1
    inputs, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3)) * groups
    batch = draw(st.integers(1, 2)) * (groups if kind == "batch" else 1)

    def each(low, high):
        return tuple(draw(st.integers(low, high)) for _ in range(rank))

    space, window = each(4, 7), each(1, 3)
    params = {
        "window_strides": each(1, 3),
        "padding": tuple(draw(st.sampled_from([(0, 0), (1, 2), (0, -1)])) for _ in range(rank)),
        "lhs_dilation": each(1, 2),
        "rhs_dilation": each(1, 2),
        "feature_group_count": groups if kind == "features" else 1,
        "batch_group_count": groups if kind == "batch" else 1,
    }
    features = inputs * (groups if kind == "features" else 1)
    return (batch, features, *space), (outputs, inputs, *window), params


@settings(max_examples=15)
@given(case=convolutions(), dtype=st.sampled_from(DTYPES))
def test_every_stride_dilation_padding_and_grouping(case, dtype):
    left_shape, right_shape, params = case
    left, right = whole_numbers(0, left_shape, dtype), whole_numbers(1, right_shape, dtype)
    expect_same(lambda x, y: lax.conv_general_dilated(x, y, **params), left, right)


@pytest.mark.parametrize("layout", [("NHWC", "HWIO", "NHWC"), ("CHWN", "IHWO", "HWNC")])
def test_dimensions_in_any_order(layout):
    sizes = {"N": 2, "C": 3, "H": 6, "W": 7, "I": 3, "O": 4}
    left = whole_numbers(0, [sizes[letter] for letter in layout[0]])
    right = whole_numbers(1, [{**sizes, "H": 3, "W": 2}[letter] for letter in layout[1]])

    def function(x, y):
        return lax.conv_general_dilated(x, y, (1, 2), "SAME", dimension_numbers=layout)

    expect_same(function, left, right)


def test_bytes_are_summed_in_the_preferred_dtype():
    left, right = (
        whole_numbers(seed, shape, np.int8) * 40
        for seed, shape in enumerate([(1, 8, 20), (3, 8, 5)])
    )

    def function(x, y):
        return lax.conv_general_dilated(x, y, (1,), "SAME", preferred_element_type=jnp.int32)

    expect_same(function, left, right)


def test_floats_and_what_is_not_a_number():
    random = np.random.default_rng(2)
    left = random.normal(size=(1, 6, 9, 9)).astype(np.float32)
    right = random.normal(size=(8, 6, 3, 3)).astype(np.float32)
    left[0, 0, 1, 1], left[0, 1, 6, 6] = np.nan, np.inf

    def function(x, y):
        return lax.conv_general_dilated(x, y, (1, 1), "SAME")

    # Sums of 54 products of one sign.
    expect_close(function, np.abs(left), np.abs(right), ulps=32)


@pytest.mark.parametrize("reversed_along", [None, (True, False)])
@pytest.mark.parametrize("has_accumulator", [False, True])
def test_the_convolution_of_a_tensor_core_adds_to_its_accumulator(reversed_along, has_accumulator):
    left, right = whole_numbers(0, (1, 6, 6, 3)), whole_numbers(1, (3, 2, 3, 4))
    start = whole_numbers(2, (1, 6, 6, 4))
    layout = ("NHWC", "HWIO", "NHWC")

    def reference(x, y, acc):
        if reversed_along is not None:
            y = lax.rev(y, [0])
        result = lax.conv_general_dilated(x, y, (1, 1), "SAME", dimension_numbers=layout)
        return acc + result if has_accumulator else result

    def kernel(x, y, acc):
        return pltpu.conv(
            x,
            y,
            acc if has_accumulator else None,
            dimension_numbers=layout,
            padding="SAME",
            window_reversal=reversed_along,
        )

    expected = np.asarray(reference(left, right, start))
    [got] = run(kernel, left, right, start)
    np.testing.assert_array_equal(got, expected)
