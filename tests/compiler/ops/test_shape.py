"""Moving elements about gives XLA's results for scalars, registers, memory and expressions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.compiler.harness import expect_same

# Registers, an odd one, memory with one long dimension, memory, and nothing.
SHAPES = [(4, 6), (3, 5), (1, 1), (2, 90), (40, 60), (0, 5)]
DTYPES = [np.float32, np.bool_, np.int8, jnp.bfloat16]


def sample(shape, dtype=np.float32):
    return (np.arange(np.prod(shape, dtype=int)) % 101 - 50).reshape(shape).astype(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rearrangements(shape, dtype):
    rows, columns = shape

    def function(x):
        return [
            lax.broadcast_in_dim(x, (2, rows, columns), (1, 2)),
            lax.broadcast_in_dim(x, (rows, 3, columns), (0, 2)),
            lax.broadcast_in_dim(x[:, :1], (rows, 7), (0, 1)),
            lax.reshape(x, (rows * columns,)),
            lax.reshape(x, (columns * rows,), dimensions=(1, 0)),
            lax.reshape(x, (columns, 1, rows)),
            x.T,
            lax.rev(x, (0,)),
            lax.rev(x, (0, 1)),
            x[:, 1:],
            x[::2, ::3],
            lax.expand_dims(x, (1,)),
            lax.squeeze(lax.expand_dims(x, (0, 2)), (0, -2)),
            lax.tile(x, (2, 3)),
            *lax.split(x, (1, columns - 1) if columns > 1 else (1,), axis=1),
            *jnp.unstack(x[:3], axis=0),
        ]

    expect_same(function, sample(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_concatenations(shape, dtype):
    def function(x):
        return [
            lax.concatenate([x, x[:1], x], 0),
            lax.concatenate([x, x[:, 1:], x[:, :0], x], 1),
            lax.concatenate([x], 0),
            jnp.stack([x, lax.rev(x, (0,))], 0),
            jnp.stack([x, x, x], 2),
            jnp.roll(x, 1, 1),
        ]

    expect_same(function, sample(shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(4, 6), (3, 5), (40, 60), (1, 1), (0, 5)])
def test_padding_of_every_sign_around_and_between(shape, dtype):
    configs = [
        ((1, 1, 0), (0, 0, 1)),
        ((1, 2, 0), (3, 4, 0)),
        ((-1, 2, 2), (3, -1, 0)),
        ((-1, -1, 1), (-2, 5, 3)),
        ((-9, 12, 0), (1, 1, 1)),
        ((0, 0, 0), (-1, 0, 0)),
    ]
    x = sample(shape, dtype)
    value = np.array(1, dtype)
    legal = []
    for config in configs:
        sizes = [
            low + high + extent + max(extent - 1, 0) * between
            for extent, (low, high, between) in zip(shape, config, strict=True)
        ]
        if min(sizes) >= 0:
            legal.append(config)
    assert legal
    expect_same(lambda x: [lax.pad(x, value, config) for config in legal], x)


@settings(max_examples=15)
@given(
    st.lists(
        st.tuples(st.integers(-6, 9), st.integers(-6, 9), st.integers(0, 3)), min_size=2, max_size=2
    ),
    st.sampled_from([(4, 5), (9, 11)]),
)
def test_padding_is_that_of_xla(config, shape):
    x = sample(shape, np.int32)
    sizes = [
        max(0, low + high + extent + (extent - 1) * between)
        for extent, (low, high, between) in zip(shape, config, strict=True)
    ]
    config = [
        # Enough behind each dimension to leave an extent that is not negative.
        (low, high + max(0, -(low + high + extent + (extent - 1) * between)), between)
        for extent, (low, high, between) in zip(shape, config, strict=True)
    ]
    assert len(sizes) == 2
    expect_same(lambda x: lax.pad(x, np.int32(7), config), x)


@pytest.mark.parametrize(
    "dtype", [np.int32, np.int8, np.uint16, np.float32, np.float16, jnp.bfloat16]
)
def test_iota_counts_along_its_dimension(dtype):
    def function():
        return [
            lax.broadcasted_iota(dtype, shape, dimension)
            for shape in [(16,), (4, 5), (300,), (7, 90), (0, 3), (1,)]
            for dimension in range(len(shape))
        ]

    # A kernel reads at least one array.
    expect_same(lambda x: [*function(), x], np.zeros(3, np.float32))


@pytest.mark.parametrize("shape", [(2, 8), (3, 64), (5,), (0, 4), (40, 60)])
def test_bits_change_their_width(shape):
    def function(x):
        narrow = [lax.bitcast_convert_type(x, dtype) for dtype in (jnp.int8, jnp.uint16)]
        wide = [lax.bitcast_convert_type(item, jnp.float32) for item in narrow]
        return [*narrow, *wide, lax.bitcast_convert_type(x.T, jnp.int8)]

    expect_same(function, sample(shape))


@settings(max_examples=25)
@given(st.data())
def test_chains_of_views_of_values_and_of_expressions(data):
    """Views compose, whatever they are views of."""
    shape = data.draw(st.sampled_from([(4, 6), (12, 18), (2, 3, 20)]))
    steps = data.draw(
        st.lists(
            st.sampled_from(["transpose", "reverse", "slice", "reshape", "add", "broadcast"]),
            min_size=1,
            max_size=5,
        )
    )

    def function(x):
        for step in steps:
            if step == "transpose":
                x = x.T
            elif step == "reverse":
                x = lax.rev(x, (x.ndim - 1,))
            elif step == "slice":
                x = x[1:] if x.shape[0] > 1 else x
            elif step == "reshape":
                x = x.reshape(x.shape[-1], -1)
            elif step == "add":
                x = x * 2 + lax.broadcasted_iota(x.dtype, x.shape, 0)
            elif x.ndim < 4 and x.size < 4000:
                x = jnp.broadcast_to(x[:, None], (x.shape[0], 2, *x.shape[1:]))
        return x

    expect_same(function, sample(shape, np.int32))


def test_an_expression_used_by_two_views_is_computed_as_xla_does():
    def function(x):
        y = x * 3
        return [(y + y.T)[1:, ::2], (y[:, ::-1] - y.T).reshape(-1)]

    expect_same(function, sample((30, 30), np.int32))
    assert jax.eval_shape(function, sample((30, 30)))[1].shape == (900,)


def test_amounts_may_be_numpy_integers():
    x = np.arange(200, dtype=np.float32).reshape(10, 20)
    expect_same(lambda x: jnp.pad(x, np.array([[1, 2], [3, 0]])), x)
    expect_same(lambda x: lax.slice(x, np.array([1, 2]), np.array([7, 19]), np.array([2, 3])), x)
