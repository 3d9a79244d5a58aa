"""Rows chosen by indices: ragged bags gathered from HBM, and rows added into shared memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

SUBCORES = 16


@pytest.fixture
def lanes(v6e) -> int:
    return plsc.get_sparse_core_info().num_lanes


@pytest.fixture
def mesh(v6e) -> plsc.VectorSubcoreMesh:
    return plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")


def number_of_subcore():
    return lax.axis_index("core") * SUBCORES + lax.axis_index("subcore")


def test_bags_of_very_different_sizes_are_gathered_and_added(mesh, lanes, compiler_params):
    rows, width = 50, 2 * lanes

    def pool(table_ref, ids_ref, bounds_ref, out_ref, ids, lines, total, bounds, done):
        me = number_of_subcore()
        pltpu.sync_copy(bounds_ref.at[me], bounds)
        # A vector subcore has no scalar loads from its vector memory; it reduces a vector instead.
        lane = lax.iota(jnp.int32, lanes)
        start = jnp.sum(jnp.where(lane == 0, bounds[...], 0))
        stop = jnp.sum(jnp.where(lane == 1, bounds[...], 0))
        total[...] = jnp.zeros((2, lanes), jnp.float32)

        @pl.loop(0, pl.cdiv(stop - start, lanes))
        def _window(number):
            first = start + number * lanes
            pltpu.sync_copy(ids_ref.at[pl.ds(first, lanes)], ids)
            # Indices behind the end of the bag belong to the next one: their rows stay zero.
            ids[...] = jnp.where(first + lane < stop, ids[...], -1)
            for row in range(lanes):
                for part in range(2):
                    lines[row, pl.ds(part * lanes, lanes)] = jnp.zeros((lanes,), jnp.float32)
            chosen = table_ref.at[plsc.Indices(ids, ignored_value=-1)]
            pltpu.async_copy(chosen, lines, done).wait()
            for row in range(lanes):
                for part in range(2):
                    total[part] += lines[row, pl.ds(part * lanes, lanes)]

        pltpu.sync_copy(total, out_ref.at[me])

    kernel = cokernel.kernel(
        pool,
        jax.ShapeDtypeStruct((2 * SUBCORES, 2, lanes), jnp.float32),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((lanes,), jnp.int32),
            pltpu.VMEM((lanes, width), jnp.float32),
            pltpu.VMEM((2, lanes), jnp.float32),
            pltpu.VMEM((lanes,), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=compiler_params,
    )
    random = np.random.default_rng(0)
    sizes = random.permutation(
        [0, 1, lanes - 1, lanes, lanes + 1, 100, *random.integers(0, 40, 26)]
    )
    ends = np.cumsum(sizes)
    ids = random.integers(0, rows, ends[-1], np.int32)
    table = random.integers(-9, 9, (rows, width)).astype(np.float32)
    bounds = np.zeros((2 * SUBCORES, lanes), np.int32)
    bounds[:, 0], bounds[:, 1] = ends - sizes, ends
    padded = np.concatenate([ids, np.full(lanes, 7, np.int32)])
    expected = [table[ids[end - size : end]].sum(0) for size, end in zip(sizes, ends, strict=True)]
    result = kernel(table, padded, bounds)
    np.testing.assert_array_equal(result.reshape(-1, width), expected)


def test_gathers_with_add_sum_what_they_find(mesh, lanes, compiler_params):
    rows = 40

    def gather(table_ref, ids_ref, out_ref, ids, lines, done):
        me = number_of_subcore()
        for row in range(lanes):
            lines[row] = jnp.full((lanes,), 100, jnp.int32)

        @pl.loop(0, 3)
        def _round(number):
            pltpu.sync_copy(ids_ref.at[number, me], ids)
            pltpu.async_copy(table_ref.at[ids], lines, done, add=True).wait()

        pltpu.sync_copy(lines, out_ref.at[me])

    kernel = cokernel.kernel(
        gather,
        jax.ShapeDtypeStruct((2 * SUBCORES, lanes, lanes), jnp.int32),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((lanes,), jnp.int32),
            pltpu.VMEM((lanes, lanes), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=compiler_params,
    )
    random = np.random.default_rng(0)
    table = random.integers(-99, 99, (rows, lanes), np.int32)
    ids = random.integers(0, rows, (3, 2 * SUBCORES, lanes), np.int32)
    np.testing.assert_array_equal(kernel(table, ids), 100 + table[ids].sum(0))


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32], ids=str)
def test_all_subcores_add_rows_into_shared_memory_and_none_is_lost(
    dtype, mesh, lanes, compiler_params
):
    rows, windows = 4 * SUBCORES, 10

    def scatter(values_ref, ids_ref, out_ref, sums, values, ids, part, done):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        own_rows = pl.ds(subcore * 4, 4)
        for row in range(4):
            part[row] = jnp.zeros((lanes,), dtype)
        pltpu.sync_copy(part, sums.at[own_rows])
        plsc.subcore_barrier()

        @pl.loop(0, windows)
        def _window(window):
            pltpu.sync_copy(values_ref.at[core, subcore, window], values)
            pltpu.sync_copy(ids_ref.at[core, subcore, window], ids)
            pltpu.async_copy(values, sums.at[ids], done, add=True).wait()

        plsc.subcore_barrier()
        pltpu.sync_copy(sums.at[own_rows], out_ref.at[core, own_rows])

    kernel = cokernel.kernel(
        scatter,
        jax.ShapeDtypeStruct((2, rows, lanes), dtype),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM_SHARED((rows, lanes), dtype),
            pltpu.VMEM((lanes, lanes), dtype),
            pltpu.VMEM((lanes,), jnp.int32),
            pltpu.VMEM((4, lanes), dtype),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=compiler_params,
    )
    random = np.random.default_rng(0)
    ids = random.integers(0, rows, (2, SUBCORES, windows, lanes), np.int32)
    # Small integers, so that float32 sums do not depend on the order.
    values = random.integers(-9, 9, (*ids.shape, lanes)).astype(dtype)
    expected = np.zeros((2, rows, lanes), dtype)
    for core in range(2):
        np.add.at(expected[core], ids[core], values[core])
    np.testing.assert_array_equal(kernel(values, ids), expected)


def test_a_scatter_to_hbm_skips_ignored_indices(mesh, lanes, compiler_params):
    rows = 2 * SUBCORES * lanes

    def scatter(values_ref, ids_ref, out_ref, values, ids, done):
        me = number_of_subcore()
        pltpu.sync_copy(values_ref.at[me], values)
        pltpu.sync_copy(ids_ref.at[me], ids)
        pltpu.async_copy(values, out_ref.at[plsc.Indices(ids, ignored_value=-1)], done).wait()

    kernel = cokernel.kernel(
        lambda values_ref, ids_ref, _, out_ref, *scratch: scatter(
            values_ref, ids_ref, out_ref, *scratch
        ),
        jax.ShapeDtypeStruct((rows, lanes), jnp.int32),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((lanes, lanes), jnp.int32),
            pltpu.VMEM((lanes,), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
        input_output_aliases={2: 0},
        compiler_params=compiler_params,
    )
    random = np.random.default_rng(0)
    values = random.integers(0, 99, (rows, lanes), np.int32)
    ids = np.where(random.random(rows) < 0.3, -1, random.permutation(rows)).astype(np.int32)
    before = np.full((rows, lanes), 7, np.int32)
    expected = before.copy()
    expected[ids[ids >= 0]] = values[ids >= 0]
    result = kernel(
        values.reshape(2 * SUBCORES, lanes, lanes),
        ids.reshape(2 * SUBCORES, lanes),
        jnp.asarray(before),
    )
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(before, 7)
