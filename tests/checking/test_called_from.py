"""Where a line is in a function of the user's own, reports say from where that was called."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel.checking.places import CALLS_TOLD, called_at

REGULAR, DMA = pltpu.SemaphoreType.REGULAR, pltpu.SemaphoreType.DMA
X = jnp.ones((4, 16), jnp.int32)


def explored(body, *scratch, cores=2, schedules=2):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(X.shape, jnp.int32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=scratch,
    )
    return cokernel.explore(lambda: kernel(X), schedules=schedules)


def lines_of(text, start, end):
    """The lines between one that starts so and the next that starts otherwise, without indents."""
    lines = [line.strip() for line in text.splitlines()]
    begin = next(at for at, line in enumerate(lines) if line.startswith(start))
    stop = next(at for at in range(begin, len(lines)) if lines[at].startswith(end))
    return lines[begin:stop]


def tell(sem, core):
    pl.semaphore_signal(sem, 1, device_id={"core": core})


def test_who_could_end_a_deadlock_is_told_with_each_call():
    def body(x_ref, out_ref, sem):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _first():
            pl.semaphore_wait(sem, 9)
            out_ref[...] = x_ref[...]

        @pl.when(core == 1)
        def _second():
            tell(sem, 0)  # One.
            tell(sem, 0)  # Another.
            for _ in range(3):
                tell(sem, 0)  # Of a loop that is written out.

    [finding] = explored(body, REGULAR).findings
    assert finding.kind == "Deadlock"
    told = lines_of(finding.text(), "it could be signalled", "of those, now")
    begin = body.__code__.co_firstlineno
    function = told[3].rpartition(" in ")[2]
    assert told[2:] == [
        'pl.semaphore_signal(sem, 1, device_id={"core": core})',
        f"called at {__file__}:{begin + 10} in {function}",
        "tell(sem, 0)  # One.",
        f"and at {__file__}:{begin + 11} in {function}",
        "tell(sem, 0)  # Another.",
        f"and at {__file__}:{begin + 13} in {function}",
        "tell(sem, 0)  # Of a loop that is written out.",
    ]


def test_a_signal_that_goes_elsewhere_is_told_with_its_call():
    def body(x_ref, out_ref, sems):
        out_ref[...] = x_ref[...]
        tell(sems.at[1], 0)  # The wrong one.
        pl.semaphore_wait(sems.at[0], 1)

    [finding] = explored(body, pltpu.SemaphoreType.REGULAR((2,)), cores=1).findings
    assert "nothing in this kernel ever signals it" in finding.text()
    told = lines_of(finding.text(), "nothing in this kernel", "What to do:")
    assert "tell(sems.at[1], 0)  # The wrong one." in told
    meanwhile = lines_of(finding.text(), "meanwhile semaphore", "nothing in this kernel")
    assert "tell(sems.at[1], 0)  # The wrong one." in meanwhile


def test_copies_that_have_signalled_are_told_with_their_calls():
    def fetch(x_ref, row, done):
        copy = pltpu.make_async_copy(x_ref.at[0], row, done)
        copy.start()
        return copy

    def body(x_ref, out_ref, row, done):
        out_ref[...] = x_ref[...]
        fetch(x_ref, row, done).wait()  # Waited for.
        copy = fetch(x_ref, row, done)  # Waited for too often.
        copy.wait()
        copy.wait()

    [finding] = explored(body, cokernel.private((16,), jnp.int32), DMA, cores=1).findings
    told = lines_of(finding.text(), "no copy is in flight", "it could be signalled")
    assert "fetch(x_ref, row, done).wait()  # Waited for." in told
    assert "copy = fetch(x_ref, row, done)  # Waited for too often." in told
    assert sum(line.startswith("called at") for line in told) == 1
    assert sum(line.startswith("and at") for line in told) == 1


def caller(line, function="body"):
    return {"file": "kernel.py", "line": line, "function": function}


@pytest.mark.parametrize("count", [1, CALLS_TOLD, CALLS_TOLD + 1, 40])
def test_of_many_calls_a_handful_is_told_each_once_and_in_the_order_of_the_program(count):
    sites = [{"callers": [caller(line)]} for line in range(count, 0, -1)] * 2
    lines = called_at(sites, "  ")
    told = min(count, CALLS_TOLD)
    assert lines[:told] == [
        f"  {'and' if line > 1 else 'called'} at kernel.py:{line} in body"
        for line in range(1, told + 1)
    ]
    left_out = count - told
    places = "place" if left_out == 1 else "places"
    assert lines[told:] == [f"  and at {left_out} more {places}"] * bool(left_out)


def test_calls_of_calls_stand_below_the_call_that_they_led_to():
    site = {"callers": [caller(3, "inner"), caller(9)]}
    other = {"callers": [caller(4, "inner"), caller(9)]}
    assert called_at([site], "") == [
        "called at kernel.py:3 in inner",
        "called at kernel.py:9 in body",
    ]
    assert called_at([site, other, site, None, {}], "") == [
        "called at kernel.py:3 in inner",
        "  called at kernel.py:9 in body",
        "and at kernel.py:4 in inner",
        "  called at kernel.py:9 in body",
    ]
