"""Ten thousand cores pass one message around a ring."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

CORES = 10_000


def test_a_message_comes_back_after_it_has_been_on_every_core(compiler_params):
    def pass_on(start_ref, out_ref, visits_ref, message, arrived):
        core = lax.axis_index("core")

        @pl.when(core == 0)
        def _begin():
            message[0] = start_ref[0]

        @pl.when(core > 0)
        def _receive():
            pl.semaphore_wait(arrived, 1)

        # Every core adds its number, in an order that matters.
        message[0] = message[0] * 3 + core
        visits_ref[core] = message[0]
        pl.semaphore_signal(arrived, 1, device_id={"core": (core + 1) % CORES})

        @pl.when(core == 0)
        def _end():
            pl.semaphore_wait(arrived, 1)
            out_ref[0] = message[0]

    kernel = cokernel.kernel(
        pass_on,
        [jax.ShapeDtypeStruct((1,), jnp.uint32), jax.ShapeDtypeStruct((CORES,), jnp.uint32)],
        mesh=cokernel.CoreMesh(core=CORES),
        scratch_types=[cokernel.shared((1,), jnp.uint32), pltpu.SemaphoreType.REGULAR],
        compiler_params=compiler_params,
    )
    out, visits = kernel(jnp.array([5], jnp.uint32))
    message, expected = 5, []
    for core in range(CORES):
        message = (message * 3 + core) % (1 << 32)
        expected.append(message)
    np.testing.assert_array_equal(visits, np.array(expected, np.uint32))
    assert int(out[0]) == message
