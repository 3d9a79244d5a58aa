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
