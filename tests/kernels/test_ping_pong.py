"""Two cores take turns, and the semaphore alone decides whose turn it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel


def hit(player: jax.Array | int, ball: jax.Array) -> jax.Array:
    """What a player does to the ball; the order of the hits decides where it ends."""
    return jnp.where(player == 0, 3 * ball + 1, ball - 5)


def played(start: int, turns: int) -> np.ndarray:
    ball, log = np.int32(start), []
    for turn in range(turns):
        ball = np.int32(3) * ball + np.int32(1) if turn % 2 == 0 else ball - np.int32(5)
        log.append(ball)
    return np.array(log, np.int32)


@pytest.mark.parametrize("rounds", [0, 1, 9])
def test_two_cores_of_one_mesh_alternate(rounds, compiler_params):
    def play(start_ref, log_ref, ball, my_turn):
        player = lax.axis_index("player")

        @pl.when(player == 0)
        def _serve():
            ball[0] = start_ref[0]
            pl.semaphore_signal(my_turn, 1)

        @pl.loop(0, rounds)
        def _round(number):
            pl.semaphore_wait(my_turn, 1)
            ball[0] = hit(player, ball[0])
            log_ref[2 * number + player] = ball[0]
            pl.semaphore_signal(my_turn, 1, device_id={"player": 1 - player})

        @pl.when(player == 0)
        def _leave_the_semaphore_at_zero():
            pl.semaphore_wait(my_turn, 1)

    kernel = cokernel.kernel(
        play,
        jax.ShapeDtypeStruct((2 * rounds,), jnp.int32),
        mesh=cokernel.CoreMesh(player=2),
        scratch_types=[cokernel.shared((1,), jnp.int32), pltpu.SemaphoreType.REGULAR],
        compiler_params=compiler_params,
    )
    np.testing.assert_array_equal(kernel(jnp.array([4], jnp.int32)), played(4, 2 * rounds))


def test_a_scalar_subcore_and_a_tensor_core_alternate(v6e, compiler_params):
    rounds = 6
    scalar_mesh = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=1)
    tensor_mesh = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)

    def turn(number, player, ball, log_ref, value_ref):
        # Both kinds of core reach HBM by DMA only, so the ball passes through their own memory.
        pltpu.sync_copy(ball, value_ref)
        value_ref[0] = hit(player, value_ref[0])
        pltpu.sync_copy(value_ref, ball)
        pltpu.sync_copy(value_ref, log_ref.at[pl.ds(2 * number + player, 1)])

    def scalar(start_ref, log_ref, ball, value_ref, _, scalars_turn, tensors_turn):
        pltpu.sync_copy(start_ref, ball)

        @pl.loop(0, rounds)
        def _round(number):
            turn(number, 0, ball, log_ref, value_ref)
            pl.semaphore_signal(tensors_turn, 1, device_id={"tensor": 0})
            pl.semaphore_wait(scalars_turn, 1)

    def tensor(start_ref, log_ref, ball, _, value_ref, scalars_turn, tensors_turn):
        @pl.loop(0, rounds)
        def _round(number):
            pl.semaphore_wait(tensors_turn, 1)
            turn(number, 1, ball, log_ref, value_ref)
            pl.semaphore_signal(scalars_turn, 1, device_id={"core": 0})

    kernel = cokernel.mpmd_map(
        [(scalar_mesh, scalar), (tensor_mesh, tensor)],
        jax.ShapeDtypeStruct((2 * rounds,), jnp.int32),
        scratch_types=[
            pltpu.HBM((1,), jnp.int32),
            pltpu.SMEM((1,), jnp.int32) @ scalar_mesh,
            pltpu.SMEM((1,), jnp.int32) @ tensor_mesh,
            pltpu.SemaphoreType.REGULAR @ scalar_mesh,
            pltpu.SemaphoreType.REGULAR @ tensor_mesh,
        ],
        compiler_params=compiler_params,
    )
    np.testing.assert_array_equal(kernel(jnp.array([4], jnp.int32)), played(4, 2 * rounds))
