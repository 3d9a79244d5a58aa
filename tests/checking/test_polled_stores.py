"""A flag that is stored to again before its writer waits is seen with each of its values."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel.checking.launches import collected_reports


def passing_value(out_ref, flag):
    """The second core waits for the very value 1 of a flag that goes on to 2."""
    core = lax.axis_index("core")

    @pl.when(core == 0)
    def _lower():
        flag[0] = 0

    plsc.subcore_barrier()

    @pl.when(core == 0)
    def _raise():
        flag[0] = 1
        flag[0] = 2

    @pl.when(core == 1)
    def _watch():
        lax.while_loop(lambda seen: seen != 1, lambda _: flag[0], jnp.int32(0))

    out_ref[core] = core


def test_a_value_that_a_flag_passes_through_is_seen_under_some_schedules_and_missed_under_others():
    kernel = cokernel.kernel(
        passing_value,
        jax.ShapeDtypeStruct((2,), jnp.int32),
        mesh=cokernel.CoreMesh(core=2),
        scratch_types=[cokernel.shared((1,), jnp.int32)],
    )
    for options in (
        {"schedules": 1000, "exhaustive": True, "preemptions": None},
        {"schedules": 100},
    ):
        with collected_reports() as heard:
            report = cokernel.explore(kernel, **options)
        assert [finding.kind for finding in report.findings] == ["Livelock"]
        ends = [bool(record["findings"]) for _, record in heard]
        assert set(ends) == {True, False}


@pytest.mark.parametrize("strategy", ["random", "pct", "round_robin"])
def test_who_looks_between_two_stores_to_a_flag_is_found(strategy):
    rows = 8

    def body(x_ref, out_ref, progress, shared):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _lower():
            progress[0] = 0

        plsc.subcore_barrier()

        @pl.when(core == 1)
        def _produce():
            @pl.loop(0, rows)
            def _row(row):
                pl.when(row == rows // 2)(lambda: progress.__setitem__(0, row + 1))
                shared[row] = x_ref[row]
                progress[0] = row + 1

        @pl.when(core == 0)
        def _consume():
            @pl.loop(0, rows)
            def _row(row):
                lax.while_loop(lambda done: done <= row, lambda _: progress[0], jnp.int32(0))
                out_ref[row] = shared[row]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((rows,), jnp.int32),
        mesh=cokernel.CoreMesh(core=2),
        scratch_types=[
            cokernel.shared((1,), jnp.int32),
            cokernel.shared((rows,), jnp.int32),
        ],
    )
    options = cokernel.Checked(strategy=strategy)
    report = cokernel.explore(kernel, jnp.arange(rows), schedules=400, options=options)
    assert {(finding.kind, finding.name, finding.indices) for finding in report.findings} == {
        ("Race", "shared", f"[{rows // 2}]")
    }
