"""Who reads before others have written is in a race, and that is one finding; what nobody writes is
another.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

CORES = 4
WIDTH = 16
X = jnp.arange(CORES * WIDTH, dtype=jnp.int32).reshape(CORES, WIDTH)
BOARD = cokernel.shared((CORES, WIDTH), jnp.int32)
MINE = cokernel.private((WIDTH,), jnp.int32)
OUT = jax.ShapeDtypeStruct(X.shape, jnp.int32)
TOO_EARLY = "board is read before anybody has written it"


def explored(body, *scratch, function=None, **options):
    kernel = cokernel.kernel(body, OUT, mesh=cokernel.CoreMesh(core=CORES), scratch_types=scratch)
    call = (lambda: kernel(X)) if function is None else function(kernel)
    return cokernel.explore(call, schedules=20, options=cokernel.Checked(**options))


def exchange(is_broken):
    def body(x_ref, out_ref, board):
        core = lax.axis_index("core")
        board[core] = x_ref[core]
        if not is_broken:
            plsc.subcore_barrier()
        out_ref[core] = board[(core + 1) % CORES]

    return body


def by_copies(is_broken):
    def body(x_ref, out_ref, board, mine):
        core = lax.axis_index("core")
        pltpu.sync_copy(x_ref.at[core], board.at[core])
        if not is_broken:
            plsc.subcore_barrier()
        pltpu.sync_copy(board.at[(core + 1) % CORES], mine)
        out_ref[core] = mine[...] * 2

    return body


def by_a_branch(is_broken):
    def body(x_ref, out_ref, board):
        core = lax.axis_index("core")
        board[core] = x_ref[core]
        out_ref[core] = x_ref[core]
        if not is_broken:
            plsc.subcore_barrier()
        value = board[(core + 1) % CORES, 0] + 1

        @pl.when(value > 3)
        def _():
            out_ref[core] = x_ref[core] * 2

    return body


def further_on(is_broken):
    def body(x_ref, out_ref, board, sums):
        # What a core has read too early it writes to where another one reads it.
        core = lax.axis_index("core")
        board[core] = x_ref[core]
        if not is_broken:
            plsc.subcore_barrier()
        sums[core] = board[core] + board[(core + 1) % CORES]
        plsc.subcore_barrier()
        out_ref[core] = sums[(core + 2) % CORES]

    return body


SHAPES = {
    exchange: [BOARD],
    by_copies: [BOARD, MINE],
    by_a_branch: [BOARD],
    further_on: [BOARD, BOARD],
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_missing_barrier_is_one_race_that_says_what_is_read_too_early(shape):
    [finding] = explored(shape(True), *SHAPES[shape]).findings
    assert (finding.kind, finding.name) == ("Race", "board")
    assert TOO_EARLY in "\n".join(finding.details)
    assert finding.text().count(TOO_EARLY) == 1


@pytest.mark.parametrize("shape", SHAPES)
def test_with_the_barrier_there_is_nothing(shape):
    assert not explored(shape(False), *SHAPES[shape]).findings


def test_batches_make_no_difference():
    def function(kernel):
        return lambda: jax.vmap(kernel)(jnp.stack([X, X + 1]))

    [finding] = explored(exchange(True), BOARD, function=function).findings
    assert finding.kind == "Race"
    assert TOO_EARLY in "\n".join(finding.details)


def test_several_schedules_of_one_launch_make_no_difference():
    body = exchange(True)
    kernel = cokernel.kernel(body, OUT, mesh=cokernel.CoreMesh(core=CORES), scratch_types=[BOARD])
    with cokernel.checked(schedules=5, on_finding="warn"), pytest.warns(cokernel.CheckWarning):
        jax.block_until_ready(kernel(X))
    [finding] = cokernel.last_report().findings
    assert finding.kind == "Race"
    assert TOO_EARLY in "\n".join(finding.details)


def test_the_first_finding_stops_a_launch_that_asks_for_it():
    kinds = {
        finding.kind for finding in explored(exchange(True), BOARD, stop_at_first=True).findings
    }
    assert "Race" in kinds


def test_a_subcore_that_gathers_from_shared_memory_too_early_is_one_race():
    def body(x_ref, out_ref, board, mine):
        subcore = lax.axis_index("subcore")
        pltpu.sync_copy(x_ref.at[subcore], board.at[subcore])
        pltpu.sync_copy(board.at[(subcore + 1) % 16], mine)
        pltpu.sync_copy(mine, out_ref.at[lax.axis_index("core"), subcore])

    with cokernel.target("tpu7x"):
        mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
        kernel = cokernel.kernel(
            body,
            jax.ShapeDtypeStruct((2, 16, 16), jnp.int32),
            mesh=mesh,
            scratch_types=[pltpu.VMEM_SHARED((16, 16), jnp.int32), pltpu.VMEM((16,), jnp.int32)],
        )
        x = jnp.ones((16, 16), jnp.int32)
        [finding] = cokernel.explore(lambda: kernel(x), schedules=5).findings
    assert (finding.kind, finding.name) == ("Race", "board")
    assert TOO_EARLY in "\n".join(finding.details)


def test_what_nobody_writes_stays_a_finding_of_its_own_with_these_elements_alone():
    def body(x_ref, out_ref, board):
        core = lax.axis_index("core")
        board[core] = x_ref[core]
        # The last core reads a row that there is not.
        out_ref[core] = board[core + 1]

    rows = cokernel.shared((CORES + 1, WIDTH), jnp.int32)
    race, read = explored(body, rows).findings
    assert (race.kind, read.kind) == ("Race", "UninitialisedRead")
    assert (read.name, read.indices) == ("board", f"[{CORES}, 0:{WIDTH}]")
    assert read.parties[0].core == f"core={CORES - 1}"
    assert read.also == ()


def test_another_ref_that_the_same_line_reads_is_not_forgotten():
    def body(x_ref, out_ref, board, other):
        core = lax.axis_index("core")
        board[core] = x_ref[core]
        out_ref[core] = board[(core + 1) % CORES] + other[...]

    found = explored(body, BOARD, MINE).findings
    assert {(finding.kind, finding.name) for finding in found} == {
        ("Race", "board"),
        ("UninitialisedRead", "other"),
    }


def test_a_sum_that_nobody_has_begun_is_not_explained_by_others_that_add_to_it():
    def body(x_ref, out_ref, total):
        core = lax.axis_index("core")
        total[...] += x_ref[core]
        plsc.subcore_barrier()
        out_ref[core] = total[...]

    found = explored(body, cokernel.shared((WIDTH,), jnp.int32)).findings
    assert {finding.kind for finding in found} == {"Race", "UninitialisedRead"}


def test_a_read_that_is_ordered_before_the_write_is_no_race():
    def body(x_ref, out_ref, board):
        core = lax.axis_index("core")
        out_ref[core] = board[(core + 1) % CORES]
        plsc.subcore_barrier()
        board[core] = x_ref[core]

    [finding] = explored(body, BOARD).findings
    assert finding.kind == "UninitialisedRead"
