"""Elements that index arrays, masks and lanes pick may lie in the padding of tiles, under
`padded_tiles=True`: what is read there is undefined, and what is written there is lost.
"""

import functools

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
from cokernel import _jax
from tests.compiler.spot_cases import CASES, LANES, padded

PL = _jax.pallas_primitives
CHIP = "v6e"
FAILURES = (jax.errors.JaxRuntimeError, ValueError)
PADDED = cokernel.Checked(padded_tiles=True, fill="nan", chip_limits="off")
# Only what is read, and not whether it may be.
UNTRACKED = PADDED.replace(uninitialised=False)


def results_of(case):
    """The shape of what a case reads."""
    shape = case.indices
    values = np.zeros(shape, np.float32)
    found = case.model(
        np.zeros(padded(case.shape), np.float32), 0, 0, values.astype(int), values == 0, values
    )
    return np.shape(found) if found is not None and np.size(found) else None


def mesh_of(case):
    if not case.is_vector:
        return pltpu.TensorCoreMesh(axis_name="core", num_cores=1)
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
    )


@functools.cache
def compiled(name, interpret):
    """The kernel of a case: (float32[*shape], int32[2], int32[*indices], int32[*indices],
    float32[*indices]) -> what was read, and what is left of the first.
    """
    case = CASES[name]
    read = results_of(case)

    def body(*refs):
        inputs, (read_ref, left_ref) = refs[:5], refs[5:7]
        own = refs[7:12]
        result = refs[12]
        for outside, inside in zip(inputs, own, strict=True):
            pltpu.sync_copy(outside, inside)
        block, numbers, at, keep, values = own
        if case.is_vector:
            first = numbers[...]
            i, j = first[0], first[1]
        else:
            i, j = numbers[0], numbers[1]
        found = case.access(block, i, j, at[...], keep[...] != 0, values[...])
        if read is not None:
            result[...] = found
        if read is None:
            pltpu.sync_copy(values, read_ref)
        else:
            pltpu.sync_copy(result, read_ref)
        pltpu.sync_copy(block, left_ref)

    shape = read or case.indices
    numbers = pltpu.VMEM((LANES,), jnp.int32) if case.is_vector else pltpu.SMEM((2,), jnp.int32)
    with cokernel.target(CHIP):
        return jax.jit(
            cokernel.kernel(
                body,
                out_type=[
                    jax.ShapeDtypeStruct(shape, jnp.float32),
                    jax.ShapeDtypeStruct(case.shape, jnp.float32),
                ],
                mesh=mesh_of(case),
                scratch_types=[
                    pltpu.VMEM(case.shape, jnp.float32),
                    numbers,
                    pltpu.VMEM(case.indices, jnp.int32),
                    pltpu.VMEM(case.indices, jnp.int32),
                    pltpu.VMEM(case.indices, jnp.float32),
                    pltpu.VMEM(shape, jnp.float32),
                ],
                interpret=interpret,
            )
        )


def run(name, interpret, numbers, at, keep, values):
    case = CASES[name]
    numbers = np.resize(np.asarray(numbers, np.int32), (LANES if case.is_vector else 2,))
    x = np.arange(np.prod(case.shape), dtype=np.float32).reshape(case.shape) + 1
    with cokernel.target(CHIP):
        arguments = (x, numbers, at.astype(np.int32), keep.astype(np.int32), values)
        found, left = map(np.asarray, compiled(name, interpret)(*arguments))
    whole = np.full(padded(case.shape), -1, np.int32).view(np.float32)
    inside = tuple(slice(0, extent) for extent in case.shape)
    whole[inside] = x
    i, j = map(int, numbers[:2])
    expected = case.model(whole, i, j, at, keep, values)
    return (found, left), (expected, whole[inside])


def arguments_of(case, draw):
    """Numbers, indices, a mask and values for a case."""
    numbers = [draw(st.integers(0, room - 1)) for room in case.room[1:]]
    random = np.random.default_rng(draw(st.integers(0, 1000)))
    at = random.integers(0, case.room[0], case.indices)
    keep = random.random(case.indices) < 0.6
    return numbers, at, keep, random.integers(1, 99, case.indices).astype(np.float32)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_what_is_picked_is_that_of_the_padded_array(name, data):
    arguments = arguments_of(CASES[name], data.draw)
    (found, left), (expected, whole) = run(name, UNTRACKED, *arguments)
    if results_of(CASES[name]) is not None:
        np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(left, whole)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_value_from_the_padding_is_found_and_no_other(name, data):
    arguments = arguments_of(CASES[name], data.draw)
    # What numpy reads from the padding is not a number.
    _, (expected, whole) = run(name, UNTRACKED, *arguments)
    if expected is not None and np.isnan(np.asarray(expected, np.float32)).any():
        with pytest.raises(FAILURES, match="UninitialisedRead"):
            run(name, PADDED, *arguments)
    else:
        (_, left), _ = run(name, PADDED, *arguments)
        np.testing.assert_array_equal(left, whole)
        assert cokernel.last_report().findings == ()


