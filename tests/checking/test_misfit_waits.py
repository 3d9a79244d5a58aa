"""Waits on one semaphore must stand for the copies on it: for one, for several, or for a part."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

ROWS = 16
X = jnp.ones((ROWS, 16), jnp.int32)


def report_of(copies, waits, *, scoped, rounds=1, schedules=20):
    """Copies of so many rows each, and then waits for so many."""

    def body(x_ref, out_ref, done):
        def transfers(done):
            first = 0
            for rows in copies:
                window = pl.ds(first, rows)
                pltpu.make_async_copy(x_ref.at[window], out_ref.at[window], done).start()
                first += rows
            for rows in waits:
                window = pl.ds(0, rows)
                pltpu.make_async_copy(x_ref.at[window], out_ref.at[window], done).wait()

        for _ in range(rounds):
            if scoped:
                pl.run_scoped(transfers, pltpu.SemaphoreType.DMA)
            else:
                transfers(done)
        out_ref[...] = x_ref[...]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(X.shape, jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.SemaphoreType.DMA],
    )
    return cokernel.explore(lambda: kernel(X), schedules=schedules)


@pytest.mark.parametrize("scoped", [True, False])
def test_a_wait_that_ends_within_a_larger_copy_on_the_semaphore_is_told(scoped):
    report = report_of((1, 4), (2, 3), scoped=scoped)
    [finding] = report.findings
    assert finding.kind == "WaitTooLarge"
    assert "waits for 192 bytes" in finding.sentence
    assert "none of the 2 copies on it, nor several together" in finding.sentence
    assert [party.action for party in finding.parties] == ["waits for", "signals"]
    assert finding.occurrences == 20


@pytest.mark.parametrize(
    ("copies", "waits"),
    [
        ((1, 2, 4), (4, 1, 2)),
        ((1, 2, 4), (7,)),
        ((1, 2, 4), (3, 4)),
        ((8,), (2, 2, 4)),
        # Each of the waits for one row belongs to another copy, or is one.
        ((1, 2, 5), (3, 1, 4)),
        ((2,) * 4, (4, 2, 2)),
        # More than are looked at.
        ((1,) * 9 + (5,), (2,) * 7),
    ],
)
@pytest.mark.parametrize("scoped", [True, False])
def test_waits_that_can_stand_for_the_copies_are_not(copies, waits, scoped):
    report = report_of(copies, waits, scoped=scoped)
    assert not report.findings, str(report)


@pytest.mark.parametrize("waits", [(3, 1), (1, 3)])
def test_a_wait_for_more_than_any_copy_is_one_finding_whichever_copies_come_first(waits):
    def body(x_ref, out_ref, landed, sent, received):
        core = lax.axis_index("core")
        copy = pltpu.make_async_remote_copy(
            x_ref.at[pl.ds(0, 2)], landed.at[pl.ds(2 * core, 2)], sent, received, {"core": 0}
        )
        copy.start()
        copy.wait_send()

        @pl.when(core == 0)
        def _receive():
            for rows in waits:
                part = pl.ds(0, rows)
                pltpu.make_async_copy(x_ref.at[part], landed.at[part], received).wait()
            out_ref[...] = landed[...]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((4, 16), jnp.int32),
        mesh=cokernel.CoreMesh(core=2),
        scratch_types=[
            cokernel.private((4, 16), jnp.int32),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ],
    )
    [finding] = cokernel.explore(lambda: kernel(X), schedules=20).findings
    assert finding.kind == "WaitTooLarge"
    assert f"waits for {3 * 64} bytes on 'received'" in finding.sentence
    # Which copy it should have stood for nobody can know.
    assert "the copy it stands for" not in finding.text()


def test_scopes_are_looked_at_one_by_one():
    assert not report_of((1, 4), (4, 1), scoped=True, rounds=6).findings
    [finding] = report_of((1, 4), (2, 3), scoped=True, rounds=3).findings
    assert finding.kind == "WaitTooLarge"
