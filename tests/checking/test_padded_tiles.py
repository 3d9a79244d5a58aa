"""Windows that reach into the padding of tiles, under `padded_tiles=True`."""

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

CHIP = "v6e"
FAILURES = (jax.errors.JaxRuntimeError, ValueError)
PADDED = cokernel.Checked(padded_tiles=True, fill="nan", chip_limits="off")
# Only what is read, and not whether it may be.
UNTRACKED = PADDED.replace(uninitialised=False)
# Ten rows lie in two tiles of 8 x 128, of float32.
ROWS, WINDOW = 10, 8
# A register of the chip's vector subcores.
LANES = 8


def tensor_core(make, body, *out_types, scratch, interpret):
    return make(
        body,
        out_type=list(out_types),
        mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=1),
        scratch_types=scratch,
        interpret=interpret,
    )


def all_accesses(make, dtype, interpret):
    """A kernel with a load, a store, a swap, a row, and copies from and to windows that begin at a
    row that its second argument names: (dtype[10, 128], int32[1]) -> what was read, and what is
    left of dtype[10, 128].
    """

    def body(x_ref, start_ref, read_ref, left_ref, block, window, start_in_smem):
        pltpu.sync_copy(start_ref, start_in_smem)
        pltpu.sync_copy(x_ref, block)
        start = start_in_smem[0]
        part = pl.ds(start, WINDOW)

        def tell(number, value):
            window[...] = value
            pltpu.sync_copy(window, read_ref.at[number])

        tell(0, block[part])
        block[part] = jnp.full((WINDOW, 128), 2, dtype)
        tell(1, jax.ref.swap(block, part, jnp.full((WINDOW, 128), 6, dtype)))
        tell(2, jnp.broadcast_to(block[start + WINDOW - 1], (WINDOW, 128)))
        block[start + WINDOW - 1] = jnp.full((128,), 3, dtype)
        window[...] = jnp.full((WINDOW, 128), 4, dtype)
        pltpu.sync_copy(x_ref.at[part], window)
        pltpu.sync_copy(window, read_ref.at[3])
        window[...] = jnp.full((WINDOW, 128), 5, dtype)
        pltpu.sync_copy(window.at[pl.ds(0, 4)], block.at[pl.ds(start + 4, 4)])
        pltpu.sync_copy(block, left_ref)

    return tensor_core(
        make,
        body,
        jax.ShapeDtypeStruct((4, WINDOW, 128), dtype),
        jax.ShapeDtypeStruct((ROWS, 128), dtype),
        scratch=[
            pltpu.VMEM((ROWS, 128), dtype),
            pltpu.VMEM((WINDOW, 128), dtype),
            pltpu.SMEM((1,), jnp.int32),
        ],
        interpret=interpret,
    )


@functools.cache
def compiled(dtype, mine):
    with cokernel.target(CHIP):
        if mine:
            return jax.jit(all_accesses(cokernel.kernel, dtype, UNTRACKED))
        params = pltpu.InterpretParams(buffer_bounds="padded")
        return jax.jit(all_accesses(pl.kernel, dtype, params))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("start", [0, 2, 3, 7, 8])
def test_accesses_equal_those_of_jax_interpreter(dtype, start):
    with cokernel.target(CHIP):
        x = jnp.arange(ROWS * 128).reshape(ROWS, 128).astype(dtype) % 200
        results = [compiled(dtype, mine)(x, jnp.array([start], jnp.int32)) for mine in (1, 0)]
    for found, expected in zip(*results, strict=True):
        found, expected = (np.asarray(array, np.float32) for array in (found, expected))
        np.testing.assert_array_equal(found, expected)
    assert np.isnan(np.asarray(results[0][0], np.float32)).any() == (start > ROWS - WINDOW)


def test_a_sum_leaves_out_what_lies_in_the_padding():
    def body(x_ref, start_ref, out_ref, block, start):
        pltpu.sync_copy(start_ref, start)
        pltpu.sync_copy(x_ref, block)
        jax.ref.addupdate(block, pl.ds(start[0], WINDOW), jnp.ones((WINDOW, 128)))
        pltpu.sync_copy(block, out_ref)

    with cokernel.target(CHIP):
        kernel = tensor_core(
            cokernel.kernel,
            body,
            jax.ShapeDtypeStruct((ROWS, 128), jnp.float32),
            scratch=[pltpu.VMEM((ROWS, 128), jnp.float32), pltpu.SMEM((1,), jnp.int32)],
            interpret=PADDED,
        )
        x = np.arange(ROWS * 128, dtype=np.float32).reshape(ROWS, 128)
        for start in (0, 1, 5, 8):
            expected = x.copy()
            expected[start : start + WINDOW] += 1
            np.testing.assert_array_equal(kernel(x, np.array([start], np.int32))[0], expected)


