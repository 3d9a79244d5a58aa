"""Barriers: the subcores' own, one made of semaphores, and the barrier semaphore.

Each test lets cores write, meet, and read what others wrote, in several rounds: a core that passed
too early would read an old value, and one that ran ahead would overwrite what others still need.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

ROUNDS = 5


def test_subcores_of_each_sparse_core_meet_at_their_barrier(v6e, compiler_params):
    lanes = plsc.get_sparse_core_info().num_lanes
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def pass_on(x_ref, out_ref, board, value):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        pltpu.sync_copy(x_ref.at[core, subcore], value)

        @pl.loop(0, ROUNDS)
        def _round(_):
            pltpu.sync_copy(value, board.at[subcore])
            plsc.subcore_barrier()
            pltpu.sync_copy(board.at[(subcore + 3) % 16], value)
            value[...] = value[...] * 2 + core
            plsc.subcore_barrier()

        pltpu.sync_copy(value, out_ref.at[core, subcore])

    kernel = cokernel.kernel(
        pass_on,
        jax.ShapeDtypeStruct((2, 16, lanes), jnp.int32),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM_SHARED((16, lanes), jnp.int32),
            pltpu.VMEM((lanes,), jnp.int32),
        ],
        compiler_params=compiler_params,
    )
    x = np.random.default_rng(0).integers(-9, 9, (2, 16, lanes), np.int32)
    expected = x
    for _ in range(ROUNDS):
        expected = np.roll(expected, -3, axis=1) * 2 + np.arange(2, dtype=np.int32)[:, None, None]
    np.testing.assert_array_equal(kernel(x), expected)


@pytest.mark.parametrize("num_cores", [1, 2, 13])
def test_a_dissemination_barrier_made_of_semaphores(num_cores, compiler_params):
    num_steps = (num_cores - 1).bit_length()

    def meet(arrived, core):
        # In step k everyone hears from the core 2^k before it, and so of 2^(k+1) cores. Each
        # semaphore has one sender, so a core that is a round ahead confuses nobody.
        for step in range(num_steps):
            reached = (core + 2**step) % num_cores
            pl.semaphore_signal(arrived.at[step], 1, device_id={"core": reached})
            pl.semaphore_wait(arrived.at[step], 1)

    def add_neighbours(x_ref, out_ref, board, arrived):
        core = lax.axis_index("core")
        out_ref[core] = x_ref[core]

        @pl.loop(0, ROUNDS)
        def _round(_):
            board[core] = out_ref[core]
            meet(arrived, core)
            out_ref[core] = board[(core + 1) % num_cores] + 2 * board[(core + 5) % num_cores]
            meet(arrived, core)

    kernel = cokernel.kernel(
        add_neighbours,
        jax.ShapeDtypeStruct((num_cores,), jnp.int32),
        mesh=cokernel.CoreMesh(core=num_cores),
        scratch_types=[
            cokernel.shared((num_cores,), jnp.int32),
            pltpu.SemaphoreType.REGULAR((max(num_steps, 1),)),
        ],
        compiler_params=compiler_params,
    )
    x = np.arange(num_cores, dtype=np.int32) ** 2
    expected = x
    for _ in range(ROUNDS):
        expected = np.roll(expected, -1) + 2 * np.roll(expected, -5)
    np.testing.assert_array_equal(kernel(x), expected)


def test_the_barrier_semaphore_of_each_core_is_signalled_by_its_neighbours(compiler_params):
    num_cores = 6
    params = compiler_params.replace(collective_id=7)

    def neighbours(x_ref, out_ref, board):
        core = lax.axis_index("core")
        barrier = pltpu.get_barrier_semaphore()
        before, after = (core - 1) % num_cores, (core + 1) % num_cores
        board[core] = x_ref[core] * 10
        pl.semaphore_signal(barrier, 1, device_id={"core": before})
        pl.semaphore_signal(barrier, 1, device_id={"core": after})
        pl.semaphore_wait(barrier, 2)
        out_ref[core] = board[before] + board[after]

    kernel = cokernel.kernel(
        neighbours,
        jax.ShapeDtypeStruct((num_cores,), jnp.int32),
        mesh=cokernel.CoreMesh(core=num_cores),
        scratch_types=[cokernel.shared((num_cores,), jnp.int32)],
        compiler_params=params,
    )
    x = np.arange(num_cores, dtype=np.int32)
    np.testing.assert_array_equal(kernel(x), np.roll(x * 10, 1) + np.roll(x * 10, -1))
