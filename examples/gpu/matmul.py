"""A matrix product on an NVIDIA Hopper GPU by two programs: one fetches, one multiplies.

The producer is one warpgroup and copies tiles from global to shared memory. The consumer is two
warpgroups, each of which multiplies half of the rows on the tensor cores. A ring of shared memory
lets the producer be ahead. Here JAX's interpreter runs it on a CPU and looks for races;
`cokernel aot examples/gpu/matmul.py:multiply 'float16[256,256]' 'float16[256,256]' --target h100`
compiles it for the chip.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cokernel

SIZE, ROWS, COLUMNS, DEPTH, STAGES = 256, 128, 128, 64, 2
STEPS = SIZE // DEPTH

grid = {"grid": (SIZE // ROWS, SIZE // COLUMNS), "grid_names": ("row", "column")}
producers = plgpu.Mesh(**grid, num_threads=1, thread_name="producer")
consumers = plgpu.Mesh(**grid, num_threads=2, thread_name="consumer")


def fetch(a_ref, b_ref, out_ref, a_ring, b_ring, out_tile, full, empty):
    """Copies the tiles that a block needs, as soon as there is room."""
    rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)
    columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)

    @pl.loop(0, STEPS)
    def _step(step):
        slot, depth = step % STAGES, pl.ds(step * DEPTH, DEPTH)

        @pl.when(step >= STAGES)
        def _wait_for_room():
            plgpu.barrier_wait(empty.at[slot])

        plgpu.copy_gmem_to_smem(a_ref.at[rows, depth], a_ring.at[slot], full.at[slot])
        plgpu.copy_gmem_to_smem(b_ref.at[depth, columns], b_ring.at[slot], full.at[slot])


def multiply_tiles(a_ref, b_ref, out_ref, a_ring, b_ring, out_tile, full, empty):
    """Multiplies half of a block's rows, tile by tile."""
    half = pl.ds(lax.axis_index("consumer") * (ROWS // 2), ROWS // 2)

    def accumulate(sums):
        @pl.loop(0, STEPS)
        def _step(step):
            slot = step % STAGES
            plgpu.barrier_wait(full.at[slot])
            plgpu.wgmma(sums, a_ring.at[slot, half], b_ring.at[slot])
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(empty.at[slot])

        return sums[...]

    sums = pl.run_scoped(accumulate, plgpu.ACC((ROWS // 2, COLUMNS), jnp.float32))
    out_tile[half] = sums.astype(jnp.float16)
    plgpu.commit_smem()
    first = lax.axis_index("row") * ROWS + lax.axis_index("consumer") * (ROWS // 2)
    columns = pl.ds(lax.axis_index("column") * COLUMNS, COLUMNS)
    plgpu.copy_smem_to_gmem(out_tile.at[half], out_ref.at[pl.ds(first, ROWS // 2), columns])
    plgpu.wait_smem_to_gmem(0)


tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
multiply = cokernel.mpmd_map(
    [(producers, fetch), (consumers, multiply_tiles)],
    jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float16),
    scratch_types=[
        plgpu.SMEM((STAGES, ROWS, DEPTH), jnp.float16, transforms=tiled),
        plgpu.SMEM((STAGES, DEPTH, COLUMNS), jnp.float16, transforms=tiled),
        plgpu.SMEM((ROWS, COLUMNS), jnp.float16, transforms=tiled),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
        plgpu.Barrier(num_arrivals=2, num_barriers=STAGES),
    ],
    interpret=plgpu.InterpretGPUParams(detect_races=True),
)

if __name__ == "__main__":
    random = np.random.default_rng(0)
    a, b = (random.integers(-4, 4, (SIZE, SIZE)).astype(np.float16) for _ in range(2))
    np.testing.assert_array_equal(multiply(a, b), (a.astype(np.float32) @ b).astype(np.float16))
    print(f"two {SIZE}x{SIZE} matrices are multiplied, and there was no race")