def copy_between(size, rows, columns):
    """Copies a window of an array to one of another, both beginning where the third argument says,
    of a size that it says as well: (float32[rows, columns], the same, int32[6]) -> the second.
    """

    def body(x_ref, y_ref, where_ref, out_ref, source, target, where):
        pltpu.sync_copy(where_ref, where)
        pltpu.sync_copy(x_ref, source)
        pltpu.sync_copy(y_ref, target)
        extents = [where[4], where[5]] if size is None else size
        pltpu.sync_copy(
            source.at[pl.ds(where[0], extents[0]), pl.ds(where[1], extents[1])],
            target.at[pl.ds(where[2], extents[0]), pl.ds(where[3], extents[1])],
        )
        pltpu.sync_copy(target, out_ref)

    return tensor_core(
        cokernel.kernel,
        body,
        jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        scratch=[
            *[pltpu.VMEM((rows, columns), jnp.float32)] * 2,
            pltpu.SMEM((6,), jnp.int32),
        ],
        interpret=UNTRACKED,
    )


@functools.cache
def copies_between(size, rows, columns):
    with cokernel.target(CHIP):
        return jax.jit(copy_between(size, rows, columns))


@pytest.mark.parametrize("is_dynamic", [False, True])
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_copy_moves_what_lies_in_both_arrays_and_makes_up_the_rest(is_dynamic, data):
    rows, columns, room = 10, 100, (16, 128)
    size = (5, 40)
    if is_dynamic:
        size = tuple(data.draw(st.integers(1, extent)) for extent in (8, 64))
    starts = [
        data.draw(st.integers(0, limit - extent))
        for limit, extent in zip(room * 2, size * 2, strict=True)
    ]
    x, y = np.arange(2 * rows * columns, dtype=np.float32).reshape(2, rows, columns)
    whole = [np.full(room, np.nan, np.float32) for _ in range(2)]
    for padded, array in zip(whole, (x, y), strict=True):
        padded[:rows, :columns] = array
    source, target = (
        array[row : row + size[0], column : column + size[1]]
        for array, row, column in ((whole[0], *starts[:2]), (whole[1], *starts[2:]))
    )
    target[...] = source
    kernel = copies_between(None if is_dynamic else size, rows, columns)
    with cokernel.target(CHIP):
        [found] = kernel(x, y, np.array([*starts, *size], np.int32))
    np.testing.assert_array_equal(found, whole[1][:rows, :columns])


def one_window(dtype, rows, *, start=0, interpret=PADDED, size=WINDOW, keep=WINDOW):
    """The first rows of a window that begins where it is told."""

    def body(x_ref, start_ref, out_ref, block, window, start_in_smem):
        pltpu.sync_copy(start_ref, start_in_smem)
        pltpu.sync_copy(x_ref, block)
        window[...] = block[pl.ds(start_in_smem[0], size)]
        pltpu.sync_copy(window.at[pl.ds(0, keep)], out_ref)

    with cokernel.target(CHIP):
        kernel = tensor_core(
            cokernel.kernel,
            body,
            jax.ShapeDtypeStruct((keep, 128), dtype),
            scratch=[
                pltpu.VMEM((rows, 128), dtype),
                pltpu.VMEM((size, 128), dtype),
                pltpu.SMEM((1,), jnp.int32),
            ],
            interpret=interpret,
        )
        x = jnp.arange(rows * 128, dtype=dtype).reshape(rows, 128)
        return x, kernel(x, np.array([start], np.int32))[0]


def test_what_comes_from_the_padding_is_undefined_and_the_rest_is_not():
    x, found = one_window(jnp.float32, ROWS, start=6, keep=4)
    np.testing.assert_array_equal(found, x[6:])
    with pytest.raises(FAILURES, match=r"UninitialisedRead.*'body' on core=0"):
        one_window(jnp.float32, ROWS, start=6, keep=5)
    [finding] = cokernel.last_report().findings
    assert finding.name == "block"
    assert finding.parties[0].action == "reads"
    assert "[10:14, 0:128] of 'block', which is the padding of its tiles" in finding.sentence
    assert finding.indices == "[10:14, 0:128]"
    assert finding.allocation.code.startswith("return make(")
    assert "smaller, or mask it" in finding.advice[0]


