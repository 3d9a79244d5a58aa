"""Reading and writing at run-time positions gives XLA's results, inside the array and outside."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.compiler.harness import expect_same

SHAPES = [(5,), (16,), (4, 6), (40, 60), (3, 4, 5), (2, 8, 64)]
MODES = ["clip", "fill", "promise_in_bounds"]


def sample(shape, dtype, seed=0):
    return np.random.default_rng(seed).integers(-9, 9, shape).astype(dtype)


def indices(mode, extent, shape, seed=0):
    """Indices that leave an axis, unless they are promised not to."""
    low, high = (0, extent) if mode == "promise_in_bounds" else (-3, extent + 4)
    return np.random.default_rng(seed).integers(low, high, shape).astype(np.int32)


@pytest.mark.parametrize("index_dtype", [np.int32, np.int8, np.uint8, np.uint32])
@pytest.mark.parametrize("shape", SHAPES)
def test_dynamic_slices_move_inside(shape, index_dtype):
    x = sample(shape, np.float32)
    rng = np.random.default_rng(1)
    starts = rng.integers(-5, 70, (3, len(shape))).astype(index_dtype)
    sizes = [tuple(int(rng.integers(0, extent + 1)) for extent in shape), (1,) * len(shape), shape]

    def function(x, starts):
        results = []
        for size in sizes:
            for row in range(3):
                start = [starts[row, axis] for axis in range(len(shape))]
                results.append(lax.dynamic_slice(x, start, size))
                results.append(lax.dynamic_slice(x * 2 + x, start, size))
                update = jnp.full(size, 7, x.dtype)
                results.append(lax.dynamic_update_slice(x, update, start))
        return results

    expect_same(function, x, starts)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gather_of_whole_rows(shape, mode):
    tables = [sample(shape, dtype) for dtype in (np.float32, np.uint8, jnp.bfloat16, np.bool_)]
    rows = [indices(mode, shape[0], many) for many in [(), (1,), (7,), (16,), (90,), (3, 2), (0,)]]

    def function(*arrays):
        tables, rows = arrays[:4], arrays[4:]
        return [
            table.at[row].get(mode=mode, wrap_negative_indices=False)
            for table in tables
            for row in rows
        ]

    expect_same(function, *tables, *rows)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [np.float32, np.int32, jnp.bfloat16])
def test_scatter_of_whole_rows_in_the_order_of_the_indices(shape, mode, dtype):
    table = sample(shape, dtype)
    rows = [indices(mode, shape[0], many) for many in [(), (1,), (7,), (90,), (3, 2), (0,)]]
    updates = [sample((*row.shape, *shape[1:]), dtype, 1) for row in rows]

    def function(table, *arrays):
        return [
            getattr(table.at[row], how)(update, mode=mode, wrap_negative_indices=False)
            for row, update in zip(arrays[: len(rows)], arrays[len(rows) :], strict=True)
            for how in ("set", "add", "subtract", "min", "max")
        ]

    expect_same(function, table, *rows, *updates)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(4, 6), (40, 60), (2, 8, 64)])
def test_gather_and_scatter_of_elements(shape, mode):
    x = sample(shape, np.float32)
    i, j = indices(mode, shape[0], (5,)), indices("promise_in_bounds", shape[1], (5,))

    def function(x, i, j):
        return [
            x.at[i, j].get(mode=mode, wrap_negative_indices=False),
            x.at[i, j].add(x[0, 0], mode=mode, wrap_negative_indices=False),
            x.at[i, j].multiply(2, mode=mode, wrap_negative_indices=False),
            x[:, j],
            x[:, j] + 1,
        ]

    expect_same(function, x, i, j)


@pytest.mark.parametrize("shape", [(4, 6), (40, 60), (2, 8, 64)])
def test_gather_and_scatter_in_batches(shape):
    x = sample(shape, np.float32)
    along = np.random.default_rng(1).integers(0, shape[1], shape).astype(np.int32)
    each = np.random.default_rng(2).integers(0, shape[1], (shape[0], 3)).astype(np.int32)
    start = np.random.default_rng(3).integers(-1, shape[1] + 3, shape[0]).astype(np.int32)

    def function(x, along, each, start):
        return [
            jnp.take_along_axis(x, along, 1),
            jnp.take_along_axis(x * 2, along, 1),
            jax.vmap(lambda row, i: row[i])(x, each),
            jax.vmap(lambda row, i: row.at[i].set(0))(x, each),
            jax.vmap(lambda row, i: lax.dynamic_slice_in_dim(row, i, 2))(x, start),
        ]

    expect_same(function, x, along, each, start)


@pytest.mark.parametrize("shape", [(5,), (16,), (1,), (300,)])
def test_one_element_is_replaced_or_changed(shape):
    x = sample(shape, np.int32)

    def function(x, i):
        return [
            x.at[i].set(77),
            x.at[i].apply(lambda v: v * v + 1),
            x.at[i].add(5, mode="clip"),
            lax.dynamic_update_slice(x, jnp.full((1,), 9, x.dtype), (i,)),
            x[i],
        ]

    for i in (-400, -1, 0, 2, 400):
        expect_same(function, x, np.int32(i))
