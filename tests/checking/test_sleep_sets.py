"""Sleep sets leave out runs, and neither behaviours nor findings."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel.checking.launches import collected_reports


def exchanged(cores):
    """Neighbours exchange a signal; the pairs have nothing to do with each other."""

    def body(out_ref, sem):
        core = lax.axis_index("core")
        pl.semaphore_signal(sem, 1, device_id={"core": core + 1 - 2 * (core % 2)})
        pl.semaphore_wait(sem, 1)
        out_ref[core] = core

    return body, [pltpu.SemaphoreType.REGULAR]


def gathered(cores):
    """Everybody signals the first core, which takes the signals in the order in which they come."""

    def body(out_ref, sem):
        core = lax.axis_index("core")
        pl.semaphore_signal(sem, 1, device_id={"core": 0})
        out_ref[core] = core

        @pl.when(core == 0)
        def _take():
            for _ in range(cores):
                pl.semaphore_wait(sem, 1)

    return body, [pltpu.SemaphoreType.REGULAR]


def copied(cores):
    """Each core has a copy of its own under way while it draws a ticket, and one races."""

    def body(out_ref, buffer, other, sem, turn):
        core = lax.axis_index("core")
        buffer[0] = core
        copy = pltpu.make_async_copy(buffer, other, sem)
        copy.start()
        pl.semaphore_signal(turn, 1, device_id={"core": 0})

        @pl.when(core > 0)
        def _in_time():
            copy.wait()

        out_ref[core] = other[0]

        @pl.when(core == 0)
        def _too_late():
            copy.wait()
            pl.semaphore_wait(turn, cores)

    cell = pltpu.VMEM((1,), jnp.int32)
    return body, [cell, cell, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR]


def polled_count(cores):
    """The first core polls a semaphore until everybody has signalled it."""

    def body(out_ref, sem):
        core = lax.axis_index("core")
        pl.semaphore_signal(sem, 1, device_id={"core": 0})

        @pl.when(core == 0)
        def _poll():
            lax.while_loop(lambda n: n < cores, lambda _: pl.semaphore_read(sem), jnp.int32(0))
            pl.semaphore_wait(sem, cores)

        out_ref[core] = core

    return body, [pltpu.SemaphoreType.REGULAR]


def polled_flag(cores):
    """Each core raises a flag and polls that of its neighbour, and signals when it has seen it."""

    def body(out_ref, flags, sem):
        core = lax.axis_index("core")
        flags[core] = 1
        pl.semaphore_signal(sem, 1)
        lax.while_loop(lambda flag: flag == 0, lambda _: flags[core ^ 1] & 1, jnp.int32(0))
        pl.semaphore_signal(sem, 1, device_id={"core": core ^ 1})
        pl.semaphore_wait(sem, 2)
        out_ref[core] = core

    return body, [pltpu.HBM((cores,), jnp.int32), pltpu.SemaphoreType.REGULAR]


def given_up(cores):
    """A core polls a flag three times at most; another one raises it between two signals."""

    def body(out_ref, flag, sem, seen):
        core = lax.axis_index("core")
        out_ref[core] = core

        @pl.when(core == 0)
        def _raise():
            pl.semaphore_signal(sem, 1)
            flag[0] = 1
            pl.semaphore_wait(sem, 1)

        @pl.when(core == 1)
        def _poll():
            def look(state):
                number, _ = state
                return number + 1, flag[0]

            _, last = lax.while_loop(
                lambda state: (state[0] < 3) & (state[1] != 1), look, (jnp.int32(0), jnp.int32(0))
            )

            @pl.when(last == 1)
            def _tell():
                pl.semaphore_signal(seen, 1)

    return body, [pltpu.HBM((1,), jnp.int32), *[pltpu.SemaphoreType.REGULAR] * 2]


def copied_flag(cores):
    """A copy raises the flag that a core polls."""

    def body(out_ref, source, flag, done, sem):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _copy():
            source[0] = 1
            copy = pltpu.make_async_copy(source, flag, done)
            copy.start()
            pl.semaphore_signal(sem, 1)
            copy.wait()
            pl.semaphore_wait(sem, 1)

        @pl.when(core == 1)
        def _poll():
            lax.while_loop(lambda seen: seen != 1, lambda _: flag[0], jnp.int32(0))
            pl.semaphore_signal(sem, 1)
            pl.semaphore_wait(sem, 1)

        out_ref[core] = core

    flag = pltpu.HBM((1,), jnp.int32)
    return body, [flag, flag, pltpu.SemaphoreType.DMA, pltpu.SemaphoreType.REGULAR]


@pytest.mark.parametrize(
    ("make", "cores", "most"),
    [
        (exchanged, 2, 6),
        (gathered, 3, 30),
        (copied, 2, 60),
        (polled_count, 2, 8),
        (polled_flag, 2, 60),
        (given_up, 2, 30),
        (copied_flag, 2, 40),
    ],
)
def test_sleep_sets_lose_no_behaviour_and_no_finding(make, cores, most):
    body, scratch = make(cores)
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((cores,), jnp.int32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=scratch,
    )

    def explored(preemptions):
        with collected_reports() as heard:
            report = cokernel.explore(
                kernel,
                schedules=4000,
                exhaustive=True,
                preemptions=preemptions,
                options=cokernel.Checked(fill="zeros"),
            )
        assert report.exhaustive
        kinds = sorted(finding.kind for finding in report.findings)
        return {record["behaviour"] for _, record in heard}, kinds, report.schedules

    # A bound that is never met visits every order, without sleep sets.
    behaviours, kinds, runs = explored(10_000)
    with_sets = explored(None)
    assert with_sets[:2] == (behaviours, kinds)
    assert with_sets[2] <= most < runs
    with collected_reports() as heard:
        # Those of drawn schedules know nothing of what is left out.
        options = cokernel.Checked(fill="zeros")
        cokernel.explore(kernel, schedules=200, options=options)
    assert {record["behaviour"] for _, record in heard} <= behaviours
