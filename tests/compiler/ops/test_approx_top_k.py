"""approx_top_k is exact, as it is where XLA compiles it for a processor."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.compiler import tolerance
from tests.compiler.harness import expect_same


@pytest.mark.parametrize("function", [lax.approx_max_k, lax.approx_min_k])
@pytest.mark.parametrize("aggregate_to_topk", [True, False])
@pytest.mark.parametrize("axis", [0, -1])
def test_the_first_in_order_and_their_places(function, aggregate_to_topk, axis):
    x = np.random.default_rng(0).permutation(3 * 400).reshape(3, 400).astype(np.float32)
    x = x.T if axis == 0 else x

    def run(x):
        return function(x, 5, reduction_dimension=axis, aggregate_to_topk=aggregate_to_topk)

    expect_same(run, jnp.asarray(x))
    tolerance.note(lax.approx_top_k_p, np.float32, 0.0)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16])
def test_narrow_floats(dtype):
    x = jnp.asarray(np.random.default_rng(1).permutation(60)).astype(dtype)
    expect_same(lambda x: lax.approx_max_k(x, 7), x)
    tolerance.note(lax.approx_top_k_p, dtype, 0.0)
