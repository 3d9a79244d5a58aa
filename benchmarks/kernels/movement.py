"""Kernels whose time goes into moving data."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

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
