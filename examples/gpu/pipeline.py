"""A pipeline of three programs on an NVIDIA GPU: load, compute, store.

Each program is one warpgroup. Pieces pass from one to the next through rings in shared memory, so
that three pieces are under way at any time. Here JAX's interpreter runs it on a CPU and looks for
races; `cokernel aot examples/gpu/pipeline.py:softplus 'float32[6,256]' --target h100` compiles it
for the chip.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import cokernel

PIECES, LENGTH, SLOTS = 6, 256, 2

loader = plgpu.Mesh(num_threads=1, thread_name="loader")
worker = plgpu.Mesh(num_threads=1, thread_name="worker")
storer = plgpu.Mesh(num_threads=1, thread_name="storer")


def wait_for_room(piece, empty):
    """Waits until a slot has been emptied that was filled before."""

    @pl.when(piece >= SLOTS)
    def _wait():
        plgpu.barrier_wait(empty.at[piece % SLOTS])


def load(x_ref, out_ref, inputs, results, loaded, taken, computed, stored):
    """Copies each piece to shared memory."""

    @pl.loop(0, PIECES)
    def _piece(piece):
        slot = piece % SLOTS
        wait_for_room(piece, taken)
        plgpu.copy_gmem_to_smem(x_ref.at[piece], inputs.at[slot], loaded.at[slot])


def compute(x_ref, out_ref, inputs, results, loaded, taken, computed, stored):
    """Takes the softplus of each piece, from one ring to the other."""

    @pl.loop(0, PIECES)
    def _piece(piece):
        slot = piece % SLOTS
        plgpu.barrier_wait(loaded.at[slot])
        x = inputs[slot]
        wait_for_room(piece, stored)
        results[slot] = jnp.maximum(x, 0) + jnp.log(1 + jnp.exp(-jnp.abs(x)))
        # What follows is seen by the copies, which are not this program's own.
        plgpu.commit_smem()
        plgpu.barrier_arrive(taken.at[slot])
        plgpu.barrier_arrive(computed.at[slot])


def store(x_ref, out_ref, inputs, results, loaded, taken, computed, stored):
    """Copies each result from shared memory."""

    @pl.loop(0, PIECES)
    def _piece(piece):
        slot = piece % SLOTS
        plgpu.barrier_wait(computed.at[slot])
        plgpu.copy_smem_to_gmem(results.at[slot], out_ref.at[piece])
        plgpu.wait_smem_to_gmem(0)
        plgpu.barrier_arrive(stored.at[slot])


ring = plgpu.SMEM((SLOTS, LENGTH), jnp.float32)
softplus = cokernel.mpmd_map(
    [(loader, load), (worker, compute), (storer, store)],
    jax.ShapeDtypeStruct((PIECES, LENGTH), jnp.float32),
    scratch_types=[ring, ring, *[plgpu.Barrier(num_barriers=SLOTS)] * 4],
    interpret=plgpu.InterpretGPUParams(detect_races=True),
)

if __name__ == "__main__":
    x = np.random.default_rng(0).standard_normal((PIECES, LENGTH), np.float32)
    np.testing.assert_allclose(softplus(x), np.logaddexp(x, 0), rtol=1e-5)
    print(f"{PIECES} pieces passed through three programs, and there was no race")
