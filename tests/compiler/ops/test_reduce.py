"""Reductions give XLA's results: exactly, but for sums and products of floats."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.compiler.harness import expect_close, expect_same, run

SHAPES = [(5,), (3, 5), (4, 4, 4), (40, 60), (2, 300), (300, 2), (7, 9, 11), (1, 1), (64, 3, 50)]


def axes_of(shape):
    ranks = range(1, len(shape) + 1)
    return [axes for n in ranks for axes in itertools.combinations(range(len(shape)), n)]


def over_all_axes(shape, *primitives):
    """The reductions of an array by each primitive over each set of axes."""
    signed = (lax.reduce_and_p, lax.reduce_or_p, lax.reduce_xor_p)

    def function(x):
        return [
            primitive.bind(x, axes=axes)
            if primitive in signed
            else primitive.bind(x, axes=axes, out_sharding=None)
            for axes in axes_of(shape)
            for primitive in primitives
        ]

    return function


def integers(shape, dtype):
    return np.random.default_rng(len(shape)).integers(-50, 50, shape).astype(dtype)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
@pytest.mark.parametrize("shape", SHAPES)
def test_integers(shape, dtype):
    primitives = [
        lax.reduce_sum_p,
        lax.reduce_prod_p,
        lax.reduce_max_p,
        lax.reduce_min_p,
        lax.reduce_and_p,
        lax.reduce_or_p,
        lax.reduce_xor_p,
    ]
    expect_same(over_all_axes(shape, *primitives), integers(shape, dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_truth_values(shape):
    primitives = [lax.reduce_max_p, lax.reduce_min_p, lax.reduce_and_p, lax.reduce_or_p]
    expect_same(over_all_axes(shape, *primitives), integers(shape, np.int8) > 30)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_extremes_of_floats(shape, dtype):
    function = over_all_axes(shape, lax.reduce_max_p, lax.reduce_min_p)
    expect_same(function, integers(shape, dtype))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_greater_zero_is_the_positive_one(shape):
    is_negative = integers(shape, np.int32) < 0
    x = np.where(is_negative, np.float32(-0.0), np.float32(0))
    ours = run(over_all_axes(shape, lax.reduce_max_p, lax.reduce_min_p), x)
    theirs = [fold(is_negative, axes) for axes in axes_of(shape) for fold in (np.all, np.any)]
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our, 0)
        np.testing.assert_array_equal(np.signbit(our), their)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, jnp.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_an_extreme_is_nan_if_any_element_is(shape, dtype):
    # XLA itself loses NaNs in large arrays, so that numpy is what to compare with.
    x = integers(shape, dtype)
    x = np.where(np.random.default_rng(1).random(shape) < 0.02, np.array(np.nan, dtype), x)
    ours = run(over_all_axes(shape, lax.reduce_max_p, lax.reduce_min_p), x)
    wide = x.astype(np.float32)
    theirs = [extreme(wide, axes) for axes in axes_of(shape) for extreme in (np.max, np.min)]
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(our.astype(np.float32), their)


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_of_whole_floats_are_exact(shape):
    expect_same(over_all_axes(shape, lax.reduce_sum_p), integers(shape, np.float32))


@pytest.mark.parametrize("shape", SHAPES)
def test_sums_and_products_of_floats_differ_by_rounding_only(shape):
    x = np.random.default_rng(2).random(shape).astype(np.float32) + 0.5
    expect_close(over_all_axes(shape, lax.reduce_sum_p), x, ulps=200)
    y = 1 + (x - 1) / 100
    expect_close(over_all_axes(shape, lax.reduce_prod_p), y, ulps=1000)


def test_a_sum_of_negative_zeros_is_zero():
    x = np.full((3, 200), -0.0, np.float32)
    expect_same(lambda x: [jnp.sum(x), jnp.sum(x, 0), jnp.sum(x[:2, :4], 1), jnp.sum(x[:1], 0)], x)


@pytest.mark.parametrize("dtype", [np.float16, jnp.bfloat16])
def test_narrow_floats_are_summed_in_float32(dtype):
    # 1 + 1 + ... in the narrow dtype itself would stop growing.
    x = np.ones((3, 3000), dtype)
    expect_close(lambda x: lax.reduce_sum_p.bind(x, axes=(1,), out_sharding=None), x, ulps=2)


@pytest.mark.parametrize("dtype", [np.float32, np.int8, np.bool_])
def test_reducing_nothing_gives_the_identity(dtype):
    x = np.zeros((0, 3), dtype)
    primitives = [lax.reduce_max_p, lax.reduce_min_p]
    if dtype != np.bool_:
        primitives += [lax.reduce_sum_p, lax.reduce_prod_p]
    expect_same(over_all_axes((0, 3), *primitives), x)


@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16, np.uint8])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (4, 4, 4), (40, 60), (2, 300), (300, 2), (1, 1)])
def test_argmax_and_argmin_take_the_first_of_equals_and_the_first_nan(shape, dtype):
    x = np.random.default_rng(3).integers(0, 5, shape).astype(dtype)

    def function(*arrays):
        return [
            find(array, axis, index_dtype)
            for array in arrays
            for axis in range(len(shape))
            for find in (lax.argmax, lax.argmin)
            for index_dtype in (np.int32, np.int16)
        ]

    arrays = [x]
    if np.dtype(dtype).kind not in "iu":
        odds = np.random.default_rng(4).random(shape)
        arrays.append(np.where(odds < 0.05, np.array(np.nan, dtype), x))
    expect_same(function, *arrays)


@pytest.mark.parametrize("shape", [(5,), (3, 5), (40, 60)])
def test_a_reducer_of_the_users_own_on_two_arrays(shape):
    def reducer(left, right):
        is_left = left[0] >= right[0]
        return jnp.maximum(left[0], right[0]), jnp.where(is_left, left[1], right[1])

    def function(x):
        place = lax.broadcasted_iota(np.int32, x.shape, 0)
        start = (np.int32(-1000), np.int32(0))
        return [lax.reduce((x, place), start, reducer, (axis,)) for axis in range(len(shape))]

    # Without equals, the order in which XLA folds does not show.
    order = np.random.default_rng(5).permutation(int(np.prod(shape)))
    expect_same(function, order.reshape(shape).astype(np.int32))


def test_a_reduction_of_an_expression_reads_through_it():
    def function(x):
        y = x * 2 + x.T
        return [jnp.sum(y, 0), jnp.max(y[::2], 1), jnp.sum(y.T, 0), jnp.min(y)]

    expect_same(function, integers((60, 60), np.int32))


def test_a_sum_of_products_of_signed_and_unsigned_bytes():
    # LLVM has an instruction for this, which it must not use wrongly.
    a, b = integers((64,), np.int8), integers((64,), np.uint8)
    expect_same(lambda a, b: jnp.sum(a.astype(jnp.int32) * b.astype(jnp.int32)), a, b)


SPECIAL = [np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-45, 3.5, -3.5]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", SPECIAL)
def test_extremes_of_many_floats_know_every_special_value(value, dtype):
    x = np.full((40, 70), value, dtype)
    x[3, 5], x[20, 60], x[21] = -0.0, 0.0, -np.inf
    x[22] = np.inf

    def function(x):
        return [reduce(x, axis=axis) for reduce in (jnp.max, jnp.min) for axis in (0, 1, None)]

    with jax.enable_x64(dtype == np.float64):
        got = run(function, x)
    expected = [reduce(x, axis=axis) for reduce in (np.max, np.min) for axis in (0, 1, None)]
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_zeros_have_an_order():
    x = np.zeros((40, 70), np.float32)
    x[::2] = -0.0
    largest, smallest = run(lambda x: [jnp.max(x, axis=0), jnp.min(x, axis=0)], x)
    assert not np.signbit(largest).any()
    assert np.signbit(smallest).all()
