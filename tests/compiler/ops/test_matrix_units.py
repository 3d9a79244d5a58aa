"""Staged matrix units multiply with the weights that were loaded, and keep what is not popped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax
from tests.compiler import tolerance
from tests.compiler.harness import MESH

TPU = _jax.tpu_primitives

# The chip with accumulators, and one with result queues.
WITH_ACCUMULATORS = "tpu7x"


def numbers(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def launch(chip, body, out, *arrays, scratch=()):
    with cokernel.target(chip):
        scratch = scratch() if callable(scratch) else scratch
        kernel = cokernel.kernel(body, out, mesh=MESH, scratch_types=scratch)
        return np.asarray(kernel(*(jnp.asarray(array) for array in arrays)))


@pytest.fixture
def size():
    with cokernel.target(WITH_ACCUMULATORS):
        return pltpu.get_tpu_info().mxu_column_size


@pytest.mark.parametrize("transpose", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int8])
def test_products_accumulate_until_they_are_popped(size, dtype, transpose):
    total = np.int32 if dtype == np.int8 else np.float32
    a, b = numbers(0, 16, size, dtype=dtype), numbers(1, size, size, dtype=dtype)

    def body(a_ref, b_ref, o_ref, acc):
        pltpu.matmul_push_rhs(b_ref[...], 0, 1, transpose=transpose)
        pltpu.matmul_acc_lhs(acc.at[pl.ds(0, 16)], a_ref[...], load_staged_rhs=0)
        pltpu.matmul_acc_lhs(acc.at[pl.ds(0, 16)], a_ref[...])
        o_ref[0] = pltpu.matmul_pop(acc.at[pl.ds(0, 16)])
        o_ref[1] = pltpu.matmul_pop(acc.at[pl.ds(0, 16)])
        o_ref[2] = pltpu.matmul_pop(acc.at[pl.ds(16, 16)])

    got = launch(
        WITH_ACCUMULATORS,
        body,
        jax.ShapeDtypeStruct((3, 16, size), total),
        a,
        b,
        scratch=lambda: [pltpu.ACC(1)((32, size), total)],
    )
    right = b.astype(total).T if transpose else b.astype(total)
    np.testing.assert_array_equal(got[0], 2 * (a.astype(total) @ right))
    np.testing.assert_array_equal(got[1:], 0)
    for primitive in (TPU.matmul_push_rhs_p, TPU.matmul_acc_lhs_p):
        tolerance.note(primitive, dtype, 0.0)
    tolerance.note(TPU.matmul_pop_p, total, 0.0)


def test_weights_are_staged_one_iteration_ahead(size):
    blocks = 4
    a, b = numbers(0, blocks, 8, size), numbers(1, blocks, size, size)

    def body(a_ref, b_ref, o_ref):
        pltpu.matmul_push_rhs(b_ref[0], 0, 0)

        @pl.loop(0, blocks)
        def _block(i):
            def scoped(acc):
                pltpu.matmul_acc_lhs(acc, a_ref[i], load_staged_rhs=0)

                @pl.when(i + 1 < blocks)
                def _next():
                    pltpu.matmul_push_rhs(b_ref[jnp.minimum(i + 1, blocks - 1)], 0, 0)

                pltpu.matmul_acc_lhs(acc, a_ref[i])
                o_ref[i] = acc[...]

            pl.run_scoped(scoped, pltpu.ACC(0)((8, size), jnp.float32))

    out = jax.ShapeDtypeStruct((blocks, 8, size), jnp.float32)
    got = launch(WITH_ACCUMULATORS, body, out, a, b)
    np.testing.assert_array_equal(got, 2 * (a @ b))


def test_results_leave_a_queue_in_the_order_they_came():
    size, rounds = 128, 70
    a, b = numbers(0, rounds, 16, size), numbers(1, 2, size, size)

    def body(a_ref, b_ref, o_ref):
        pltpu.matmul_push_rhs(b_ref[0], 0, 0)
        pltpu.matmul_push_rhs(b_ref[1], 1, 0)
        pltpu.matmul_lhs_fifo(a_ref[0], 0, load_staged_rhs=0)

        @pl.loop(1, rounds)
        def _push(i):
            pltpu.matmul_lhs_fifo(a_ref[i], 0, load_staged_rhs=1)
            for half in range(2):
                at = pl.ds(8 * half, 8)
                o_ref[i - 1, at] = pltpu.matmul_pop_fifo((8, size), jnp.float32, 0)

        o_ref[rounds - 1] = pltpu.matmul_pop_fifo((16, size), jnp.float32, 0)

    got = launch("v5e", body, jax.ShapeDtypeStruct((rounds, 16, size), jnp.float32), a, b)
    np.testing.assert_array_equal(got[0], a[0] @ b[0])
    np.testing.assert_array_equal(got[1:], a[1:] @ b[1])
    for primitive in (TPU.matmul_lhs_fifo_p, TPU.matmul_pop_fifo_p):
        tolerance.note(primitive, np.float32, 0.0)


def test_an_empty_or_full_queue_is_an_error():
    size = 128
    a, b = numbers(0, 16, size), numbers(1, size, size)

    def body(a_ref, b_ref, n_ref, o_ref):
        pltpu.matmul_push_rhs(b_ref[...], 0, 0)
        pltpu.matmul_lhs_fifo(a_ref[...], 0, load_staged_rhs=0)

        @pl.loop(0, n_ref[0])
        def _push(i):
            pltpu.matmul_lhs_fifo(a_ref[...], 0)

        @pl.loop(0, n_ref[1])
        def _pop(i):
            o_ref[...] = pltpu.matmul_pop_fifo((16, size), jnp.float32, 0)

    out = jax.ShapeDtypeStruct((16, size), jnp.float32)
    np.testing.assert_array_equal(launch("v5e", body, out, a, b, [3, 4]), a @ b)
    with pytest.raises(Exception, match="result queue holds 0 rows, but 16 are taken"):
        launch("v5e", body, out, a, b, [0, 2])
    with pytest.raises(Exception, match="result queue holds 2048 rows, 2048 at most"):
        launch("v5e", body, out, a, b, [300, 0])


def test_loading_what_was_never_pushed_is_an_error():
    def body(a_ref, o_ref):
        pltpu.matmul_lhs_fifo(a_ref[...], 0, load_staged_rhs=1)
        o_ref[...] = pltpu.matmul_pop_fifo((8, 128), jnp.float32, 0)

    with pytest.raises(ValueError, match="staging register 1 of matrix unit 0 is loaded, but"):
        launch("v5e", body, jax.ShapeDtypeStruct((8, 128), jnp.float32), numbers(0, 8, 128))
