"""Where a fault comes from the use of an undefined value, that is the finding, and tells of it."""

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

X = jnp.arange(32, dtype=jnp.int32).reshape(4, 8)
OUT = jax.ShapeDtypeStruct(X.shape, X.dtype)
REGULAR, DMA = pltpu.SemaphoreType.REGULAR, pltpu.SemaphoreType.DMA


def on_core(number):
    return pl.when(lax.axis_index("core") == number)


def read(x, o, n):
    o[0] = x[n[0]]


def write(x, o, n):
    o[n[0]] = x[0]


def window(x, o, n):
    o[pl.ds(0, 2)] = x[pl.ds(n[0], 2)]


def source_of_a_copy(x, o, n, sem):
    pltpu.async_copy(x.at[n[0]], o.at[0], sem).wait()


def target_of_a_copy(x, o, n, sem):
    pltpu.async_copy(x.at[0], o.at[n[0]], sem).wait()


def rows_of_a_copy(x, o, n, sem, rows):
    rows[...] = n[...]
    pltpu.async_copy(x.at[rows], o, sem).wait()


def signalled_element(x, o, n, sems):
    pl.semaphore_signal(sems.at[n[0]], 1)
    pl.semaphore_wait(sems.at[1], 1)


def waited_element(x, o, n, sems):
    pl.semaphore_signal(sems.at[1], 1)
    pl.semaphore_wait(sems.at[n[0]], 1)


def signalled_core(x, o, n, sem):
    @on_core(0)
    def _signal():
        pl.semaphore_signal(sem, 1, device_id={"core": n[0]})

    @on_core(1)
    def _wait():
        pl.semaphore_wait(sem, 1)


def element_a_copy_signals(x, o, n, sems):
    pltpu.make_async_copy(x.at[0], o.at[0], sems.at[n[0]]).start()
    pltpu.make_async_copy(x.at[0], o.at[0], sems.at[1]).wait()


def signalled_amount(x, o, n, sem):
    pl.semaphore_signal(sem, n[0])
    pl.semaphore_wait(sem, 1)


def waited_amount(x, o, n, sem):
    pl.semaphore_signal(sem, 1)
    pl.semaphore_wait(sem, n[0] + 1)


def number_of_rounds(x, o, n):
    @pl.loop(0, n[0])
    def _round(i):
        o[i] = x[i]


def rounds_that_signal(x, o, n, sem):
    @on_core(0)
    def _signal():
        @pl.loop(0, n[0])
        def _round(i):
            pl.semaphore_signal(sem, 1, device_id={"core": 1})

    @on_core(1)
    def _wait():
        pl.semaphore_wait(sem, 3)


def rounds_that_wait(x, o, n, sem):
    @pl.loop(0, 4 - n[0])
    def _round(i):
        pl.semaphore_wait(sem, 1)


def signal_if_it_is_three(n, sem):
    @on_core(0)
    def _signal():
        @pl.when(n[0] == 3)
        def _now():
            pl.semaphore_signal(sem, 1, device_id={"core": 1})


def branch_that_signals(x, o, n, sem):
    signal_if_it_is_three(n, sem)

    @on_core(1)
    def _wait():
        pl.semaphore_wait(sem, 1)


def branch_that_takes(x, o, n, sem):
    pl.semaphore_signal(sem, 1)

    @pl.when(n[0] == 3)
    def _now():
        pl.semaphore_wait(sem, 1)


def place_of_a_race(x, o, n):
    @on_core(0)
    def _all():
        o[...] = x[...]

    @on_core(1)
    def _one():
        o[n[0]] = x[0]


def count_that_is_polled(x, o, n, sem):
    signal_if_it_is_three(n, sem)

    @on_core(1)
    def _poll():
        lax.while_loop(lambda seen: seen == 0, lambda _: pl.semaphore_read(sem), jnp.int32(0))


def rows_that_are_written(x, o, n):
    @pl.loop(0, n[0])
    def _round(i):
        o[i & 3] = x[i & 3]


SEM, TWO = [REGULAR], [REGULAR((2,))]
ROWS = pltpu.VMEM((4,), jnp.int32)
# The body, its scratch, its cores, what each byte of undefined memory holds, and what comes of it.
CASES = [
    (read, [], 1, 255, "OutOfBounds"),
    (write, [], 1, 255, "OutOfBounds"),
    (window, [], 1, 255, "OutOfBounds"),
    (source_of_a_copy, [DMA], 1, 255, "OutOfBounds"),
    (target_of_a_copy, [DMA], 1, 255, "OutOfBounds"),
    (rows_of_a_copy, [DMA, ROWS], 1, 255, "OutOfBounds"),
    (signalled_element, TWO, 1, 255, "OutOfBounds"),
    (signalled_element, TWO, 1, 0, "Deadlock"),
    (waited_element, TWO, 1, 0, "Deadlock"),
    (signalled_core, SEM, 2, 255, "Check"),
    (signalled_core, SEM, 2, 0, "Deadlock"),
    (element_a_copy_signals, [DMA((2,))], 1, 0, "Deadlock"),
    (signalled_amount, SEM, 1, 0, "Deadlock"),
    (signalled_amount, SEM, 1, 1, "LeftoverSemaphore"),
    (signalled_amount, SEM, 1, 255, "SemaphoreUnderflow"),
    (waited_amount, SEM, 1, 1, "Deadlock"),
    (waited_amount, SEM, 1, 254, "Check"),
    (number_of_rounds, [], 1, 1, "OutOfBounds"),
    (rounds_that_signal, SEM, 2, 0, "Deadlock"),
    (rounds_that_wait, SEM, 1, 0, "Deadlock"),
    (branch_that_signals, SEM, 2, 0, "Deadlock"),
    (branch_that_takes, SEM, 1, 0, "LeftoverSemaphore"),
    (place_of_a_race, [], 2, 0, "Race"),
    (count_that_is_polled, SEM, 2, 1, "Livelock"),
    (rows_that_are_written, [], 1, 0, "NeverWritten"),
]


