"""Semaphores and `space @ mesh` Refs as outputs of one kernel and inputs of the next."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

CORES = 4
MESH = cokernel.CoreMesh(core=CORES)
VOTES = pltpu.SemaphoreType.REGULAR((2,)) @ MESH
NOTES = pltpu.VMEM((8,), jnp.int32) @ MESH


def carried(value: jax.Array, like) -> jax.Array:
    """Wraps what a kernel returned for an output of type `like` for the next kernel."""
    return jax.new_ref(value, memory_space=like.memory_space)


@pytest.fixture
def write(compiler_params):
    def body(x_ref, votes, notes):
        core = lax.axis_index("core")
        notes[...] = x_ref[...] * (core + 1)
        # The second semaphore of each core gets a count of its own.
        pl.semaphore_signal(votes.at[1], core + 5)
        pl.semaphore_signal(votes.at[0], 1, device_id={"core": (core + 1) % CORES})

    return cokernel.kernel(body, [VOTES, NOTES], mesh=MESH, compiler_params=compiler_params)


@pytest.fixture
def read(compiler_params):
    def body(votes, notes, out_ref):
        core = lax.axis_index("core")
        pl.semaphore_wait(votes.at[1], core + 5)
        pl.semaphore_wait(votes.at[0], 1)
        out_ref[core] = notes[...]

    out_type = jax.ShapeDtypeStruct((CORES, 8), jnp.int32)
    return cokernel.kernel(body, out_type, mesh=MESH, compiler_params=compiler_params)


def test_what_each_core_left_behind_is_found_by_the_next_kernel(write, read):
    @jax.jit
    def both(x):
        votes, notes = write(x)
        return read(carried(votes, VOTES), carried(notes, NOTES))

    x = np.arange(8, dtype=np.int32)
    for _ in range(3):
        np.testing.assert_array_equal(both(x), x * np.arange(1, CORES + 1)[:, None])


@pytest.mark.parametrize(("out_type", "what"), [(VOTES, "holds semaphores"), (NOTES, "vmem")])
def test_what_stays_with_the_cores_is_not_handed_to_python(out_type, what):
    kernel = cokernel.kernel(lambda out_ref: None, [out_type], mesh=MESH, name="write")
    with pytest.raises(ValueError, match=rf"out_types\[0\] of kernel 'write' .*{what}.*jax.jit"):
        kernel()


def test_two_pairs_of_kernels_in_one_jit_do_not_mix_what_they_carry(write, read):
    @jax.jit
    def crossed(x, y):
        first, second = write(x), write(y)
        return tuple(
            read(carried(votes, VOTES), carried(notes, NOTES)) for votes, notes in (second, first)
        )

    x, y = np.arange(8, dtype=np.int32), np.arange(8, dtype=np.int32) * -3
    of_y, of_x = crossed(x, y)
    np.testing.assert_array_equal(of_x, x * np.arange(1, CORES + 1)[:, None])
    np.testing.assert_array_equal(of_y, y * np.arange(1, CORES + 1)[:, None])


def test_a_kernel_on_another_mesh_signals_a_carried_semaphore(write, read, compiler_params):
    helpers = cokernel.CoreMesh(helper=3)

    def add_votes(votes):
        helper = lax.axis_index("helper")

        @pl.when(helper == 2)
        def _only_one_of_them():
            for core in range(CORES):
                pl.semaphore_signal(votes.at[1], 10, device_id={"core": core})

    def take_more(votes, out_ref):
        core = lax.axis_index("core")
        pl.semaphore_wait(votes.at[1], core + 15)
        pl.semaphore_wait(votes.at[0], 1)
        out_ref[core] = core + 15

    adding = cokernel.kernel(add_votes, mesh=helpers, compiler_params=compiler_params)
    taking = cokernel.kernel(
        take_more,
        jax.ShapeDtypeStruct((CORES,), jnp.int32),
        mesh=MESH,
        compiler_params=compiler_params,
    )

    @jax.jit
    def three(x):
        votes = carried(write(x)[0], VOTES)
        adding(votes)
        return taking(votes)

    np.testing.assert_array_equal(three(np.zeros(8, np.int32)), np.arange(15, 15 + CORES))
