"""What crosses the border between XLA and a kernel arrives unchanged."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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
