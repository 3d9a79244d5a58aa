"""A sort over all cores by odd-even exchange: neighbours merge, one keeps the lower half."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

SIZE = 16


def exchange(x: jax.Array, distance: int, keeps_low: jax.Array) -> jax.Array:
    """Orders the pairs that lie `distance` apart, each as `keeps_low` says for its group."""
    pairs = x.reshape(-1, 2, distance)
    low = jnp.minimum(pairs[:, 0], pairs[:, 1])
    high = jnp.maximum(pairs[:, 0], pairs[:, 1])
    first = jnp.where(keeps_low, low, high)
    second = jnp.where(keeps_low, high, low)
    return jnp.stack([first, second], axis=1).reshape(SIZE)


def merge(x: jax.Array) -> jax.Array:
    """Sorts a bitonic sequence."""
    distance = SIZE // 2
    while distance:
        x = exchange(x, distance, True)
        distance //= 2
    return x


def sort(x: jax.Array) -> jax.Array:
    """Sorts by a bitonic network."""
    length = 2
    while length <= SIZE:
        distance = length // 2
        while distance:
            group = lax.broadcasted_iota(jnp.int32, (SIZE // (2 * distance), 1), 0)
            x = exchange(x, distance, group * 2 * distance // length % 2 == 0)
            distance //= 2
        length *= 2
    return x


@pytest.mark.parametrize("num_cores", [1, 2, 7, 16])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32], ids=str)
def test_odd_even_exchange_between_cores_sorts(num_cores, dtype, compiler_params):
    def sort_blocks(x_ref, out_ref, block, inbox, sent, received, read):
        core = lax.axis_index("core")
        block[...] = sort(x_ref[core])

        @pl.loop(0, num_cores)
        def _phase(phase):
            is_left = core % 2 == phase % 2
            partner = jnp.where(is_left, core + 1, core - 1)
            slot = phase % 2

            @pl.when((partner >= 0) & (partner < num_cores))
            def _exchange():
                message = pltpu.make_async_remote_copy(
                    block, inbox.at[slot], sent, received.at[slot], device_id={"core": partner}
                )
                message.start()
                message.wait()
                # The smaller of each pair, one sequence reversed, are the lower half of both.
                other = lax.rev(inbox[slot], (0,))
                mine = block[...]
                low, high = jnp.minimum(mine, other), jnp.maximum(mine, other)
                block[...] = merge(jnp.where(is_left, low, high))
                # Nobody sends to this slot again before its owner has read it.
                pl.semaphore_signal(read, 1, device_id={"core": partner})
                pl.semaphore_wait(read, 1)

        out_ref[core] = block[...]

    kernel = cokernel.kernel(
        sort_blocks,
        jax.ShapeDtypeStruct((num_cores, SIZE), dtype),
        mesh=cokernel.CoreMesh(core=num_cores),
        scratch_types=[
            cokernel.private((SIZE,), dtype),
            cokernel.private((2, SIZE), dtype),
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.REGULAR,
        ],
        compiler_params=compiler_params,
    )
    random = np.random.default_rng(num_cores)
    x = random.integers(-50, 50, (num_cores, SIZE)).astype(dtype)
    np.testing.assert_array_equal(kernel(x), np.sort(x, axis=None).reshape(x.shape))
