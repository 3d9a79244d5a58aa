"""Partial sums meet in pairs until one core has them all."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

WIDTH = 24


def tree_sum(x: np.ndarray) -> np.ndarray:
    """Adds rows in the order of the tree, so that float32 results are equal to the last bit."""
    x, distance = x.copy(), 1
    while distance < len(x):
        for row in range(0, len(x) - distance, 2 * distance):
            x[row] += x[row + distance]
        distance *= 2
    return x[0]


@pytest.mark.parametrize("num_cores", [1, 2, 13, 32])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32], ids=str)
def test_a_tree_of_cores_adds_rows(num_cores, dtype, compiler_params):
    steps = (num_cores - 1).bit_length()

    def add(x_ref, out_ref, total, inbox, sent, received):
        core = lax.axis_index("core")
        total[...] = x_ref[core]
        for step in range(steps):
            distance = 2**step
            is_sender = core % (2 * distance) == distance
            is_receiver = (core % (2 * distance) == 0) & (core + distance < num_cores)
            message = pltpu.make_async_remote_copy(
                total,
                inbox.at[step],
                sent,
                received.at[step],
                device_id={"core": core - distance},
            )

            @pl.when(is_sender)
            def _send(message=message):
                message.start()
                message.wait_send()

            @pl.when(is_receiver)
            def _add(message=message, step=step):
                message.wait_recv()
                total[...] += inbox[step]

        @pl.when(core == 0)
        def _root():
            out_ref[...] = total[...]

    kernel = cokernel.kernel(
        add,
        jax.ShapeDtypeStruct((WIDTH,), dtype),
        mesh=cokernel.CoreMesh(core=num_cores),
        scratch_types=[
            cokernel.private((WIDTH,), dtype),
            cokernel.private((max(steps, 1), WIDTH), dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((max(steps, 1),)),
        ],
        compiler_params=compiler_params,
    )
    x = (np.random.default_rng(0).standard_normal((num_cores, WIDTH)) * 1000).astype(dtype)
    np.testing.assert_array_equal(kernel(x), tree_sum(x))
