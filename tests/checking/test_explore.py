"""Kernels explored under many schedules, and schedules replayed."""

import dataclasses
import io
import json
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel.checking.launches import collected_reports
from cokernel.checking.schedules import Schedule

CORES = 3


def tickets(guarded: bool):
    """Cores write their number where the order in which they come leads them."""

    def body(out_ref, board, turn):
        core = lax.axis_index("core")
        if guarded:

            @pl.when(core > 0)
            def _wait():
                pl.semaphore_wait(turn, 1)

        board[0] = core

        if guarded:

            @pl.when(core + 1 < CORES)
            def _next():
                pl.semaphore_signal(turn, 1, device_id={"core": core + 1})

            @pl.when(core + 1 == CORES)
            def _out():
                out_ref[0] = board[0]
        else:
            pl.semaphore_signal(turn, 1, device_id={"core": 0})

            @pl.when(core == 0)
            def _out():
                pl.semaphore_wait(turn, CORES)
                out_ref[0] = board[0]

    return cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=cokernel.CoreMesh(core=CORES),
        scratch_types=[cokernel.shared((1,), jnp.int32), pltpu.SemaphoreType.REGULAR],
    )


def test_equal_findings_of_many_schedules_are_merged():
    report = cokernel.explore(tickets(guarded=False), schedules=20)
    assert report.schedules == 20
    [finding] = report.of_kind("Race")
    assert finding.occurrences >= 20
    assert finding.name == "board"
    assert report.behaviours > 1


def test_a_kernel_in_order_has_no_finding_and_one_behaviour():
    report = cokernel.explore(tickets(guarded=True), schedules=20)
    assert not report.findings, str(report)
    assert report.is_clean


@pytest.mark.parametrize("preemptions", [0, 1, None])
def test_all_schedules_of_a_small_kernel_are_visited(preemptions):
    report = cokernel.explore(
        tickets(guarded=False), schedules=2000, exhaustive=True, preemptions=preemptions
    )
    assert report.exhaustive
    extent = {
        None: "all there are",
        0: "all there are with at most 0 interruptions of a core",
        1: "all there are with at most 1 interruption of a core",
    }[preemptions]
    assert f" seen, {extent}.\n" in str(report)
    assert f"schedules, {extent}." in str(report)
    assert report.of_kind("Race")
    assert 1 <= report.behaviours <= report.schedules


def test_an_exploration_that_is_cut_off_says_so():
    report = cokernel.explore(tickets(guarded=False), schedules=2, exhaustive=True)
    assert not report.exhaustive
    assert report.schedules == 2


def test_the_same_seed_gives_the_same_results_findings_and_behaviour():
    def once(seed):
        with cokernel.checked(seed=seed, on_finding="warn"), collected_reports() as heard:
            result = np.asarray(tickets(guarded=False)())
        [(report, record)] = heard
        return result.tolist(), json.dumps(report.to_dict()), record["behaviour"]

    for seed in range(8):
        assert once(seed) == once(seed)


def test_different_seeds_give_different_results_where_there_is_a_race():
    results = set()
    for seed in range(40):
        with cokernel.checked(seed=seed, on_finding="warn"), collected_reports():
            results.add(int(tickets(guarded=False)()[0]))
    assert len(results) > 1


