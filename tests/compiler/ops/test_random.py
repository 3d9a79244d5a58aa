"""Random numbers: JAX's keys give JAX's bits, and each core's generator is a good one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax
from tests.compiler import tolerance
from tests.compiler.harness import MESH, expect_close, expect_same, run

SAMPLERS = {
    "bits": lambda key: jax.random.bits(key, (3, 5)),
    "many bits": lambda key: jax.random.bits(key, (40, 50)),
    "bytes": lambda key: jax.random.bits(key, (7,), jnp.uint8),
    "uniform": lambda key: jax.random.uniform(key, (33,)),
    "a number": lambda key: jax.random.uniform(key),
    "integers": lambda key: jax.random.randint(key, (6, 30), -5, 1000),
    "bernoulli": lambda key: jax.random.bernoulli(key, 0.3, (100,)),
    "permutation": lambda key: jax.random.permutation(key, 20),
    "split": lambda key: jax.random.bits(jax.random.split(key, 5)[3], (4,)),
    "split in two": lambda key: [jax.random.bits(k, (4,)) for k in jax.random.split(key)],
    "split many": lambda key: jax.vmap(lambda k: jax.random.bits(k, (4,)))(
        jax.random.split(key, 6)
    ),
    "fold in": lambda key: jax.random.bits(jax.random.fold_in(key, 17), (4,)),
    "data": lambda key: jax.random.key_data(jax.random.clone(key)),
}


# What the samplers are made of.
DRAWING = (
    _jax.prng.random_bits_p, _jax.prng.random_fold_in_p, _jax.prng.random_seed_p,
    _jax.prng.random_split_p, _jax.prng.random_unwrap_p, _jax.threefry2x32_p,
)  # fmt: skip


@pytest.mark.parametrize("name", SAMPLERS)
@settings(max_examples=4)
@given(seed=st.integers(-(1 << 31), (1 << 31) - 1))
def test_keys_give_the_bits_of_jax(name, seed):
    sample = SAMPLERS[name]
    expect_same(lambda seed: sample(jax.random.key(seed)), np.int32(seed))
    for primitive in DRAWING:
        tolerance.note(primitive, np.uint32, 0.0)


def test_normal_numbers_are_those_of_jax_up_to_rounding():
    def function(seed):
        return jax.random.normal(jax.random.key(seed), (200,))

    [got] = run(function, np.int32(5))
    np.testing.assert_allclose(got, function(5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "sample",
    [
        lambda key: jax.random.gamma(key, 2.5, (9,)),
        lambda key: jax.random.loggamma(key, jnp.arange(4.0) * 9 + 0.01),
        lambda key: jax.vmap(lambda k: jax.random.gamma(k, 0.3))(jax.random.split(key, 3)),
        lambda key: jax.random.beta(key, 2.0, 0.5, (2, 3)),
    ],
)
def test_numbers_that_follow_a_gamma_distribution_are_those_of_jax_up_to_rounding(sample):
    expect_close(lambda seed: sample(jax.random.key(seed)), np.int32(5), ulps=200)
    tolerance.note(_jax.random_gamma_p, np.float32, 200.0)


def test_raw_words_are_keys_too():
    def function(words):
        key = jax.random.wrap_key_data(words)
        return jax.random.bits(key, (9,)), jax.random.bits(words, (9,))

    expect_same(function, np.asarray([3, 5], np.uint32))


def test_keys_pass_through_loops_branches_and_selections():
    def function(seed, flag):
        keys = jax.random.split(jax.random.key(seed), 4)

        def step(i, carry):
            key, total = carry
            key, use = jax.random.split(key)
            use = lax.cond(flag, lambda: jax.random.fold_in(use, i), lambda: use)
            return key, total + jax.random.bits(use, (8,))

        key, total = lax.fori_loop(0, 5, step, (keys[1], jnp.zeros((8,), jnp.uint32)))
        chosen = jnp.where(flag, key, keys[2])
        _, drawn = lax.scan(lambda c, k: (c, jax.random.bits(k, (3,))), 0, keys.reshape(2, 2)[1])
        swapped = jnp.concatenate([keys[2:], keys[:2]])
        at = jnp.asarray(flag, jnp.int32)
        return total, jax.random.bits(chosen, (8,)), drawn, jax.random.key_data(swapped[at + 1])

    for flag in (False, True):
        expect_same(function, np.int32(3), np.asarray(flag))


def test_keys_are_moved_and_compared_as_whole_keys():
    def words(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        moved = [
            lax.rev(keys, (0,)), keys[::2], jnp.stack([keys, keys]), jnp.tile(keys, 2),
            keys.at[1].set(keys[0]), lax.dynamic_slice(keys, (seed,), (2,)),
            keys[seed * jnp.arange(3)], jnp.split(keys, 2)[1], keys.reshape(2, 2).T,
            lax.optimization_barrier(keys), jnp.broadcast_to(keys, (2, 4)), keys[:1].squeeze(),
        ]  # fmt: skip
        return [jax.random.key_data(each) for each in moved]

    def comparisons(seed):
        keys = jax.random.split(jax.random.key(seed), 4)
        return keys == keys[::-1], keys != keys[0], keys[2] == keys[2]

    expect_same(words, np.int32(1))
    expect_same(comparisons, np.int32(1))


def test_what_has_no_meaning_for_keys_names_the_primitive_and_the_line(line_of):
    def function(seed):
        jax.debug.print("{}", jax.random.key(seed))
        return seed

    with pytest.raises(NotImplementedError, match="debug_print") as caught:
        run(function, np.int32(1))
    assert line_of(function, "debug.print") in str(caught.value)


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
@pytest.mark.filterwarnings("ignore:.*rng_bit_generator")
def test_a_kernel_takes_keys(implementation):
    keys = jax.random.split(jax.random.key(1, impl=implementation), 3)

    def body(keys_ref, i_ref, o_ref):
        o_ref[0] = jax.random.bits(keys_ref[0], (8,))
        o_ref[1] = jax.random.bits(keys_ref[i_ref[0]], (8,))

    kernel = cokernel.mpmd_map([(MESH, body)], jax.ShapeDtypeStruct((2, 8), jnp.uint32))
    got = np.asarray(kernel(keys, jnp.asarray([2])))
    expected = [jax.random.bits(keys[i], (8,)) for i in (0, 2)]
    np.testing.assert_array_equal(got, expected)


def draw(body, shape, *arrays, mesh=MESH):
    kernel = cokernel.mpmd_map([(mesh, body)], jax.ShapeDtypeStruct(shape, jnp.int32))
    return np.asarray(kernel(*(jnp.asarray(array) for array in arrays)))


def seeded(seeds, shape):
    def body(seeds_ref, o_ref):
        pltpu.prng_seed(*(seeds_ref[i] for i in range(len(seeds))))
        o_ref[...] = pltpu.prng_random_bits(shape)

    return draw(body, shape, np.asarray(seeds, np.int32))


@pytest.mark.parametrize("shape", [(8,), (200, 70)])
def test_equal_seeds_give_equal_numbers_and_others_do_not(shape):
    first = seeded([1, 2], shape)
    np.testing.assert_array_equal(first, seeded([1, 2], shape))
    for other in ([2, 1], [1, 3], [1], [1, 2, 0]):
        assert np.mean(first == seeded(other, shape)) < 0.01


def test_numbers_go_on_where_the_last_ones_ended():
    def body(o_ref):
        pltpu.prng_seed(7)
        o_ref[...] = pltpu.prng_random_bits((100,))

    def in_parts(o_ref):
        pltpu.prng_seed(7)

        @pl.loop(0, 5)
        def _part(i):
            o_ref[pl.ds(20 * i, 20)] = pltpu.prng_random_bits((20,))

    np.testing.assert_array_equal(draw(body, (100,)), draw(in_parts, (100,)))


def test_cores_with_equal_seeds_draw_equal_numbers():
    cores = 6

    def body(o_ref):
        core = lax.axis_index("core")
        pltpu.prng_seed(core // 2)
        o_ref[core] = pltpu.prng_random_bits((40,))

    got = draw(body, (cores, 40), mesh=cokernel.CoreMesh(core=cores))
    np.testing.assert_array_equal(got[::2], got[1::2])
    assert np.unique(got).size == 40 * cores // 2


def test_the_generator_is_well_distributed():
    bits = seeded([123], (1 << 16,)).view(np.uint32)
    count = bits.size
    # Each bit is set half the time, and independent of the bit before and of the number before:
    # within five standard deviations.
    for bit in range(32):
        ones = (bits >> np.uint32(bit)) & 1
        assert abs(ones.mean() - 0.5) < 5 * 0.5 / np.sqrt(count)
        assert abs((ones[1:] ^ ones[:-1]).mean() - 0.5) < 5 * 0.5 / np.sqrt(count)
    cells = np.bincount(bits >> 24, minlength=256)
    expected = count / 256
    chi_square = ((cells - expected) ** 2 / expected).sum()
    assert abs(chi_square - 255) < 5 * np.sqrt(2 * 255)
    assert np.unique(bits).size > count - 10


def test_neighbouring_seeds_are_unrelated():
    draws = np.stack([seeded([seed], (64,)) for seed in range(8)]).view(np.uint32)
    share = np.unpackbits((draws[1:] ^ draws[:-1]).view(np.uint8)).mean()
    assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(7 * 64 * 32)


def test_pallas_keys_seed_the_generator():
    key = pltpu.to_pallas_key(jax.random.key(3))

    def body(key_ref, o_ref):
        key = key_ref[...]
        for row in range(3):
            o_ref[row] = lax.bitcast_convert_type(
                jax.random.bits(jax.random.fold_in(key, row // 2), (16,)), jnp.int32
            )

    got = draw(body, (3, 16), key)
    np.testing.assert_array_equal(got[0], got[1])
    assert np.unique(got[1:]).size == 32


def test_pallas_keys_come_apart_and_together():
    tpu = _jax.tpu_primitives

    def body(key_ref, o_ref):
        words = tpu.unwrap_pallas_seed(key_ref[...])
        again = tpu.unwrap_pallas_seed(tpu.wrap_pallas_seed(*words[::-1], impl="pallas_tpu"))
        for place, word in enumerate((*words, *again)):
            o_ref[place] = lax.bitcast_convert_type(word, jnp.int32)

    key = jax.random.wrap_key_data(jnp.asarray([[5, 9]], jnp.uint32), impl="pallas_tpu")
    np.testing.assert_array_equal(draw(body, (4,), key), [5, 9, 9, 5])


def test_stateful_samplers_draw_from_the_cores_generator():
    def body(o_ref):
        pltpu.prng_seed(4)
        numbers = pltpu.stateful_uniform((500,))
        o_ref[...] = (numbers * 1000).astype(jnp.int32)

    got = draw(body, (500,))
    assert got.min() >= 0
    assert got.max() < 1000
    assert abs(got.mean() - 500) < 5 * 1000 / np.sqrt(12 * 500)
