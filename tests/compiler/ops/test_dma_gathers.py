"""DMAs gather and scatter rows at indices, and add to what lies where they write."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.compiler.ops.dma_harness import DMA, FOUR, WORKERS, launch, like, numbers


def gathered(table, indices, ignored=None, width=None, is_value=False, dtype=np.int32, **params):
    """Rows of the table at the indices; those ignored stay -1."""
    count = len(indices)
    room = np.full((count, *table.shape[1:]), -1, table.dtype)

    def body(table_ref, indices_ref, room_ref, out_ref, rows, buffer, sem):
        pltpu.sync_copy(indices_ref, rows)
        pltpu.sync_copy(room_ref, buffer)
        where = rows[...] if is_value else rows
        where = plsc.Indices(where, ignored_value=ignored) if ignored is not None else where
        source, to = table_ref.at[where], buffer
        if width is not None:
            source, to = table_ref.at[where, pl.ds(1, width)], buffer.at[:, pl.ds(2, width)]
        pltpu.async_copy(source, to, sem).wait()
        pltpu.sync_copy(buffer, out_ref)

    scratch = [cokernel.private((count,), dtype), cokernel.private(room.shape, room.dtype), DMA]
    return launch(
        body, like(room), table, np.asarray(indices, dtype), room, scratch=scratch, **params
    )


@pytest.mark.parametrize("columns", [1, 3, 16, 128, 130, 700])
@pytest.mark.parametrize("is_value", [False, True], ids=["ref", "value"])
@pytest.mark.parametrize("count", [1, 5, 100])
def test_a_gather_picks_rows_by_indices_in_a_ref_or_a_value(columns, is_value, count):
    table = numbers((50, columns))
    indices = np.random.default_rng(0).integers(0, 50, count)
    np.testing.assert_array_equal(gathered(table, indices, is_value=is_value), table[indices])


def test_a_gather_from_a_vector_picks_single_elements():
    table = numbers((50,), np.int16)
    indices = [49, 0, 7, 7, 31]
    np.testing.assert_array_equal(gathered(table, indices), table[indices])


def test_a_gather_of_part_of_each_row_leaves_the_rest_alone():
    table = numbers((20, 10))
    indices = [3, 19, 0]
    expected = np.full((3, 10), -1, np.float32)
    expected[:, 2:7] = table[indices, 1:6]
    np.testing.assert_array_equal(gathered(table, indices, width=5), expected)


@pytest.mark.parametrize("ignored", [-1, 2**31 - 1, 5])
@pytest.mark.parametrize("is_value", [False, True], ids=["ref", "value"])
def test_ignored_indices_leave_their_rows_untouched_and_count_all_the_same(ignored, is_value):
    table = numbers((9, 4))
    indices = np.array([8, ignored, 0, ignored, 5 if ignored != 5 else 6])
    expected = table[np.where(indices == ignored, 0, indices)]
    expected[indices == ignored] = -1
    out = gathered(table, indices, ignored=ignored, is_value=is_value)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("bad", [50, -1, -(2**31), 2**31 - 1])
@pytest.mark.parametrize("is_value", [False, True], ids=["ref", "value"])
def test_a_row_index_out_of_range_is_named_with_its_ref(bad, is_value):
    table = numbers((50, 8))
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        gathered(table, [0, 49, bad, 3], is_value=is_value)
    assert f"index {bad} " in str(caught.value)
    assert "'table_ref'" in str(caught.value)
    np.testing.assert_array_equal(gathered(table, [0, 49]), table[[0, 49]])


def test_a_dynamic_number_of_indices_gathers_as_many_rows():
    table = numbers((32, 16))
    indices = np.arange(20, dtype=np.int32)[::-1].copy()

    def body(table_ref, indices_ref, size_ref, room_ref, out_ref, rows, sem):
        pltpu.sync_copy(indices_ref, rows)
        pltpu.sync_copy(room_ref, out_ref)
        start, size = size_ref[0], size_ref[1]
        copy = pltpu.async_copy(
            table_ref.at[rows.at[pl.ds(start, size)]], out_ref.at[pl.ds(0, size)], sem
        )
        copy.wait()

    room = np.zeros((20, 16), np.float32)
    where = np.array([4, 9], np.int32)
    scratch = [cokernel.private((20,), np.int32), DMA]
    out = launch(body, like(room), table, indices, where, room, scratch=scratch)
    np.testing.assert_array_equal(out[:9], table[indices[4:13]])
    np.testing.assert_array_equal(out[9:], 0)


@pytest.mark.parametrize("columns", [1, 16, 300])
def test_a_scatter_writes_rows_and_skips_ignored_indices(columns):
    rows = numbers((6, columns))
    indices = np.array([4, 9, -1, 0, 7, -1], np.int32)
    before = np.full((12, columns), -5, np.float32)

    def body(rows_ref, indices_ref, before_ref, out_ref, buffer, where, sem):
        pltpu.sync_copy(before_ref, out_ref)
        pltpu.sync_copy(rows_ref, buffer)
        pltpu.sync_copy(indices_ref, where)
        target = out_ref.at[plsc.Indices(where, ignored_value=-1)]
        pltpu.async_copy(buffer, target, sem).wait()

    scratch = [cokernel.private(rows.shape, rows.dtype), cokernel.private((6,), np.int32), DMA]
    out = launch(body, like(before), rows, indices, before, scratch=scratch)
    expected = before.copy()
    expected[indices[indices >= 0]] = rows[indices >= 0]
    np.testing.assert_array_equal(out, expected)


ADDED = [np.int8, np.int32, np.uint16, np.float32, np.float16, ml_dtypes.bfloat16]


@pytest.mark.parametrize("dtype", ADDED, ids=lambda dtype: np.dtype(dtype).name)
def test_a_gather_that_adds_sums_into_private_memory(dtype):
    table = numbers((10, 33), dtype)
    indices = np.array([3, 9, 3, 0], np.int32)
    start = numbers((4, 33), dtype)

    def body(table_ref, indices_ref, start_ref, out_ref, rows, buffer, sem):
        pltpu.sync_copy(indices_ref, rows)
        pltpu.sync_copy(start_ref, buffer)
        pltpu.async_copy(table_ref.at[rows], buffer, sem, add=True).wait()
        pltpu.sync_copy(buffer, out_ref)

    scratch = [cokernel.private((4,), np.int32), cokernel.private(start.shape, dtype), DMA]
    out = launch(body, like(start), table, indices, start, scratch=scratch)
    np.testing.assert_array_equal(out, start + table[indices])


@WORKERS
@pytest.mark.parametrize("dtype", ADDED, ids=lambda dtype: np.dtype(dtype).name)
def test_scatters_that_add_from_all_subcores_lose_nothing(v6e, dtype, workers):
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore", num_cores=1)
    indices = np.array([0, 2, 2, 1], np.int32)
    ones = np.ones((4, 16), dtype)
    zeros = np.zeros((3, 16), dtype)

    def body(ones_ref, zeros_ref, indices_ref, out_ref, total, rows, where, sem):
        first = lax.axis_index("subcore") == 0

        @pl.when(first)
        def _clear():
            pltpu.sync_copy(zeros_ref, total)

        pltpu.sync_copy(ones_ref, rows)
        pltpu.sync_copy(indices_ref, where)
        plsc.subcore_barrier()
        for _ in range(3):
            pltpu.async_copy(rows, total.at[where], sem, add=True).wait()
        plsc.subcore_barrier()

        @pl.when(first)
        def _store():
            pltpu.sync_copy(total, out_ref)

    scratch = [
        pltpu.VMEM_SHARED((3, 16), dtype),
        pltpu.VMEM((4, 16), dtype),
        pltpu.VMEM((4,), jnp.int32),
        DMA,
    ]
    out = launch(
        body, like(zeros), ones, zeros, indices, mesh=mesh, scratch=scratch, workers=workers
    )
    expected = np.repeat(np.array([[48], [48], [96]]), 16, axis=1)
    np.testing.assert_array_equal(out.astype(np.float32), expected)


@WORKERS
def test_sums_into_windows_that_overlap_without_being_rows_lose_nothing(workers):
    # The windows begin at different elements, and lie across several of the pieces that are locked.
    ones = np.ones((2500,), np.float32)
    zeros = np.zeros((3000,), np.float32)

    def body(ones_ref, zeros_ref, out_ref, total, mine, sem):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _clear():
            pltpu.sync_copy(zeros_ref, total)

        pltpu.sync_copy(ones_ref, mine)
        plsc.subcore_barrier()

        @pl.loop(0, 40)
        def _add(turn):
            pltpu.async_copy(mine, total.at[pl.ds(core * 77, 2500)], sem, add=True).wait()

        plsc.subcore_barrier()

        @pl.when(core == 0)
        def _store():
            pltpu.sync_copy(total, out_ref)

    scratch = [
        cokernel.shared(zeros.shape, jnp.float32),
        cokernel.private(ones.shape, jnp.float32),
        DMA,
    ]
    out = launch(body, like(zeros), ones, zeros, mesh=FOUR, scratch=scratch, workers=workers)
    expected = zeros.copy()
    for core in range(4):
        expected[core * 77 : core * 77 + 2500] += 40
    np.testing.assert_array_equal(out, expected)
