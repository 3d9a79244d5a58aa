"""Cases whose time goes into arithmetic."""

import ctypes
import functools
import math
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import scipy.special
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels import arithmetic as kernels
from measure import Case
from native import COUNT, INT, POINTER, THREADS, address
from rows import Group, Sample, multiply_adds, row, traffic

import cokernel
from cokernel.compiler import blas

SIDE, SIDE_ROWS = 1024, 32
SOFTMAX_SHAPE, SOFTMAX_ROWS = (1024, 4096), 8
QUERIES, KEYS, HEAD = 2048, 2048, 128
QUERY_BLOCK, KEY_BLOCK = 256, 512
# Of the rows, the summed dimension and the columns; each core of a chip has its share of the rows.
SMALL_BLOCKS, LARGE_BLOCKS = (256, 512, 512), (1024, 1024, 1024)


def _normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


# Elementwise functions and softmax.


def _by_rows(function: Callable, shape: tuple[int, int], rows: int) -> Callable:
    """Returns a `pallas_call` for JAX's HLO interpreter that goes by so many rows at a time."""

    def block(x_ref, out_ref):
        out_ref[...] = function(x_ref[...])

    spec = pl.BlockSpec((rows, shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        block,
        out_shape=jax.ShapeDtypeStruct(shape, jnp.float32),
        grid=(shape[0] // rows,),
        in_specs=[spec],
        out_specs=spec,
        interpret=True,
    )


def _elementwise(
    limits: ctypes.CDLL, key: str, function: Callable, exact: Callable, by_hand: str
) -> Case:
    x = _normal(SIDE, SIDE)
    return row(
        key,
        f"{key}(x) of 2^20 float32 in blocks of {SIDE_ROWS} KiB x 4, a pipeline on 2 cores",
        kernel=kernels.elementwise(cokernel.kernel, function, x.shape, SIDE_ROWS),
        plain=function,
        interpreted=_by_rows(function, x.shape, SIDE_ROWS),
        arguments=(x,),
        expected=exact(x.astype(np.float64)).astype(np.float32),
        hand=lambda threads, out: getattr(limits, by_hand)(address(x), out, x.size, threads, 20),
        limit=traffic(limits, x.nbytes, x.nbytes),
    )


def exp(limits: ctypes.CDLL) -> Case:
    """exp of many numbers."""
    return _elementwise(limits, "exp", jnp.exp, np.exp, "exponentials")


def tanh(limits: ctypes.CDLL) -> Case:
    """tanh of many numbers."""
    return _elementwise(limits, "tanh", jnp.tanh, np.tanh, "hyperbolic_tangents")


def erf(limits: ctypes.CDLL) -> Case:
    """erf of many numbers."""
    return _elementwise(limits, "erf", lax.erf, scipy.special.erf, "error_functions")


def _softmax(x: np.ndarray) -> np.ndarray:
    return scipy.special.softmax(x.astype(np.float64), axis=1).astype(np.float32)


def softmax(limits: ctypes.CDLL) -> Case:
    """Softmax along long rows."""
    x = _normal(*SOFTMAX_SHAPE)
    rows, columns = x.shape
    return row(
        "softmax",
        f"Softmax of {rows} rows of {columns} float32, {SOFTMAX_ROWS} at a time on 2 cores",
        kernel=kernels.softmax(cokernel.kernel, x.shape, SOFTMAX_ROWS),
        plain=functools.partial(jax.nn.softmax, axis=1),
        interpreted=_by_rows(kernels.softmax_of_rows, x.shape, SOFTMAX_ROWS),
        arguments=(x,),
        expected=_softmax(x),
        hand=lambda threads, out: limits.softmax(address(x), out, rows, columns, threads, 5),
        limit=traffic(limits, x.nbytes, x.nbytes),
    )


# Matrix products.


def _blas_name(threads: int) -> str:
    return f"BLAS of SciPy, {threads} thread{'s' * (threads > 1)}"


def _in_float32_name(threads: int) -> str:
    return f"{_blas_name(threads)}, in float32"


def _set_blas_threads(number: int) -> None:
    setter = blas.symbols().get(f"{blas.PREFIX}set_threads")
    if setter is not None:
        ctypes.CFUNCTYPE(None, ctypes.c_int)(setter)(number)


def _by_blas(left: np.ndarray, right: np.ndarray) -> Callable[[int, int | None], float]:
    """Returns what multiplies two matrices with SciPy's BLAS; the time is of one product."""
    # To BLAS, which counts columns first, each of our matrices is the transposed one.
    factors = right.T, left.T
    kept = np.zeros((right.shape[1], left.shape[0]), np.float32, order="F")

    def multiply(threads: int, out: int | None) -> float:
        _set_blas_threads(threads)
        start = time.perf_counter()
        product = scipy.linalg.blas.sgemm(1.0, *factors, c=kept, overwrite_c=out is None)
        seconds = time.perf_counter() - start
        _set_blas_threads(THREADS)
        if out is not None:
            ctypes.memmove(out, np.ascontiguousarray(product.T).ctypes.data, product.nbytes)
        return seconds

    return multiply


def _interpreted_matmul(
    sizes: tuple[int, int, int], blocks: tuple[int, int, int], dtype: jnp.dtype
) -> Callable:
    """Returns a `pallas_call` for JAX's HLO interpreter that sums in an accumulator."""
    (m, k, n), (block_m, block_k, block_n) = sizes, blocks
    return pl.pallas_call(
        kernels.matmul_block(k // block_k, dtype),
        out_shape=jax.ShapeDtypeStruct((m, n), dtype),
        grid=(m // block_m, n // block_n, k // block_k),
        in_specs=[
            pl.BlockSpec((block_m, block_k), lambda i, j, k: (i, k)),
            pl.BlockSpec((block_k, block_n), lambda i, j, k: (k, j)),
        ],
        out_specs=pl.BlockSpec((block_m, block_n), lambda i, j, k: (i, j)),
        scratch_shapes=[pltpu.VMEM((block_m, block_n), jnp.float32)],
        interpret=True,
    )


def _matmul(size: int, dtype: jnp.dtype, blocks: tuple[int, int, int]) -> Callable:
    """Returns what builds the case of a product of two square matrices."""

    def build(limits: ctypes.CDLL) -> Case:
        left, right = (jnp.asarray(_normal(size, size, seed=seed), dtype) for seed in (0, 1))
        wide = [np.asarray(item, np.float32) for item in (left, right)]
        sizes = (size, size, size)
        is_float32 = dtype == jnp.float32
        name = "float32" if is_float32 else "bfloat16"
        if is_float32:
            limit = multiply_adds(limits, size**3)
        else:
            limit = (
                f"limit: {THREADS} threads do {size**3:.2g} multiply-adds of bfloat16",
                lambda: limits.multiply_adds_bfloat16(size**3, THREADS, 3),
            )
        return row(
            f"matmul_{size}_{name}",
            f"Product of two {size} x {size} matrices of {name}, a pipeline on 2 cores",
            kernel=kernels.matmul(cokernel.kernel, sizes, blocks, dtype),
            plain=jnp.matmul,
            interpreted=_interpreted_matmul(sizes, blocks, dtype),
            arguments=(left, right),
            expected=np.matmul(*wide),
            hand=_by_blas(*wide),
            hand_name=_blas_name if is_float32 else _in_float32_name,
            limit=limit,
            tolerance=1e-3 if is_float32 else 1e-1 * math.sqrt(size / 512),
        )

    return build


# Attention.


def _exact_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    q, k, v = (item.astype(np.float64) for item in (q, k, v))
    scores = q @ k.T / math.sqrt(q.shape[1])
    return (scipy.special.softmax(scores, axis=1) @ v).astype(np.float32)


def _plain_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.softmax(q @ k.T / math.sqrt(q.shape[1]), axis=1) @ v


def _interpreted_attention() -> Callable:
    rows = pl.BlockSpec((QUERY_BLOCK, HEAD), lambda i, j: (i, 0))
    columns = pl.BlockSpec((KEY_BLOCK, HEAD), lambda i, j: (j, 0))
    return pl.pallas_call(
        kernels.attention_block(KEYS // KEY_BLOCK, HEAD),
        out_shape=jax.ShapeDtypeStruct((QUERIES, HEAD), jnp.float32),
        grid=(QUERIES // QUERY_BLOCK, KEYS // KEY_BLOCK),
        in_specs=[rows, columns, columns],
        out_specs=rows,
        scratch_shapes=kernels.attention_scratch(QUERY_BLOCK, HEAD),
        interpret=True,
    )


def attention(limits: ctypes.CDLL) -> Case:
    """Attention of one head, keys in blocks."""
    arrays = [_normal(size, HEAD, seed=seed) for seed, size in enumerate((QUERIES, KEYS, KEYS))]
    gemm = blas.symbols()[f"{blas.PREFIX}sgemm"]

    def by_hand(threads: int, out: int | None) -> float:
        # The threads are the loop's own.
        _set_blas_threads(1)
        try:
            sizes = (QUERIES, KEYS, HEAD)
            return limits.attention(*map(address, arrays), out, *sizes, gemm, threads, 1)
        finally:
            _set_blas_threads(THREADS)

    return row(
        "attention",
        f"Attention of one head: {QUERIES} queries, {KEYS} keys of {HEAD} float32, on 2 cores",
        kernel=kernels.attention(cokernel.kernel, QUERIES, KEYS, HEAD, QUERY_BLOCK, KEY_BLOCK),
        plain=_plain_attention,
        interpreted=_interpreted_attention(),
        arguments=arrays,
        expected=_exact_attention(*arrays),
        hand=by_hand,
        limit=multiply_adds(limits, 2 * QUERIES * KEYS * HEAD),
    )


# The same kernels at a small size, for JAX's interpret modes.


def _sample_elementwise(function: Callable, exact: Callable) -> Sample:
    def prepare(make, options):
        x = _normal(32, 128)
        kernel = kernels.elementwise(make, function, x.shape, 8, **options)
        return kernel, (x,), exact(x)

    return Sample("32 x 128, 8 rows at a time", prepare)


def _sample_softmax(make, options):
    x = _normal(32, 256)
    return kernels.softmax(make, x.shape, 8, **options), (x,), _softmax(x)


def _sample_matmul(dtype: jnp.dtype) -> Sample:
    def prepare(make, options):
        left, right = (jnp.asarray(_normal(256, 256, seed=seed), dtype) for seed in (0, 1))
        kernel = kernels.matmul(make, (256,) * 3, (128,) * 3, dtype, **options)
        expected = np.matmul(*(np.asarray(item, np.float32) for item in (left, right)))
        return kernel, (left, right), expected

    return Sample("256 x 256, blocks of 128", prepare, 1e-3 if dtype == jnp.float32 else 1e-1)


def _sample_attention(make, options):
    arrays = [_normal(256, HEAD, seed=seed) for seed in range(3)]
    kernel = kernels.attention(make, 256, 256, HEAD, 128, 128, **options)
    return kernel, tuple(arrays), _exact_attention(*arrays)


GROUP = Group(
    cases={
        "matmul_512_float32": _matmul(512, jnp.float32, SMALL_BLOCKS),
        "matmul_2048_float32": _matmul(2048, jnp.float32, LARGE_BLOCKS),
        "matmul_512_bfloat16": _matmul(512, jnp.bfloat16, SMALL_BLOCKS),
        "matmul_2048_bfloat16": _matmul(2048, jnp.bfloat16, LARGE_BLOCKS),
        "softmax": softmax,
        "attention": attention,
        "exp": exp,
        "tanh": tanh,
        "erf": erf,
    },
    samples={
        "matmul_512_float32": _sample_matmul(jnp.float32),
        "matmul_512_bfloat16": _sample_matmul(jnp.bfloat16),
        # The large products at the size of the small ones.
        "matmul_2048_float32": _sample_matmul(jnp.float32),
        "matmul_2048_bfloat16": _sample_matmul(jnp.bfloat16),
        "softmax": Sample("32 x 256, 8 rows at a time", _sample_softmax),
        "attention": Sample("256 queries and keys, blocks of 128", _sample_attention),
        "exp": _sample_elementwise(jnp.exp, np.exp),
        "tanh": _sample_elementwise(jnp.tanh, np.tanh),
        "erf": _sample_elementwise(lax.erf, scipy.special.erf),
    },
    signatures={
        "exponentials": [POINTER] * 2 + [COUNT, INT, COUNT],
        "hyperbolic_tangents": [POINTER] * 2 + [COUNT, INT, COUNT],
        "error_functions": [POINTER] * 2 + [COUNT, INT, COUNT],
        "softmax": [POINTER] * 2 + [COUNT] * 2 + [INT, COUNT],
        "attention": [POINTER] * 4 + [COUNT] * 3 + [POINTER, INT, COUNT],
        "multiply_adds_bfloat16": [COUNT, INT, COUNT],
    },
)
