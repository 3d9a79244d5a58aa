"""Copies whose indices pick what may lie in the padding of tiles, under `padded_tiles=True`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

CHIP = "v6e"
FAILURES = (jax.errors.JaxRuntimeError, ValueError)
PADDED = cokernel.Checked(padded_tiles=True, fill="nan", chip_limits="off")
# Only what is read, and not whether it may be.
UNTRACKED = PADDED.replace(uninitialised=False)
ROWS, COLUMNS, ROOM = 10, 100, (16, 128)
COUNT = 8


@dataclasses.dataclass(frozen=True)
class Case:
    """A copy from an array to another, and what numpy makes of it.

    Attributes:
      copy: does it, given (source, target, indices, two numbers, how to copy).
      model: the same of two arrays that have the padding.
      rooms: what the indices, and each of the two numbers, stay below.
      is_distinct: whether no index may come twice.
      adds: whether the copy adds.
    """

    copy: Callable
    model: Callable
    rooms: tuple[int, int, int] = (16, 1, 1)
    is_distinct: bool = False
    adds: bool = False


def assigned(target, where, values):
    target[where] = values


CASES = {
    "rows gathered": Case(
        lambda x, y, at, i, j, copy: copy(x.at[at], y.at[pl.ds(0, COUNT)]),
        lambda x, y, at, i, j: assigned(y, np.s_[:COUNT, :COLUMNS], x[at, :COLUMNS]),
    ),
    "rows gathered into a window": Case(
        lambda x, y, at, i, j, copy: copy(x.at[at], y.at[pl.ds(i, COUNT)]),
        lambda x, y, at, i, j: assigned(y, np.s_[i : i + COUNT, :COLUMNS], x[at, :COLUMNS]),
        rooms=(16, 9, 1),
    ),
    "parts of rows gathered into a window": Case(
        lambda x, y, at, i, j, copy: copy(
            x.at[at, pl.ds(j, 16)], y.at[pl.ds(i, COUNT), pl.ds(j // 2, 16)]
        ),
        lambda x, y, at, i, j: assigned(
            y, np.s_[i : i + COUNT, j // 2 : j // 2 + 16], x[at, j : j + 16]
        ),
        rooms=(16, 9, 113),
    ),
    "parts of rows, of a size that is told at run time": Case(
        lambda x, y, at, i, j, copy: copy(
            x.at[at, pl.ds(j, i + 1)], y.at[pl.ds(0, COUNT), pl.ds(j // 2, i + 1)]
        ),
        lambda x, y, at, i, j: assigned(
            y, np.s_[:COUNT, j // 2 : j // 2 + i + 1], x[at, j : j + i + 1]
        ),
        rooms=(16, 28, 100),
    ),
    "rows gathered but for those that are ignored": Case(
        lambda x, y, at, i, j, copy: copy(
            x.at[plsc.Indices(at, ignored_value=11)], y.at[pl.ds(0, COUNT)]
        ),
        lambda x, y, at, i, j: assigned(
            y, np.s_[(at != 11).nonzero()[0], :COLUMNS], x[at[at != 11], :COLUMNS]
        ),
    ),
    "rows scattered": Case(
        lambda x, y, at, i, j, copy: copy(x.at[pl.ds(i, COUNT)], y.at[at]),
        lambda x, y, at, i, j: assigned(y, np.s_[at, :COLUMNS], x[i : i + COUNT, :COLUMNS]),
        rooms=(16, 9, 1),
        is_distinct=True,
    ),
    "rows scattered to some columns": Case(
        lambda x, y, at, i, j, copy: copy(
            x.at[pl.ds(0, COUNT), pl.ds(0, 16)], y.at[at, pl.ds(j, 16)]
        ),
        lambda x, y, at, i, j: assigned(y, np.s_[at, j : j + 16], x[:COUNT, :16]),
        rooms=(16, 1, 113),
        is_distinct=True,
    ),
    "rows of a window gathered": Case(
        lambda x, y, at, i, j, copy: copy(
            x.at[pl.ds(i, 8), pl.ds(j, 16)].at[at], y.at[pl.ds(0, COUNT), pl.ds(0, 16)]
        ),
        lambda x, y, at, i, j: assigned(y, np.s_[:COUNT, :16], x[i:, j : j + 16][at]),
        rooms=(8, 9, 113),
    ),
    "rows of a window under another shape": Case(
        lambda x, y, at, i, j, copy: copy(
            x.at[pl.ds(i, 4), pl.ds(j, 8)].reshape(2, 16), y.at[pl.ds(2, 2), pl.ds(0, 16)]
        ),
        lambda x, y, at, i, j: assigned(y, np.s_[2:4, :16], x[i : i + 4, j : j + 8].reshape(2, 16)),
        rooms=(1, 13, 121),
    ),
    "rows added": Case(
        lambda x, y, at, i, j, copy: copy(x.at[pl.ds(0, COUNT)], y.at[at], add=True),
        lambda x, y, at, i, j: np.add.at(y[:, :COLUMNS], at, x[:COUNT, :COLUMNS]),
        adds=True,
    ),
}


@functools.cache
def compiled(name, interpret, in_ref):
    """The kernel of a case: (float32[10, 100], float32[10, 100], int32[8], int32[8]) -> what is
    left of the second.
    """
    case = CASES[name]

    def body(x_ref, y_ref, at_ref, numbers_ref, out_ref, x, y, at, numbers, done):
        pltpu.sync_copy(x_ref, x)
        pltpu.sync_copy(y_ref, y)
        pltpu.sync_copy(at_ref, at)
        pltpu.sync_copy(numbers_ref, numbers)
        first = numbers[...]

        def copy(source, target, add=False):
            pltpu.async_copy(source, target, done, add=add).wait()

        case.copy(x, y, at if in_ref else at[...], first[0], first[1], copy)
        pltpu.sync_copy(y, out_ref)

    with cokernel.target(CHIP):
        return jax.jit(
            cokernel.kernel(
                body,
                jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32),
                mesh=plsc.VectorSubcoreMesh(
                    core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
                ),
                scratch_types=[
                    *[pltpu.VMEM((ROWS, COLUMNS), jnp.float32)] * 2,
                    *[pltpu.VMEM((COUNT,), jnp.int32)] * 2,
                    pltpu.SemaphoreType.DMA,
                ],
                interpret=interpret,
            )
        )


def run(name, interpret, in_ref, at, numbers):
    """What is left of the target, and what numpy leaves of it."""
    case = CASES[name]
    x, y = np.arange(2 * ROWS * COLUMNS, dtype=np.float32).reshape(2, ROWS, COLUMNS)
    whole = [np.full(ROOM, np.nan, np.float32) for _ in range(2)]
    for padded, array in zip(whole, (x, y), strict=True):
        padded[:ROWS, :COLUMNS] = array
    case.model(*whole, np.asarray(at), *numbers)
    with cokernel.target(CHIP):
        arguments = np.asarray(at, np.int32), np.resize(np.asarray(numbers, np.int32), COUNT)
        found = compiled(name, interpret, in_ref)(x, y, *arguments)
        return np.asarray(found), whole[1][:ROWS, :COLUMNS]


def arguments_of(name, draw):
    case = CASES[name]
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    at = random.permutation(case.rooms[0])[:COUNT]
    if not case.is_distinct:
        at = random.integers(0, case.rooms[0], COUNT)
    return at, [draw(st.integers(0, room - 1)) for room in case.rooms[1:]]


@pytest.mark.parametrize("in_ref", [False, True])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_copy_moves_what_is_picked_in_both_arrays(name, in_ref, data):
    found, expected = run(name, UNTRACKED, in_ref, *arguments_of(name, data.draw))
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("in_ref", [False, True])
@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_what_is_copied_from_the_padding_is_found_and_nothing_else(name, in_ref, data):
    at, numbers = arguments_of(name, data.draw)
    _, expected = run(name, UNTRACKED, in_ref, at, numbers)
    if np.isnan(expected).any():
        with pytest.raises(FAILURES, match="UninitialisedRead"):
            run(name, PADDED, in_ref, at, numbers)
    else:
        found, _ = run(name, PADDED, in_ref, at, numbers)
        np.testing.assert_array_equal(found, expected)
        assert cokernel.last_report().findings == ()


@pytest.mark.parametrize("in_ref", [False, True])
@pytest.mark.parametrize(
    ("name", "at", "numbers", "indices"),
    [
        ("rows gathered", [0, 12, 3, 15, 1, 1, 11, 2], (0, 0), "[11:13, 0:100] and [15, 0:100]"),
        ("parts of rows gathered into a window", [0, 10] + [1] * 6, (0, 0), "[10, 0:16]"),
        ("parts of rows gathered into a window", [3] * 8, (0, 92), "[3, 100:108]"),
        (
            "rows of a window under another shape",
            [0] * 8,
            (8, 96),
            "[8:10, 100:104] and [10:12, 96:104]",
        ),
        ("rows scattered", [*range(8)], (3, 0), "[10, 0:100]"),
    ],
)
def test_a_report_names_just_the_elements_of_the_padding(name, at, numbers, indices, in_ref):
    with pytest.raises(FAILURES, match=r"UninitialisedRead.*'body'"):
        run(name, PADDED, in_ref, at, numbers)
    [finding] = cokernel.last_report().findings
    assert finding.name == "x"
    assert finding.indices == indices
    assert finding.parties[0].is_dma
    run(name, PADDED, in_ref, np.arange(8), (0, 0))
    assert cokernel.last_report().findings == ()


@pytest.mark.parametrize("in_ref", [False, True])
@pytest.mark.parametrize("at", [16, -1])
@pytest.mark.parametrize("name", ["rows gathered", "rows scattered", "rows added"])
def test_an_index_beyond_the_tiles_is_out_of_bounds(name, at, in_ref):
    indices = np.arange(COUNT)
    indices[5] = 15
    run(name, UNTRACKED, in_ref, indices, (0, 0))
    indices[5] = 0
    given = np.where(np.arange(COUNT) == 5, at, indices)
    x, y = np.zeros((2, ROWS, COLUMNS), np.float32)
    zeros = np.zeros(COUNT, np.int32)
    with cokernel.target(CHIP), pytest.raises(FAILURES, match=rf"OutOfBounds.* {at} .*0 to 15\b"):
        compiled(name, UNTRACKED, in_ref)(x, y, given.astype(np.int32), zeros)


def test_rows_that_are_scattered_to_one_place_race_also_where_others_are_lost():
    at = [0, 12, 3, 13, 4, 5, 3, 15]
    with pytest.raises(FAILURES, match="its indices pick that place more than once"):
        run("rows scattered", PADDED, True, at, (0, 0))
    [finding] = cokernel.last_report().findings
    assert finding.indices == "[3, 0:100]"


def test_indices_from_the_padding_of_their_own_ref_are_found():
    """A window of ten indices of which the last four are read, then the last two of them and two
    elements of the padding.
    """

    def body(x_ref, at_ref, start_ref, out_ref, x, at, start, done):
        pltpu.sync_copy(x_ref, x)
        pltpu.sync_copy(at_ref, at)
        pltpu.sync_copy(start_ref, start)
        first = start[...][0]
        pltpu.async_copy(x.at[at.at[pl.ds(first, 4)]], out_ref, done).wait()

    with cokernel.target(CHIP):
        kernel = cokernel.kernel(
            body,
            jax.ShapeDtypeStruct((4, COLUMNS), jnp.float32),
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
            ),
            scratch_types=[
                pltpu.VMEM((ROWS, COLUMNS), jnp.float32),
                pltpu.VMEM((10,), jnp.int32),
                pltpu.VMEM((COUNT,), jnp.int32),
                pltpu.SemaphoreType.DMA,
            ],
            interpret=PADDED.replace(fill="zeros"),
        )
        x = np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)
        at = np.arange(10, dtype=np.int32)[::-1]
        found = kernel(x, at, np.full(COUNT, 6, np.int32))
        np.testing.assert_array_equal(found, x[at[6:]])
        with pytest.raises(FAILURES, match="UninitialisedRead"):
            kernel(x, at, np.full(COUNT, 8, np.int32))
    finding, *rest = cokernel.last_report().findings
    assert not rest
    assert finding.name == "at"
    assert finding.indices == "[10:12]"
    assert "is used as an index" in finding.sentence
