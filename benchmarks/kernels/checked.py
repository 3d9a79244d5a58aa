"""Kernels whose number of accesses is chosen, to see what each access costs in checked mode."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels import LANES, SUBCORES, Make, subcore, vector_mesh

# How many elements a subcore has in its memory at a time.
WINDOW = 2560


def sweep(make: Make, windows: int, **options) -> Callable:
    """Computes x * 2 + 1, float32[windows * SUBCORES * WINDOW], sixteen lanes at a time, by all
    vector subcores, each of which has so many windows.
    """
    size = windows * SUBCORES * WINDOW

    def body(x_ref, out_ref, window_ref):
        @pl.loop(0, windows)
        def _window(number):
            part = pl.ds((subcore() * windows + number) * WINDOW, WINDOW)
            pltpu.sync_copy(x_ref.at[part], window_ref)

            @pl.loop(0, WINDOW, step=LANES)
            def _step(start):
                lanes = pl.ds(start, LANES)
                window_ref[lanes] = window_ref[lanes] * 2 + 1

            pltpu.sync_copy(window_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        mesh=vector_mesh(),
        scratch_types=[pltpu.VMEM((WINDOW,), jnp.float32)],
        name="sweep",
        **options,
    )


def tiles(make: Make, accesses: int, **options) -> Callable:
    """Computes x / 2 + 1 of float32[64, 128] over and over, a tile of 8 x 128 at a time, until one
    TensorCore has loaded and stored `accesses` tiles. JAX's interpreter runs it too.
    """
    tile_count = 8

    def body(x_ref, out_ref, block_ref):
        pltpu.sync_copy(x_ref, block_ref)

        @pl.loop(0, accesses // 2)
        def _tile(number):
            rows = pl.ds(number % tile_count * 8, 8)
            block_ref[rows] = block_ref[rows] * 0.5 + 1

        pltpu.sync_copy(block_ref, out_ref)

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((8 * tile_count, 128), jnp.float32),
        mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=1),
        scratch_types=[pltpu.VMEM((8 * tile_count, 128), jnp.float32)],
        name="tiles",
        **options,
    )
