"""Advice fits: it names whose memory is meant, and asks for nothing that is there already."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import Finding

DMA = pltpu.SemaphoreType.DMA
ROW = cokernel.private((16,), jnp.int32)
X = jnp.ones((4, 16), jnp.int32)


def findings_of(body, *scratch, cores=1, **options):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(X.shape, jnp.int32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=scratch,
    )
    return cokernel.explore(
        lambda: kernel(X), schedules=20, options=cokernel.Checked(**options)
    ).findings


def to_the_other(source, target, sent, received):
    other = {"core": 1 - lax.axis_index("core")}
    return pltpu.make_async_remote_copy(source, target, sent, received, device_id=other)


def test_a_copy_that_laps_its_reader_is_one_race_that_names_whose_memory_it_is():
    def body(x_ref, out_ref, outbox, inbox, sent, received):
        core = lax.axis_index("core")
        out_ref[core] = out_ref[core + 2] = x_ref[0]
        for number in range(3):
            outbox[...] = x_ref[core] + number
            copy = to_the_other(outbox, inbox, sent, received)
            copy.start()
            copy.wait()
            out_ref[core] += inbox[...]

    [finding] = findings_of(body, ROW, ROW, DMA, DMA, cores=2)
    [reader] = [party for party in finding.parties if not party.is_dma]
    [writer] = [party for party in finding.parties if party.is_dma]
    assert (finding.kind, finding.name, finding.owner) == ("Race", "inbox", reader.core)
    assert f"inbox[0:16] of {reader.core}" in finding.sentence
    advice = "\n".join(finding.advice)
    assert f"let it signal {writer.core} when it is done with 'inbox'" in advice
    assert "let the core that started the DMA wait" not in advice
    assert Finding.from_dict(finding.to_dict()) == finding


def test_copies_of_two_cores_into_one_place_are_told_whose_it_is():
    def body(x_ref, out_ref, inbox, sent, received):
        core = lax.axis_index("core")
        out_ref[core] = x_ref[core]

        @pl.when(core > 0)
        def _send():
            copy = pltpu.make_async_remote_copy(x_ref.at[core], inbox, sent, received, {"core": 0})
            copy.start()
            copy.wait_send()

        @pl.when(core == 0)
        def _receive():
            for _ in range(2):
                pltpu.make_async_copy(x_ref.at[0], inbox, received).wait()
            out_ref[3] = inbox[...]

    [finding] = findings_of(body, ROW, DMA, DMA, cores=3)
    assert (finding.kind, finding.owner) == ("Race", "core=0")
    assert "a part of 'inbox' of core=0 for itself" in finding.advice[0]


def test_who_has_waited_for_its_copy_is_asked_for_the_signal_behind_it():
    def body(x_ref, out_ref, board, done):
        core = lax.axis_index("core")
        pltpu.async_copy(x_ref.at[core], board.at[core], done).wait()
        out_ref[core] = out_ref[core + 2] = board[1 - core]

    [finding] = findings_of(body, cokernel.shared((2, 16), jnp.int32), DMA, cores=2)
    assert (finding.kind, finding.owner) == ("Race", "")
    assert "signal the other core behind its wait() for the DMA" in finding.advice[0]


def test_semaphores_out_of_bounds_are_not_said_to_be_read():
    def body(x_ref, out_ref, sems):
        pl.semaphore_signal(sems.at[x_ref[0, 0] + 4], 1)
        out_ref[...] = x_ref[...]

    [finding] = findings_of(body, pltpu.SemaphoreType.REGULAR((2,)))
    assert finding.kind == "OutOfBounds"
    assert "of semaphores 'sems' by program" in finding.sentence
    assert "read or written" not in finding.text()
    assert "compare the index of the semaphore with how many there are" in finding.advice[0]


@pytest.mark.parametrize("is_copied", [False, True])
def test_copies_are_advised_only_for_what_is_copied_to(is_copied):
    def body(x_ref, out_ref, window, done):
        if is_copied:

            @pl.when(x_ref[0, 0] > 5)
            def _fetch():
                pltpu.async_copy(x_ref.at[0], window, done).wait()

        out_ref[...] = x_ref[...]
        out_ref[0] = window[...]

    [finding] = findings_of(body, ROW, DMA)
    assert finding.kind == "UninitialisedRead"
    assert ("DMA" in finding.advice[0]) == is_copied


def test_an_empty_array_is_advised_to_be_filled():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + lax.empty(X.shape, jnp.int32)

    [finding] = findings_of(body)
    assert finding.kind == "UninitialisedRead"
    assert "DMA" not in "\n".join(finding.advice)
    assert "lax.empty" in finding.advice[0]


def test_a_bad_index_of_a_gather_is_told_with_its_place_among_the_indices():
    def body(x_ref, out_ref, ids, rows, done):
        ids[...] = jnp.full((4,), 2, jnp.int32)
        ids[3] = 9
        pltpu.async_copy(x_ref.at[ids], rows, done).wait()
        out_ref[...] = rows[...]

    scratch = (cokernel.private((4,), jnp.int32), cokernel.private((4, 16), jnp.int32), DMA)
    [finding] = findings_of(body, *scratch)
    assert "of 'x_ref' by program" in finding.sentence
    assert "asks for index 9 (at position 3 of 'ids') of dimension 0" in finding.sentence
    assert "compare the values of the indices" in finding.advice[0]


@pytest.mark.parametrize("count", [4, 300])
def test_a_bad_index_of_an_array_is_told_with_its_place(count):
    def body(x_ref, out_ref):
        ids = jnp.where(lax.iota(jnp.int32, count) == count - 2, 9, 1)
        out_ref[...] = x_ref[...] + x_ref[ids].sum()

    [finding] = findings_of(body)
    assert f"index 9 (at position {count - 2} of the indices)" in finding.sentence


@pytest.mark.parametrize("is_masked", [False, True])
def test_a_bad_lane_of_a_vector_subcore_is_told_with_its_place(is_masked):
    lanes = 16

    def body(x_ref, out_ref, table, ids, rows):
        pltpu.sync_copy(x_ref.at[0], table)
        ids[...] = lax.iota(jnp.int32, lanes) % 16
        ids[pl.ds(0, 1)] = ids[pl.ds(lanes - 3, 1)] = jnp.full((1,), 20, jnp.int32)
        mask = lax.iota(jnp.int32, lanes) > 0 if is_masked else None
        rows[...] = plsc.load_gather(table, [ids[...]], mask=mask)
        pltpu.sync_copy(rows.at[pl.ds(0, 16)], out_ref.at[0])

    with cokernel.target("tpu7x"):
        kernel = cokernel.kernel(
            body,
            jax.ShapeDtypeStruct(X.shape, jnp.int32),
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
            ),
            scratch_types=[pltpu.VMEM((size,), jnp.int32) for size in (16, lanes, lanes)],
        )
        [finding] = cokernel.explore(lambda: kernel(X), schedules=1).findings
    place = lanes - 3 if is_masked else 0
    assert f"asks for index 20 (at position {place} of the indices)" in finding.sentence
    assert "compare the values of the indices" in finding.advice[0]


def test_an_index_that_stands_alone_has_no_place():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        out_ref[0] = x_ref[x_ref[0, 0] + 8]

    [finding] = findings_of(body)
    assert "asks for index 9 of dimension 0" in finding.sentence
