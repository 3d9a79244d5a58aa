"""Copies in checked mode move what native ones do, at a later moment: indices that are values are
those of the start, indices in a Ref those of the moment when the copy takes effect.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

X = np.arange(64, dtype=np.int32).reshape(16, 4)
ROWS = np.array([3, 1, 14, 7], np.int32)


def kernel(body, *scratch, shape=(4, 4), **options):
    """body(x_ref, rows_ref, o_ref, semaphore, *scratch) on one vector subcore, copies delayed."""
    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )
        options = {"strategy": "delay_dma", "chip_limits": "off", **options}
        return cokernel.kernel(
            body,
            jax.ShapeDtypeStruct(shape, jnp.int32),
            mesh=mesh,
            scratch_types=[pltpu.SemaphoreType.DMA, *scratch],
            interpret=cokernel.Checked(**options),
        )


INDICES = pltpu.VMEM((4,), jnp.int32)
BUFFER = pltpu.VMEM((4, 4), jnp.int32)


def test_indices_that_are_values_are_those_of_the_start():
    def body(x_ref, rows_ref, o_ref, done, indices, other):
        pltpu.sync_copy(rows_ref, indices)
        pltpu.sync_copy(rows_ref, other)
        copy = pltpu.make_async_copy(x_ref.at[indices[...]], o_ref, done)
        copy.start()
        # The register that held the indices is used again before the copy takes effect.
        other[...] = (other[...] * 3) % 16
        copy.wait()

    got = kernel(body, INDICES, INDICES)(X, ROWS)
    np.testing.assert_array_equal(got, X[ROWS])


def test_indices_in_a_ref_are_read_when_the_copy_takes_effect_which_is_a_race():
    def body(x_ref, rows_ref, o_ref, done, indices):
        pltpu.sync_copy(rows_ref, indices)
        copy = pltpu.make_async_copy(x_ref.at[indices], o_ref, done)
        copy.start()
        indices[...] = jnp.zeros((4,), jnp.int32)
        copy.wait()

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="Race"):
        jax.block_until_ready(kernel(body, INDICES)(X, ROWS))
    [race] = [item for item in cokernel.last_report().findings if item.kind == "Race"]
    assert race.name == "indices"
    assert any("indices[...] =" in (party.code or "") for party in race.parties)


@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("size", [1, 3])
def test_windows_of_dynamic_start_and_size_are_copied(start, size):
    def body(x_ref, rows_ref, o_ref, done, buffer):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 4)], o_ref)
        first, count = rows_ref[0], rows_ref[1]
        source, target = x_ref.at[pl.ds(first, count)], o_ref.at[pl.ds(0, count)]
        pltpu.make_async_copy(source, target, done).start()
        pltpu.make_async_copy(source, target, done).wait()

    window = np.array([start, size, 0, 0], np.int32)
    got = kernel(body, BUFFER)(X, window)
    np.testing.assert_array_equal(got, [*X[start : start + size], *X[size:4]])


def test_scatters_add_under_equal_indices_and_skip_ignored_ones():
    def body(x_ref, rows_ref, o_ref, done, indices, buffer, total):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 4)], total)
        pltpu.sync_copy(x_ref.at[pl.ds(4, 4)], buffer)
        pltpu.sync_copy(rows_ref, indices)
        pltpu.sync_copy(buffer, total.at[plsc.Indices(indices, ignored_value=-1)], add=True)
        pltpu.sync_copy(total, o_ref)

    rows = np.array([2, -1, 2, 0], np.int32)
    got = kernel(body, INDICES, BUFFER, pltpu.VMEM_SHARED((4, 4), jnp.int32))(X, rows)
    expected = X[:4].copy()
    np.add.at(expected, [2, 2, 0], X[[4, 6, 7]])
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("chosen", [0, 1])
def test_a_ref_chosen_at_run_time_is_the_one_copied(chosen):
    def body(x_ref, rows_ref, o_ref, done, one, two):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 4)], one)
        pltpu.sync_copy(x_ref.at[pl.ds(4, 4)], two)
        pltpu.sync_copy(pl.select_ref(rows_ref[0], one, two), o_ref)

    got = kernel(body, BUFFER, BUFFER)(X, np.full(4, chosen, np.int32))
    np.testing.assert_array_equal(got, X[4 * chosen : 4 * chosen + 4])


def test_a_bad_index_in_a_ref_ends_the_launch_with_its_line():
    def body(x_ref, rows_ref, o_ref, done, indices):
        pltpu.sync_copy(rows_ref, indices)
        pltpu.sync_copy(x_ref.at[indices], o_ref)

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="index 16") as error:
        jax.block_until_ready(kernel(body, INDICES)(X, np.array([1, 16, 2, 3], np.int32)))
    assert "test_checked_dma.py" in str(error.value)


def test_refs_of_a_loop_body_stay_until_their_copies_are_done():
    def body(x_ref, rows_ref, o_ref, done):
        def step(i, _):
            def scoped(buffer, arrived):
                copy = pltpu.make_async_copy(x_ref.at[pl.ds(4 * i, 4)], buffer, arrived)
                copy.start()
                copy.wait()
                pltpu.sync_copy(buffer.at[pl.ds(i, 1)], o_ref.at[pl.ds(i, 1)])

            pl.run_scoped(scoped, BUFFER, pltpu.SemaphoreType.DMA)

        lax.fori_loop(0, 4, step, None)

    got = kernel(body)(X, ROWS)
    np.testing.assert_array_equal(got, X[[0, 5, 10, 15]])
