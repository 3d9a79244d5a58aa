"""Kernels outlive the process that compiled them: in exported files and in JAX's cache on disk."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

F32 = jnp.float32
CORES = cokernel.CoreMesh(core=2)
LANE = cokernel.CoreMesh(lane=1)


def first(x_ref, o_ref, ready):
    half = pl.ds(4 * lax.axis_index("core"), 4)
    o_ref[half] = 2.0 * x_ref[half]
    pl.semaphore_signal(ready, 1, device_id={"lane": 0})


def second(x_ref, o_ref, ready):
    pl.semaphore_wait(ready, 2)
    o_ref[0] = o_ref[7]


kernel = cokernel.mpmd_map(
    [(CORES, first), (LANE, second)],
    jax.ShapeDtypeStruct((8,), F32),
    scratch_types=[pltpu.SemaphoreType.REGULAR @ LANE],
)

LOAD = """
import sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
import cokernel
with open(sys.argv[1], "rb") as file:
    exported = jax.export.deserialize(bytearray(file.read()))
print(exported.call(jnp.arange(8.0)).tolist())
"""

COMPILE = """
import logging, sys
import jax
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 4)
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda name, **_: hits.append(name))
import jax.numpy as jnp
sys.path.insert(0, sys.argv[2])
from test_export import kernel
out = jax.jit(lambda x: kernel(x) + 1.0)(jnp.arange(8.0))
counts = [hits.count("/jax/compilation_cache/cache_" + kind) for kind in ("hits", "misses")]
print(out.tolist(), *counts)
"""

WANTED = [14.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0]


def run(program, *args):
    done = subprocess.run(
        [sys.executable, "-c", program, *args],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


def export(fn, *args):
    checks = [jax.export.DisabledSafetyCheck.custom_call("cokernel_launch")]
    return jax.export.export(fn, disabled_checks=checks)(*args)


def test_an_exported_kernel_runs_in_a_new_process(tmp_path):
    path = tmp_path / "kernel"
    path.write_bytes(export(jax.jit(kernel), jnp.arange(8.0)).serialize())
    assert run(LOAD, str(path)) == str(WANTED)


def test_an_exported_kernel_runs_here():
    np.testing.assert_array_equal(
        export(jax.jit(kernel), jnp.arange(8.0)).call(jnp.arange(8.0)), WANTED
    )


def test_the_persistent_cache_hits_in_a_new_process(tmp_path):
    here = os.path.dirname(__file__)
    wanted = [x + 1.0 for x in WANTED]
    out, _, misses = run(COMPILE, str(tmp_path), here).rsplit(" ", 2)
    assert out == str(wanted)
    assert int(misses) > 0
    out, hits, misses = run(COMPILE, str(tmp_path), here).rsplit(" ", 2)
    assert out == str(wanted)
    assert int(hits) > 0
    assert int(misses) == 0
