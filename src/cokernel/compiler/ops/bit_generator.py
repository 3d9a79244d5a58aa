"""`rng_bit_generator`, the counter-based generator behind `rbg` keys, bit by bit as XLA has it.

Philox-4x32 with 10 rounds (Salmon et al., 2011): 128 bits of state, of which the first half is the
key and the upper half of the counter too, and the second half counts blocks of four words.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cokernel.compiler.ops.traced import traced

FACTORS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10


@traced(lax.rng_bit_generator_p)
def rng_bit_generator(
    state: jax.Array, *, shape: tuple[int, ...], dtype: Any, algorithm: Any, **params: Any
) -> tuple[jax.Array, jax.Array]:
    """The state afterwards, and bits: of one word for each element, or of two if it has 64."""
    names = (lax.RandomAlgorithm.RNG_DEFAULT, lax.RandomAlgorithm.RNG_PHILOX)
    if algorithm not in names:
        raise NotImplementedError(f"rng_bit_generator with the algorithm {algorithm}")
    words = state if state.dtype == jnp.uint32 else _halves(state)
    dtype = np.dtype(dtype)
    per_element = 2 if dtype.itemsize == 8 else 1
    count = math.prod(shape) * per_element
    blocks = -(-count // 4)
    number = lax.iota(jnp.uint32, blocks)
    # The counter is one number of 128 bits, though only the lower half of it is kept.
    counter = []
    carry = number
    for word in (words[2], words[3], words[0], words[1]):
        total = word + carry
        carry = (total < carry).astype(jnp.uint32)
        counter.append(total)
    bits = jnp.stack(_philox(counter, [words[0], words[1]]), axis=1).reshape(-1)[:count]
    after = words[2] + jnp.uint32(blocks)
    carried = words[3] + (after < words[2]).astype(jnp.uint32)
    new = jnp.stack([words[0], words[1], after, carried])
    if state.dtype != jnp.uint32:
        new = _joined(new.reshape(2, 2))
    if per_element == 2:
        return new, _joined(bits.reshape(*shape, 2)).astype(dtype)
    return new, bits.reshape(shape).astype(dtype)


def _philox(counter: list[jax.Array], key: list[jax.Array]) -> list[jax.Array]:
    for _ in range(ROUNDS):
        first = jnp.uint32(FACTORS[0]), counter[0]
        second = jnp.uint32(FACTORS[1]), counter[2]
        counter = [
            lax.mulhi(*_alike(*second)) ^ counter[1] ^ key[0],
            second[0] * second[1],
            lax.mulhi(*_alike(*first)) ^ counter[3] ^ key[1],
            first[0] * first[1],
        ]
        key = [word + jnp.uint32(step) for word, step in zip(key, WEYL, strict=True)]
    return counter


def _alike(factor: jax.Array, words: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.full(words.shape, factor), words


def _halves(state: jax.Array) -> jax.Array:
    low = state.astype(jnp.uint32)
    high = (state >> np.uint64(32)).astype(jnp.uint32)
    return jnp.stack([low, high], axis=1).reshape(-1)


def _joined(pairs: jax.Array) -> jax.Array:
    low, high = pairs[..., 0].astype(jnp.uint64), pairs[..., 1].astype(jnp.uint64)
    return low | (high << np.uint64(32))
