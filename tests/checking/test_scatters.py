"""A copy whose indices pick one place twice races with itself; sums may meet, and reads too."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

X = jnp.arange(128, dtype=jnp.int32).reshape(8, 16)
IDS = cokernel.private((8,), jnp.int32)
DMA = pltpu.SemaphoreType.DMA


def report_of(copy, *scratch, schedules=3, **options):
    def body(x_ref, out_ref, ids, *rest):
        pltpu.sync_copy(x_ref, out_ref)
        ids[...] = lax.iota(jnp.int32, 8) // 2 * 2  # 0, 0, 2, 2, 4, 4, 6, 6.
        copy(x_ref, out_ref, ids, *rest)

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(X.shape, jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[IDS, *scratch],
    )
    options = cokernel.Checked(**options)
    return cokernel.explore(lambda: kernel(X), schedules=schedules, options=options)


def test_every_row_that_is_written_twice_is_named():
    def copy(x_ref, out_ref, ids, done):
        pltpu.async_copy(x_ref, out_ref.at[ids], done).wait()

    [finding] = report_of(copy, DMA).findings
    assert finding.kind == "Race"
    assert finding.memory.parts == [f"[{row}, 0:16]" for row in (0, 2, 4, 6)]
    assert finding.occurrences == 3
    assert "its indices pick that place more than once" in finding.sentence
    assert len({party.line for party in finding.parties}) == 1
    assert "add=True" in "\n".join(finding.advice)


def test_windows_of_rows_are_told_by_the_elements_that_are_written_twice():
    def copy(x_ref, out_ref, ids, done):
        window = pl.ds(4, 8)
        pltpu.async_copy(x_ref.at[:, window], out_ref.at[ids, window], done).wait()

    [finding] = report_of(copy, DMA).findings
    assert finding.memory.parts == [f"[{row}, 4:12]" for row in (0, 2, 4, 6)]


def test_a_copy_that_nobody_waits_for_is_another_finding():
    def copy(x_ref, out_ref, ids, done):
        pltpu.make_async_copy(x_ref, out_ref.at[ids], done).start()

    assert [item.kind for item in report_of(copy, DMA).findings] == ["Race", "UnwaitedCopy"]


def test_where_nothing_else_is_looked_for_it_is_looked_for_no_more():
    def copy(x_ref, out_ref, ids, done):
        pltpu.async_copy(x_ref, out_ref.at[ids], done).wait()

    assert not report_of(copy, DMA, races=False).findings


@pytest.mark.parametrize("way", ["sums", "gather", "turns"])
def test_sums_reads_and_copies_one_after_the_other_may_meet(way):
    def copy(x_ref, out_ref, ids, done):
        if way == "sums":
            pltpu.async_copy(x_ref, out_ref.at[ids], done, add=True).wait()
        elif way == "gather":
            pltpu.async_copy(x_ref.at[ids], out_ref, done).wait()
        else:
            ids[...] = lax.iota(jnp.int32, 8)
            for _ in range(2):
                pltpu.async_copy(x_ref, out_ref.at[ids], done).wait()

    assert not report_of(copy, DMA, schedules=20).findings