@pytest.mark.parametrize(
    ("dtype", "rows", "room"),
    [
        (jnp.float32, 10, 16),
        (jnp.int32, 3, 4),
        (jnp.bfloat16, 10, 16),
        (jnp.int8, 33, 40),
        (jnp.bool_, 33, 40),
    ],
)
@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 1000))
def test_every_dtype_has_the_room_of_its_tiles(dtype, rows, room, seed):
    with cokernel.target(CHIP):
        kernel = of_dtype(dtype, rows)
        random = np.random.default_rng(seed)
        at, keep = random.integers(0, room, LANES), random.random(LANES) < 0.5
        x = jnp.asarray(random.integers(0, 2, (rows, 128))).astype(dtype)
        fetched, swapped, left = kernel(x, at.astype(np.int32), keep.astype(np.int32))
        whole = np.frombuffer(b"\xff" * room * 128 * x.itemsize, x.dtype).reshape(room, 128).copy()
        whole[:rows] = x
        expected = whole[at]
        np.testing.assert_array_equal(*as_numbers(fetched, expected))
        for row, is_taken in zip(at, keep, strict=True):
            if is_taken:
                whole[row] = x[0]
        taken = np.where(keep[:, None], expected, x[0])
        np.testing.assert_array_equal(*as_numbers(swapped, taken))
        np.testing.assert_array_equal(*as_numbers(left, whole[:rows]))
        with pytest.raises(FAILURES, match=f"OutOfBounds.*0 to {room - 1}\\b"):
            kernel(x, np.full(LANES, room, np.int32), keep.astype(np.int32))


def as_numbers(*arrays):
    return [np.asarray(array).astype(np.float32) for array in arrays]


@functools.cache
def of_dtype(dtype, rows):
    """A kernel that copies rows, and swaps some of them for the first row: (dtype[rows, 128],
    int32[8], int32[8]) -> the copies, what was swapped, what is left.
    """

    def body(x_ref, at_ref, keep_ref, fetched_ref, swapped_ref, left_ref, *scratch):
        x, at, keep, fetched, swapped, done = scratch
        pltpu.sync_copy(x_ref, x)
        pltpu.sync_copy(at_ref, at)
        pltpu.sync_copy(keep_ref, keep)
        pltpu.async_copy(x.at[at], fetched, done).wait()
        first = jnp.broadcast_to(x[0], (LANES, 128))
        taken = jnp.broadcast_to((keep[...] != 0)[:, None], (LANES, 128))
        swapped[...] = PL.swap(x, (at[...],), first, mask=taken)
        pltpu.sync_copy(fetched, fetched_ref)
        pltpu.sync_copy(swapped, swapped_ref)
        pltpu.sync_copy(x, left_ref)

    some = (LANES, 128)
    return jax.jit(
        cokernel.kernel(
            body,
            [jax.ShapeDtypeStruct(shape, dtype) for shape in (some, some, (rows, 128))],
            mesh=mesh_of(CASES["rows by an array"]),
            scratch_types=[
                pltpu.VMEM((rows, 128), dtype),
                *[pltpu.VMEM((LANES,), jnp.int32)] * 2,
                *[pltpu.VMEM(some, dtype)] * 2,
                pltpu.SemaphoreType.DMA,
            ],
            interpret=UNTRACKED,
        )
    )


def one_by_one(name, at, *, keep=None, numbers=(0, 0), interpret=PADDED):
    """What a case reads with these indices, of the numbers 1, 2, 3 ..."""
    at = np.asarray(at)
    keep = np.ones(at.shape, bool) if keep is None else np.asarray(keep)
    (found, _), _ = run(name, interpret, numbers, at, keep, np.ones(at.shape, np.float32))
    return found


@pytest.mark.parametrize(
    ("name", "at", "repaired", "indices"),
    [
        ("gather", [3, 105, 99, 104, 0, 127, 7, 104], [3] * 8, "[104:106] and [127]"),
        ("gather without a mask", [3, 100, 99, 4, 0, 9, 7, 1], [99] * 8, "[100]"),
        (
            "gather of rows and columns",
            [10, 11, 0, 0, 0, 0, 0, 0],
            [9] * 8,
            "[10, 10] and [11, 11]",
        ),
        ("gather of rows and columns", [104, 0, 0, 0, 0, 0, 0, 0], [9] * 8, "[8, 104]"),
        ("rows by an array", [1, 12, 3, 10, 11, 0, 0, 0], [9] * 8, "[10:13, 0:100]"),
        ("rows by an array, of some columns", [1, 2, 3, 14, 0, 0, 0, 0], [9] * 8, "[14, 0:16]"),
    ],
)
def test_a_report_names_just_the_elements_of_the_padding(name, at, repaired, indices):
    one_by_one(name, repaired)
    assert cokernel.last_report().findings == ()
    with pytest.raises(FAILURES, match=r"UninitialisedRead.*'body'"):
        one_by_one(name, at)
    [finding] = cokernel.last_report().findings
    assert finding.indices == indices
    assert finding.parties[0].action == "reads"
    assert "which is the padding of its tiles and nobody has written" in finding.sentence
    assert "beyond the end" in finding.advice[0]


