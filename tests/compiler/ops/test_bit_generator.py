"""rng_bit_generator, and the keys built on it, give the bits of XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.compiler import tolerance
from tests.compiler.harness import expect_same

# Near an overflow of each half of the counter too.
WORDS = st.sampled_from([0, 1, 12345, 0xFFFFFFFE, 0xFFFFFFFF])


@settings(max_examples=8)
@given(
    state=st.lists(WORDS, min_size=4, max_size=4),
    shape=st.sampled_from([(), (1,), (10,), (7, 3), (70,)]),
    dtype=st.sampled_from([jnp.uint8, jnp.uint16, jnp.uint32]),
)
def test_any_state_gives_the_bits_of_xla_and_the_next_state(state, shape, dtype):
    key = jnp.asarray(state, jnp.uint32)
    expect_same(lambda key: lax.rng_bit_generator(key, shape, dtype), key)
    tolerance.note(lax.rng_bit_generator_p, dtype, 0.0)


def test_numbers_of_64_bits_and_states_of_64_bits():
    with jax.enable_x64(True):
        narrow = jnp.asarray([1, 2, 3, 4], jnp.uint32)
        wide = jnp.asarray([1 << 63, (1 << 64) - 2], jnp.uint64)
        for key in (narrow, wide):
            expect_same(lambda key: lax.rng_bit_generator(key, (9,), jnp.uint64), key)
            expect_same(lambda key: lax.rng_bit_generator(key, (9,), jnp.uint32), key)


@pytest.mark.parametrize("impl", ["rbg", "unsafe_rbg"])
def test_keys_of_this_generator_split_fold_and_draw_as_in_jax(impl):
    def draw(words):
        key = jax.random.wrap_key_data(words, impl=impl)
        one, other = jax.random.split(key)
        return (
            jax.random.bits(one, (3, 50)),
            jax.random.bits(jax.random.fold_in(key, 3), (5,), jnp.uint8),
            jax.random.key_data(jax.random.split(other, 3)),
            jax.vmap(lambda key: jax.random.bits(key, (3,)))(jax.random.split(one, 3)),
        )

    expect_same(draw, jnp.asarray(np.arange(4), jnp.uint32))
