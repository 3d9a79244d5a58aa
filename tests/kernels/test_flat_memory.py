"""Memory stays flat over many launches, and over many that fail."""

import subprocess
import sys
import textwrap

import pytest

_PROGRAM = """
    import resource, sys
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_platforms", "cpu")
    from jax import lax
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    import cokernel

    fails, launches = sys.argv[1] == "fails", int(sys.argv[2])

    def body(x_ref, out_ref, scratch, arrived):
        core = lax.axis_index("core")
        scratch[0] = x_ref[core]
        scratch[250_000 - 1] = x_ref[core]

        @pl.when((core != 2) | (x_ref[0] == 0))
        def _signal():
            pl.semaphore_signal(arrived, 1, device_id={"core": (core + 1) % 4})
        pl.semaphore_wait(arrived, 1)
        out_ref[core] = scratch[250_000 - 1] + 1

    # A megabyte for each core, so that a launch whose memory is lost shows.
    kernel = jax.jit(cokernel.kernel(
        body, jax.ShapeDtypeStruct((4,), jnp.int32), mesh=cokernel.CoreMesh(core=4),
        scratch_types=[cokernel.private((250_000,), jnp.int32), pltpu.SemaphoreType.REGULAR],
    ))
    x = jnp.full((4,), int(fails), jnp.int32)

    def launch():
        try:
            jax.block_until_ready(kernel(x))
        except (jax.errors.JaxRuntimeError, ValueError) as error:
            return "Deadlock" in str(error)
        return False

    def run(count):
        for _ in range(count):
            assert launch() == fails
        used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return used / (1e3 if sys.platform == "linux" else 1e6)

    before = run(launches // 10)
    print(run(launches) - before)
"""


@pytest.mark.parametrize(("outcome", "launches"), [("succeeds", 20_000), ("fails", 300)])
def test_memory_is_flat(outcome, launches):
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_PROGRAM), outcome, str(launches)],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=600,
    )
    # Megabytes. A launch that kept its blocks would add a thousand of them and more.
    assert float(run.stdout) < 32
