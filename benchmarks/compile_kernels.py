"""Kernels whose compile time is measured, each with the same computation in plain JAX.

They are meant for a chip with two SparseCores, so call them inside `cokernel.target("7x")`.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

LANES = 16
SUBCORES = 32


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel made by `make(make_kernel)`, where `make_kernel` has the interface of
    `cokernel.mpmd_map`; its arguments; and what computes the same in plain JAX.
    """

    title: str
    make: Callable[[Callable], Callable]
    arguments: tuple[np.ndarray, ...]
    plain: Callable


def _vector_mesh() -> plsc.VectorSubcoreMesh:
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=2, num_subcores=16
    )


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, dtype=np.float32)


# Rows of LANES elements: each is sorted, or, if its sum is negative, the squares of its elements
# are summed up from the left. A scalar subcore counts the rows as they are done.

ROWS = 1024
SHARE = ROWS // SUBCORES


def _rows(make_kernel: Callable) -> Callable:
    vector, scalar = _vector_mesh(), plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)

    def work(x_ref, out_ref, count_ref, ready):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        mine = pl.ds((core * 16 + subcore) * SHARE, SHARE)

        def with_buffers(rows, results, arrived):
            pltpu.async_copy(x_ref.at[mine], rows, arrived).wait()

            def step(row, total):
                x = rows[row]

                @pl.when(jnp.sum(x) >= 0)
                def _sort():
                    results[row] = plsc.sort_key_val(x, x)[0]

                @pl.when(jnp.sum(x) < 0)
                def _sum():
                    results[row] = plsc.cumsum(x * x)

                return total + jnp.where(x > 0, 1, 0)

            positive = lax.fori_loop(0, SHARE, step, jnp.zeros(LANES, jnp.int32))
            pltpu.sync_copy(results, out_ref.at[mine])
            there = {"core": core}
            done = SHARE + jnp.minimum(jnp.sum(positive), 0)
            pl.semaphore_signal(ready, done, device_id=there)

        pl.run_scoped(
            with_buffers,
            pltpu.VMEM((SHARE, LANES), jnp.float32),
            pltpu.VMEM((SHARE, LANES), jnp.float32),
            pltpu.SemaphoreType.DMA,
        )

    def count(x_ref, out_ref, count_ref, ready):
        pl.semaphore_wait(ready, ROWS // 2)

        def with_buffer(total):
            total[0] = ROWS // 2
            pltpu.sync_copy(total, count_ref.at[pl.ds(lax.axis_index("core"), 1)])

        pl.run_scoped(with_buffer, pltpu.SMEM((1,), jnp.int32))

    return make_kernel(
        [(vector, work), (scalar, count)],
        (
            jax.ShapeDtypeStruct((ROWS, LANES), jnp.float32),
            jax.ShapeDtypeStruct((2,), jnp.int32),
        ),
        scratch_types=[pltpu.SemaphoreType.REGULAR @ scalar],
        name="rows",
    )


def _plain_rows(x):
    is_sorted = jnp.sum(x, axis=1, keepdims=True) >= 0
    out = jnp.where(is_sorted, jnp.sort(x, axis=1), jnp.cumsum(x * x, axis=1))
    return out, jnp.full(2, ROWS // 2, jnp.int32)


# Blocks of 16 rows of LANES elements, each given a score: a merge sort written out, as sorts on
# vector subcores are.


def _score(x: jax.Array) -> jax.Array:
    """A polynomial, written out."""
    score = x * 0.5
    for coefficient in (1.0, -0.25, 0.5, 2.0, -1.5, 0.125):
        score = score * x + coefficient
    return score


def _merge(make_kernel: Callable) -> Callable:
    mesh = _vector_mesh()
    count = 16

    def body(x_ref, out_ref):
        def block(x, out):
            rows = [jnp.sort(_score(x[row])) for row in range(count)]
            size = 1
            while size < count:
                rows = [
                    row
                    for first in range(0, count, 2 * size)
                    for row in _merged(rows[first : first + 2 * size])
                ]
                size *= 2
            for row, values in enumerate(rows):
                out[row] = values

        spec = pl.BlockSpec((count, LANES), lambda i: (i, 0))
        pltpu.emit_pipeline(
            block,
            grid=(ROWS // count,),
            in_specs=[spec],
            out_specs=[spec],
            core_axis_name=("core", "subcore"),
            dimension_semantics=(pltpu.PARALLEL,),
        )(x_ref, out_ref)

    return make_kernel(
        [(mesh, body)], jax.ShapeDtypeStruct((ROWS, LANES), jnp.float32), name="merge"
    )


def _merged(rows: list[jax.Array]) -> list[jax.Array]:
    """Merges two sorted halves of rows, by a bitonic network."""
    middle = len(rows) // 2
    rows = rows[:middle] + [jnp.flip(row) for row in reversed(rows[middle:])]
    distance = middle
    while distance:
        for first in range(0, len(rows), 2 * distance):
            for low in range(first, first + distance):
                one, other = rows[low], rows[low + distance]
                rows[low], rows[low + distance] = jnp.minimum(one, other), jnp.maximum(one, other)
        distance //= 2
    return [jnp.sort(row) for row in rows]


def _plain_merge(x):
    return jnp.sort(_score(x).reshape(-1, 16 * LANES), axis=1).reshape(x.shape)


# A product of matrices in blocks, with an activation behind it.

SIZE, BLOCK = 512, 128


def _product(make_kernel: Callable) -> Callable:
    def body(x_ref, y_ref, out_ref):
        def block(x, y, out):
            @pl.when(pl.program_id(2) == 0)
            def _clear():
                out[...] = jnp.zeros_like(out)

            out[...] += jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

            @pl.when(pl.program_id(2) == SIZE // BLOCK - 1)
            def _activate():
                out[...] = jax.nn.gelu(out[...])

        pltpu.emit_pipeline(
            block,
            grid=(SIZE // BLOCK,) * 3,
            in_specs=[
                pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
                pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j))],
        )(x_ref, y_ref, out_ref)

    return make_kernel(
        [(pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1), body)],
        jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32),
        name="product",
    )


# Many operations on whole arrays, one after the other.


def _layers(x, y):
    for number in range(6):
        x = x - jnp.mean(x, axis=1, keepdims=True)
        x = x / jnp.sqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-5)
        x = jnp.where(x > 0, x * 1.5 + number, jnp.exp(x) - 1) + jnp.tanh(y) * 0.5
        y = jnp.roll(y, number + 1, axis=1) * jax.nn.sigmoid(x)
    return x + y, jnp.max(x, axis=0)


def _straight(make_kernel: Callable) -> Callable:
    def body(x_ref, y_ref, out_ref, top_ref):
        out_ref[...], top_ref[...] = _layers(x_ref[...], y_ref[...])

    return make_kernel(
        [(cokernel.CoreMesh(core=1), body)],
        (
            jax.ShapeDtypeStruct((256, 512), jnp.float32),
            jax.ShapeDtypeStruct((512,), jnp.float32),
        ),
        name="straight",
    )


KERNELS = {
    "rows": Kernel(
        "two programs: DMAs, a loop over 16-lane vectors, sorts",
        _rows,
        (_random(ROWS, LANES),),
        _plain_rows,
    ),
    "merge": Kernel(
        "a merge sort written out, in a pipeline", _merge, (_random(ROWS, LANES),), _plain_merge
    ),
    "product": Kernel(
        "a product of matrices in a pipeline",
        _product,
        (_random(SIZE, SIZE), _random(SIZE, SIZE)),
        lambda x, y: jax.nn.gelu(x @ y),
    ),
    "straight": Kernel(
        "operations on whole arrays", _straight, (_random(256, 512), _random(256, 512)), _layers
    ),
}
