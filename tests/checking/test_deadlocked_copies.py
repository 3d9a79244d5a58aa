"""A wait for a copy that never comes says which copies there were, and what is wrong with it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

DMA = pltpu.SemaphoreType.DMA
X = jnp.ones((4, 16), jnp.int32)
ROW = 64


def explored(body, *scratch, cores=1):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(X.shape, jnp.int32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=scratch,
    )
    return cokernel.explore(lambda: kernel(X), schedules=3)


def the_deadlock(body, *scratch, cores=1):
    report = explored(body, *scratch, cores=cores)
    [finding] = report.findings
    assert finding.kind == "Deadlock"
    # Waiting cores cannot start copies, so that to advise it would lead astray.
    assert "could still signal" not in finding.text()
    return finding


def test_one_wait_too_many_names_the_copies_that_have_been_waited_for():
    def body(x_ref, out_ref, done):
        def copy(row):
            return pltpu.make_async_copy(x_ref.at[row], out_ref.at[row], done)

        for row in range(4):
            copy(row).start()

        @pl.loop(0, 5)
        def _wait(_):
            copy(0).wait()

    finding = the_deadlock(body, DMA)
    details = "\n".join(finding.details)
    assert f"{ROW} bytes, 4 times, by DMAs of body core=0" in details
    assert "copy(row).start()" in details
    [advice] = finding.advice
    assert "No copy is in flight that could end the wait for 'done'" in advice
    assert "one wait() too many" in advice


def test_a_start_that_was_not_reached_is_said_to_be_so():
    def body(x_ref, out_ref, done):
        copy = pltpu.make_async_copy(x_ref, out_ref, done)

        @pl.when(x_ref[0, 0] > 5)
        def _start():
            copy.start()

        copy.wait()

    finding = the_deadlock(body, DMA)
    assert "none has signalled it so far" in "\n".join(finding.details)
    [advice] = finding.advice
    assert "the start() was not reached" in advice


def test_a_copy_that_another_core_did_not_start_is_told_in_the_same_way():
    def body(x_ref, out_ref, window, sent, received):
        core = lax.axis_index("core")
        copy = pltpu.make_async_remote_copy(
            x_ref.at[core], window, sent, received, device_id={"core": 1 - core}
        )

        @pl.when(core == 0)
        def _send():
            copy.start()
            copy.wait_send()

        copy.wait_recv()
        out_ref[core] = window[...]

    finding = the_deadlock(body, cokernel.private((16,), jnp.int32), DMA, DMA, cores=2)
    assert "the start() was not reached" in "\n".join(finding.advice)
    assert "core=1 has finished" in "\n".join(finding.details)


def test_copies_of_an_earlier_scope_are_not_told():
    def body(x_ref, out_ref):
        def right(done):
            pltpu.async_copy(x_ref.at[0], out_ref.at[0], done).wait()

        def wrong(done):
            pltpu.make_async_copy(x_ref.at[1], out_ref.at[1], done).wait()

        pl.run_scoped(right, DMA)
        pl.run_scoped(wrong, DMA)

    finding = the_deadlock(body)
    assert "none has signalled it so far" in "\n".join(finding.details)


def test_a_wait_for_more_than_was_copied_is_told_before_the_deadlock_that_follows():
    def body(x_ref, out_ref, done):
        pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done).start()
        pltpu.make_async_copy(x_ref.at[pl.ds(0, 2)], out_ref.at[pl.ds(0, 2)], done).wait()

    report = explored(body, DMA)
    assert [finding.kind for finding in report.findings] == ["WaitTooLarge", "Deadlock"]
    cause, deadlock = report.findings
    assert f"waits for {2 * ROW} bytes on 'done', but the copy it stands for moved {ROW}" in (
        cause.sentence
    )
    assert deadlock.advice == (
        "The wait for 'done' takes what is not there: see the WaitTooLarge that is told of it.",
    )


def test_a_wait_for_more_than_several_copies_says_what_they_moved_together():
    def body(x_ref, out_ref, done):
        for row in range(3):
            pltpu.make_async_copy(x_ref.at[row], out_ref.at[row], done).start()
        pltpu.make_async_copy(x_ref, out_ref, done).wait()

    cause, _ = explored(body, DMA).findings
    assert f"the 3 copies that it can stand for moved together {3 * ROW}" in cause.sentence


def test_a_deadlock_of_other_cores_keeps_its_place():
    def body(x_ref, out_ref, done, ready):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _one():
            pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done).start()
            pltpu.make_async_copy(x_ref.at[pl.ds(0, 2)], out_ref.at[pl.ds(0, 2)], done).wait()

        @pl.when(core == 1)
        def _other():
            pl.semaphore_wait(ready, 1)

    report = explored(body, DMA, pltpu.SemaphoreType.REGULAR, cores=2)
    assert [finding.kind for finding in report.findings] == ["WaitTooLarge", "Deadlock"]
    advice = "\n".join(report.findings[1].advice)
    assert "see the WaitTooLarge" in advice
    assert "Add a signal of 'ready'" in advice