def test_a_finding_is_replayed_in_another_process(tmp_path):
    script = tmp_path / "racing.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys
            import jax, jax.numpy as jnp
            from jax import lax
            import cokernel

            def body(out_ref):
                core = lax.axis_index("core")
                out_ref[0] = core

            kernel = cokernel.kernel(
                body, jax.ShapeDtypeStruct((1,), jnp.int32), mesh=cokernel.CoreMesh(core=5)
            )
            print("result", kernel())
            """
        )
    )

    def check(*arguments):
        command = [sys.executable, "-m", "cokernel", "check", "--json", "-", *arguments, script]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ran.returncode == 1, ran.stderr
        [result] = [line for line in ran.stderr.splitlines() if line.startswith("result")]
        return result, json.loads(ran.stdout)

    result, [report] = check("--seed", "5")
    [finding] = report["findings"]
    assert finding["kind"] == "Race"
    again, [replayed] = check("--replay", finding["replay"])
    assert again == result
    assert replayed["findings"] == report["findings"]


def test_errors_of_the_function_itself_are_raised():
    def function():
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        cokernel.explore(function, schedules=2)


def test_an_error_after_a_launch_with_findings_is_raised():
    kernel = tickets(guarded=False)

    def function():
        kernel()
        raise AssertionError("the answer is wrong")

    with pytest.raises(AssertionError, match="the answer is wrong"):
        cokernel.explore(function, schedules=2)


def test_what_ended_a_launch_raises_inside_an_exploration_and_is_in_its_report():
    raised = []

    def body(out_ref, flag):
        lax.while_loop(lambda _: flag[0] == 0, lambda carry: carry, 0)
        out_ref[0] = 1

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=cokernel.CoreMesh(core=2),
        scratch_types=[cokernel.shared((1,), jnp.int32)],
    )

    def function():
        try:
            jax.block_until_ready(kernel())
        except Exception as error:
            raised.append(str(error))
            raise

    options = cokernel.Checked(fill="zeros", max_findings=1, on_finding="warn")
    report = cokernel.explore(function, schedules=3, options=options)
    [finding] = report.findings
    # Nobody has written the flag, so that this comes first.
    assert (finding.kind, finding.name) == ("UninitialisedRead", "flag")
    [livelock] = finding.consequences
    assert livelock.kind == "Livelock"
    assert len(raised) == 3
    assert all("Livelock" in text for text in raised)
    assert livelock.name == "flag"
    assert "polls flag[0]" in livelock.sentence
    assert {party.core for party in livelock.parties} == {"core=0", "core=1"}
    assert all("flag[0] == 0" in (party.code or "") for party in livelock.parties)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"schedules": 0}, ValueError, "schedules"),
        ({"schedules": 2.5}, TypeError, "schedules"),
        (
            {"schedules": 3, "options": cokernel.Checked(schedules=4)},
            ValueError,
            r"explore\(schedules=3\) and Checked\(schedules=4\) contradict",
        ),
        ({"schedules": True}, TypeError, "schedules"),
        ({"preemptions": -1}, ValueError, "preemptions"),
        ({"preemptions": "2"}, TypeError, "preemptions"),
        ({"exhaustive": 1}, TypeError, "exhaustive"),
        ({"options": {"seed": 1}}, TypeError, "cokernel.Checked"),
    ],
)
def test_meaningless_arguments_of_an_exploration_are_refused_by_name(arguments, error, words):
    with pytest.raises(error, match=words):
        cokernel.explore(tickets(guarded=True), **arguments)


def test_options_say_how_often_if_the_argument_does_not():
    options = cokernel.Checked(schedules=4)
    assert cokernel.explore(tickets(guarded=True), options=options).schedules == 4
    again = cokernel.explore(tickets(guarded=True), options=options, schedules=np.int64(4))
    assert again.schedules == 4


@pytest.mark.parametrize("exhaustive", [False, True])
def test_one_behaviour_is_told_in_the_singular(exhaustive):
    from rich.console import Console

    def body(out_ref):
        out_ref[0] = 1

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((1,), jnp.int32), mesh=cokernel.CoreMesh(core=1)
    )
    report = cokernel.explore(kernel, schedules=3, exhaustive=exhaustive)
    report = dataclasses.replace(report, schedules=3)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report)
    for text in (str(report), console.export_text()):
        assert "1 behaviour was seen" in text


@pytest.mark.parametrize("function", [3, None, "kernel", np.zeros(2)])
def test_what_cannot_be_called_cannot_be_explored(function):
    with pytest.raises(TypeError, match=r"explore\(f, x\)"):
        cokernel.explore(function)


def test_the_largest_seed_is_explored_from():
    options = cokernel.Checked(seed=2**64 - 1)
    assert cokernel.explore(tickets(guarded=True), schedules=3, options=options).schedules == 3


def test_choices_of_another_kernel_are_refused():
    choices = Schedule(strategy="choices", choices=(7, 1, 0, 3, 2) * 9).to_text()
    options = cokernel.Checked(replay=choices)
    with pytest.raises(ValueError, match="belongs to another kernel"):
        cokernel.explore(tickets(guarded=True), options=options)
    raises = pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="to another kernel")
    with raises, cokernel.checked(options):
        jax.block_until_ready(tickets(guarded=True)())


def test_a_finding_of_an_exhaustive_exploration_is_replayed():
    kernel = tickets(guarded=False)
    report = cokernel.explore(kernel, schedules=2000, exhaustive=True)
    [race] = report.of_kind("Race")
    again = cokernel.explore(kernel, options=cokernel.Checked(replay=race.replay))
    assert again.of_kind("Race")[0].sentence == race.sentence


def test_a_function_without_kernels_is_refused():
    with pytest.raises(ValueError, match="no kernel in checked mode"):
        cokernel.explore(lambda: jnp.zeros(3) + 1, schedules=2)


def test_a_finding_is_raised_out_of_jit():
    kernel = tickets(guarded=False)

    @jax.jit
    def function():
        return kernel() + 1

    native = function()
    raises = pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="Race: program 'body'")
    with raises, cokernel.checked():
        jax.block_until_ready(function())
    assert cokernel.last_report().of_kind("Race")
    assert native.shape == function().shape


def test_each_launch_may_run_under_several_schedules():
    raises = pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="under 7 schedules")
    with raises, cokernel.checked(schedules=7):
        jax.block_until_ready(tickets(guarded=False)())


def test_a_launch_that_updates_its_argument_runs_each_time_on_what_it_was_given():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((4,), jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        input_output_aliases={0: 0},
    )
    with cokernel.checked(schedules=5):
        result = kernel(jnp.arange(4, dtype=jnp.int32))
    np.testing.assert_array_equal(result, np.arange(4) + 1)


def test_what_nobody_wrote_is_met_once_in_each_run():
    def body(x_ref, out_ref):
        for row in range(0, 64, 2):
            out_ref[row] = x_ref[row]

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((64, 8), jnp.float32), mesh=cokernel.CoreMesh(core=1)
    )
    [finding] = cokernel.explore(kernel, jnp.ones((64, 8)), schedules=3).findings
    assert finding.occurrences == 3
    assert "256 elements have never been written" in finding.sentence
    assert finding.memory.count == 256


def test_one_signal_too_many_is_one_finding():
    def body(out_ref):
        def scoped(sem):
            @pl.loop(0, 3)
            def _step(i):
                pl.semaphore_signal(sem, 2)
                pl.semaphore_wait(sem, 1)

        pl.run_scoped(scoped, pltpu.SemaphoreType.REGULAR)
        out_ref[0] = 1

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((1,), jnp.int32), mesh=cokernel.CoreMesh(core=1)
    )
    [finding] = cokernel.explore(kernel, schedules=2).findings
    assert finding.kind == "LeftoverSemaphore"


def test_a_flag_in_device_memory_that_nobody_raises_is_named():
    def body(flags, out_ref):
        core = lax.axis_index("core")

        @pl.when(core > 0)
        def _wait():
            lax.while_loop(lambda _: flags[core, 1] != 7, lambda carry: carry, 0)

        out_ref[core] = 1

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((3,), jnp.int32), mesh=cokernel.CoreMesh(core=3)
    )
    report = cokernel.explore(lambda: kernel(jax.new_ref(jnp.zeros((3, 2), jnp.int32))))
    [finding] = report.of_kind("Livelock")
    assert {(party.core, party.polled) for party in finding.parties} == {
        ("core=1", "flags[1, 1]"),
        ("core=2", "flags[2, 1]"),
    }
    assert {party.core for party in finding.parties} == {"core=1", "core=2"}
    assert all(party.name.startswith("flags") for party in finding.parties)


def test_a_count_that_has_passed_the_polled_value_is_told():
    def body(out_ref, sem):
        for _ in range(3):
            pl.semaphore_signal(sem, 1)
        lax.while_loop(lambda _: pl.semaphore_read(sem) != 2, lambda carry: carry, 0)
        pl.semaphore_wait(sem, 3)
        out_ref[0] = 1

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((1,), jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.SemaphoreType.REGULAR],
    )
    [finding] = cokernel.explore(kernel, schedules=2).of_kind("Livelock")
    assert "polls sem (which counts 3)" in finding.sentence


def test_accesses_that_nobody_asked_for_are_off_and_not_unseen():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=cokernel.CoreMesh(core=1)
    )
    options = cokernel.Checked(races=False, uninitialised=False)
    report = cokernel.explore(kernel, jnp.ones(8), schedules=1, options=options)
    assert report.not_checked == ()
    assert report.off == ("races", "uninitialised")


def nothing_to_write(x_ref, out_ref):
    pass


def copies(x_ref, out_ref):
    out_ref[...] = x_ref[...]


def _kernel(body, size, make=cokernel.kernel):
    mesh = cokernel.CoreMesh(core=1)
    return make(body, jax.ShapeDtypeStruct((size,), jnp.float32), mesh=mesh)


WITHOUT_A_LAUNCH = {
    "no elements": (
        lambda x: _kernel(nothing_to_write, 0)(x),
        "XLA does not run kernel 'nothing_to_write', since its outputs have no elements",
    ),
    "not used": (
        jax.jit(lambda x: (_kernel(copies, 8)(x), x)[1]),
        "XLA does not run kernel 'copies', since nobody uses its outputs",
    ),
    "no outputs": (
        cokernel.kernel(lambda x_ref: None, mesh=cokernel.CoreMesh(core=1), name="looks"),
        "XLA does not run kernel 'looks', since it has no outputs and writes to no Ref",
    ),
    "no kernel": (lambda x: x[0] + 1, "nothing in it calls one"),
    "untraceable": (lambda x: float(x[0]) + 1, "cannot be traced to see why (Concretization"),
    "interpreted": (
        pl.pallas_call(copies, out_shape=jnp.ones(8), interpret=True),
        "pl.pallas_call is run by JAX itself",
    ),
}


@pytest.mark.parametrize("is_exhaustive", [False, True])
@pytest.mark.parametrize("what", WITHOUT_A_LAUNCH)
def test_where_no_kernel_ran_it_is_said_why(what, is_exhaustive):
    function, reason = WITHOUT_A_LAUNCH[what]
    with pytest.raises(ValueError, match="launched no kernel in checked mode") as raised:
        cokernel.explore(function, jnp.ones(8), schedules=2, exhaustive=is_exhaustive)
    assert reason in str(raised.value)
    assert "enabled()" not in str(raised.value)


def test_of_a_stock_kernel_it_is_said_what_it_needs():
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
    function = pl.kernel(copies, jax.ShapeDtypeStruct((8,), jnp.float32), mesh=mesh, interpret=True)
    with pytest.raises(ValueError, match=r"'copies'.*needs cokernel.pallas.enabled\(\)"):
        cokernel.explore(function, jnp.ones(8), schedules=1)