def finding_in_the_padding(body, scratch):
    """What is found when a body hands on four rows of which the last is padding; nothing is when
    they end with the last row."""
    with cokernel.target(CHIP):
        kernel = tensor_core(
            cokernel.kernel,
            body,
            jax.ShapeDtypeStruct((4, 128), jnp.float32),
            scratch=scratch,
            interpret=PADDED,
        )
        x = jnp.arange(ROWS * 128, dtype=jnp.float32).reshape(ROWS, 128)
        np.testing.assert_array_equal(kernel(x, np.array([6], np.int32))[0], x[6:])
        with pytest.raises(FAILURES, match="UninitialisedRead"):
            kernel(x, np.array([7], np.int32))
    [finding] = cokernel.last_report().findings
    return finding


def test_the_padding_of_an_operand_is_undefined_too():
    def body(x_ref, start_ref, out_ref):
        out_ref[...] = x_ref[pl.ds(start_ref[0], 4)]

    finding = finding_in_the_padding(body, scratch=[])
    assert finding.name == "x_ref"
    assert finding.indices == "[10, 0:128]"


def test_a_copy_from_the_padding_is_an_uninitialised_read_where_it_matters():
    def body(x_ref, start_ref, out_ref, window, start):
        pltpu.sync_copy(start_ref, start)
        pltpu.sync_copy(x_ref.at[pl.ds(start[0], WINDOW)], window)
        pltpu.sync_copy(window.at[pl.ds(0, 4)], out_ref)

    scratch = [pltpu.VMEM((WINDOW, 128), jnp.float32), pltpu.SMEM((1,), jnp.int32)]
    finding = finding_in_the_padding(body, scratch)
    assert finding.name == "x_ref"
    assert finding.parties[0].is_dma
    assert finding.indices == "[10:15, 0:128]"


def test_the_indices_are_those_of_the_ref_whatever_the_view_of_it():
    """A window of a window of some columns, transposed: columns 96 to 103 of 100, rows 8 to 11 of
    10."""

    def body(x_ref, start_ref, out_ref, block, start):
        pltpu.sync_copy(start_ref, start)
        pltpu.sync_copy(x_ref, block)
        part = block.at[1, pl.ds(start[1], 8), pl.ds(start[0] + 80, 16)].at[pl.ds(start[1], 4)]
        out_ref[...] = part.T[pl.ds(8, 8), :]

    with cokernel.target(CHIP):
        kernel = tensor_core(
            cokernel.kernel,
            body,
            jax.ShapeDtypeStruct((8, 4), jnp.float32),
            scratch=[pltpu.VMEM((2, 10, 100), jnp.float32), pltpu.SMEM((2,), jnp.int32)],
            interpret=PADDED,
        )
        with pytest.raises(FAILURES, match="UninitialisedRead"):
            kernel(jnp.zeros((2, 10, 100)), np.array([8, 4], np.int32))
    [finding] = cokernel.last_report().findings
    assert finding.indices == "[1, 10:12, 96:104] and [1, 8:10, 100:104]"


@pytest.mark.parametrize(
    ("dtype", "rows", "room"),
    [(jnp.float32, 10, 16), (jnp.bfloat16, 10, 16), (jnp.int8, 33, 40), (jnp.float32, 16, 16)],
)
def test_beyond_the_padding_is_out_of_bounds(dtype, rows, room):
    one_window(dtype, rows, start=room - WINDOW, interpret=UNTRACKED)
    with pytest.raises(FAILURES, match="OutOfBounds"):
        one_window(dtype, rows, start=room - WINDOW + 1, interpret=UNTRACKED)


def test_scalar_memory_has_no_padding():
    def body(start_ref, out_ref, numbers):
        pltpu.sync_copy(start_ref, numbers)
        numbers[numbers[0]] = jnp.int32(7)
        pltpu.sync_copy(numbers, out_ref)

    with cokernel.target(CHIP):
        kernel = tensor_core(
            cokernel.kernel,
            body,
            jax.ShapeDtypeStruct((2,), jnp.int32),
            scratch=[pltpu.SMEM((2,), jnp.int32)],
            interpret=PADDED,
        )
        np.testing.assert_array_equal(kernel(np.array([1, 5], np.int32))[0], [1, 7])
        with pytest.raises(FAILURES, match="OutOfBounds"):
            kernel(np.array([2, 5], np.int32))


def lanes(interpret, access):
    """A vector subcore that does something with eight of its hundred numbers."""

    def body(x_ref, start_ref, out_ref, numbers, where, result):
        pltpu.sync_copy(x_ref, numbers)
        pltpu.sync_copy(start_ref, where)
        start = where[...][0]
        access(numbers, start, result)
        pltpu.sync_copy(result, out_ref)

    with cokernel.target(CHIP):
        return cokernel.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((LANES,), jnp.float32),
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
            ),
            scratch_types=[
                pltpu.VMEM((100,), jnp.float32),
                pltpu.VMEM((LANES,), jnp.int32),
                pltpu.VMEM((LANES,), jnp.float32),
            ],
            interpret=interpret,
        )


