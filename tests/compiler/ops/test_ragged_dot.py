"""Products of groups of rows give XLA's results for each of the three kinds of ragged dimension."""

import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.compiler.harness import expect_same

OVER_SUM = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
OVER_BATCH = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())


def whole_numbers(seed, *shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape)).astype(dtype)


@settings(max_examples=10)
@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=4),
    rest=st.integers(0, 3),
    dtype=st.sampled_from([np.float32, jnp.bfloat16, np.int32]),
)
def test_groups_of_rows_of_any_size_with_rows_of_no_group(sizes, rest, dtype):
    rows = max(sum(sizes) + rest, 1)
    left = whole_numbers(0, rows, 6, dtype=dtype)
    right = whole_numbers(1, len(sizes), 6, 5, dtype=dtype)
    expect_same(lax.ragged_dot, left, right, jnp.asarray(sizes, jnp.int32))


def test_groups_of_what_is_summed_and_of_the_batch():
    sizes = jnp.asarray([5, 0, 7], jnp.int32)
    left, right = whole_numbers(0, 12, 4), whole_numbers(1, 12, 5)
    expect_same(lambda x, y, n: lax.ragged_dot_general(x, y, n, OVER_SUM), left, right, sizes)
    sizes = jnp.asarray([3, 1, 2], jnp.int32)
    left, right = whole_numbers(2, 6, 3, 4), whole_numbers(3, 6, 4, 5)
    expect_same(lambda x, y, n: lax.ragged_dot_general(x, y, n, OVER_BATCH), left, right, sizes)