def explored(body, scratch, cores, undefined=True, **options):
    """Runs a body that is given memory of which it writes nothing, or which it finds filled."""

    def program(x, o, n, *rest):
        if body is not rows_that_are_written:
            pl.when(lax.axis_index("core") == 0)(lambda: pltpu.sync_copy(x, o))
        if not undefined:
            for i in range(4):
                n[i] = 3 * (body.__name__.startswith(("r", "n", "b")))
        body(x, o, n, *rest)

    program.__name__ = body.__name__
    kernel = cokernel.kernel(
        program,
        OUT,
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=[pltpu.SMEM((4,), jnp.int32), *scratch],
    )
    return cokernel.explore(kernel, X, schedules=1, options=cokernel.Checked(**options))


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[4]}")
def test_the_undefined_value_leads_and_tells_what_came_of_it(case):
    body, scratch, cores, fill, kind = case
    report = explored(body, scratch, cores, fill=fill)
    [finding] = report.findings
    assert (finding.kind, finding.name) == ("UninitialisedRead", "n"), str(report)
    assert kind in [one.kind for one in finding.consequences], str(report)
    text = finding.text()
    assert text.startswith("UninitialisedRead: ")
    assert f"  so {kind}: " in text
    plain = json.loads(json.dumps(report.to_dict()))["findings"][0]
    assert kind in [one["kind"] for one in plain["consequences"]]
    assert cokernel.Finding.from_dict(plain) == finding


@pytest.mark.parametrize(
    "options", [{"races": False}, {"leftovers": False, "unwaited_copies": False}]
)
def test_other_checks_are_not_needed_for_that(options):
    [finding] = explored(read, [], 1, **options).findings
    assert [one.kind for one in finding.consequences] == ["OutOfBounds"]


def test_where_undefined_values_are_not_looked_for_the_consequence_is_alone():
    [finding] = explored(read, [], 1, uninitialised=False).findings
    assert finding.kind == "OutOfBounds"
    [finding] = explored(waited_amount, SEM, 1, fill=1, uninitialised=False).findings
    assert finding.kind == "Deadlock"


def test_a_launch_that_stops_at_its_first_finding_stops_at_the_undefined_value():
    [finding] = explored(read, [], 1, stop_at_first=True).findings
    assert (finding.kind, finding.consequences) == ("UninitialisedRead", ())


def test_the_exception_of_a_launch_tells_both():
    def body(x, o, n):
        o[...] = x[...]
        o[0] = x[n[0]]

    kernel = cokernel.kernel(
        body,
        OUT,
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.SMEM((4,), jnp.int32)],
        interpret=cokernel.Checked(on_finding="warn"),
    )
    with pytest.raises(jax.errors.JaxRuntimeError, match="so OutOfBounds: read of 'x'") as error:
        jax.block_until_ready(kernel(X))
    [finding] = cokernel.report_of(error.value).findings
    assert finding.kind == "UninitialisedRead"


def test_faults_that_have_nothing_to_do_with_it_are_findings_of_their_own():
    def body(x, o, n, sem):
        o[...] = x[...]
        o[0] = x[n[0] & 1]
        bad = x[0, 0] + 7
        o[1] = x[bad]

    kinds = [one.kind for one in explored(body, SEM, 1, fill=0).findings]
    assert kinds == ["OutOfBounds", "UninitialisedRead"]

    def waits(x, o, n, sem):
        o[...] = x[...]

        @pl.when(n[0] == 1)
        def _other():
            o[0] = x[1]

        pl.semaphore_wait(sem, 1)

    kinds = [one.kind for one in explored(waits, SEM, 1, fill=0).findings]
    assert kinds == ["Deadlock", "UninitialisedRead"]


def test_a_bad_index_on_a_line_that_met_an_undefined_one_before_is_a_finding_of_its_own():
    def body(x, o, n):
        o[...] = x[...]
        n[1] = 90

        @pl.loop(0, 2)
        def _round(i):
            o[0] = x[n[i]]

    report = explored(body, [], 1, fill=0)
    assert [one.kind for one in report.findings] == ["OutOfBounds", "UninitialisedRead"]


def test_findings_of_several_schedules_are_merged_with_what_came_of_them():
    def program(x, o, n):
        o[0] = x[n[0]]

    kernel = cokernel.kernel(
        program,
        OUT,
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.SMEM((4,), jnp.int32)],
    )
    [finding] = cokernel.explore(kernel, X, schedules=5).findings
    [consequence] = finding.consequences
    assert (finding.occurrences, consequence.occurrences) == (5, 5)


@pytest.mark.parametrize("body", [read, write, window, number_of_rounds, rounds_that_signal])
def test_with_values_that_were_written_there_is_no_finding(body):
    [scratch, cores] = next([case[1], case[2]] for case in CASES if case[0] is body)
    report = explored(body, scratch, cores, undefined=False)
    assert report.is_clean, str(report)
