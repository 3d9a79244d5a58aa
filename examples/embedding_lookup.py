"""An embedding lookup on the 32 vector subcores of a TPU that need not be there.

Each subcore takes its share of the indices, in windows, through its own memory. Two windows are
under way at any time: while one is written out, the rows of the next are gathered.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

ROWS, WIDTH, WINDOW = 8192, 128, 64
SHARE = ROWS // 32
WINDOWS = SHARE // WINDOW


def look_up(table_ref, indices_ref, out_ref, indices, rows, gathered, written):
    """Copies the table's rows that the indices name to the output."""
    first = (lax.axis_index("core") * 16 + lax.axis_index("subcore")) * SHARE
    pltpu.sync_copy(indices_ref.at[pl.ds(first, SHARE)], indices)

    def gather(window):
        # A Ref as an index: the DMA engine reads the row numbers from it.
        chosen = table_ref.at[indices.at[pl.ds(window * WINDOW, WINDOW)]]
        return pltpu.make_async_copy(chosen, rows.at[window % 2], gathered.at[window % 2])

    def write(window):
        target = out_ref.at[pl.ds(first + window * WINDOW, WINDOW)]
        return pltpu.make_async_copy(rows.at[window % 2], target, written.at[window % 2])

    gather(0).start()
    for window in range(WINDOWS):
        if window + 1 < WINDOWS:
            if window >= 1:
                write(window - 1).wait()  # The buffer that the next gather fills.
            gather(window + 1).start()
        gather(window).wait()
        write(window).start()
    for window in range(max(WINDOWS - 2, 0), WINDOWS):
        write(window).wait()


with cokernel.target("v6e"):
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lookup = cokernel.kernel(
        look_up,
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((SHARE,), jnp.int32),
            pltpu.VMEM((2, WINDOW, WIDTH), jnp.float32),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )

if __name__ == "__main__":
    random = np.random.default_rng(0)
    table = random.standard_normal((1000, WIDTH), np.float32)
    indices = random.integers(0, 1000, ROWS, np.int32)
    result = lookup(table, indices)
    np.testing.assert_array_equal(result, table[indices])
    print(f"{ROWS} rows are where they should be")
    for program in cokernel.last_launch().programs:
        print(f"{program.cores} cores moved {program.dma_bytes} bytes in {program.dma_count} DMAs")
