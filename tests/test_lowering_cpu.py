"""What crosses the border between XLA and a kernel arrives unchanged, and compiled kernels are used
again."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import cokernel

MESH = cokernel.CoreMesh(core=1)


def flip(x_ref, out_ref):
    out_ref[...] = jnp.flip(x_ref[...])


@pytest.mark.parametrize("size", [1, 7, 8, 130])
@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4, jnp.int2, jnp.uint2])
def test_narrow_integers_that_xla_packs_into_bytes(dtype, size):
    x = (jnp.arange(size) % 5).astype(dtype)
    kernel = cokernel.mpmd_map([(MESH, flip)], jax.ShapeDtypeStruct((size,), dtype))
    np.testing.assert_array_equal(jax.jit(kernel)(x), np.flip(np.asarray(x)))


def test_a_narrow_ref_is_updated_in_place():
    def increment(x_ref):
        x_ref[...] = x_ref[...] + jnp.ones((9,), jnp.int4)

    ref = jax.new_ref(jnp.arange(-4, 5).astype(jnp.int4))
    cokernel.mpmd_map([(MESH, increment)])(ref)
    np.testing.assert_array_equal(ref[...], np.arange(-3, 6))


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_denormals_are_treated_alike_by_all_workers(workers):
    """XLA flushes denormals on its threads; a core must not compute another result on a helper."""
    cores = cokernel.CoreMesh(core=64)

    def halve(x_ref, out_ref):
        core = jax.lax.axis_index("core")

        def step(_, value):
            return value * jnp.float32(0.5)

        out_ref[core] = jax.lax.fori_loop(0, 130, step, x_ref[core])

    x = jnp.full((64,), 1.0, jnp.float32)
    kernel = cokernel.mpmd_map(
        [(cores, halve)],
        jax.ShapeDtypeStruct((64,), jnp.float32),
        compiler_params=cokernel.CompilerParams(num_workers=workers),
    )
    for _ in range(20):
        assert len(set(np.asarray(kernel(x)).tolist())) == 1


def test_a_kernel_that_was_let_go_is_loaded_again(monkeypatch):
    from cokernel import _runtime
    from cokernel.lowering import cpu

    monkeypatch.setattr(cpu, "REGISTERED_KERNELS", 1)

    def scale(factor):
        def body(x_ref, out_ref):
            out_ref[...] = x_ref[...] * factor

        return jax.jit(cokernel.mpmd_map([(MESH, body)], jax.ShapeDtypeStruct((16,), jnp.float32)))

    kernels = [scale(factor) for factor in (3.25, 4.25, 5.25)]
    x = np.arange(16, dtype=np.float32)
    forgotten = []
    unregister = _runtime.unregister_executable
    monkeypatch.setattr(cpu, "_reloadable", type(cpu._reloadable)())
    monkeypatch.setattr(
        _runtime, "unregister_executable", lambda key: (forgotten.append(key), unregister(key))
    )
    for _ in range(2):
        for kernel, factor in zip(kernels, (3.25, 4.25, 5.25), strict=True):
            np.testing.assert_array_equal(kernel(x), x * np.float32(factor))
    # Each call but the first met a kernel that its predecessors had pushed out.
    assert len(forgotten) == 5


# The cache of modules.


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("COKERNEL_CACHE", str(tmp_path))
    return tmp_path


def double(shift=0, **params):
    """A kernel that is traced anew, in a process that forgets what it has compiled."""

    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2 + shift

    kernel = cokernel.mpmd_map(
        [(MESH, body)],
        jax.ShapeDtypeStruct((100,), jnp.int32),
        compiler_params=cokernel.CompilerParams(**params),
    )
    return np.asarray(kernel(jnp.arange(100))) - 2 * np.arange(100)


@pytest.fixture
def emissions(monkeypatch):
    """A list that grows with each kernel for which code is emitted."""
    from cokernel.compiler.kernel import Kernel

    names = []
    compile_kernel = Kernel.compile

    def counted(self):
        names.append(self.name)
        return compile_kernel(self)

    monkeypatch.setattr(Kernel, "compile", counted)
    return names


def test_a_cached_kernel_is_not_emitted_again(kernels, emissions):
    for _ in range(3):
        np.testing.assert_array_equal(double(), 0)
    assert len(emissions) == 1
    np.testing.assert_array_equal(double(shift=1), 1)
    np.testing.assert_array_equal(double(time_limit_s=100), 0)
    assert len(emissions) == 3


@pytest.mark.parametrize("suffix", [".json", ".o"])
def test_a_damaged_cache_costs_only_time(kernels, emissions, suffix):
    _runtime_forgets_all()
    np.testing.assert_array_equal(double(shift=2), 2)
    [path] = kernels.glob(f"*{suffix}")
    path.write_bytes(path.read_bytes()[:-9])
    _runtime_forgets_all()
    np.testing.assert_array_equal(double(shift=2), 2)
    assert len(emissions) == (2 if suffix == ".json" else 1)


def _runtime_forgets_all():
    from cokernel import _runtime
    from cokernel.lowering import cpu

    while cpu._reloadable:
        _runtime.unregister_executable(cpu._reloadable.popleft())


def test_a_kernel_that_calls_python_is_not_cached(kernels, emissions, capfd):
    def body(x_ref, out_ref):
        pl.debug_print("x is {}", x_ref[0])
        out_ref[...] = x_ref[...]

    for _ in range(2):
        kernel = cokernel.mpmd_map([(MESH, body)], jax.ShapeDtypeStruct((4,), jnp.int32))
        jax.block_until_ready(jax.jit(lambda x, kernel=kernel: kernel(x))(jnp.arange(4)))
    jax.effects_barrier()
    assert len(emissions) == 2
    assert not list(kernels.glob("*.json"))


def test_another_process_takes_the_module_from_the_cache(kernels, tmp_path):
    script = tmp_path / "program.py"
    script.write_text(
        "import sys, jax, jax.numpy as jnp, numpy as np, cokernel\n"
        "from jax.experimental import pallas as pl\n"
        "from jax.experimental.pallas import tpu as pltpu\n"
        "def body(x_ref, out_ref, semaphore):\n"
        "    pl.semaphore_signal(semaphore, 1, device_id={'core': 0})\n"
        "    pl.semaphore_wait(semaphore, 1)\n"
        "    out_ref[...] = jax.lax.fori_loop(0, 3, lambda i, x: x + i, x_ref[...])\n"
        "kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((8,), jnp.int32),\n"
        "    mesh=cokernel.CoreMesh(core=1), scratch_types=[pltpu.SemaphoreType.REGULAR])\n"
        "assert (np.asarray(kernel(jnp.arange(8))) == np.arange(8) + 3).all()\n"
        "names = 'compiler.kernel', 'compiler.ops.control', 'compiler.ops.convolution'\n"
        "print(*(f'cokernel.{name}' in sys.modules for name in names))\n"
    )
    emitted = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, script], env=environment, capture_output=True, text=True, check=True
        )
        emitted.append(done.stdout.strip())
    # Nobody waits for modules that have nothing to do with the kernel.
    assert emitted == ["True True False", "False False False"]
