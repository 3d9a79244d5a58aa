"""Every core sends something to every other core."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

SUBCORES = 16


def place(core: jax.Array) -> dict[str, jax.Array]:
    """The coordinates of a vector subcore by its number among all of them."""
    return {"core": core // SUBCORES, "subcore": core % SUBCORES}


def test_32_vector_subcores_exchange_rows_by_dma_into_each_others_memory(v6e, compiler_params):
    lanes = plsc.get_sparse_core_info().num_lanes
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    num_cores = 2 * SUBCORES

    def exchange(x_ref, out_ref, outbox, inbox, ready, sent, received):
        me = lax.axis_index("core") * SUBCORES + lax.axis_index("subcore")

        def message(other):
            return pltpu.make_async_remote_copy(
                outbox.at[other], inbox.at[me], sent, received, device_id=place(other)
            )

        # Nobody may write into the memory of a core that has not begun.
        @pl.loop(0, num_cores)
        def _announce(other):
            pl.semaphore_signal(ready, 1, device_id=place(other))

        pltpu.sync_copy(x_ref.at[me], outbox)
        pl.semaphore_wait(ready, num_cores)

        @pl.loop(0, num_cores)
        def _send(step):
            message((me + step) % num_cores).start()

        @pl.loop(0, num_cores)
        def _wait(step):
            message(step).wait_send()
            message(step).wait_recv()

        pltpu.sync_copy(inbox, out_ref.at[me])

    kernel = cokernel.kernel(
        exchange,
        jax.ShapeDtypeStruct((num_cores, num_cores, lanes), jnp.int32),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((num_cores, lanes), jnp.int32),
            pltpu.VMEM((num_cores, lanes), jnp.int32),
            pltpu.SemaphoreType.REGULAR,
            pltpu.SemaphoreType.DMA,
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=compiler_params,
    )
    x = np.random.default_rng(0).integers(0, 1 << 30, (num_cores, num_cores, lanes), np.int32)
    np.testing.assert_array_equal(kernel(x), x.transpose(1, 0, 2))


def test_cores_count_the_signals_that_all_others_sent_them(compiler_params):
    rows, columns = 3, 5

    def count(out_ref, votes):
        row, column = lax.axis_index("row"), lax.axis_index("column")
        for other_row in range(rows):
            for other_column in range(columns):
                weight = 1 + (row * columns + column) * (other_row + 1)
                target = {"row": other_row, "column": other_column}
                pl.semaphore_signal(votes.at[other_column % 2], weight, device_id=target)
        # The cores' numbers are 0 to 14, so the expected sum is known in advance.
        total = rows * columns + sum(range(rows * columns)) * (row + 1)
        pl.semaphore_wait(votes.at[column % 2], total)
        out_ref[row, column] = total

    kernel = cokernel.kernel(
        count,
        jax.ShapeDtypeStruct((rows, columns), jnp.int32),
        mesh=cokernel.CoreMesh(row=rows, column=columns),
        scratch_types=[pltpu.SemaphoreType.REGULAR((2,))],
        compiler_params=compiler_params,
    )
    expected = 15 + 105 * np.arange(1, rows + 1)[:, None] * np.ones((1, columns), int)
    np.testing.assert_array_equal(kernel(), expected)
