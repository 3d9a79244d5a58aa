"""A semaphore that counts too far is one finding, which names every line that has signalled it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

HALF = 2**30
SEMAPHORE = pltpu.SemaphoreType.REGULAR


def findings_of(body, *scratch, cores=1):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((cores,), jnp.int32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=scratch,
    )
    return cokernel.explore(kernel, schedules=20).findings


def test_signals_from_several_lines_that_overflow_together_are_one_finding():
    def body(out_ref, sem):
        pl.semaphore_signal(sem, HALF)
        pl.semaphore_signal(sem, HALF)
        pl.semaphore_signal(sem, 5)
        out_ref[0] = 0
        pl.semaphore_wait(sem, HALF)
        pl.semaphore_wait(sem, HALF)
        pl.semaphore_wait(sem, 5)

    [finding] = findings_of(body, SEMAPHORE)
    assert (finding.kind, finding.name, finding.occurrences) == ("SemaphoreOverflow", "sem", 20)
    first = body.__code__.co_firstlineno + 1
    assert [party.line for party in finding.parties] == [first + 1, first]
    assert f"brings 'sem' to {2 * HALF}" in finding.sentence


def test_which_core_signals_last_does_not_matter():
    def body(out_ref, sem):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _one():
            pl.semaphore_signal(sem, HALF, device_id={"core": 2})

        @pl.when(core == 1)
        def _other():
            pl.semaphore_signal(sem, HALF, device_id={"core": 2})

        @pl.when(core == 2)
        def _take():
            pl.semaphore_wait(sem, HALF)
            pl.semaphore_wait(sem, HALF)

        out_ref[core] = core

    [finding] = findings_of(body, SEMAPHORE, cores=3)
    assert finding.kind == "SemaphoreOverflow"
    assert {party.core for party in finding.parties} == {"core=0", "core=1"}
    assert len({party.line for party in finding.parties}) == 2


def test_two_semaphores_that_overflow_are_two_findings():
    def body(out_ref, sems):
        for number in range(2):
            pl.semaphore_signal(sems.at[number], HALF)
            pl.semaphore_signal(sems.at[number], HALF)
            pl.semaphore_wait(sems.at[number], HALF)
            pl.semaphore_wait(sems.at[number], HALF)
        out_ref[0] = 0

    found = findings_of(body, SEMAPHORE((2,)))
    assert [finding.name for finding in found] == ["sems[0]", "sems[1]"]
