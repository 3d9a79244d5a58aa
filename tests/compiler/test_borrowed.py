"""Blocks of operands are read in place where nobody can tell, and copied where somebody could."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from tests.compiler.harness import MESH, counts_of_plans, numbers

ROWS, COLUMNS, BLOCK = 32, 256, 8
SPEC = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))
OUT = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)


@pytest.fixture(autouse=True)
def chip():
    with cokernel.target("v6e"):
        yield


@pytest.fixture
def borrowed(monkeypatch):
    """Collects how many Refs each program borrows; programs are compiled afresh for it."""
    return counts_of_plans(monkeypatch, "borrowed_blocks", len)


def pipeline(step, *, grid=(ROWS // BLOCK,), inputs=(SPEC,), output=SPEC):
    """The body of a kernel that is one pipeline."""

    def body(*refs):
        pltpu.emit_pipeline(step, grid=grid, in_specs=list(inputs), out_specs=[output])(*refs)

    return body


def launch(body, *arrays, out=OUT, mesh=MESH, scratch=(), **options):
    kernel = cokernel.kernel(body, out, mesh=mesh, scratch_types=scratch, **options)
    return np.asarray(kernel(*map(jnp.asarray, arrays)))


def test_blocks_are_read_in_place(borrowed):
    x = numbers(ROWS, COLUMNS)

    def step(x_block, out_block):
        out_block[...] = x_block[...] * 2

        # A row at a time, picked as the program runs.
        @pl.loop(0, BLOCK)
        def _row(row):
            out_block[pl.ds(row, 1)] += x_block[pl.ds(row, 1)]

    np.testing.assert_array_equal(launch(pipeline(step), x), 3 * x)
    assert borrowed == [1]


def test_blocks_may_be_tiles_and_lack_dimensions(borrowed):
    x = numbers(4, 64, 96)
    spec = pl.BlockSpec((None, 32, 48), lambda i, j, k: (i, j, k))
    y = numbers(4, 96, 64)
    turned = pl.BlockSpec((None, 48, 32), lambda i, j, k: (i, k, j))

    def step(x_block, y_block, out_block):
        out_block[...] = x_block[...] + y_block[...].T

    body = pipeline(step, grid=(4, 2, 2), inputs=(spec, turned), output=spec)
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    expected = x + y.transpose(0, 2, 1)
    np.testing.assert_array_equal(launch(body, x, y, out=out), expected)
    assert borrowed == [2]


def test_factors_of_a_product_are_read_in_place(borrowed):
    left, right = numbers(64, 96), numbers(96, 64)

    def step(left_block, right_block, out_block):
        @pl.when(pl.program_id(2) == 0)
        def _clear():
            out_block[...] = jnp.zeros_like(out_block)

        out_block[...] += jnp.dot(left_block[...], right_block[...])

    body = pipeline(
        step,
        grid=(2, 2, 3),
        inputs=(
            pl.BlockSpec((32, 32), lambda i, j, k: (i, k)),
            pl.BlockSpec((32, 32), lambda i, j, k: (k, j)),
        ),
        output=pl.BlockSpec((32, 32), lambda i, j, k: (i, j)),
    )
    out = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    np.testing.assert_array_equal(launch(body, left, right, out=out), left @ right)
    assert borrowed == [2]


def test_a_block_that_the_body_changes_is_copied(borrowed):
    x = numbers(ROWS, COLUMNS)

    def step(x_block, out_block):
        x_block[...] += 1
        out_block[...] = x_block[...]

    given = jnp.asarray(x)
    kernel = cokernel.kernel(pipeline(step), OUT, mesh=MESH)
    np.testing.assert_array_equal(kernel(given), x + 1)
    np.testing.assert_array_equal(given, x)
    assert borrowed == [0]


def test_a_block_of_a_ref_that_the_kernel_changes_is_copied(borrowed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref):
        def step(x_block, out_block):
            # What the previous step has written must not be seen here.
            out_block[...] = x_block[...] + 1

        # Each block goes one place further than where it comes from.
        pltpu.emit_pipeline(
            step,
            grid=(ROWS // BLOCK - 1,),
            in_specs=[pl.BlockSpec((BLOCK, COLUMNS), lambda i: (ROWS // BLOCK - 2 - i, 0))],
            out_specs=[pl.BlockSpec((BLOCK, COLUMNS), lambda i: (ROWS // BLOCK - 1 - i, 0))],
        )(x_ref, x_ref)

    @jax.jit
    def run(x):
        ref = jax.new_ref(x)
        cokernel.kernel(body, (), mesh=MESH)(ref)
        return ref[...]

    expected = np.concatenate([x[:BLOCK], x[:-BLOCK] + 1])
    np.testing.assert_array_equal(run(jnp.asarray(x)), expected)
    assert set(borrowed) == {0}


def test_a_block_that_hangs_over_the_end_is_copied(borrowed):
    x = numbers(ROWS - 4, COLUMNS)

    def step(x_block, out_block):
        out_block[...] = x_block[...] + 1

    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    np.testing.assert_array_equal(launch(pipeline(step), x, out=out), x + 1)
    assert borrowed == [0]


def test_a_block_that_may_start_anywhere_is_cut_off_at_the_end(borrowed):
    x = numbers(2 * BLOCK, COLUMNS)

    def step(x_block, out_block):
        out_block[:4] = x_block[:4]

    body = pipeline(
        step,
        grid=(2,),
        inputs=(pl.BlockSpec((pl.Element(BLOCK), pl.Element(COLUMNS)), lambda i: (i * 12, 0)),),
    )
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    got = launch(body, x, out=out)
    np.testing.assert_array_equal(got[:4], x[:4])
    np.testing.assert_array_equal(got[BLOCK : BLOCK + 4], x[12:])
    assert borrowed == [0]


def test_whole_refs_are_read_in_place(borrowed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref, out_ref, block_ref, sum_ref):
        sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.loop(0, ROWS // BLOCK)
        def _block(i):
            pltpu.sync_copy(x_ref.at[pl.ds(i * BLOCK, BLOCK)], block_ref)

            @pl.loop(0, BLOCK)
            def _row(row):
                sum_ref[pl.ds(row, 1)] += block_ref[pl.ds(row, 1)]

        # The last block is still there, for copies as well.
        sum_ref[...] += block_ref[...]
        pltpu.sync_copy(sum_ref, out_ref.at[pl.ds(0, BLOCK)])
        pltpu.sync_copy(block_ref.at[pl.ds(2, 4)], out_ref.at[pl.ds(BLOCK, 4)])

    out = jax.ShapeDtypeStruct((BLOCK + 4, COLUMNS), jnp.float32)
    got = launch(body, x, out=out, scratch=[pltpu.VMEM((BLOCK, COLUMNS), jnp.float32)] * 2)
    last = x[-BLOCK:]
    np.testing.assert_array_equal(got[:BLOCK], x.reshape(-1, BLOCK, COLUMNS).sum(0) + last)
    np.testing.assert_array_equal(got[BLOCK:], last[2:6])
    assert borrowed == [1]


def test_a_whole_ref_that_is_also_filled_in_part_is_copied(borrowed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref, out_ref, block_ref):
        pltpu.sync_copy(x_ref.at[pl.ds(0, BLOCK)], block_ref)
        pltpu.sync_copy(x_ref.at[pl.ds(BLOCK, 4)], block_ref.at[pl.ds(0, 4)])
        out_ref[...] = block_ref[...] * 2

    out = jax.ShapeDtypeStruct((BLOCK, COLUMNS), jnp.float32)
    got = launch(body, x, out=out, scratch=[pltpu.VMEM((BLOCK, COLUMNS), jnp.float32)])
    np.testing.assert_array_equal(got, 2 * np.concatenate([x[BLOCK : BLOCK + 4], x[4:BLOCK]]))
    assert borrowed == [0]


def test_blocks_of_scratch_in_hbm_are_copied(borrowed):
    x = numbers(ROWS, COLUMNS)

    def step(x_block, out_block):
        out_block[...] = x_block[...] + pl.program_id(0).astype(jnp.float32)

    def body(x_ref, out_ref, between_ref):
        pipeline(step)(x_ref, between_ref)
        pipeline(step)(between_ref, out_ref)

    expected = x + 2 * (np.arange(ROWS)[:, None] // BLOCK)
    got = launch(body, x, scratch=[pltpu.HBM((ROWS, COLUMNS), jnp.float32)])
    np.testing.assert_array_equal(got, expected)
    assert borrowed == [1]


def test_slots_are_checked(borrowed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref, slot_ref, out_ref):
        def scope(slots, done):
            pltpu.async_copy(x_ref.at[pl.ds(8, BLOCK)], slots.at[slot_ref[0]], done).wait()
            out_ref[...] = slots[slot_ref[0]]

        pl.run_scoped(scope, pltpu.VMEM((2, BLOCK, COLUMNS), jnp.float32), pltpu.SemaphoreType.DMA)

    out = jax.ShapeDtypeStruct((BLOCK, COLUMNS), jnp.float32)
    for slot in (0, 1):
        got = launch(body, x, np.asarray([slot], np.int32), out=out)
        np.testing.assert_array_equal(got, x[8:16])
    for slot in (2, -1):
        with pytest.raises(Exception, match=f"(?s)slots.*{slot}"):
            launch(body, x, np.asarray([slot], np.int32), out=out)
    assert set(borrowed) == {1}
