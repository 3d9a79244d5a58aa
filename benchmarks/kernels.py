"""The kernels that are measured, in the plain language of Pallas.

Each function builds one kernel with `make`, which is `cokernel.kernel`, or `pl.kernel` to run the
same kernel under JAX's interpret modes. They are meant for a chip with two SparseCores of sixteen
vector subcores each, so call them inside `cokernel.target("v6e")`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

SUBCORES = 32
LANES = 16
Make = Callable[..., Callable]


def _vector_mesh() -> plsc.VectorSubcoreMesh:
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=2, num_subcores=16
    )


def _subcore() -> jax.Array:
    """Returns the number of the calling vector subcore among all of them."""
    return lax.axis_index("core") * 16 + lax.axis_index("subcore")


def round_trips(make: Make, rounds: int, **options) -> Callable:
    """Two scalar subcores send a semaphore back and forth; returns int32[2], `rounds` twice."""

    def body(out_ref, count_ref, semaphore):
        me = lax.axis_index("core")
        count_ref[0] = 0

        @pl.when(me == 0)
        def _serve():
            @pl.loop(0, rounds)
            def _round(_):
                pl.semaphore_signal(semaphore, 1, device_id={"core": 1})
                pl.semaphore_wait(semaphore, 1)
                count_ref[0] += 1

        @pl.when(me == 1)
        def _return():
            @pl.loop(0, rounds)
            def _round(_):
                pl.semaphore_wait(semaphore, 1)
                count_ref[0] += 1
                pl.semaphore_signal(semaphore, 1, device_id={"core": 0})

        pltpu.sync_copy(count_ref, out_ref.at[pl.ds(me, 1)])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((2,), jnp.int32),
        mesh=plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2),
        scratch_types=[pltpu.SMEM((1,), jnp.int32), pltpu.SemaphoreType.REGULAR],
        name="round_trips",
        **options,
    )


def empty(make: Make, **options) -> Callable:
    """Does nothing on 34 cores: int32[8] -> int32[8], whose contents mean nothing."""

    def body(x_ref, out_ref):
        del x_ref, out_ref

    return make(
        [body, body],
        out_type=jax.ShapeDtypeStruct((8,), jnp.int32),
        mesh=[_vector_mesh(), plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)],
        name="empty",
        **options,
    )


def gather(make: Make, rows: int, width: int, window: int, **options) -> Callable:
    """Gathers table rows: (float32[n, width], int32[rows]) -> float32[rows, width].

    Each subcore takes its share of the rows in windows, through its own memory.
    """
    share = rows // SUBCORES

    def body(table_ref, indices_ref, out_ref, window_ref, rows_ref, semaphore):
        @pl.loop(0, share, step=window)
        def _window(offset):
            part = pl.ds(_subcore() * share + offset, window)
            pltpu.sync_copy(indices_ref.at[part], window_ref)
            pltpu.async_copy(table_ref.at[window_ref], rows_ref, semaphore).wait()
            pltpu.sync_copy(rows_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((rows, width), jnp.float32),
        mesh=_vector_mesh(),
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
            part = pl.ds(_subcore() * share + offset, window)
            pltpu.sync_copy(x_ref.at[part], in_ref)

            @pl.loop(0, window, step=LANES)
            def _step(start):
                lanes = pl.ds(start, LANES)
                result_ref[lanes] = in_ref[lanes] * 2 + 1

            pltpu.sync_copy(result_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((size,), jnp.float32),
        mesh=_vector_mesh(),
        scratch_types=[pltpu.VMEM((window,), jnp.float32)] * 2,
        name="affine",
        **options,
    )


def iterate(make: Make, steps: int, **options) -> Callable:
    """Iterates x -> 2.9 * x * (1 - x) `steps` times on float32[512], sixteen lanes a subcore."""

    def body(x_ref, out_ref, lanes_ref):
        part = pl.ds(_subcore() * LANES, LANES)
        pltpu.sync_copy(x_ref.at[part], lanes_ref)
        lanes_ref[...] = lax.fori_loop(
            0, steps, lambda _, x: 2.9 * x * (1 - x), lanes_ref[...], unroll=4
        )
        pltpu.sync_copy(lanes_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((SUBCORES * LANES,), jnp.float32),
        mesh=_vector_mesh(),
        scratch_types=[pltpu.VMEM((LANES,), jnp.float32)],
        name="iterate",
        **options,
    )
