"""Kernels whose time goes into arithmetic, as an author of TensorCore kernels writes them."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels import Make

AXIS = "core"
CORES = 2


def _mesh() -> pltpu.TensorCoreMesh:
    return pltpu.TensorCoreMesh(axis_name=AXIS, num_cores=CORES)


def elementwise(
    make: Make, function: Callable, shape: tuple[int, int], rows: int, **options
) -> Callable:
    """Applies a function to each element of float32[shape], `rows` rows at a time."""

    def body(x_ref, out_ref):
        def block(x_block, out_block):
            out_block[...] = function(x_block[...])

        spec = pl.BlockSpec((rows, shape[1]), lambda i: (i, 0))
        pltpu.emit_pipeline(
            block,
            grid=(shape[0] // rows,),
            in_specs=[spec],
            out_specs=[spec],
            core_axis_name=AXIS,
            dimension_semantics=(pltpu.PARALLEL,),
        )(x_ref, out_ref)

    return make(
        body,
        out_type=jax.ShapeDtypeStruct(shape, jnp.float32),
        mesh=_mesh(),
        name="elementwise",
        **options,
    )


def softmax_of_rows(x: jax.Array) -> jax.Array:
    """Softmax along the last dimension, as its definition says."""
    grown = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    return grown / jnp.sum(grown, axis=1, keepdims=True)


def softmax(make: Make, shape: tuple[int, int], rows: int, **options) -> Callable:
    """Softmax along the rows of float32[shape], `rows` of them at a time."""
    return elementwise(make, softmax_of_rows, shape, rows, **options)


def matmul_block(steps: int, dtype: jnp.dtype) -> Callable:
    """Returns the body of one step of a product, which sums over the last dimension of the grid."""

    def block(left_block, right_block, out_block, total_ref):
        @pl.when(pl.program_id(2) == 0)
        def _clear():
            total_ref[...] = jnp.zeros_like(total_ref)

        total_ref[...] += jnp.dot(
            left_block[...], right_block[...], preferred_element_type=jnp.float32
        )

        @pl.when(pl.program_id(2) == steps - 1)
        def _store():
            out_block[...] = total_ref[...].astype(dtype)

    return block


def matmul(
    make: Make,
    sizes: tuple[int, int, int],
    blocks: tuple[int, int, int],
    dtype: jnp.dtype,
    **options,
) -> Callable:
    """The product of dtype[m, k] and dtype[k, n], summed in a float32 accumulator in VMEM.

    `sizes` and `blocks` are of m, k and n.
    """
    (m, k, n), (block_m, block_k, block_n) = sizes, blocks
    block = matmul_block(k // block_k, dtype)

    def body(left_ref, right_ref, out_ref, total_ref):
        pltpu.emit_pipeline(
            lambda *blocks: block(*blocks, total_ref),
            grid=(m // block_m, n // block_n, k // block_k),
            in_specs=[
                pl.BlockSpec((block_m, block_k), lambda i, j, k: (i, k)),
                pl.BlockSpec((block_k, block_n), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((block_m, block_n), lambda i, j, k: (i, j))],
            core_axis_name=AXIS,
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
        )(left_ref, right_ref, out_ref)

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), dtype),
        mesh=_mesh(),
        scratch_types=[pltpu.VMEM((block_m, block_n), jnp.float32)],
        name="matmul",
        **options,
    )


def attention_scratch(block_q: int, width: int) -> list:
    """Returns the running maximum and sum of each row of a block, and its weighted values."""
    return [
        pltpu.VMEM((block_q, 1), jnp.float32),
        pltpu.VMEM((block_q, 1), jnp.float32),
        pltpu.VMEM((block_q, width), jnp.float32),
    ]


def attention_block(steps: int, width: int) -> Callable:
    """Returns the body of one step of attention: a block of queries meets a block of keys."""
    scale = 1 / math.sqrt(width)

    def block(q_block, k_block, v_block, out_block, maximum_ref, sum_ref, total_ref):
        step = pl.program_id(1)

        @pl.when(step == 0)
        def _clear():
            maximum_ref[...] = jnp.full_like(maximum_ref, -jnp.inf)
            sum_ref[...] = jnp.zeros_like(sum_ref)
            total_ref[...] = jnp.zeros_like(total_ref)

        scores = lax.dot_general(q_block[...], k_block[...], (((1,), (1,)), ((), ()))) * scale
        before = maximum_ref[...]
        now = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - now)
        shrink = jnp.exp(before - now)
        maximum_ref[...] = now
        sum_ref[...] = sum_ref[...] * shrink + jnp.sum(weights, axis=1, keepdims=True)
        total_ref[...] = total_ref[...] * shrink + jnp.dot(weights, v_block[...])

        @pl.when(step == steps - 1)
        def _store():
            out_block[...] = total_ref[...] / sum_ref[...]

    return block


def attention(
    make: Make, queries: int, keys: int, width: int, block_q: int, block_k: int, **options
) -> Callable:
    """softmax(q k^T / sqrt(width)) v of one head in float32, a block of keys at a time.

    What is known of each block of queries so far stays in VMEM while keys and values stream by.
    """
    block = attention_block(keys // block_k, width)

    def body(q_ref, k_ref, v_ref, out_ref, *scratch):
        rows = pl.BlockSpec((block_q, width), lambda i, j: (i, 0))
        columns = pl.BlockSpec((block_k, width), lambda i, j: (j, 0))
        pltpu.emit_pipeline(
            lambda *blocks: block(*blocks, *scratch),
            grid=(queries // block_q, keys // block_k),
            in_specs=[rows, columns, columns],
            out_specs=[rows],
            core_axis_name=AXIS,
            dimension_semantics=(pltpu.PARALLEL, pltpu.ARBITRARY),
        )(q_ref, k_ref, v_ref, out_ref)

    return make(
        body,
        out_type=jax.ShapeDtypeStruct((queries, width), jnp.float32),
        mesh=_mesh(),
        scratch_types=attention_scratch(block_q, width),
        name="attention",
        **options,
    )
