"""Kernels explored under many schedules, and schedules replayed."""

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
from cokernel.checking.report import collected_reports

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
        result, _, text = ran.stdout.partition("\n")
        return result, json.loads(text)

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
