"""Loads and stores with a mask touch the elements it selects and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax
from tests.compiler.harness import MESH

PL = _jax.pallas_primitives
DTYPES = [np.float32, np.int8, jnp.bfloat16, np.bool_]


def launch(body, *outs, arrays=()):
    types = [jax.ShapeDtypeStruct(out.shape, out.dtype) for out in outs]
    kernel = cokernel.mpmd_map([(MESH, body)], types)
    return [np.asarray(result) for result in kernel(*(jnp.asarray(a) for a in arrays))]


def example(shape, dtype):
    return np.arange(np.prod(shape)).reshape(shape).astype(dtype)


@st.composite
def parts(draw):
    """A shape, the start and size of a box in it, and a mask for the box."""
    shape = draw(st.sampled_from([(16,), (100,), (5, 8), (12, 30)]))
    start = [draw(st.integers(0, extent - 1)) for extent in shape]
    size = [
        draw(st.integers(1, extent - first)) for first, extent in zip(start, shape, strict=True)
    ]
    seed = draw(st.integers(0, 100))
    return shape, start, size, np.random.default_rng(seed).random(size) < 0.6


def box(start, size):
    return tuple(slice(first, first + count) for first, count in zip(start, size, strict=True))


def dynamic_box(starts_ref, start, size, dynamic):
    return tuple(
        pl.ds(starts_ref[number] if dynamic else start[number], count)
        for number, count in enumerate(size)
    )


@settings(max_examples=30)
@given(part=parts(), dtype=st.sampled_from(DTYPES), dynamic=st.booleans())
def test_a_masked_load_gives_the_other_value_elsewhere(part, dtype, dynamic):
    shape, start, size, mask = part
    x, other = example(shape, dtype), np.asarray(3).astype(dtype)

    def body(x_ref, m_ref, s_ref, other_ref, o_ref):
        at = dynamic_box(s_ref, start, size, dynamic)
        rest = jnp.broadcast_to(other_ref[0], tuple(size))
        o_ref[...] = PL.load(x_ref, at, mask=m_ref[...], other=rest)

    out = jax.ShapeDtypeStruct(tuple(size), dtype)
    arrays = (x, mask, np.asarray(start, np.int32), other.reshape(1))
    [got] = launch(body, out, arrays=arrays)
    np.testing.assert_array_equal(got, np.where(mask, x[box(start, size)], other))


@settings(max_examples=30)
@given(part=parts(), dtype=st.sampled_from(DTYPES), dynamic=st.booleans(), swap=st.booleans())
def test_a_masked_store_leaves_the_rest_alone(part, dtype, dynamic, swap):
    shape, start, size, mask = part
    x, value = example(shape, dtype), example(tuple(size), dtype)[::-1]

    def body(x_ref, m_ref, s_ref, v_ref, o_ref, old_ref):
        o_ref[...] = x_ref[...]
        at = dynamic_box(s_ref, start, size, dynamic)
        if swap:
            old_ref[...] = PL.swap(o_ref, at, v_ref[...], mask=m_ref[...])
        else:
            PL.store(o_ref, at, v_ref[...], mask=m_ref[...])
            old_ref[...] = v_ref[...]

    arrays = (x, mask, np.asarray(start, np.int32), value)
    got, old = launch(body, x, value, arrays=arrays)
    expected = x.copy()
    expected[box(start, size)][mask] = value[mask]
    np.testing.assert_array_equal(got, expected)
    if swap:
        np.testing.assert_array_equal(old, np.where(mask, x[box(start, size)], value))


def test_a_mask_is_broadcast():
    x = example((6, 7), np.int32)

    def body(x_ref, o_ref):
        row = jnp.arange(7) % 2 == 0
        o_ref[...] = jnp.zeros((6, 7), jnp.int32)
        pltpu.store(o_ref, x_ref[...], mask=row[None])

    [got] = launch(body, x, arrays=(x,))
    np.testing.assert_array_equal(got, np.where(np.arange(7) % 2 == 0, x, 0))


@pytest.mark.parametrize("store", [False, True])
def test_what_the_mask_leaves_out_may_be_out_of_bounds(store):
    def body(s_ref, m_ref, o_ref, scratch):
        at = (pl.ds(s_ref[0], 8),)
        lanes = jnp.arange(8, dtype=jnp.int32)
        scratch[...] = jnp.arange(16, dtype=jnp.int32)
        if store:
            PL.store(scratch, at, 100 + lanes, mask=m_ref[...])
            o_ref[...] = scratch[pl.ds(8, 8)]
        else:
            o_ref[...] = PL.load(scratch, at, mask=m_ref[...], other=-lanes)

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((8,), jnp.int32),
        mesh=MESH,
        scratch_types=[pltpu.VMEM((16,), jnp.int32)],
    )
    mask = np.arange(8) < 4
    expected = [8, 9, 10, 11, 100, 101, 102, 103] if store else [12, 13, 14, 15, -4, -5, -6, -7]
    got = kernel(jnp.asarray([12], jnp.int32), jnp.asarray(mask))
    np.testing.assert_array_equal(got, expected)
    for start in (13, -1):
        with pytest.raises(Exception, match=r"(?s)OutOfBounds.*scratch"):
            jax.block_until_ready(kernel(jnp.asarray([start], jnp.int32), jnp.asarray(mask)))


@pytest.mark.parametrize("count", [5, 100])
def test_a_masked_store_goes_through_arrays_of_indices(count):
    random = np.random.default_rng(0)
    index, mask = random.integers(0, 12, count).astype(np.int32), random.random(count) < 0.5
    value = np.arange(count, dtype=np.int32)

    def body(i_ref, m_ref, v_ref, o_ref):
        o_ref[...] = jnp.full((12,), -1, jnp.int32)
        PL.store(o_ref, (i_ref[...],), v_ref[...], mask=m_ref[...])

    [got] = launch(body, jax.ShapeDtypeStruct((12,), jnp.int32), arrays=(index, mask, value))
    expected = np.full(12, -1)
    for place, keep, number in zip(index, mask, value, strict=True):
        if keep:
            expected[place] = number
    np.testing.assert_array_equal(got, expected)
