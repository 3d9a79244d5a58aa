"""Kernels whose time goes into moving data."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from kernels import LANES, SUBCORES, Make, subcore, vector_mesh


def gather(make: Make, rows: int, width: int, window: int, **options) -> Callable:
    """Gathers table rows: (float32[n, width], int32[rows]) -> float32[rows, width].

    Each subcore takes its share of the rows in windows, through its own memory.
    """
    share = rows // SUBCORES

    def body(table_ref, indices_ref, out_ref, window_ref, rows_ref, semaphore):
        @pl.loop(0, share, step=window)
        def _window(offset):
            part = pl.ds(subcore() * share + offset, window)
            pltpu.sync_copy(indices_ref.at[part], window_ref)
            pltpu.async_copy(table_ref.at[window_ref], rows_ref, semaphore).wait()
            pltpu.sync_copy(rows_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.float32),
        mesh=vector_mesh(),
        scratch_types=[
            pltpu.VMEM((window,), jnp.int32),
            pltpu.VMEM((window, width), jnp.float32),
            pltpu.SemaphoreType.DMA,
        ],
        name="gather",
        **options,
    )


def affine(make: Make, size: int, window: int, **options) -> Callable:
    """Computes x * 2 + 1, float32[size] -> float32[size], in steps of sixteen lanes."""
    share = size // SUBCORES

    def body(x_ref, out_ref, in_ref, result_ref):
        @pl.loop(0, share, step=window)
        def _window(offset):
            part = pl.ds(subcore() * share + offset, window)
            pltpu.sync_copy(x_ref.at[part], in_ref)

            @pl.loop(0, window, step=LANES)
            def _step(start):
                lanes = pl.ds(start, LANES)
                result_ref[lanes] = in_ref[lanes] * 2 + 1

            pltpu.sync_copy(result_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        mesh=vector_mesh(),
        scratch_types=[pltpu.VMEM((window,), jnp.float32)] * 2,
        name="affine",
        **options,
    )


def copy(make: Make, rows: int, columns: int, tile: int, **options) -> Callable:
    """Copies float32[rows, columns] through the subcores' memory, `tile` rows at a time."""
    share = rows // SUBCORES

    def body(x_ref, out_ref, tile_ref):
        @pl.loop(0, share, step=tile)
        def _tile(offset):
            part = pl.ds(subcore() * share + offset, tile)
            pltpu.sync_copy(x_ref.at[part], tile_ref)
            pltpu.sync_copy(tile_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        mesh=vector_mesh(),
        scratch_types=[pltpu.VMEM((tile, columns), jnp.float32)],
        name="copy",
        **options,
    )


def scale(make: Make, rows: int, columns: int, tile: int, **options) -> Callable:
    """Computes x * 3, float32[rows, columns], on two TensorCores, by pipelines over `tile` rows."""

    def body(x_ref, out_ref):
        def step(x_tile, out_tile):
            out_tile[...] = x_tile[...] * 3

        pltpu.emit_pipeline(
            step,
            grid=(rows // tile,),
            in_specs=[pl.BlockSpec((tile, columns), lambda i: (i, 0))],
            out_specs=[pl.BlockSpec((tile, columns), lambda i: (i, 0))],
            core_axis_name="core",
            dimension_semantics=(pltpu.PARALLEL,),
        )(x_ref, out_ref)

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=2),
        name="scale",
        **options,
    )


