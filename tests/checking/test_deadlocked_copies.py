"""A wait for a copy that never comes says which copies there were, and what is wrong with it."""

import jax
import jax.numpy as jnp
import pytest
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
    assert f"waits for {2 * ROW} bytes on 'done', but only {ROW} are there, of one copy" in (
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
    assert f"only {3 * ROW} are there, of 3 copies, and no more will come" in cause.sentence


@pytest.mark.parametrize("is_dynamic", [False, True])
def test_a_wait_on_another_element_than_the_copy_signals_names_both(is_dynamic):
    def body(x_ref, out_ref, done):
        first = x_ref[0, 0] if is_dynamic else 1
        pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done.at[first]).start()
        pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done.at[1 - first]).wait()

    finding = the_deadlock(body, DMA((2,)))
    text = finding.text()
    assert f"meanwhile semaphore 'done[1]' counts {ROW} bytes that nobody has taken" in text
    assert "done.at[first]).start()" in text
    # The copy is called by what it signals, and not by what it moves; there is only one core.
    assert "'out_ref'" not in text
    assert "device_id" not in text
    [advice] = finding.advice
    assert "'done[0]'" in advice
    assert "'done[1]'" in advice


def test_a_copy_to_another_core_than_the_one_that_waits_names_that_core():
    def body(x_ref, out_ref, window, sent, received):
        core = lax.axis_index("core")
        # It should go to core 0.
        copy = pltpu.make_async_remote_copy(
            x_ref.at[core], window, sent, received, device_id={"core": core}
        )

        @pl.when(core == 1)
        def _send():
            copy.start()
            copy.wait_send()

        @pl.when(core == 0)
        def _receive():
            copy.wait_recv()

    finding = the_deadlock(body, cokernel.private((16,), jnp.int32), DMA, DMA, cores=2)
    assert f"meanwhile semaphore 'received' of core=1 counts {ROW} bytes" in finding.text()
    assert "'received' of core=1 instead" in finding.advice[0]


def test_a_signal_of_another_element_is_named_without_advice_on_cores():
    def body(x_ref, out_ref, ready):
        core = lax.axis_index("core")
        pl.semaphore_signal(ready.at[0], 1, device_id={"core": 1 - core})
        pl.semaphore_wait(ready.at[1], 1)

    finding = the_deadlock(body, pltpu.SemaphoreType.REGULAR((2,)), cores=2)
    assert "signals 'ready[0]' by semaphore_signal" in finding.text()
    [advice] = finding.advice
    assert "Nothing signals 'ready[1]', but something signals 'ready[0]'" in advice
    assert "device_id" not in advice


def test_the_wait_that_is_left_when_another_was_too_large_is_not_a_second_finding():
    def body(x_ref, out_ref, done):
        for row in range(2):
            pltpu.make_async_copy(x_ref.at[row], out_ref.at[row], done).start()
        part = (pl.ds(0, 3), pl.ds(0, 8))
        pltpu.make_async_copy(x_ref.at[part], out_ref.at[part], done).wait()
        pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done).wait()

    cause, deadlock = explored(body, DMA).findings
    assert (cause.kind, deadlock.kind) == ("WaitTooLarge", "Deadlock")
    assert f"waits for {ROW + ROW // 2} bytes on 'done'" in cause.sentence
    assert f"no copy on it has moved more than {ROW}" in cause.sentence
    assert "see the WaitTooLarge" in deadlock.advice[0]


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
