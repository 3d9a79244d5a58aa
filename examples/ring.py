"""A producer and a consumer with a ring of buffers between them.

The producer may be ahead by as many items as the ring has buffers. Two arrays of semaphores, one
semaphore for each buffer, say which buffers are full and which are empty.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

ITEMS, DEPTH, SIZE = 100, 3, 16

producers = cokernel.CoreMesh(producer=1)
consumers = cokernel.CoreMesh(consumer=1)


def produce(x_ref, out_ref, ring, full, empty, total):
    """Puts the square of each item into the ring."""

    @pl.loop(0, ITEMS)
    def _item(item):
        slot = item % DEPTH

        @pl.when(item >= DEPTH)
        def _wait_until_it_was_read():
            pl.semaphore_wait(empty.at[slot])

        ring[slot] = x_ref[item] ** 2
        pl.semaphore_signal(full.at[slot], device_id={"consumer": 0})

    # Wait for the last signals too: a semaphore that is not zero at the end is a mistake.
    for item in range(ITEMS - DEPTH, ITEMS):
        pl.semaphore_wait(empty.at[item % DEPTH])


def consume(x_ref, out_ref, ring, full, empty, total):
    """Adds up what comes out of the ring."""
    total[...] = jnp.zeros_like(total)

    @pl.loop(0, ITEMS)
    def _item(item):
        slot = item % DEPTH
        pl.semaphore_wait(full.at[slot])
        total[...] += ring[slot]
        pl.semaphore_signal(empty.at[slot], device_id={"producer": 0})

    out_ref[...] = total[...]


sum_of_squares = cokernel.mpmd_map(
    [(producers, produce), (consumers, consume)],
    jax.ShapeDtypeStruct((SIZE,), jnp.float32),
    # `@ mesh` says whose memory it is: here each side owns the semaphores it waits for. What lies
    # in HBM belongs to all programs.
    scratch_types=[
        pltpu.HBM((DEPTH, SIZE), jnp.float32),
        pltpu.SemaphoreType.REGULAR((DEPTH,)) @ consumers,
        pltpu.SemaphoreType.REGULAR((DEPTH,)) @ producers,
        cokernel.private((SIZE,), jnp.float32) @ consumers,
    ],
)

if __name__ == "__main__":
    x = np.random.default_rng(0).standard_normal((ITEMS, SIZE), np.float32)
    result = sum_of_squares(x)
    print(result)
    np.testing.assert_allclose(result, (x**2).sum(0), rtol=1e-5)