def scatter_add(make: Make, size: int, table: int, window: int, **options) -> Callable:
    """Adds values at their places: (float32[size], int32[size]) -> float32[table].

    Each of two subcores adds its half of the values to a table in its own memory, and then its
    half of both tables to each other.
    """
    subcores = 2
    share, part = size // subcores, table // subcores

    def body(
        values_ref, indices_ref, out_ref,
        table_ref, value_window, index_window, mine_ref, other_ref, shared_ref,
    ):  # fmt: skip
        place = lax.axis_index("subcore")

        @plsc.parallel_loop(0, table, step=LANES)
        def _clear(start):
            table_ref[pl.ds(start, LANES)] = jnp.zeros(LANES, jnp.float32)

        @pl.loop(0, share, step=window)
        def _window(offset):
            where = pl.ds(place * share + offset, window)
            pltpu.sync_copy(values_ref.at[where], value_window)
            pltpu.sync_copy(indices_ref.at[where], index_window)

            @pl.loop(0, window, step=LANES)
            def _add(start):
                lanes = pl.ds(start, LANES)
                plsc.addupdate_scatter(table_ref, [index_window[lanes]], value_window[lanes])

        pltpu.sync_copy(table_ref.at[pl.ds((1 - place) * part, part)], shared_ref.at[place])
        plsc.subcore_barrier()
        pltpu.sync_copy(shared_ref.at[1 - place], other_ref)

        @plsc.parallel_loop(0, part, step=LANES)
        def _sum(start):
            lanes = pl.ds(start, LANES)
            mine_ref[lanes] = table_ref[pl.ds(place * part + start, LANES)] + other_ref[lanes]

        pltpu.sync_copy(mine_ref, out_ref.at[pl.ds(place * part, part)])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((table,), jnp.float32),
        mesh=plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=subcores
        ),
        scratch_types=[
            pltpu.VMEM((table,), jnp.float32),
            pltpu.VMEM((window,), jnp.float32),
            pltpu.VMEM((window,), jnp.int32),
            pltpu.VMEM((part,), jnp.float32),
            pltpu.VMEM((part,), jnp.float32),
            pltpu.VMEM_SHARED((subcores, part), jnp.float32),
        ],
        name="scatter_add",
        **options,
    )


def cumulative_sum(make: Make, size: int, **options) -> Callable:
    """The running sums of float32[size] on the sixteen subcores of one SparseCore.

    Each first sums up its piece and tells the others, and then starts from the sum of the pieces
    before its own.
    """
    subcores = 16
    share = size // subcores

    def body(x_ref, out_ref, piece_ref, total_ref, totals_ref, shared_ref):
        place = lax.axis_index("subcore")
        part = pl.ds(place * share, share)
        pltpu.sync_copy(x_ref.at[part], piece_ref)

        @plsc.parallel_loop(0, share, step=LANES, carry=jnp.zeros(LANES, jnp.float32))
        def lanes(start, carry):
            return carry + piece_ref[pl.ds(start, LANES)]

        total_ref[...] = jnp.full(LANES, jnp.sum(lanes))
        pltpu.sync_copy(total_ref, shared_ref.at[place])
        plsc.subcore_barrier()
        pltpu.sync_copy(shared_ref, totals_ref)
        before = lax.fori_loop(
            0, place, lambda i, sums: sums + totals_ref[i, :], jnp.zeros(LANES, jnp.float32)
        )

        @pl.loop(0, share, step=LANES, init_carry=before)
        def _step(start, carry):
            lanes = pl.ds(start, LANES)
            within = plsc.cumsum(piece_ref[lanes])
            piece_ref[lanes] = within + carry
            return carry + within[LANES - 1]

        pltpu.sync_copy(piece_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        mesh=plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=subcores
        ),
        scratch_types=[
            pltpu.VMEM((share,), jnp.float32),
            pltpu.VMEM((LANES,), jnp.float32),
            pltpu.VMEM((subcores, LANES), jnp.float32),
            pltpu.VMEM_SHARED((subcores, LANES), jnp.float32),
        ],
        name="cumulative_sum",
        **options,
    )


def scalar_cumulative_sum(make: Make, size: int, window: int, **options) -> Callable:
    """The running sums of float32[size], one after the other, on one scalar subcore."""

    def body(x_ref, out_ref, in_ref, sums_ref):
        @pl.loop(0, size, step=window, init_carry=jnp.float32(0))
        def _window(offset, before):
            pltpu.sync_copy(x_ref.at[pl.ds(offset, window)], in_ref)

            @pl.loop(0, window, init_carry=before)
            def _step(i, total):
                total += in_ref[i]
                sums_ref[i] = total
                return total

            pltpu.sync_copy(sums_ref, out_ref.at[pl.ds(offset, window)])
            return _step

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        mesh=plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1),
        scratch_types=[pltpu.SMEM((window,), jnp.float32)] * 2,
        name="scalar_cumulative_sum",
        **options,
    )


def sort(make: Make, size: int, **options) -> Callable:
    """Sorts float32[size] on one TensorCore."""

    def body(x_ref, out_ref, in_ref):
        pltpu.sync_copy(x_ref, in_ref)
        in_ref[...] = lax.sort(in_ref[...])
        pltpu.sync_copy(in_ref, out_ref)

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=1),
        scratch_types=[pltpu.VMEM((size,), jnp.float32)],
        name="sort",
        **options,
    )
