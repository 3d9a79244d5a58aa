"""Windows and indices that leave the array they belong to."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.faults.case import case

ROWS, BLOCK, WIDTH = 8, 2, 16
X = jnp.arange(ROWS * WIDTH, dtype=jnp.int32).reshape(ROWS, WIDTH)
OUT = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32)
WINDOW = cokernel.private((BLOCK, WIDTH), jnp.int32)


def one_core(body, *scratch, out=OUT, arguments=(X,)):
    kernel = cokernel.kernel(body, out, mesh=cokernel.CoreMesh(core=1), scratch_types=scratch)
    return lambda: kernel(*arguments)


@case("OutOfBounds", "x_ref", always=True)
def index_map_counts_rows_instead_of_blocks(broken):
    def body(x_ref, out_ref, window):
        blocks = ROWS // BLOCK

        @pl.loop(0, blocks)
        def _block(block):
            first = block * BLOCK * (BLOCK if broken else 1)
            pltpu.sync_copy(x_ref.at[pl.ds(first, BLOCK)], window)  # fault
            pltpu.sync_copy(window, out_ref.at[pl.ds(block * BLOCK, BLOCK)])

    return one_core(body, WINDOW)


@case("OutOfBounds", "x_ref", always=True)
def last_window_hangs_over_the_end(broken):
    size = 3

    def body(x_ref, out_ref, window):
        @pl.loop(0, pl.cdiv(ROWS, size))
        def _window(number):
            first = number * size
            if not broken:
                first = jnp.minimum(first, ROWS - size)
            pltpu.sync_copy(x_ref.at[pl.ds(first, size)], window)  # fault
            pltpu.sync_copy(window, out_ref.at[pl.ds(first, size)])

    return one_core(body, cokernel.private((size, WIDTH), jnp.int32))


@case("OutOfBounds", "x_ref", always=True)
def prefetch_one_step_beyond_the_last(broken):
    def body(x_ref, out_ref, windows, done):
        def fetch(row):
            return pltpu.make_async_copy(x_ref.at[row], windows.at[row % 2], done.at[row % 2])

        fetch(0).start()

        @pl.loop(0, ROWS)
        def _step(row):
            @pl.when((row + 1 < ROWS) | broken)
            def _prefetch():
                fetch(row + 1).start()  # fault

            fetch(row).wait()
            out_ref[row] = windows[row % 2]

    windows = cokernel.private((2, WIDTH), jnp.int32)
    return one_core(body, windows, pltpu.SemaphoreType.DMA((2,)))


@case("OutOfBounds", "x_ref", always=True)
def row_number_from_data_is_too_large(broken):
    def body(x_ref, ids_ref, out_ref):
        @pl.loop(0, ROWS)
        def _row(row):
            out_ref[row] = x_ref[ids_ref[row]]  # fault

    ids = jnp.arange(ROWS).at[5].set(ROWS if broken else 0)
    return one_core(body, arguments=(X, ids))


@case("OutOfBounds", "x_ref", always=True)
def row_number_from_data_is_negative(broken):
    def body(x_ref, ids_ref, out_ref):
        @pl.loop(0, ROWS)
        def _row(row):
            out_ref[row] = x_ref[ids_ref[row]]  # fault

    ids = jnp.arange(ROWS).at[2].set(-1 if broken else 1)
    return one_core(body, arguments=(X, ids))


@case("OutOfBounds", "x_ref", always=True)
def gather_by_an_id_that_does_not_exist(broken):
    def body(x_ref, ids_ref, out_ref, ids, rows, done):
        pltpu.sync_copy(ids_ref, ids)
        pltpu.async_copy(x_ref.at[ids], rows, done).wait()  # fault
        pltpu.sync_copy(rows, out_ref)

    ids = jnp.arange(ROWS).at[3].set(ROWS + 4 if broken else 4)
    return one_core(
        body,
        cokernel.private((ROWS,), jnp.int32),
        cokernel.private((ROWS, WIDTH), jnp.int32),
        pltpu.SemaphoreType.DMA,
        arguments=(X, ids),
    )


@case("OutOfBounds", "out_ref", always=True)
def loop_over_the_padded_length(broken):
    padded = 12

    def body(x_ref, out_ref):
        @pl.loop(0, padded)
        def _row(row):
            @pl.when((row < ROWS) | broken)
            def _store():
                out_ref[row] = x_ref[row % ROWS] + 1  # fault

    return one_core(body)


@case("OutOfBounds", "inbox", always=True)
def every_core_sends_to_a_slot_by_its_global_number(broken):
    def body(x_ref, out_ref, outbox, inbox, sent, received):
        row, column = lax.axis_index("row"), lax.axis_index("column")
        me = row * 2 + column
        outbox[...] = x_ref[me]
        slot = me if broken else column
        there = {"row": row, "column": 1 - column}
        copy = pltpu.make_async_remote_copy(outbox, inbox.at[slot], sent, received, device_id=there)
        copy.start()  # fault
        copy.wait()
        out_ref[me] = inbox[1 - column]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((4, WIDTH), jnp.int32),
        mesh=cokernel.CoreMesh(row=2, column=2),
        scratch_types=[
            cokernel.private((WIDTH,), jnp.int32),
            cokernel.private((2, WIDTH), jnp.int32),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ],
    )
    return lambda: kernel(X[:4])


@case("OutOfBounds", "table", always=True, chip="tpu7x")
def lane_index_beyond_the_table(broken):
    def body(x_ref, out_ref, table, row):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        pltpu.sync_copy(x_ref.at[pl.ds(0, 8)], table)
        places = lax.iota(jnp.int32, 16) if broken else lax.iota(jnp.int32, 16) % 8
        row[...] = plsc.load_gather(table, [places])  # fault
        pltpu.sync_copy(row, out_ref.at[core, subcore])

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 16, 16), jnp.int32),
        mesh=plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore"),
        scratch_types=[pltpu.VMEM((8,), jnp.int32), pltpu.VMEM((16,), jnp.int32)],
    )
    return lambda: kernel(jnp.arange(16, dtype=jnp.int32))


@case("Race", "out_ref")
def output_windows_of_two_cores_in_no_order(broken):
    # Each core revisits the block of the other in its second half, as a wrong index map does.
    def body(x_ref, out_ref, window):
        core = lax.axis_index("core")

        @pl.loop(0, 4)
        def _step(step):
            block = (core * 4 + step) % 4 if broken else core * 4 + step
            pltpu.sync_copy(x_ref.at[block], window)
            pltpu.sync_copy(window, out_ref.at[block])  # fault

        if broken:

            @pl.when(core == 0)
            def _rest():
                for row in range(4, ROWS):
                    pltpu.sync_copy(x_ref.at[row], out_ref.at[row])

    kernel = cokernel.kernel(
        body,
        OUT,
        mesh=cokernel.CoreMesh(core=2),
        scratch_types=[cokernel.private((WIDTH,), jnp.int32)],
    )
    return lambda: kernel(X)
