"""Kernels whose time goes into starting cores, and into waking one from another."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

from kernels import LANES, SUBCORES, Make, subcore, vector_mesh


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
        mesh=[vector_mesh(), plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)],
        name="empty",
        **options,
    )


def iterate(make: Make, steps: int, **options) -> Callable:
    """Iterates x -> 2.9 * x * (1 - x) `steps` times on float32[512], sixteen lanes a subcore."""

    def body(x_ref, out_ref, lanes_ref):
        part = pl.ds(subcore() * LANES, LANES)
        pltpu.sync_copy(x_ref.at[part], lanes_ref)
        lanes_ref[...] = lax.fori_loop(
            0, steps, lambda _, x: 2.9 * x * (1 - x), lanes_ref[...], unroll=4
        )
        pltpu.sync_copy(lanes_ref, out_ref.at[part])

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((SUBCORES * LANES,), jnp.float32),
        mesh=vector_mesh(),
        scratch_types=[pltpu.VMEM((LANES,), jnp.float32)],
        name="iterate",
        **options,
    )