@pytest.mark.parametrize(
    "form", ["gather", "sum by a scatter", "expanded load", "masked load", "an array"]
)
def test_what_nobody_has_written_is_told_with_the_padding(form):
    """Elements 16 to 23 of twenty, of which nobody has written the last four."""

    def body(start_ref, out_ref, block, where, result):
        pltpu.sync_copy(start_ref, where)
        at = where[...]
        block[pl.ds(0, 8)] = jnp.zeros(LANES, jnp.float32)
        block[pl.ds(8, 8)] = jnp.zeros(LANES, jnp.float32)
        if form == "gather":
            found = plsc.load_gather(block, [at])
        elif form == "expanded load":
            found = plsc.load_expanded(block.at[pl.ds(at[0], LANES)], mask=at >= 0)
        elif form == "masked load":
            found = PL.load(block, (pl.ds(at[0], LANES),), mask=at >= 0)
        elif form == "an array":
            found = block[at]
        else:
            plsc.addupdate_scatter(block, [at], jnp.ones(LANES, jnp.float32))
            found = block[pl.ds(12, LANES)]
        result[...] = found
        pltpu.sync_copy(result, out_ref)

    with cokernel.target(CHIP):
        kernel = cokernel.kernel(
            body,
            jax.ShapeDtypeStruct((LANES,), jnp.float32),
            mesh=mesh_of(CASES["gather"]),
            scratch_types=[
                pltpu.VMEM((20,), jnp.float32),
                pltpu.VMEM((LANES,), jnp.int32),
                pltpu.VMEM((LANES,), jnp.float32),
            ],
            interpret=PADDED,
        )
        at = np.arange(LANES, dtype=np.int32)
        if form != "sum by a scatter":
            kernel(at)
            assert cokernel.last_report().findings == ()
        with pytest.raises(FAILURES, match="UninitialisedRead"):
            kernel(at + 16)
    [finding] = cokernel.last_report().findings
    assert finding.name == "block"
    # What a sum leaves in the padding is lost.
    is_sum = form == "sum by a scatter"
    assert finding.indices == ("[16:20]" if is_sum else "[16:20] and [20:24]")


def test_a_mask_that_leaves_the_padding_out_is_clean():
    at = [3, 105, 99, 104, 0, 127, 7, 104]
    found = one_by_one("gather", at, keep=np.asarray(at) < 100)
    np.testing.assert_array_equal(found, [4, 0, 100, 0, 1, 0, 8, 0])
    assert cokernel.last_report().findings == ()


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("gather", 128),
        ("scatter", 128),
        ("sum by a scatter", -1),
        ("rows by an array", 16),
        ("store to rows by an array", 17),
        ("sum into elements by an array", 128),
        ("masked swap by an array", 1000),
    ],
)
def test_an_index_beyond_the_tiles_is_out_of_bounds(name, at):
    room = CASES[name].room[0]
    inside = np.full(LANES, room - 1)
    one_by_one(name, inside, interpret=UNTRACKED)
    outside = np.where(np.arange(LANES) == 5, at, 0)
    with pytest.raises(FAILURES, match=rf"OutOfBounds.* index {at} .*0 to {room - 1}\b"):
        one_by_one(name, outside, interpret=UNTRACKED)


@pytest.mark.parametrize(
    ("name", "numbers", "room"),
    [
        ("masked load", (13, 0), 16),
        ("masked store", (0, 121), 128),
        ("masked swap", (-1, 0), 16),
        ("expanded load", (121, 0), 128),
        ("compressed store", (121, 0), 128),
        ("sum into a window", (121, 0), 128),
    ],
)
def test_a_masked_window_beyond_the_tiles_is_out_of_bounds(name, numbers, room):
    at = np.zeros(CASES[name].indices, int)
    allowed = np.clip(numbers, 0, np.asarray(CASES[name].room[1:]) - 1)
    one_by_one(name, at, numbers=allowed, interpret=UNTRACKED)
    with pytest.raises(FAILURES, match=rf"OutOfBounds.*\b({room}|0 to {room - 1})\b"):
        one_by_one(name, at, numbers=numbers, interpret=UNTRACKED)
