"""SparseCore and TensorCore of a TPU in one kernel: one gathers rows, the other multiplies them.

Sixteen vector subcores gather rows of a table into memory that both kinds of core reach, and signal
the TensorCore, which multiplies each piece by a matrix while the next is gathered. Here it runs on
a CPU. On a TPU it becomes two calls that overlap, which `cokernel aot` shows: name
examples/look_up_and_multiply.py:look_up_and_multiply, then 'float32[1000,128]' 'int32[512]'
'float32[128,128]' and --target v6e.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

ROWS, WIDTH, PIECE = 512, 128, 128
SHARE = PIECE // 16

with cokernel.target("v6e"):
    subcores = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=1
    )
tensor_core = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)


def gather(table_ref, rows_ref, weights_ref, out_ref, *, gathered, ready, mine, found, **_):
    """Gathers this subcore's share of each piece."""

    @pl.loop(0, ROWS, step=PIECE)
    def _piece(first):
        share = pl.ds(first + lax.axis_index("subcore") * SHARE, SHARE)
        pltpu.sync_copy(rows_ref.at[share], mine)
        pltpu.sync_copy(table_ref.at[mine], found)
        pltpu.sync_copy(found, gathered.at[share])
        # A TensorCore's semaphore may be signalled from a SparseCore, but not the other way round.
        pl.semaphore_signal(ready.at[first // PIECE], device_id={"tensor": 0})


def multiply(table_ref, rows_ref, weights_ref, out_ref, *, gathered, ready, block, weights, **_):
    """Multiplies each piece as soon as all subcores have gathered their share."""
    pltpu.sync_copy(weights_ref, weights)

    @pl.loop(0, ROWS, step=PIECE)
    def _piece(first):
        pl.semaphore_wait(ready.at[first // PIECE], 16)
        rows = pl.ds(pl.multiple_of(first, PIECE), PIECE)
        pltpu.sync_copy(gathered.at[rows], block)
        block[...] = jnp.dot(block[...], weights[...], preferred_element_type=jnp.float32)
        pltpu.sync_copy(block, out_ref.at[rows])


look_up_and_multiply = cokernel.mpmd_map(
    [(subcores, gather), (tensor_core, multiply)],
    jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
    scratch_types={
        "gathered": pltpu.HBM((ROWS, WIDTH), jnp.float32),
        "ready": pltpu.SemaphoreType.REGULAR((ROWS // PIECE,)) @ tensor_core,
        "mine": pltpu.VMEM((SHARE,), jnp.int32) @ subcores,
        "found": pltpu.VMEM((SHARE, WIDTH), jnp.float32) @ subcores,
        "block": pltpu.VMEM((PIECE, WIDTH), jnp.float32) @ tensor_core,
        "weights": pltpu.VMEM((WIDTH, WIDTH), jnp.float32) @ tensor_core,
    },
    name="look_up_and_multiply",
)

if __name__ == "__main__":
    random = np.random.default_rng(0)
    # Small integers, so that the order in which products are added does not show.
    table = random.integers(-4, 4, (1000, WIDTH)).astype(np.float32)
    weights = random.integers(-4, 4, (WIDTH, WIDTH)).astype(np.float32)
    rows = random.integers(0, 1000, ROWS, np.int32)
    result = look_up_and_multiply(table, rows, weights)
    np.testing.assert_array_equal(result, table[rows] @ weights)
    print(f"{ROWS} rows are looked up and multiplied")
