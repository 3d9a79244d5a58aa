"""One mistake is one finding, which tells of what follows from it; another one is not lost."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

DMA = pltpu.SemaphoreType.DMA
WINDOW = cokernel.private((16,), jnp.int32)
X = jnp.ones((4, 16), jnp.int32)


def findings_of(body, *scratch, cores=1):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(X.shape, jnp.int32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=scratch,
    )
    return cokernel.explore(lambda: kernel(X), schedules=20).findings


def test_a_missing_wait_in_a_scope_is_one_finding_that_tells_which_memory_ends():
    def body(x_ref, out_ref):
        def scope(window, done):
            pltpu.make_async_copy(x_ref.at[0], window, done).start()

        out_ref[...] = x_ref[...]
        pl.run_scoped(scope, WINDOW, DMA)

    [finding] = findings_of(body)
    assert (finding.kind, finding.name, finding.occurrences) == ("UnwaitedCopy", "done", 20)
    details = "\n".join(finding.details)
    assert "may still be copying when the scope of window[0:16] ends" in details
    assert "may still be copying when the scope of done ends" in details
    assert f"{__file__}:" in details
    assert details in finding.text().replace("\n  ", "\n")


def test_a_wait_that_comes_after_the_scope_is_told_of_the_memory():
    def body(x_ref, out_ref, done):
        def scope(window):
            window[...] = x_ref[0]
            pltpu.make_async_copy(window, out_ref.at[0], done).start()

        out_ref[...] = x_ref[...]
        pl.run_scoped(scope, WINDOW)
        pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done).wait()

    [finding] = findings_of(body, DMA)
    assert (finding.kind, finding.name) == ("CopyInFlight", "window")


def test_reading_too_early_is_a_race_and_not_a_read_of_nothing_as_well():
    def body(x_ref, out_ref, window, done):
        out_ref[...] = x_ref[...]
        copy = pltpu.make_async_copy(x_ref.at[0], window, done)
        copy.start()
        out_ref[0] = window[...]
        copy.wait()

    [finding] = findings_of(body, WINDOW, DMA)
    assert finding.kind == "Race"
    assert "so window is read before anybody has written it" in "\n".join(finding.details)


def test_a_race_with_a_copy_that_nobody_waits_for_is_told_below_it_with_the_line_of_the_read():
    def body(x_ref, out_ref, window, done):
        out_ref[...] = x_ref[...]
        pltpu.make_async_copy(x_ref.at[0], window, done).start()
        out_ref[0] = window[...]

    [finding] = findings_of(body, WINDOW, DMA)
    assert finding.kind == "UnwaitedCopy"
    read, undefined = finding.details
    line = f"{__file__}:{body.__code__.co_firstlineno + 3}"
    assert "core=0 reads window[0:16] that a DMA of program 'body' on core=0 writes" in read
    assert line in read
    assert "so window is read before anybody has written it" in undefined


def test_a_race_with_a_copy_that_is_waited_for_too_late_stays_beside_one_that_is_not():
    def body(x_ref, out_ref, window, done):
        out_ref[...] = x_ref[...]

        @pl.loop(0, 3)
        def _fetch(row):
            @pl.when(row > 0)
            def _wait():
                pltpu.make_async_copy(x_ref.at[0], window, done).wait()

            pltpu.make_async_copy(x_ref.at[row], window, done).start()
            out_ref[row] = window[...]

    assert [finding.kind for finding in findings_of(body, WINDOW, DMA)] == ["Race", "UnwaitedCopy"]


def test_copies_from_one_line_that_meet_are_one_finding():
    def body(x_ref, out_ref, window, done):
        out_ref[...] = x_ref[...]
        for row in range(3):
            pltpu.make_async_copy(x_ref.at[row], window, done).start()

    [finding] = findings_of(body, WINDOW, DMA)
    assert finding.kind == "UnwaitedCopy"
    assert "two DMAs of program 'body' on core=0 both touch window" in "\n".join(finding.details)


def test_a_copy_to_another_core_that_it_reads_without_waiting_is_one_finding():
    def body(x_ref, out_ref, inbox, sent, received):
        core = lax.axis_index("core")
        out_ref[core + 2] = x_ref[core]
        copy = pltpu.make_async_remote_copy(
            x_ref.at[core], inbox, sent, received, {"core": 1 - core}
        )
        copy.start()
        copy.wait_send()
        out_ref[core] = inbox[...]

    [finding] = findings_of(body, WINDOW, DMA, DMA, cores=2)
    assert (finding.kind, finding.name) == ("UnwaitedCopy", "received")
    assert "reads inbox[0:16]" in "\n".join(finding.details)


@pytest.mark.parametrize("waits", ["never", "after the scope"])
@pytest.mark.parametrize("touches", ["reads", "writes"])
def test_what_a_scope_does_with_memory_that_a_copy_outlives_is_told(waits, touches):
    def body(x_ref, out_ref, done):
        out_ref[...] = x_ref[...]

        def scope(window):
            window[...] = x_ref[2]
            if touches == "reads":
                pltpu.make_async_copy(x_ref.at[0], window, done).start()
                out_ref[0] = window[...]
            else:
                pltpu.make_async_copy(window, out_ref.at[0], done).start()
                window[...] = x_ref[3]

        pl.run_scoped(scope, WINDOW)
        if waits != "never":
            pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done).wait()

    [finding] = findings_of(body, DMA)
    assert finding.kind == ("UnwaitedCopy" if waits == "never" else "CopyInFlight")
    other = "writes" if touches == "reads" else "reads"
    [told] = [line for line in finding.details if "without waiting for it" in line]
    assert f"core=0 {touches} window[0:16] that a DMA of program 'body' on core=0 {other}" in told
    line = body.__code__.co_firstlineno + (7 if touches == "reads" else 10)
    assert f"{__file__}:{line}" in told


def test_what_a_scope_does_before_it_starts_a_copy_is_no_race_with_it():
    def body(x_ref, out_ref, done):
        out_ref[...] = x_ref[...]

        def scope(window):
            window[...] = x_ref[2]
            out_ref[0] = window[...]
            pltpu.make_async_copy(x_ref.at[0], window, done).start()

        pl.run_scoped(scope, WINDOW)
        pltpu.make_async_copy(x_ref.at[0], out_ref.at[0], done).wait()

    [finding] = findings_of(body, DMA)
    assert (finding.kind, finding.details) == ("CopyInFlight", ())


def test_what_was_read_beside_the_target_of_the_copy_is_told():
    def body(x_ref, out_ref, windows, done):
        copy = pltpu.make_async_copy(x_ref.at[0], windows.at[0], done)
        copy.start()
        out_ref[...] = windows[...]
        copy.wait()

    windows = cokernel.private((4, 16), jnp.int32)
    assert [finding.kind for finding in findings_of(body, windows, DMA)] == [
        "Race",
        "UninitialisedRead",
    ]


def test_rounds_of_a_loop_whose_copies_meet_are_one_finding():
    def body(x_ref, out_ref, window, done):
        out_ref[...] = x_ref[...]

        @pl.loop(0, 3)
        def _fetch(row):
            pltpu.make_async_copy(x_ref.at[row], window, done).start()

    [finding] = findings_of(body, WINDOW, DMA)
    assert finding.kind == "UnwaitedCopy"
    assert "two DMAs of program 'body' on core=0 both touch window" in "\n".join(finding.details)


def test_copies_of_two_cores_into_one_place_stay_a_race():
    def body(x_ref, out_ref, board, done):
        core = lax.axis_index("core")
        pltpu.make_async_copy(x_ref.at[core], board, done).start()

        @pl.when(core == 0)
        def _fill():
            out_ref[...] = x_ref[...]

    board = cokernel.shared((16,), jnp.int32)
    kinds = [finding.kind for finding in findings_of(body, board, DMA, cores=2)]
    assert kinds == ["Race", "UnwaitedCopy"]


def test_copies_from_two_lines_that_nobody_waits_for_are_two_findings():
    def body(x_ref, out_ref, done):
        pltpu.make_async_copy(x_ref.at[pl.ds(0, 2)], out_ref.at[pl.ds(0, 2)], done).start()
        pltpu.make_async_copy(x_ref.at[pl.ds(2, 2)], out_ref.at[pl.ds(2, 2)], done).start()

    found = findings_of(body, DMA)
    assert [finding.kind for finding in found] == ["UnwaitedCopy"] * 2
    assert len({finding.parties[0].line for finding in found}) == 2