def test_registers_are_read_from_a_vector_rounded_up_to_the_tile():
    def access(numbers, start, result):
        result[...] = numbers[pl.ds(start, LANES)]

    kernel = lanes(UNTRACKED, access)
    x = np.arange(100, dtype=np.float32)
    for start in (0, 92, 96, 120):
        expected = np.full(LANES, np.nan, np.float32)
        expected[: max(0, 100 - start)] = x[start : start + LANES]
        found = kernel(x, np.full(LANES, start, np.int32))
        np.testing.assert_array_equal(found, expected)
    with pytest.raises(FAILURES, match="OutOfBounds"):
        kernel(x, np.full(LANES, 121, np.int32))


@pytest.mark.parametrize("is_of_a_window", [False, True])
def test_a_subcores_own_part_of_shared_memory_has_the_padding_of_the_whole(is_of_a_window):
    subcores = 16

    def body(start_ref, out_ref, shared, row, where):
        me = jax.lax.axis_index("subcore")
        pltpu.sync_copy(start_ref, where)
        start = where[...][0]
        row[...] = jnp.full((LANES,), me)
        part = shared.at[pl.ds(start, 4)] if is_of_a_window else shared
        mine = plsc.slice_subcore_vmem_from_shared(part)
        for number in range(4):
            pltpu.sync_copy(row, mine.at[number if is_of_a_window else start + number])
        plsc.subcore_barrier()

        @pl.when(me == 0)
        def _publish():
            pltpu.sync_copy(shared, out_ref)

    with cokernel.target(CHIP):
        kernel = cokernel.kernel(
            body,
            jax.ShapeDtypeStruct((ROWS, LANES * subcores), jnp.int32),
            mesh=plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1
            ),
            scratch_types=[
                pltpu.VMEM_SHARED((ROWS, LANES * subcores), jnp.int32),
                *[pltpu.VMEM((LANES,), jnp.int32)] * 2,
            ],
            interpret=UNTRACKED,
        )
        for start in (2, 8, 12):
            found = np.asarray(kernel(np.full(LANES, start, np.int32)))[start : start + 4]
            expected = np.tile(np.repeat(np.arange(subcores), LANES), (len(found), 1))
            np.testing.assert_array_equal(found, expected)
        with pytest.raises(FAILURES, match="OutOfBounds"):
            kernel(np.full(LANES, 13, np.int32))


