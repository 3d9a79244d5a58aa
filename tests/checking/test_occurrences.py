"""How often a finding was met is a number of accesses, and no report depends on addresses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

ROOT = Path(__file__).parents[2]
SCHEDULES = 20
X = jnp.ones((4, 16), jnp.int32)


def explored(body, *scratch, out=(4, 16), cores=1, schedules=SCHEDULES):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(out, jnp.int32),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=scratch,
    )
    return cokernel.explore(lambda: kernel(X), schedules=schedules)


def times(report, kind):
    [finding] = report.of_kind(kind)
    return finding.occurrences


TILE = cokernel.private((4, 16), jnp.int32)
# More than a page of shadow memory, at whatever address it begins.
LARGE = cokernel.private((40, 100), jnp.int32)


@pytest.mark.parametrize("scratch", [TILE, LARGE])
def test_a_read_of_a_whole_ref_is_met_once_under_each_schedule(scratch):
    def body(x_ref, out_ref, tile):
        out_ref[...] = tile[...] + 1

    shape = tuple(scratch.shape)
    assert times(explored(body, scratch, out=shape), "UninitialisedRead") == SCHEDULES


def test_a_copied_read_is_met_once_under_each_schedule():
    def body(x_ref, out_ref, tile, done):
        copy = pltpu.make_async_copy(tile, out_ref, done)
        copy.start()
        copy.wait()

    report = explored(body, LARGE, pltpu.SemaphoreType.DMA, out=(40, 100))
    assert times(report, "UninitialisedRead") == SCHEDULES


def test_each_read_of_a_loop_counts():
    def body(x_ref, out_ref, tile):
        @pl.loop(0, 4)
        def _row(row):
            out_ref[row] = tile[row] + 1

    assert times(explored(body, TILE), "UninitialisedRead") == 4 * SCHEDULES


def test_a_read_that_decides_branches_counts_once_for_each_branch():
    def body(x_ref, out_ref, tile):
        out_ref[...] = x_ref[...]

        @pl.loop(0, 3)
        def _row(row):
            value = tile[row, 0]

            @pl.when(value > 0)
            def _set():
                out_ref[row, 0] = 1

    assert times(explored(body, TILE), "UninitialisedRead") == 3 * SCHEDULES


def test_sums_into_what_nobody_wrote_count_each():
    def body(x_ref, out_ref, ids, done):
        ids[...] = lax.iota(jnp.int32, 4)
        for _ in range(2):
            pltpu.async_copy(x_ref, out_ref.at[ids], done, add=True).wait()

    ids = cokernel.private((4,), jnp.int32)
    report = explored(body, ids, pltpu.SemaphoreType.DMA)
    assert times(report, "UninitialisedRead") == 2 * SCHEDULES


def test_a_read_of_many_picked_rows_is_met_once_under_each_schedule():
    # So many that the compiler tells of them one by one.
    def body(x_ref, out_ref, table):
        rows = lax.iota(jnp.int32, 600) % 4
        out_ref[...] = x_ref[...]
        out_ref[0, 0] = jnp.sum(table[rows, 0])

    assert times(explored(body, TILE), "UninitialisedRead") == SCHEDULES


def test_a_race_is_met_once_by_each_access_whatever_it_touches():
    def body(x_ref, out_ref, board):
        core = lax.axis_index("core")
        board[...] = jnp.full((40, 100), core)

        @pl.when(core == 0)
        def _read():
            out_ref[...] = x_ref[...]

    report = explored(body, cokernel.shared((40, 100), jnp.int32), cores=2)
    assert times(report, "Race") == SCHEDULES


def test_the_rows_of_one_scatter_race_as_one_access():
    def body(x_ref, out_ref, board, ids, done):
        core = lax.axis_index("core")
        ids[...] = 3 - lax.iota(jnp.int32, 4)
        copy = pltpu.make_async_copy(x_ref, board.at[ids], done)
        copy.start()
        copy.wait()

        @pl.when(core == 0)
        def _read():
            out_ref[...] = x_ref[...]

    board = cokernel.shared((4, 16), jnp.int32)
    ids = cokernel.private((4,), jnp.int32)
    report = explored(body, board, ids, pltpu.SemaphoreType.DMA, cores=2)
    assert times(report, "Race") == SCHEDULES


def test_arrivals_at_barriers_are_counted_as_what_was_looked_at():
    def body(x_ref, out_ref):
        for _ in range(2):
            plsc.subcore_barrier()

        @pl.when(lax.axis_index("core") == 0)
        def _fill():
            out_ref[...] = x_ref[...]

    report = explored(body, cores=3, schedules=4)
    assert report.counts["barriers"] == 2 * 3 * 4
    assert "24 arrivals at barriers" in report.looked_at()


# Some of every file of the corpus, with pieces of memory of many sizes and alignments.
SCRIPT = """
import json, sys
junk = [bytearray(int(sys.argv[1]) + 37 * n % 4096) for n in range(int(sys.argv[1]))]
from tests.faults import copies, leftovers, pipelines, races, uninitialised, deadlocks
from tests.faults.case import CASES
names = sorted(name for name in CASES if CASES[name].chip is None)[::3]
reports = {name: CASES[name].run(True, 6).to_dict() for name in names}
json.dump(reports, open(sys.argv[2], "w"), sort_keys=True)
"""


def reports_of_a_process(number, folder):
    path = folder / f"{number}.json"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "PADDING": "x" * (1237 * number),
        "JAX_PLATFORMS": "cpu",
    }
    command = [sys.executable, "-c", SCRIPT, str(711 * number), str(path)]
    subprocess.run(command, env=environment, check=True, cwd=ROOT)
    return json.loads(path.read_text())


def test_processes_with_other_addresses_make_the_same_reports(tmp_path):
    first, second = (reports_of_a_process(number, tmp_path) for number in (1, 5))
    assert len(first) > 15
    different = [name for name in first if first[name] != second[name]]
    assert not different, json.dumps([first[different[0]], second[different[0]]], indent=1)
