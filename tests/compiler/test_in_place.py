"""Blocks are computed where they will be copied to where nobody can tell, and nowhere else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.compiler.harness import MESH, counts_of_plans, numbers

ROWS, COLUMNS, BLOCK = 32, 256, 8
SPEC = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0))
OUT = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.float32)
VMEM = pltpu.VMEM((BLOCK, COLUMNS), jnp.float32)


@pytest.fixture(autouse=True)
def chip():
    with cokernel.target("v6e"):
        yield


@pytest.fixture
def placed(monkeypatch):
    """Collects how many Refs each program computes in place; programs are compiled afresh."""
    return counts_of_plans(monkeypatch, "placed_blocks", lambda plan: len(plan[1]))


def pipeline(step, *, grid=(ROWS // BLOCK,), inputs=(SPEC,), outputs=(SPEC,), **options):
    """The body of a kernel that is one pipeline."""

    def body(*refs):
        pltpu.emit_pipeline(
            step, grid=grid, in_specs=list(inputs), out_specs=list(outputs), **options
        )(*refs)

    return body


def launch(body, *arrays, out=OUT, mesh=MESH, scratch=(), is_checked=True):
    """What the kernel gives, which must be what it gives in checked mode to the last bit."""
    kernel = cokernel.kernel(body, out, mesh=mesh, scratch_types=scratch)
    given = tuple(map(jnp.asarray, arrays))
    result = jax.tree.map(np.asarray, kernel(*given))
    if is_checked:
        checked = cokernel.kernel(
            body, out, mesh=mesh, scratch_types=scratch, interpret=cokernel.Checked()
        )
        jax.tree.map(
            np.testing.assert_array_equal, result, jax.tree.map(np.asarray, checked(*given))
        )
    return result


def doubled(x_block, out_block):
    out_block[...] = x_block[...] * 2


def test_outputs_of_a_pipeline_are_computed_in_place(placed):
    x = numbers(ROWS, COLUMNS)
    np.testing.assert_array_equal(launch(pipeline(doubled), x), 2 * x)
    assert placed == [1]


def test_several_outputs_may_be_tiles_and_lack_dimensions(placed):
    x = numbers(4, 64, 96)
    tile = pl.BlockSpec((None, 32, 48), lambda i, j, k: (i, j, k))
    turned = pl.BlockSpec((None, 48, 32), lambda i, j, k: (i, k, j))

    def step(x_block, twice_block, turned_block):
        twice_block[...] = x_block[...] * 2
        turned_block[...] = x_block[...].T

    body = pipeline(step, grid=(4, 2, 2), inputs=(tile,), outputs=(tile, turned))
    out = [
        jax.ShapeDtypeStruct(x.shape, jnp.float32),
        jax.ShapeDtypeStruct((4, 96, 64), jnp.float32),
    ]
    twice, transposed = launch(body, x, out=out)
    np.testing.assert_array_equal(twice, 2 * x)
    np.testing.assert_array_equal(transposed, x.transpose(0, 2, 1))
    assert placed == [2]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_number_of_buffers_is_computed_in_place(placed, count):
    x = numbers(ROWS, COLUMNS)
    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i, 0), pipeline_mode=pl.Buffered(count))
    np.testing.assert_array_equal(launch(pipeline(doubled, outputs=(spec,)), x), 2 * x)
    assert placed == [1]


def test_cores_share_the_blocks_of_a_pipeline(placed):
    x = numbers(ROWS, COLUMNS)
    body = pipeline(doubled, core_axis_name="core", dimension_semantics=(pltpu.PARALLEL,))
    with cokernel.target("tpu7x"):
        mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)
        np.testing.assert_array_equal(launch(body, x, mesh=mesh), 2 * x)
    assert placed == [1]


def test_a_block_that_is_revisited_holds_what_was_written_last(placed):
    x = numbers(ROWS, COLUMNS)

    def step(x_block, out_block):
        out_block[...] = x_block[...]

    # Each output block takes two blocks of the input, one after the other.
    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i // 2, 0))
    out = jax.ShapeDtypeStruct((ROWS // 2, COLUMNS), jnp.float32)
    expected = x.reshape(2, 2, BLOCK, COLUMNS)[:, 1].reshape(out.shape)
    np.testing.assert_array_equal(launch(pipeline(step, outputs=(spec,)), x, out=out), expected)
    assert placed == [1]


@pytest.mark.parametrize("rows", [64, 4096])
def test_a_tile_that_is_revisited_stays_inside_of_the_memory_of_its_core(placed, rows):
    """The tile is written more often than copied, and a row of the output is long."""
    count = 16
    x = numbers(2 * rows, 32)

    def step(x_block, out_block):
        out_block[...] = x_block[...] + 1

    def body(x_ref, out_ref, kept_ref):
        def scope(first, last):
            first[...] = x_ref[:BLOCK]
            last[...] = x_ref[BLOCK : 2 * BLOCK]
            pltpu.emit_pipeline(
                step,
                grid=(count, 2),
                in_specs=[pl.BlockSpec((rows, 32), lambda i, j: (j, 0))],
                out_specs=[pl.BlockSpec((rows, 32), lambda i, j: (0, i))],
            )(x_ref, out_ref)
            kept_ref[...] = first[...] + last[...]

        pl.run_scoped(scope, *[pltpu.VMEM((BLOCK, 32), jnp.float32)] * 2)

    out = [
        jax.ShapeDtypeStruct((rows, 32 * count), jnp.float32),
        jax.ShapeDtypeStruct((BLOCK, 32), jnp.float32),
    ]
    got, kept = launch(body, x, out=out)
    np.testing.assert_array_equal(got, np.concatenate([x[rows:] + 1] * count, 1))
    np.testing.assert_array_equal(kept, x[:BLOCK] + x[BLOCK : 2 * BLOCK])
    # With many rows, a tile with room between its rows takes more memory than it is worth.
    assert placed == [1 if rows == 64 else 0]


def test_a_block_to_which_the_grid_returns_holds_what_was_written_last(placed):
    x = numbers(ROWS, COLUMNS)
    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (i % 2, 0))
    out = jax.ShapeDtypeStruct((2 * BLOCK, COLUMNS), jnp.float32)
    got = launch(pipeline(doubled, outputs=(spec,)), x, out=out)
    np.testing.assert_array_equal(got, 2 * x[2 * BLOCK :])
    assert placed == [1]


def test_an_accumulated_block_is_copied(placed):
    x = numbers(ROWS, COLUMNS)

    def step(x_block, out_block):
        @pl.when(pl.program_id(0) == 0)
        def _clear():
            out_block[...] = jnp.zeros_like(out_block)

        out_block[...] += x_block[...]

    spec = pl.BlockSpec((BLOCK, COLUMNS), lambda i: (0, 0))
    out = jax.ShapeDtypeStruct((BLOCK, COLUMNS), jnp.float32)
    got = launch(pipeline(step, outputs=(spec,)), x, out=out)
    np.testing.assert_array_equal(got, x.reshape(-1, BLOCK, COLUMNS).sum(0))
    assert placed == [0]


def test_a_block_that_is_not_always_written_keeps_what_its_slot_held(placed):
    x = numbers(ROWS, COLUMNS)

    def step(x_block, out_block):
        @pl.when(pl.program_id(0) < 2)
        def _store():
            out_block[...] = x_block[...]

    expected = np.concatenate([x[: 2 * BLOCK]] * 2)
    np.testing.assert_array_equal(launch(pipeline(step), x), expected)
    assert placed == [0]


def test_a_block_that_is_partly_written_keeps_what_its_slot_held(placed):
    x = numbers(ROWS, COLUMNS)

    def step(x_block, out_block):
        @pl.when(pl.program_id(0) < 2)
        def _clear():
            out_block[...] = jnp.zeros_like(out_block)

        out_block[:4] = x_block[:4]

    expected = np.where(np.arange(ROWS)[:, None] % BLOCK < 4, x, 0)
    np.testing.assert_array_equal(launch(pipeline(step), x), expected)
    assert placed == [0]


def test_a_block_that_the_body_reads_is_copied(placed):
    x = numbers(ROWS, COLUMNS)

    def step(x_block, out_block):
        out_block[...] = x_block[...] + 1
        out_block[...] = out_block[...] * 2

    np.testing.assert_array_equal(launch(pipeline(step), x), 2 * (x + 1))
    assert placed == [0]


def test_a_block_that_hangs_over_the_end_is_copied(placed):
    x = numbers(ROWS - 4, COLUMNS)
    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    np.testing.assert_array_equal(launch(pipeline(doubled), x, out=out), 2 * x)
    assert placed == [0]


def test_a_product_is_summed_in_memory_of_the_core(placed):
    """Two cores that both compute it must not add to the same sums."""
    x, y = numbers(ROWS, COLUMNS), numbers(COLUMNS, COLUMNS)

    def step(x_block, y_block, out_block):
        out_block[...] = jnp.dot(x_block[...], y_block[...])

    whole = pl.BlockSpec((COLUMNS, COLUMNS), lambda i: (0, 0))
    np.testing.assert_array_equal(launch(pipeline(step, inputs=(SPEC, whole)), x, y), x @ y)
    assert placed == [0]


def test_a_block_that_may_start_anywhere_is_cut_off_at_the_end(placed):
    x = numbers(BLOCK, COLUMNS)

    def index(i):
        return (i * 12, 0)

    def step(x_block, out_block):
        out_block[...] = x_block[...]

    body = pipeline(
        step,
        grid=(2,),
        inputs=(pl.BlockSpec((BLOCK, COLUMNS), lambda i: (0, 0)),),
        outputs=(pl.BlockSpec((pl.Element(BLOCK), pl.Element(COLUMNS)), index),),
    )
    out = jax.ShapeDtypeStruct((2 * BLOCK, COLUMNS), jnp.float32)
    # Nobody writes what lies between the blocks.
    got = launch(body, x, out=out, is_checked=False)
    np.testing.assert_array_equal(got[:BLOCK], x)
    np.testing.assert_array_equal(got[12:], x[:4])
    assert placed == [0]


def test_a_pipeline_may_update_a_ref_in_place(placed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref):
        # Each block goes one place further than where it comes from, from the last to the first.
        pltpu.emit_pipeline(
            doubled,
            grid=(ROWS // BLOCK - 1,),
            in_specs=[pl.BlockSpec((BLOCK, COLUMNS), lambda i: (ROWS // BLOCK - 2 - i, 0))],
            out_specs=[pl.BlockSpec((BLOCK, COLUMNS), lambda i: (ROWS // BLOCK - 1 - i, 0))],
        )(x_ref, x_ref)

    @jax.jit
    def run(x):
        ref = jax.new_ref(x)
        cokernel.kernel(body, (), mesh=MESH)(ref)
        return ref[...]

    expected = np.concatenate([x[:BLOCK], 2 * x[:-BLOCK]])
    np.testing.assert_array_equal(run(jnp.asarray(x)), expected)


def test_blocks_of_an_output_that_overwrites_an_input_keep_their_order(placed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref, out_ref, block_ref):
        @pl.loop(0, ROWS // BLOCK - 1)
        def _block(i):
            # What the iteration before has written is read here.
            pltpu.sync_copy(x_ref.at[pl.ds(i * BLOCK, BLOCK)], block_ref)
            pltpu.sync_copy(block_ref, out_ref.at[pl.ds((i + 1) * BLOCK, BLOCK)])

    kernel = cokernel.mpmd_map(
        [(MESH, body)], OUT, scratch_types=[VMEM], input_output_aliases={0: 0}
    )
    [got] = jax.tree.leaves(jax.jit(kernel)(jnp.asarray(x)))
    np.testing.assert_array_equal(got, np.concatenate([x[:BLOCK]] * (ROWS // BLOCK)))
    assert placed == [0]


def copying(x_ref, out_ref, block_ref):
    @pl.loop(0, ROWS // BLOCK)
    def _block(i):
        part = pl.ds(i * BLOCK, BLOCK)
        pltpu.sync_copy(x_ref.at[part], block_ref)
        pltpu.sync_copy(block_ref, out_ref.at[part])


def test_a_copy_through_memory_of_the_core_goes_straight_there(placed):
    x = numbers(ROWS, COLUMNS)
    np.testing.assert_array_equal(launch(copying, x, scratch=[VMEM]), x)
    assert placed == [1]


def test_rows_that_are_gathered_go_straight_there(placed):
    table, rows = numbers(64, COLUMNS), np.random.default_rng(1).integers(0, 64, ROWS)

    def body(table_ref, rows_ref, out_ref, chosen_ref, block_ref, done):
        @pl.loop(0, ROWS // BLOCK)
        def _block(i):
            part = pl.ds(i * BLOCK, BLOCK)
            pltpu.sync_copy(rows_ref.at[part], chosen_ref)
            pltpu.async_copy(table_ref.at[chosen_ref], block_ref, done).wait()
            pltpu.sync_copy(block_ref, out_ref.at[part])

    with cokernel.target("tpu7x"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )
        scratch = [pltpu.VMEM((BLOCK,), jnp.int32), VMEM, pltpu.SemaphoreType.DMA]
        got = launch(body, table, rows.astype(np.int32), mesh=mesh, scratch=scratch)
    np.testing.assert_array_equal(got, table[rows])
    assert placed == [1]


LANES, SIZE, WINDOW = 16, 4096, 1024


def subcores(body, x, *, count=4, scratch=2, is_checked=True):
    with cokernel.target("tpu7x"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=count
        )
        out = jax.ShapeDtypeStruct((SIZE,), jnp.float32)
        memory = [pltpu.VMEM((WINDOW,), jnp.float32)] * scratch
        return launch(body, x, out=out, mesh=mesh, scratch=memory, is_checked=is_checked)


@pytest.mark.parametrize("kind", ["loop", "parallel_loop"])
def test_a_loop_that_writes_everything_writes_it_in_place(placed, kind):
    x = numbers(SIZE)

    def body(x_ref, out_ref, in_ref, result_ref):
        part = pl.ds(lax.axis_index("subcore") * WINDOW, WINDOW)
        pltpu.sync_copy(x_ref.at[part], in_ref)
        loop = pl.loop if kind == "loop" else plsc.parallel_loop

        @loop(0, WINDOW, step=LANES)
        def _step(start):
            lanes = pl.ds(start, LANES)
            result_ref[lanes] = in_ref[lanes] * 2 + 1

        pltpu.sync_copy(result_ref, out_ref.at[part])

    np.testing.assert_array_equal(subcores(body, x), 2 * x + 1)
    assert placed == [1]


@pytest.mark.parametrize(
    ("first", "last", "stride"), [(16, 1024, 16), (0, 1008, 16), (0, 1024, 32)]
)
def test_a_loop_that_leaves_something_out_writes_to_its_own_memory(placed, first, last, stride):
    x = numbers(SIZE)

    def body(x_ref, out_ref, in_ref, result_ref):
        part = pl.ds(lax.axis_index("subcore") * WINDOW, WINDOW)

        @pl.loop(0, WINDOW, step=LANES)
        def _clear(start):
            result_ref[pl.ds(start, LANES)] = jnp.zeros(LANES, jnp.float32)

        pltpu.sync_copy(x_ref.at[part], in_ref)

        @pl.loop(first, last, step=stride)
        def _step(start):
            lanes = pl.ds(start, LANES)
            result_ref[lanes] = in_ref[lanes] + 1

        pltpu.sync_copy(result_ref, out_ref.at[part])

    place = np.arange(SIZE) % WINDOW
    is_written = (place >= first) & (place < last) & ((place - first) % stride < LANES)
    np.testing.assert_array_equal(subcores(body, x), np.where(is_written, x + 1, 0))
    assert placed == [0]


@pytest.mark.parametrize("dtype", [jnp.uint8, jnp.int32])
def test_a_counter_that_begins_again_does_not_write_everything(placed, dtype):
    x = numbers(512, 16)
    is_narrow = dtype == jnp.uint8

    def body(x_ref, zeros_ref, out_ref, block_ref):
        block_ref[...] = jnp.ones_like(block_ref)
        pltpu.sync_copy(block_ref, out_ref)
        pltpu.sync_copy(zeros_ref, out_ref)

        def row(counter, _):
            block_ref[pl.ds(counter, 1)] = x_ref[pl.ds(counter.astype(jnp.int32), 1)]
            return counter + 1, None

        lax.scan(row, dtype(0), None, length=512)
        pltpu.sync_copy(block_ref, out_ref)

    out = jax.ShapeDtypeStruct(x.shape, jnp.float32)
    memory = [pltpu.VMEM(x.shape, jnp.float32)]
    got = launch(body, x, np.zeros_like(x), out=out, scratch=memory)
    np.testing.assert_array_equal(got[:256], x[:256])
    np.testing.assert_array_equal(got[256:], 1 if is_narrow else x[256:])
    assert placed == [0 if is_narrow else 1]


def test_what_is_read_again_is_copied(placed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref, out_ref, block_ref, done):
        @pl.loop(0, ROWS // BLOCK)
        def _block(i):
            part = pl.ds(i * BLOCK, BLOCK)
            pltpu.sync_copy(x_ref.at[part], block_ref)
            pltpu.sync_copy(block_ref, out_ref.at[part])

        # The last block goes to the first place as well.
        pltpu.sync_copy(block_ref, out_ref.at[pl.ds(0, BLOCK)])

    got = launch(body, x, scratch=[VMEM, pltpu.SemaphoreType.DMA])
    np.testing.assert_array_equal(got, np.concatenate([x[-BLOCK:], x[BLOCK:]]))
    assert placed == [0]


def test_what_a_store_takes_out_of_a_block_is_what_the_core_has_put_there(placed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref, out_ref, old_ref, block_ref):
        block_ref[...] = jnp.zeros_like(block_ref)
        pltpu.sync_copy(block_ref, out_ref.at[pl.ds(0, BLOCK)])

        @pl.loop(0, ROWS // BLOCK)
        def _block(i):
            part = pl.ds(i * BLOCK, BLOCK)
            old_ref[...] = jax.ref.swap(block_ref, ..., x_ref[part])
            pltpu.sync_copy(block_ref, out_ref.at[part])

    out = [OUT, jax.ShapeDtypeStruct((BLOCK, COLUMNS), jnp.float32)]
    got, old = launch(body, x, out=out, scratch=[VMEM])
    np.testing.assert_array_equal(got, x)
    np.testing.assert_array_equal(old, x[-2 * BLOCK : -BLOCK])
    assert placed == [0]


def test_what_was_read_from_the_place_of_a_block_stays_as_it_was(placed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref, old_ref, block_ref):
        before = x_ref[:BLOCK]
        block_ref[...] = x_ref[BLOCK : 2 * BLOCK] * 2
        pltpu.sync_copy(block_ref, x_ref.at[:BLOCK])
        old_ref[...] = before

    @jax.jit
    def run(x):
        ref = jax.new_ref(x)
        out = jax.ShapeDtypeStruct((BLOCK, COLUMNS), jnp.float32)
        old = cokernel.kernel(body, out, mesh=MESH, scratch_types=[VMEM])(ref)
        return old, ref[...]

    old, new = run(jnp.asarray(x))
    np.testing.assert_array_equal(old, x[:BLOCK])
    np.testing.assert_array_equal(new[:BLOCK], 2 * x[BLOCK : 2 * BLOCK])


def test_a_wait_between_writing_and_copying_keeps_the_copy_behind_it(placed):
    """Subcore 1 writes the whole output, then subcore 0 its own block over that."""
    x = numbers(SIZE)

    def body(x_ref, out_ref, mine_ref, go):
        place = lax.axis_index("subcore")
        pltpu.sync_copy(x_ref.at[pl.ds((1 - place) * WINDOW, WINDOW)], mine_ref)

        @pl.when(place == 0)
        def _wait():
            pl.semaphore_wait(go, 1)

        pltpu.sync_copy(mine_ref, out_ref.at[pl.ds(0, WINDOW)])

        @pl.when(place == 1)
        def _tell():
            pl.semaphore_signal(go, 1, device_id={"subcore": 0})

    with cokernel.target("tpu7x"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=2
        )
        out = jax.ShapeDtypeStruct((WINDOW,), jnp.float32)
        memory = [pltpu.VMEM((WINDOW,), jnp.float32), pltpu.SemaphoreType.REGULAR]
        for _ in range(20):
            got = launch(body, x, out=out, mesh=mesh, scratch=memory)
            np.testing.assert_array_equal(got, x[WINDOW : 2 * WINDOW])
    assert set(placed) == {0}


def test_the_place_of_a_block_is_checked(placed):
    x = numbers(ROWS, COLUMNS)

    def body(x_ref, start_ref, out_ref, block_ref):
        pltpu.sync_copy(x_ref.at[pl.ds(0, BLOCK)], block_ref)
        pltpu.sync_copy(block_ref, out_ref.at[pl.ds(start_ref[0], BLOCK)])

    kernel = cokernel.kernel(body, OUT, mesh=MESH, scratch_types=[VMEM])
    for start in (-1, ROWS - BLOCK + 1):
        with pytest.raises(Exception, match=r"(?s)dma_start.*out_ref"):
            jax.block_until_ready(kernel(jnp.asarray(x), jnp.full((1,), start, jnp.int32)))
    got = kernel(jnp.asarray(x), jnp.full((1,), 5, jnp.int32))
    np.testing.assert_array_equal(got[5 : 5 + BLOCK], x[:BLOCK])


def test_both_cores_may_do_all_of_the_work(placed):
    x = numbers(ROWS, COLUMNS)
    with cokernel.target("tpu7x"):
        mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)
        got = launch(pipeline(doubled), x, mesh=mesh, is_checked=False)
    np.testing.assert_array_equal(got, 2 * x)
    assert placed == [1]