def joined(halves):
    """Rows of int16 as half as many of int32, of which the first has the lower bits."""
    rows, columns = halves.shape
    pairs = halves.reshape(rows // 2, 2, columns).transpose(0, 2, 1)
    return np.ascontiguousarray(pairs).view(np.int32)[..., 0]


def apart(numbers):
    rows, columns = numbers.shape
    halves = np.ascontiguousarray(numbers).view(np.int16).reshape(rows, columns, 2)
    return halves.transpose(0, 2, 1).reshape(2 * rows, columns)


WIDER = ("load", "load some", "store", "sum", "copy from", "copy to", "narrow copy to")


@functools.cache
def under_a_wider_dtype(how, interpret):
    """A kernel that does something with a window of eight rows under another dtype: (int16[11,
    100], int32[4, 8], int32[2]) -> what it read, and what is left of the first.
    """

    def body(x_ref, values_ref, start_ref, out_ref, left_ref, block, some, start, narrow):
        pltpu.sync_copy(start_ref, start)
        pltpu.sync_copy(x_ref, block)
        pltpu.sync_copy(values_ref, some)
        narrow_window = block.at[pl.ds(start[0], 8), pl.ds(start[1], 8)]
        window = narrow_window.bitcast(jnp.int32)
        if how == "load":
            some[...] = window[...]
        elif how == "load some":
            some[pl.ds(1, 2)] = window[pl.ds(start[0] // 4 + 1, 2)]
        elif how == "store":
            window[...] = some[...]
        elif how == "sum":
            jax.ref.addupdate(window, ..., some[...])
        elif how == "copy from":
            pltpu.sync_copy(window, some)
        elif how == "copy to":
            pltpu.sync_copy(some, window)
        else:
            # Here the other side is what has its parts under each other.
            narrow[...] = jnp.zeros((8, 8), jnp.int16)
            narrow.bitcast(jnp.int32)[...] = some[...]
            pltpu.sync_copy(narrow.bitcast(jnp.int32), window)
        pltpu.sync_copy(some, out_ref)
        pltpu.sync_copy(block, left_ref)

    return jax.jit(
        tensor_core(
            cokernel.kernel,
            body,
            jax.ShapeDtypeStruct((4, 8), jnp.int32),
            jax.ShapeDtypeStruct((11, 100), jnp.int16),
            scratch=[
                pltpu.VMEM((11, 100), jnp.int16),
                pltpu.VMEM((4, 8), jnp.int32),
                pltpu.SMEM((2,), jnp.int32),
                pltpu.VMEM((8, 8), jnp.int16),
            ],
            interpret=interpret,
        )
    )


@pytest.mark.parametrize("how", WIDER)
@settings(max_examples=15, deadline=None)
@given(row=st.integers(0, 7), column=st.integers(0, 120), seed=st.integers(0, 99))
def test_of_a_wider_dtype_a_part_may_lie_in_the_padding(how, row, column, seed):
    random = np.random.default_rng(seed)
    x = random.integers(0, 1 << 15, (11, 100)).astype(np.int16)
    values = random.integers(0, 1 << 31, (4, 8)).astype(np.int32)
    whole = np.full((16, 128), -1, np.int16)
    whole[:11, :100] = x
    is_padding = np.ones((16, 128), np.int16)
    is_padding[:11, :100] = 0
    window = np.s_[row : row + 8, column : column + 8]
    expected, is_bad = values, False
    if how in ("load", "copy from"):
        expected, is_bad = joined(whole[window]), is_padding[window].any()
    elif how == "load some":
        first = row // 4 + 1
        part = np.s_[row + 2 * first : row + 2 * first + 4, column : column + 8]
        expected, is_bad = values.copy(), is_padding[part].any()
        expected[1:3] = joined(whole[part])
    elif how == "sum":
        # What carries goes to the upper half, of which the padding has the last ones.
        with np.errstate(over="ignore"):
            whole[window] = apart(joined(whole[window]) + values)
    else:
        whole[window] = apart(values)
    arguments = x, values, np.array([row, column], np.int32)
    with cokernel.target(CHIP):
        found, left = under_a_wider_dtype(how, UNTRACKED)(*arguments)
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(left, whole[:11, :100])
        if is_bad:
            with pytest.raises(FAILURES, match="UninitialisedRead"):
                under_a_wider_dtype(how, PADDED)(*arguments)
            assert {item.name for item in cokernel.last_report().findings} == {"block"}
        else:
            under_a_wider_dtype(how, PADDED)(*arguments)
            assert cokernel.last_report().findings == ()


@pytest.mark.parametrize("how", ["load", "copy from"])
def test_a_report_of_a_wider_dtype_names_the_parts_in_the_padding(how):
    x, values = np.zeros((11, 100), np.int16), np.zeros((4, 8), np.int32)
    with cokernel.target(CHIP), pytest.raises(FAILURES, match="UninitialisedRead"):
        under_a_wider_dtype(how, PADDED)(x, values, np.array([4, 8], np.int32))
    [finding] = cokernel.last_report().findings
    assert finding.indices == "[11, 8:16]"


def test_what_cannot_reach_into_the_padding_is_refused_by_name():
    def body(start_ref, out_ref, numbers, start):
        pltpu.sync_copy(start_ref, start)
        wide = numbers.at[pl.ds(start[0], 8)].bitcast(jnp.int32)
        out_ref[...] = wide.reshape(2, 256)[...]

    with cokernel.target(CHIP):
        kernel = tensor_core(
            cokernel.kernel,
            body,
            jax.ShapeDtypeStruct((2, 256), jnp.int32),
            scratch=[pltpu.VMEM((10, 128), jnp.bfloat16), pltpu.SMEM((1,), jnp.int32)],
            interpret=UNTRACKED,
        )
        with pytest.raises(NotImplementedError, match=r"(?s)int32 of 'numbers'.*padded_tiles"):
            kernel(np.zeros(1, np.int32))


@pytest.mark.parametrize("interpret", [PADDED, pltpu.InterpretParams(buffer_bounds="padded")])
def test_whose_tiles_must_be_known(interpret):
    def body(out_ref):
        out_ref[0] = 1

    out_type = jax.ShapeDtypeStruct((1,), jnp.int32)
    kernel = cokernel.kernel(body, out_type, mesh=cokernel.CoreMesh(core=1), interpret=interpret)
    with pytest.raises(ValueError, match=r"'body': padded_tiles=True.*cokernel.target"):
        kernel()
