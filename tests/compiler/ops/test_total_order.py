"""The total order of floats is XLA's, whatever a NaN carries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cokernel

# NaNs, quiet and signalling, then infinities, zeros, denormals and ones; of both signs.
SPECIAL = {
    np.uint16: {
        jnp.float16: [0x7E00, 0x7C01, 0x7FFF, 0x7C00, 0, 1, 0x3C00],
        jnp.bfloat16: [0x7FC0, 0x7F81, 0x7FFF, 0x7F80, 0, 1, 0x3F80],
    },
    np.uint32: {jnp.float32: [0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0x7F800000, 0, 1, 0x3F800000]},
}
EIGHT_BIT = (jnp.float8_e5m2, jnp.float8_e4m3fn, jnp.float8_e4m3b11fnuz, jnp.float8_e8m0fnu)


def values_of(dtype) -> np.ndarray:
    if dtype in EIGHT_BIT:
        return np.arange(256, dtype=np.uint8).view(dtype)
    [(words, magnitudes)] = [
        (words, table[dtype]) for words, table in SPECIAL.items() if dtype in table
    ]
    sign = 1 << (8 * words(0).itemsize - 1)
    return np.array([*magnitudes, *(sign | bits for bits in magnitudes)], words).view(dtype)


@pytest.mark.parametrize(
    "dtype",
    [jnp.float16, jnp.bfloat16, jnp.float32, *EIGHT_BIT],
    ids=lambda dtype: np.dtype(dtype).name,
)
def test_all_pairs_are_ordered_as_by_xla(dtype):
    left, right = (one.ravel() for one in np.meshgrid(values_of(dtype), values_of(dtype)))

    def compare(left, right):
        primitives = (lax.eq_to_p, lax.lt_to_p, lax.le_to_p)
        return jnp.stack([primitive.bind(left, right) for primitive in primitives]).astype(np.int32)

    def body(left_ref, right_ref, out_ref):
        out_ref[...] = compare(left_ref[...], right_ref[...])

    out_type = jax.ShapeDtypeStruct((3, left.size), jnp.int32)
    kernel = cokernel.kernel(body, out_type, mesh=cokernel.CoreMesh(core=1))
    np.testing.assert_array_equal(kernel(left, right), jax.jit(compare)(left, right))
