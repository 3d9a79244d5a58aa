"""dot_general of any dimensions and dtypes gives XLA's results; with whole numbers, exactly."""

import ctypes

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cokernel.compiler import blas
from tests.compiler.harness import expect_close, expect_same, run

PLAIN = (((1,), (0,)), ((), ()))

CASES = [
    # In registers.
    ((3, 4), (4, 5), PLAIN),
    ((5,), (5,), (((0,), (0,)), ((), ()))),
    ((4, 4), (4, 4), (((1,), (1,)), ((), ()))),
    ((2, 2), (2, 2), (((0, 1), (0, 1)), ((), ()))),
    ((8, 3), (3, 8), PLAIN),
    ((1, 64), (64, 1), PLAIN),
    ((7,), (5,), (((), ()), ((), ()))),
    ((7, 1), (1, 5), PLAIN),
    ((3, 7, 1), (3, 1, 2), (((2,), (1,)), ((0,), (0,)))),
    # By BLAS, with each operand as it lies and transposed.
    ((16, 16), (16, 16), (((0,), (0,)), ((), ()))),
    ((64, 48), (48, 32), PLAIN),
    ((64, 48), (32, 48), (((1,), (1,)), ((), ()))),
    ((48, 64), (48, 32), (((0,), (0,)), ((), ()))),
    ((48, 64), (32, 48), (((0,), (1,)), ((), ()))),
    # Batches, and several dimensions of one kind.
    ((3, 20, 30), (3, 30, 10), (((2,), (1,)), ((0,), (0,)))),
    ((20, 3, 30), (30, 10, 3), (((2,), (0,)), ((1,), (2,)))),
    ((2, 3, 4, 5), (5, 3, 6), (((3, 1), (0, 1)), ((), ()))),
    ((2, 8, 8, 4, 6), (2, 8, 6, 4, 9), (((3, 4), (3, 2)), ((0,), (0,)))),
    # Vectors.
    ((1, 100), (100, 50), PLAIN),
    ((100, 50), (50,), (((1,), (0,)), ((), ()))),
    ((50,), (100, 50), (((0,), (1,)), ((), ()))),
    ((300,), (300,), (((0,), (0,)), ((), ()))),
    ((70,), (50,), (((), ()), ((), ()))),
    # Nothing to sum, and nothing at all.
    ((3, 0), (0, 5), PLAIN),
    ((0, 4), (4, 5), PLAIN),
]


def whole(shape, dtype, seed=0):
    numbers = np.random.default_rng(seed).integers(-4, 5, shape)
    return numbers > 2 if dtype is np.bool_ else numbers.astype(dtype)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_whole_numbers_of_many_dtypes(case):
    left, right, numbers = case
    dtypes = [
        (np.float32, None),
        (np.int32, None),
        (np.int8, np.int32),
        (jnp.bfloat16, np.float32),
        (jnp.bfloat16, None),
        (np.float16, None),
        (np.bool_, None),
        (np.uint8, None),
    ]
    arrays = []
    for dtype, _ in dtypes:
        arrays += [whole(left, dtype), whole(right, dtype, 1)]

    def function(*arrays):
        pairs = zip(arrays[::2], arrays[1::2], dtypes, strict=True)
        return [
            lax.dot_general(a, b, numbers, preferred_element_type=preferred)
            for a, b, (_, preferred) in pairs
        ]

    expect_same(function, *arrays)


@pytest.mark.parametrize(
    ("left", "right", "preferred"),
    [
        (np.int8, np.uint8, np.int32),
        (jnp.bfloat16, np.float32, np.float32),
        (np.int8, jnp.bfloat16, jnp.bfloat16),
        (jnp.float8_e4m3fn, jnp.float8_e5m2, np.float32),
        (np.int8, np.int8, np.float32),
        (np.float32, np.float32, np.int8),
        (jnp.bfloat16, jnp.bfloat16, np.int32),
    ],
)
@pytest.mark.parametrize("size", [4, 40])
def test_operands_of_two_dtypes_meet_in_the_preferred_one(left, right, preferred, size):
    a, b = whole((size, size), left), whole((size, size), right, 1)
    if np.dtype(preferred).kind == "i" and np.dtype(left).kind not in "iu":
        # Beyond what the narrow types hold, so that rounding and saturation show.
        a = a * np.array(25, a.dtype)
    expect_same(lambda a, b: lax.dot_general(a, b, PLAIN, preferred_element_type=preferred), a, b)


@pytest.mark.parametrize("shape", [(5, 5), (16, 24), (60, 90)])
def test_products_of_floats_differ_by_rounding_only(shape):
    rng = np.random.default_rng(2)
    a, b = (rng.random(shape).astype(np.float32) for _ in range(2))
    expect_close(lambda a, b: [a @ b.T, a.T @ b, jnp.sum(a * b, 1)], a, b, ulps=200)


def test_operands_may_be_views_and_expressions():
    a = whole((64, 64), np.float32)

    def function(a):
        return [
            (a[:32] * 2) @ a[32:].T[:, ::2],
            a[::2, ::2] @ a[::2, ::2],
            a[::-1] @ a[:, ::-1],
            jnp.broadcast_to(a[:1], (64, 64)) @ a,
        ]

    expect_same(function, a)


def test_not_a_number_and_infinity_reach_the_result():
    a = np.ones((32, 32), np.float32)
    a[3, 4], a[5, 6] = np.nan, np.inf
    expect_same(lambda a, b: [a @ b, a[:4, :8] @ b[:8, :4]], a, np.eye(32, dtype=np.float32))


def test_blas_gets_its_threads_back_after_a_product():
    symbols = blas.symbols()
    name = f"{blas.PREFIX}get_threads"
    if name not in symbols:
        pytest.skip("this BLAS does not say how many threads it uses")
    threads = ctypes.CFUNCTYPE(ctypes.c_int)(symbols[name])
    before = threads()
    a = whole((64, 64), np.float32)
    for _ in range(3):
        np.testing.assert_array_equal(run(lambda a: a @ a, a)[0], a @ a)
    assert threads() == before
