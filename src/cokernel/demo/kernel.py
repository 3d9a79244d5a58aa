"""The demo's kernel: three programs on three kinds of cores turn bags of words into similarities.

    scalar subcores   stage     copy each module's word ids from HBM into shared memory
    vector subcores   pool      gather the words' vectors from a table and add them up
    TensorCore        compare   normalise the sums and multiply them with each other, in blocks

Modules are handled in blocks of BLOCK, the blocks in turns by the two SparseCores. All three
programs run at the same time, each on what the one before it has ready, with two buffers between
any two of them. Semaphores say which buffer is full or empty and which block is ready.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

CORES, SUBCORES = 2, 16
LANES = 8
# Modules in a block; rows and columns of a tile of the similarity matrix.
BLOCK = 128
# Elements of a word's vector.
WIDTH = 128
# Ids that a vector subcore gathers at a time, and that all subcores of a SparseCore do.
WINDOW = 64
CHUNK = SUBCORES * WINDOW
# Module's ids begin at multiples of this, as DMAs from HBM do on the chip.
ALIGNMENT = 8
# Each subcore moves so many of a block's sums from shared memory to HBM.
SHARE = BLOCK // SUBCORES
# Smaller than the square of any vector's length but that of a module without words.
TINY = 1e-30


def make(num_modules: int, *, forgetful: bool = False, **options: Any) -> Callable:
    """Makes the kernel for `num_modules` modules, a multiple of BLOCK.

    The kernel takes (ids, bounds, table):
      ids: int32[n], the word ids of all modules one after the other, each module at a multiple of
        ALIGNMENT, with CHUNK more elements behind the last.
      bounds: int32[num_modules, LANES], whose first two columns are the start and number of a
        module's ids; the rest is padding to a vector register.
      table: float32[words, WIDTH], the words' vectors.

    It returns:
      sums: float32[num_modules, WIDTH], the sum of the vectors of each module's words.
      tiles: float32[blocks * (blocks + 1) / 2, BLOCK, BLOCK], the lower triangle of the matrix of
        cosine similarities, block row by block row.

    Args:
      num_modules: how many modules there are, padding included.
      forgetful: makes a broken copy, in which one subcore forgets a signal.
      **options: passed on to `cokernel.mpmd_map`.
    """
    num_blocks = num_modules // BLOCK
    num_tiles = num_blocks * (num_blocks + 1) // 2
    scalar_cores = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=CORES)
    vector_cores = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=CORES, num_subcores=SUBCORES
    )
    tensor_core = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)

    def stage(
        ids_ref, bounds_ref, table_ref, sums_ref, tiles_ref, *, staged, full, empty, limits, **_
    ):
        core = lax.axis_index("core")
        pltpu.sync_copy(bounds_ref, limits)

        def stage_chunk(start, turn):
            slot = turn % 2

            @pl.when(turn >= 2)
            def _wait_until_all_subcores_have_read_it():
                pl.semaphore_wait(empty.at[slot], SUBCORES)

            start = pl.multiple_of(start, ALIGNMENT)
            pltpu.sync_copy(ids_ref.at[pl.ds(start, CHUNK)], staged.at[slot])

            @pl.loop(0, SUBCORES)
            def _announce(subcore):
                there = {"core": core, "subcore": subcore}
                pl.semaphore_signal(full.at[slot], 1, device_id=there)

        def stage_module(module, turn):
            start, chunks = limits[module, 0], pl.cdiv(limits[module, 1], CHUNK)

            @pl.loop(0, chunks)
            def _chunk(chunk):
                stage_chunk(start + chunk * CHUNK, turn + chunk)

            return turn + chunks

        @pl.loop(core, num_blocks, step=CORES, init_carry=jnp.int32(0))
        def turns(block, turn):
            first = block * BLOCK
            return lax.fori_loop(first, first + BLOCK, stage_module, turn)

        @pl.loop(jnp.maximum(turns - 2, 0), turns)
        def _wait_for_the_last(turn):
            pl.semaphore_wait(empty.at[turn % 2], SUBCORES)

    def pool(
        ids_ref, bounds_ref, table_ref, sums_ref, tiles_ref,
        *, staged, full, empty, bounds, ids, rows, gathered, sums, order, meeting, added, ready,
        **_,
    ):  # fmt: skip
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        lane = lax.iota(jnp.int32, LANES)
        parts = [pl.ds(start, LANES) for start in range(0, WIDTH, LANES)]
        pltpu.sync_copy(bounds_ref, bounds)

        @pl.loop(0, BLOCK, step=LANES)
        def _number_rows(start):
            order[pl.ds(start, LANES)] = start + lane

        def gather(turn):
            # Ids below zero are passed over: they stand behind the end of a module.
            words = plsc.Indices(ids.at[turn % 2], ignored_value=-1)
            return pltpu.make_async_copy(
                table_ref.at[words], rows.at[turn % 2], gathered.at[turn % 2]
            )

        def accumulate(turn, row, count):
            """Adds what the gather of a turn brings to the sum of a module of this block."""
            gather(turn).wait()

            def add(number, totals):
                row_parts = (rows[turn % 2, number, part] for part in parts)
                return [x + y for x, y in zip(totals, row_parts, strict=True)]

            totals = lax.fori_loop(0, count, add, [sums[row, part] for part in parts])
            for part, total in zip(parts, totals, strict=True):
                sums[row, part] = total

        def pool_module(module, state):
            limits = bounds[module]
            size = limits[1]
            # Most modules have fewer ids than a chunk holds, so not always the first ones work.
            position = (subcore + module) % SUBCORES

            def pool_chunk(chunk, state):
                chunk_turn, turn, row, count = state
                slot = chunk_turn % 2
                mine = jnp.clip(size - chunk * CHUNK - position * WINDOW, 0, WINDOW)
                pl.semaphore_wait(full.at[slot], 1)

                @pl.when(mine > 0)
                def _take_ids():
                    window = pl.ds(position * WINDOW, WINDOW)
                    pltpu.sync_copy(staged.at[slot, window], ids.at[turn % 2])

                @pl.when(subcore != 5 if forgetful else True)
                def _give_back():
                    pl.semaphore_signal(empty.at[slot], 1, device_id={"core": core})

                @pl.when(mine > 0)
                def _gather_these_and_add_those_before():
                    for start in range(0, WINDOW, LANES):
                        part = pl.ds(start, LANES)
                        word = ids[turn % 2, part]
                        ids[turn % 2, part] = jnp.where(start + lane < mine, word, -1)
                    gather(turn).start()

                    @pl.when(count > 0)
                    def _add():
                        accumulate(turn - 1, row, count)

                has_some = mine > 0
                return (
                    chunk_turn + 1,
                    jnp.where(has_some, turn + 1, turn),
                    jnp.where(has_some, module % BLOCK, row),
                    jnp.where(has_some, mine, count),
                )

            return lax.fori_loop(0, pl.cdiv(size, CHUNK), pool_chunk, state)

        @pl.loop(core, num_blocks, step=CORES, init_carry=(jnp.int32(0), jnp.int32(0)))
        def _block(block, turns):
            @pl.loop(0, BLOCK)
            def _clear(row):
                for part in parts:
                    sums[row, part] = jnp.zeros((LANES,), jnp.float32)

            share = pl.ds(subcore * SHARE, SHARE)
            pltpu.sync_copy(sums.at[pl.ds(0, SHARE)], meeting.at[share])

            first = block * BLOCK
            nothing = jnp.int32(0)
            chunk_turn, turn, row, count = lax.fori_loop(
                first, first + BLOCK, pool_module, (*turns, nothing, nothing)
            )

            @pl.when(count > 0)
            def _add_the_last():
                accumulate(turn - 1, row, count)

            # Every subcore has a part of each sum. They meet in shared memory.
            plsc.subcore_barrier()
            pltpu.async_copy(sums, meeting.at[order], added, add=True).wait()
            plsc.subcore_barrier()
            pltpu.sync_copy(meeting.at[share], sums_ref.at[pl.ds(first + subcore * SHARE, SHARE)])
            pl.semaphore_signal(ready.at[core], 1, device_id={"tensor": 0})
            return chunk_turn, turn

    def compare(
        ids_ref, bounds_ref, table_ref, sums_ref, tiles_ref,
        *, ready, raw, loaded, units, products, stored, **_,
    ):  # fmt: skip
        def load(block):
            return pltpu.make_async_copy(
                sums_ref.at[pl.ds(block * BLOCK, BLOCK)], raw.at[block % 2], loaded.at[block % 2]
            )

        def store(tile):
            return pltpu.make_async_copy(
                products.at[tile % 2], tiles_ref.at[tile], stored.at[tile % 2]
            )

        def multiply(block):
            load(block).wait()
            x = raw[block % 2]
            squares = jnp.sum(x * x, axis=1, keepdims=True)
            unit = x * lax.rsqrt(jnp.maximum(squares, TINY))
            units[block] = unit

            @pl.loop(0, block + 1)
            def _tile(other):
                tile = block * (block + 1) // 2 + other

                @pl.when(tile >= 2)
                def _wait():
                    store(tile - 2).wait()

                products[tile % 2] = lax.dot_general(
                    units[block],
                    units[other],
                    (((1,), (1,)), ((), ())),
                    preferred_element_type=jnp.float32,
                )
                store(tile).start()

        # The next block is on its way while one is multiplied.
        @pl.loop(0, num_blocks + 1)
        def _block(block):
            @pl.when(block < num_blocks)
            def _load():
                pl.semaphore_wait(ready.at[block % CORES], SUBCORES)
                load(block).start()

            @pl.when(block > 0)
            def _multiply():
                multiply(block - 1)

        for tile in range(max(num_tiles - 2, 0), num_tiles):
            store(tile).wait()

    f32, i32 = jnp.float32, jnp.int32
    semaphore, dma_semaphore = pltpu.SemaphoreType.REGULAR, pltpu.SemaphoreType.DMA
    return cokernel.mpmd_map(
        [(scalar_cores, stage), (vector_cores, pool), (tensor_core, compare)],
        [
            jax.ShapeDtypeStruct((num_modules, WIDTH), f32),
            jax.ShapeDtypeStruct((num_tiles, BLOCK, BLOCK), f32),
        ],
        scratch_types={
            # Shared by the scalar and the vector subcores of a SparseCore.
            "staged": pltpu.VMEM_SHARED((2, CHUNK), i32),
            "meeting": pltpu.VMEM_SHARED((BLOCK, WIDTH), f32),
            # Each scalar subcore's own.
            "limits": pltpu.SMEM((num_modules, LANES), i32) @ scalar_cores,
            "empty": semaphore((2,)) @ scalar_cores,
            # Each vector subcore's own.
            "full": semaphore((2,)) @ vector_cores,
            "bounds": pltpu.VMEM((num_modules, LANES), i32) @ vector_cores,
            "ids": pltpu.VMEM((2, WINDOW), i32) @ vector_cores,
            "rows": pltpu.VMEM((2, WINDOW, WIDTH), f32) @ vector_cores,
            "gathered": dma_semaphore((2,)) @ vector_cores,
            "sums": pltpu.VMEM((BLOCK, WIDTH), f32) @ vector_cores,
            "order": pltpu.VMEM((BLOCK,), i32) @ vector_cores,
            "added": dma_semaphore @ vector_cores,
            # The TensorCore's own.
            "ready": semaphore((CORES,)) @ tensor_core,
            "raw": pltpu.VMEM((2, BLOCK, WIDTH), f32) @ tensor_core,
            "loaded": dma_semaphore((2,)) @ tensor_core,
            "units": pltpu.VMEM((num_blocks, BLOCK, WIDTH), f32) @ tensor_core,
            "products": pltpu.VMEM((2, BLOCK, BLOCK), f32) @ tensor_core,
            "stored": dma_semaphore((2,)) @ tensor_core,
        },
        **options,
    )


def reference(
    ids: jax.Array, owners: jax.Array, table: jax.Array, num_modules: int
) -> tuple[jax.Array, jax.Array]:
    """Computes the same in plain jax.numpy.

    Args:
      ids: int32[n], as for the kernel.
      owners: int32[n], the module of each id; `num_modules` for padding.
      table: float32[words, WIDTH].
      num_modules: how many modules there are.

    Returns:
      sums: float32[num_modules, WIDTH].
      similarities: float32[num_modules, num_modules].
    """
    sums = jax.ops.segment_sum(table[ids], owners, num_segments=num_modules)
    squares = jnp.sum(sums * sums, axis=1, keepdims=True)
    units = sums * lax.rsqrt(jnp.maximum(squares, TINY))
    return sums, units @ units.T
