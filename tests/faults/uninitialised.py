"""Memory that is read, or handed out, before anybody has written it."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.faults.case import case

ROWS, WIDTH = 4, 16
X = jnp.arange(ROWS * WIDTH, dtype=jnp.int32).reshape(ROWS, WIDTH)
OUT = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.int32)
ROW = cokernel.private((WIDTH,), jnp.int32)


def one_core(body, *scratch, out=OUT, argument=X):
    kernel = cokernel.kernel(body, out, mesh=cokernel.CoreMesh(core=1), scratch_types=scratch)
    return lambda: kernel(argument)


@case("UninitialisedRead", "total", always=True)
def accumulator_not_cleared(broken):
    def body(x_ref, out_ref, total):
        if not broken:
            total[...] = jnp.zeros((WIDTH,), jnp.int32)
        for row in range(ROWS):
            total[...] = total[...] + x_ref[row]  # fault
        out_ref[...] = jnp.broadcast_to(total[...], (ROWS, WIDTH))

    return one_core(body, ROW)


@case("UninitialisedRead", "limit", always=True)
def branch_on_a_scalar_that_was_never_set(broken):
    def body(x_ref, out_ref, limit):
        if not broken:
            limit[0] = 2
        out_ref[...] = x_ref[...]

        @pl.when(limit[0] > 1)  # fault
        def _double():
            out_ref[...] = x_ref[...] * 2

    return one_core(body, pltpu.SMEM((1,), jnp.int32))


@case("UninitialisedRead", "places", always=True)
def index_from_a_table_filled_only_in_part(broken):
    def body(x_ref, out_ref, places):
        for row in range(ROWS - 1 if broken else ROWS):
            places[row] = ROWS - 1 - row
        for row in range(ROWS):
            # What nobody wrote is masked to a valid row here, so that only its origin is wrong.
            out_ref[row] = x_ref[places[row] & 3]  # fault

    return one_core(body, pltpu.SMEM((ROWS,), jnp.int32))


@case("NeverWritten", "out_ref", always=True)
def last_row_of_the_output_is_left_out(broken):
    def body(x_ref, out_ref):
        @pl.loop(0, ROWS - 1 if broken else ROWS)
        def _row(row):
            out_ref[row] = x_ref[row]

    return one_core(body)


@case("NeverWritten", "out_ref", always=True)
def loop_without_a_trip_writes_nothing(broken):
    def body(x_ref, out_ref):
        if not broken:
            out_ref[...] = jnp.zeros((ROWS, WIDTH), jnp.int32)

        @pl.loop(0, x_ref[0, 0])
        def _row(row):
            out_ref[row] = x_ref[row]

    return one_core(body)


@case("UninitialisedRead", "window", always=True)
def ragged_window_copied_out_whole(broken):
    def body(x_ref, out_ref, window):
        if not broken:
            window[...] = jnp.zeros((ROWS, WIDTH), jnp.int32)
        pltpu.sync_copy(x_ref.at[pl.ds(0, 3)], window.at[pl.ds(0, 3)])
        out_ref[...] = window[...]  # fault

    return one_core(body, cokernel.private((ROWS, WIDTH), jnp.int32))


@case("UninitialisedRead", "window", always=True)
def garbage_travels_through_a_copy(broken):
    def body(x_ref, out_ref, window, relay):
        for row in range(ROWS - 1 if broken else ROWS):
            window[row] = x_ref[row] + 1
        pltpu.sync_copy(window, relay)
        pltpu.sync_copy(relay, out_ref)  # fault

    window = cokernel.private((ROWS, WIDTH), jnp.int32)
    return one_core(body, window, pltpu.HBM((ROWS, WIDTH), jnp.int32))


@case("UninitialisedRead", "scratch", always=True)
def scope_expects_what_the_scope_before_it_left(broken):
    def body(x_ref, out_ref):
        def fill(scratch):
            scratch[...] = x_ref[0]
            if not broken:
                out_ref[0] = scratch[...]

        def use(scratch):
            if broken:
                out_ref[0] = scratch[...]  # fault

        out_ref[...] = x_ref[...]
        pl.run_scoped(fill, ROW)
        pl.run_scoped(use, ROW)

    return one_core(body)


@case("UninitialisedRead", "best", always=True)
def running_maximum_without_a_first_value(broken):
    def body(x_ref, out_ref, best):
        if not broken:
            best[...] = x_ref[0]

        @pl.loop(0, ROWS)
        def _row(row):
            best[...] = jnp.maximum(best[...], x_ref[row])  # fault

        out_ref[...] = jnp.broadcast_to(best[...], (ROWS, WIDTH))

    return one_core(body, ROW)


@case("UninitialisedRead", "halo", always=True)
def halo_beside_the_data_is_never_set(broken):
    def body(x_ref, out_ref, halo):
        halo[pl.ds(1, WIDTH)] = x_ref[0]
        halo[0] = 0
        if not broken:
            halo[WIDTH + 1] = 0
        left = halo[pl.ds(0, WIDTH)]
        right = halo[pl.ds(2, WIDTH)]  # fault
        out_ref[...] = jnp.broadcast_to(left + right, (ROWS, WIDTH))

    return one_core(body, cokernel.private((WIDTH + 2,), jnp.int32))


@case("UninitialisedRead", "table", always=True)
def each_core_has_a_table_but_one_fills_its_own(broken):
    def body(x_ref, out_ref, table):
        core = lax.axis_index("core")

        @pl.when((core == 0) | (not broken))
        def _fill():
            table[...] = x_ref[0] * 3

        out_ref[core] = table[...]  # fault

    kernel = cokernel.kernel(body, OUT, mesh=cokernel.CoreMesh(core=ROWS), scratch_types=[ROW])
    return lambda: kernel(X)


@case("UninitialisedRead", "kept", always=True, chip="tpu7x")
def lanes_behind_a_compressed_store(broken):
    def body(x_ref, out_ref, row, kept):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        pltpu.sync_copy(x_ref.at[0], row)
        if not broken:
            kept[...] = jnp.zeros((WIDTH,), jnp.int32)
        values = row[...]
        plsc.store_compressed(kept.at[...], values, mask=values % 2 == 0)
        row[...] = kept[...] + 1  # fault
        pltpu.sync_copy(row, out_ref.at[core, subcore])

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 16, WIDTH), jnp.int32),
        mesh=plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore"),
        scratch_types=[pltpu.VMEM((WIDTH,), jnp.int32), pltpu.VMEM((WIDTH,), jnp.int32)],
    )
    return lambda: kernel(X)


@case("UninitialisedRead", "acc", always=True, chip="tpu7x")
def matrix_product_added_to_an_accumulator_that_holds_anything(broken):
    def body(x_ref, out_ref, block, acc):
        pltpu.sync_copy(x_ref, block)
        if not broken:
            acc[...] = jnp.zeros((16, 16), jnp.float32)
        for _ in range(2):
            product = jnp.dot(block[...], block[...], preferred_element_type=jnp.float32)
            acc[...] += product  # fault
        pltpu.sync_copy(acc, out_ref)

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((16, 16), jnp.float32),
        mesh=pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1),
        scratch_types=[pltpu.VMEM((16, 16), jnp.float32), pltpu.VMEM((16, 16), jnp.float32)],
    )
    return lambda: kernel(jnp.eye(16))
