"""Loads and stores of a vector subcore do what numpy does lane by lane, and touch nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax
from tests.compiler import tolerance
from tests.compiler.ops.sparsecore_harness import CHIPS, run_on_subcore

DTYPES = [np.int32, np.float32, np.int16, jnp.bfloat16, np.int8, np.uint32]
chips = pytest.mark.parametrize("chip", CHIPS)


def shaped(shape, dtype=np.int32):
    return jax.ShapeDtypeStruct(shape, dtype)


@st.composite
def cases(draw, count):
    """A mask and an offset of 0, 1 or 5 in front of what it selects."""
    mask = np.asarray(draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    return mask, draw(st.sampled_from([0, 1, 5]))


@chips
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_an_expanded_load_puts_successive_elements_into_the_true_lanes(chip, data, dtype):
    lanes = CHIPS[chip]
    mask, offset = data.draw(cases(lanes))
    x = (np.arange(lanes + 5) + 1).astype(dtype)

    def body(x_ref, m_ref, at_ref, o_ref):
        start = at_ref[...][0]
        o_ref[...] = plsc.load_expanded(x_ref.at[pl.ds(start, lanes)], mask=m_ref[...] != 0)

    at = np.full(lanes, offset, np.int32)
    [got] = run_on_subcore(chip, body, [shaped((lanes,), dtype)], x, mask.astype(np.int32), at)
    np.testing.assert_array_equal(got[mask], x[offset:][: mask.sum()])


@chips
@pytest.mark.parametrize("add", [False, True])
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from(DTYPES))
def test_a_compressed_store_writes_the_true_lanes_side_by_side(chip, add, data, dtype):
    lanes = CHIPS[chip]
    mask, offset = data.draw(cases(lanes))
    x = (np.arange(lanes) + 1).astype(dtype)
    old = np.full(lanes + 5, 7).astype(dtype)
    store = plsc.addupdate_compressed if add else plsc.store_compressed

    def body(x_ref, m_ref, at_ref, old_ref, o_ref):
        o_ref[...] = old_ref[...]
        start = at_ref[...][0]
        store(o_ref.at[pl.ds(start, lanes)], x_ref[...], mask=m_ref[...] != 0)

    at = np.full(lanes, offset, np.int32)
    [got] = run_on_subcore(chip, body, [old], x, mask.astype(np.int32), at, old)
    expected = old.copy()
    target = expected[offset:][: mask.sum()]
    target[...] = target + x[mask] if add else x[mask]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize(
    ("dtype", "count"), [(np.int16, 32), (jnp.bfloat16, 32), (np.int8, 64), (np.int32, 32)]
)
def test_a_compressed_store_of_more_lanes_than_words_of_a_register(dtype, count, add):
    mask = np.arange(count) % 3 == 1
    x = (np.arange(count) + 1).astype(dtype)
    old = np.full(count, 7).astype(dtype)
    store = plsc.addupdate_compressed if add else plsc.store_compressed

    def body(x_ref, m_ref, old_ref, o_ref):
        o_ref[...] = old_ref[...]
        store(o_ref.at[pl.ds(0, count)], x_ref[...], mask=m_ref[...] != 0)

    [got] = run_on_subcore("tpu7x", body, [old], x, mask.astype(np.int32), old)
    expected = old.copy()
    target = expected[: mask.sum()]
    target[...] = target + x[mask] if add else x[mask]
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("load", [False, True])
def test_only_the_elements_that_the_mask_selects_must_be_in_bounds(load):
    lanes = 8

    def body(at_ref, m_ref, o_ref):
        start, mask = at_ref[...][0], m_ref[...] != 0
        view = o_ref.at[pl.ds(start, lanes)]
        if load:
            o_ref[pl.ds(0, lanes)] = plsc.load_expanded(view, mask=mask)
        else:
            plsc.store_compressed(view, at_ref[...], mask=mask)

    mask = np.asarray([0, 1, 0, 1, 1, 0, 0, 0], np.int32)
    at = np.full(lanes, 13, np.int32)
    run_on_subcore("v6e", body, [shaped((16,))], at, mask)
    with pytest.raises(Exception, match=r"(?s)OutOfBounds.*refs\[5\]"):
        run_on_subcore("v6e", body, [shaped((16,))], at + 1, mask)


@chips
def test_rows_of_a_matrix_are_expanded_and_compressed(chip):
    lanes = CHIPS[chip]
    x = np.arange(4 * lanes, dtype=np.int32).reshape(4, lanes)
    mask = (np.arange(lanes) % 3 == 1).astype(np.int32)

    def body(x_ref, m_ref, o_ref):
        keep = m_ref[...] != 0
        o_ref[0] = jnp.where(keep, plsc.load_expanded(x_ref.at[2], mask=keep), -1)
        o_ref[1] = jnp.zeros((lanes,), jnp.int32)
        plsc.store_compressed(o_ref.at[1], x_ref[3], mask=keep)

    [got] = run_on_subcore(chip, body, [shaped((2, lanes))], x, mask)
    keep = mask != 0
    expected = np.full((2, lanes), -1, np.int32)
    expected[0, keep] = x[2, : keep.sum()]
    expected[1] = 0
    expected[1, : keep.sum()] = x[3, keep]
    np.testing.assert_array_equal(got, expected)


@chips
def test_strided_and_long_parts_are_compressed_too(chip):
    count = 70
    x = np.arange(4 * count, dtype=np.int32).reshape(count, 4)
    mask = (np.arange(count) % 5 < 2).astype(np.int32)

    def body(x_ref, m_ref, o_ref):
        keep = m_ref[...] != 0
        column = x_ref.at[:, 1]
        o_ref[...] = jnp.zeros((3, count), jnp.int32)
        o_ref[0] = plsc.load_expanded(column, mask=keep)
        plsc.store_compressed(o_ref.at[1], x_ref[:, 2], mask=keep)
        plsc.addupdate_compressed(o_ref.at[1], x_ref[:, 2], mask=keep)
        plsc.addupdate(o_ref.at[2], x_ref[:, 3])

    [got] = run_on_subcore(chip, body, [shaped((3, count))], x, mask)
    keep = mask != 0
    np.testing.assert_array_equal(got[0, keep], x[: keep.sum(), 1])
    np.testing.assert_array_equal(got[1, : keep.sum()], 2 * x[keep, 2])
    np.testing.assert_array_equal(got[2], x[:, 3])


@chips
@pytest.mark.parametrize("masked", [False, True])
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from([np.int32, np.float32]))
def test_a_gather_picks_by_one_index_per_dimension(chip, masked, data, dtype):
    lanes = CHIPS[chip]
    x = np.arange(15).reshape(3, 5).astype(dtype)
    rows = data.draw(st.lists(st.integers(0, 2), min_size=lanes, max_size=lanes))
    columns = data.draw(st.lists(st.integers(0, 4), min_size=lanes, max_size=lanes))
    mask = data.draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes))
    index = np.asarray([rows, columns], np.int32)
    keep = np.asarray(mask) if masked else np.ones(lanes, bool)
    # What a mask leaves out may hold any index.
    index[:, ~keep] = -1000

    def body(x_ref, i_ref, m_ref, o_ref):
        keep = m_ref[...] != 0 if masked else None
        o_ref[...] = plsc.load_gather(x_ref, [i_ref[0], i_ref[1]], mask=keep)

    [got] = run_on_subcore(chip, body, [shaped((lanes,), dtype)], x, index, keep.astype(np.int32))
    np.testing.assert_array_equal(got[keep], x[index[0, keep], index[1, keep]])
    tolerance.note(_jax.sc_primitives.gather_p, dtype, 0.0)


@chips
@pytest.mark.parametrize("add", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@settings(max_examples=12)
@given(data=st.data(), dtype=st.sampled_from([np.int32, np.float32]))
def test_a_scatter_stores_or_adds_lane_after_lane(chip, add, masked, data, dtype):
    lanes = CHIPS[chip]
    old = np.arange(10).astype(dtype)
    x = (np.arange(lanes) + 1).astype(dtype)
    index = np.asarray(
        data.draw(st.lists(st.integers(0, 9), min_size=lanes, max_size=lanes)), np.int32
    )
    mask = np.asarray(data.draw(st.lists(st.booleans(), min_size=lanes, max_size=lanes)))
    keep = mask if masked else np.ones(lanes, bool)
    index[~keep] = 1 << 30
    store = plsc.addupdate_scatter if add else plsc.store_scatter

    def body(x_ref, i_ref, m_ref, old_ref, o_ref):
        o_ref[...] = old_ref[...]
        store(o_ref, [i_ref[...]], x_ref[...], mask=m_ref[...] != 0 if masked else None)

    [got] = run_on_subcore(chip, body, [old], x, index, keep.astype(np.int32), old)
    expected = old.copy()
    if add:
        np.add.at(expected, index[keep], x[keep])
    else:
        for lane in np.flatnonzero(keep):
            expected[index[lane]] = x[lane]
    np.testing.assert_array_equal(got, expected)
    tolerance.note(_jax.sc_primitives.scatter_p, dtype, 0.0)


def test_scatters_of_many_elements_and_through_views():
    count = 100
    index = np.random.default_rng(0).integers(0, 20, count).astype(np.int32)
    x = np.arange(count, dtype=np.int32)

    def body(x_ref, i_ref, o_ref):
        o_ref[...] = jnp.zeros((3, 20), jnp.int32)
        plsc.addupdate_scatter(o_ref.at[1], [i_ref[...]], x_ref[...], mask=x_ref[...] > 10)
        row = jnp.full((count,), 2, jnp.int32)
        plsc.store_scatter(o_ref, [row, i_ref[...]], x_ref[...])

    [got] = run_on_subcore("v6e", body, [shaped((3, 20))], x, index)
    expected = np.zeros((3, 20), np.int32)
    np.add.at(expected[1], index[x > 10], x[x > 10])
    for value, place in zip(x, index, strict=True):
        expected[2, place] = value
    np.testing.assert_array_equal(got, expected)


ACCESSES = {
    "load_gather": lambda ref, i, m, x: plsc.load_gather(ref, [i], mask=m),
    "store_scatter": lambda ref, i, m, x: plsc.store_scatter(ref, [i], x, mask=m),
    "addupdate_scatter": lambda ref, i, m, x: plsc.addupdate_scatter(ref, [i], x, mask=m),
}


@pytest.mark.parametrize("operation", ACCESSES)
@pytest.mark.parametrize("bad", [-1, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_an_index_out_of_range_is_an_error_in_a_selected_lane_only(operation, bad, masked):
    index = np.asarray([0, 3, 5, bad, 2, 2, 9, 15], np.int32)
    selected = np.ones(8, np.int32)

    def body(i_ref, m_ref, o_ref, table_ref):
        mask = m_ref[...] != 0 if masked else None
        access = ACCESSES[operation](table_ref, i_ref[...], mask, i_ref[...])
        o_ref[...] = i_ref[...] if access is None else access

    table = [pltpu.VMEM((16,), jnp.int32)]

    def launch(mask):
        run_on_subcore("v6e", body, [shaped((8,))], index, mask, scratch=table)

    with pytest.raises(Exception, match=rf"(?s)OutOfBounds.*refs\[6\].*{bad}"):
        launch(selected)
    if masked:
        selected[3] = 0
        launch(selected)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_sums_in_shared_memory_lose_nothing(workers, dtype):
    lanes, subcores, rounds = 8, 16, 40

    def body(o_ref, total, local):
        me = lax.axis_index("subcore")
        lane = lax.iota(jnp.int32, lanes)

        @pl.when(me == 0)
        def _clear():
            local[...] = jnp.zeros((3, lanes), dtype)
            pltpu.sync_copy(local, total)

        plsc.subcore_barrier()

        @pl.loop(0, rounds)
        def _add(i):
            ones = jnp.ones((lanes,), dtype)
            plsc.addupdate(total.at[0], ones)
            plsc.addupdate_compressed(total.at[1], ones, mask=lane % 2 == 0)
            plsc.addupdate_scatter(total.at[2], [lane // 4], ones)

        plsc.subcore_barrier()

        @pl.when(me == 0)
        def _publish():
            pltpu.sync_copy(total, o_ref)

    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1
        )
        kernel = cokernel.kernel(
            body,
            shaped((3, lanes), dtype),
            mesh=mesh,
            scratch_types=[
                pltpu.VMEM_SHARED((3, lanes), dtype),
                pltpu.VMEM((3, lanes), dtype),
            ],
            compiler_params=cokernel.CompilerParams(num_workers=workers),
        )
        got = np.asarray(kernel())
    each = subcores * rounds
    np.testing.assert_array_equal(got[0], each)
    np.testing.assert_array_equal(got[1], [each] * 4 + [0] * 4)
    np.testing.assert_array_equal(got[2], [4 * each, 4 * each, 0, 0, 0, 0, 0, 0])


def test_each_subcore_has_its_own_part_of_shared_memory():
    subcores = 16

    def body(o_ref, shared, local):
        me = lax.axis_index("subcore")
        mine = plsc.slice_subcore_vmem_from_shared(shared)
        mine[0] = jnp.full((8,), me, jnp.int32)
        local[...] = jnp.full((8,), me, jnp.int32)
        pltpu.sync_copy(local, mine.at[1])
        plsc.subcore_barrier()

        @pl.when(me == 0)
        def _publish():
            pltpu.sync_copy(shared, o_ref)

    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1
        )
        kernel = cokernel.kernel(
            body,
            shaped((2, 8 * subcores)),
            mesh=mesh,
            scratch_types=[
                pltpu.VMEM_SHARED((2, 8 * subcores), jnp.int32),
                pltpu.VMEM((8,), jnp.int32),
            ],
        )
        got = np.asarray(kernel())
    np.testing.assert_array_equal(got, np.tile(np.repeat(np.arange(subcores), 8), (2, 1)))
