"""Whatever reads, writes or copies memory moves the bits of every dtype."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax
from tests.compiler import tolerance
from tests.compiler.harness import MESH
from tests.compiler.ops.every_dtype import ANY, NUMBERS, SHAPE, bits_of, operands_of
from tests.compiler.ops.forms import name_of
from tests.compiler.ops.sparsecore_harness import run_on_subcore

PL = _jax.pallas_primitives
SC = _jax.sc_primitives
TPU = _jax.tpu_primitives
ROWS = 5
MASK = np.arange(np.prod(SHAPE)).reshape(SHAPE) % 3 != 1

each_dtype = pytest.mark.parametrize("dtype", ANY, ids=name_of)
some_seeds = given(seed=st.integers(0, 2**32 - 1))


@pytest.fixture(autouse=True, scope="module")
def wide_types():
    with jax.enable_x64(True):
        yield


def places(seed):
    """Rows to look up, of which the first is the start of some box too."""
    return np.random.default_rng(seed).integers(0, SHAPE[0], ROWS).astype(np.int32)


def expect_bits(ours, expected, primitives, dtype):
    for number, (our, right) in enumerate(zip(ours, expected, strict=True)):
        np.testing.assert_array_equal(bits_of(our), right, err_msg=f"result {number}")
    for primitive in primitives:
        tolerance.note(primitive, dtype, 0.0)


# Loads and stores.


def loads_and_stores(a_ref, b_ref, rows_ref, mask_ref, *outs):
    first = rows_ref[0]
    outs[0][...] = a_ref[1:6:2, pl.ds(3, 20)]
    outs[1][...] = a_ref[first]
    outs[2][...] = a_ref[rows_ref[...]]
    outs[3][...] = a_ref[...]
    outs[3][2, pl.ds(5, 7)] = b_ref[first, 5:12]
    outs[4][...] = b_ref[...]
    outs[5][...] = jax.ref.swap(outs[4], (slice(None), pl.ds(first, 9)), a_ref[:, :9])
    outs[6][...] = PL.load(a_ref, (slice(None),) * 2, mask=mask_ref[...], other=b_ref[...])
    outs[7][...] = a_ref[...]
    PL.store(outs[7], (slice(None),) * 2, b_ref[...], mask=mask_ref[...])
    outs[8][...] = a_ref.at[pl.ds(1, 4)].reshape(8, 25)[...]
    outs[9][...] = a_ref.at[:, pl.ds(0, 30)].T[...]
    copy = jax.new_ref(a_ref[...])
    copy[0] = b_ref[1]
    outs[10][...] = jax.freeze(copy)

    def scoped(scratch):
        scratch[...] = b_ref[...]
        outs[11][...] = scratch[...]

    pl.run_scoped(scoped, pltpu.VMEM(SHAPE, a_ref.dtype))


def loaded_and_stored(a, b, rows):
    first = rows[0]
    written, swapped, masked, new = a.copy(), b.copy(), np.where(MASK, b, a), a.copy()
    written[2, 5:12] = b[first, 5:12]
    swapped[:, first : first + 9] = a[:, :9]
    new[0] = b[1]
    return [
        a[1:6:2, 3:23], a[first], a[rows], written, swapped, b[:, first : first + 9],
        np.where(MASK, a, b), masked, a[1:5].reshape(8, 25), a[:, :30].T, new, b,
    ]  # fmt: skip


LOADS = (
    _jax.get_p, _jax.swap_p, PL.load_p, PL.swap_p, PL.run_scoped_p, _jax.ref_p, _jax.freeze_p,
)  # fmt: skip


@each_dtype
@settings(max_examples=3)
@some_seeds
def test_loads_and_stores(dtype, seed):
    a, b, *_ = operands_of(dtype, seed)
    rows = places(seed)
    expected = loaded_and_stored(bits_of(a), bits_of(b), rows)
    types = [jax.ShapeDtypeStruct(each.shape, dtype) for each in expected]
    kernel = cokernel.mpmd_map([(MESH, loads_and_stores)], types)
    expect_bits(kernel(a, b, rows, MASK), expected, LOADS, dtype)


# Copies.


def copies(a_ref, b_ref, rows_ref, *refs):
    outs, (room, rows, small, sem) = refs[:-4], refs[-4:]
    pltpu.sync_copy(rows_ref, rows)
    pltpu.sync_copy(a_ref, room)
    pltpu.sync_copy(room, outs[0])
    pltpu.sync_copy(b_ref, outs[1])
    pltpu.async_copy(
        room.at[pl.ds(1, 3), pl.ds(7, 30)], outs[1].at[pl.ds(2, 3), pl.ds(1, 30)], sem
    ).wait()
    pltpu.async_copy(a_ref.at[rows], small, sem).wait()
    pltpu.sync_copy(small, outs[2])
    pltpu.sync_copy(b_ref, outs[3])
    pltpu.async_copy(small, outs[3].at[rows], sem).wait()


def copied(a, b, rows):
    boxed, scattered = b.copy(), b.copy()
    boxed[2:5, 1:31] = a[1:4, 7:37]
    scattered[rows] = a[rows]
    return [a, boxed, a[rows], scattered]


@each_dtype
@settings(max_examples=3)
@some_seeds
def test_copies(dtype, seed):
    a, b, *_ = operands_of(dtype, seed)
    rows = places(seed)
    expected = copied(bits_of(a), bits_of(b), rows)
    types = [jax.ShapeDtypeStruct(each.shape, dtype) for each in expected]
    scratch = [
        cokernel.private(SHAPE, dtype),
        cokernel.private((ROWS,), np.int32),
        cokernel.private((ROWS, SHAPE[1]), dtype),
        pltpu.SemaphoreType.DMA,
    ]
    kernel = cokernel.kernel(copies, types, mesh=MESH, scratch_types=scratch)
    expect_bits(kernel(a, b, rows), expected, (TPU.dma_start_p, TPU.dma_wait_p), dtype)


# Additions in memory.


@each_dtype
def test_additions_in_memory(dtype):
    if dtype not in NUMBERS:
        pytest.skip("bools are not added")
    a, b, *_ = operands_of(dtype, 0)

    def body(a_ref, b_ref, o_ref):
        o_ref[...] = a_ref[...]
        jax.ref.addupdate(o_ref, (slice(None), pl.ds(1, 40)), b_ref[:, :40])

    kernel = cokernel.mpmd_map([(MESH, body)], jax.ShapeDtypeStruct(SHAPE, dtype))
    expected = jax.jit(lambda a, b: a.at[:, 1:41].add(b[:, :40]))(a, b)
    tolerance.expect_within(kernel(a, b), expected, 0, name_of(dtype))
    tolerance.note(_jax.addupdate_p, dtype, 0.0)


# A vector subcore.

LANES = 16


def expanded_and_compressed(a_ref, m_ref, o_ref, p_ref):
    keep = m_ref[...] != 0
    o_ref[...] = jnp.where(
        keep, plsc.load_expanded(a_ref.at[pl.ds(0, LANES)], mask=keep), a_ref[...]
    )
    p_ref[...] = a_ref[...]
    plsc.store_compressed(p_ref.at[pl.ds(0, LANES)], a_ref[...], mask=keep)


@each_dtype
def test_expanded_loads_and_compressed_stores(dtype):
    a = operands_of(dtype, 1).a[0, :LANES]
    mask = (np.arange(LANES) % 3 != 1).astype(np.int32)
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype)] * 2
    results = run_on_subcore("tpu7x", expanded_and_compressed, types, a, mask)
    given_bits = bits_of(a)
    expanded, compressed = given_bits.copy(), given_bits.copy()
    expanded[mask != 0] = given_bits[: mask.sum()]
    compressed[: mask.sum()] = given_bits[mask != 0]
    expect_bits(results, [expanded, compressed], (SC.load_p, SC.swap_p), dtype)
