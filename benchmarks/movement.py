"""Cases whose time goes into moving data."""

import ctypes
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from kernels import movement as kernels
from measure import Case
from native import COUNT, FLOAT, INT, POINTER, address
from rows import Group, Sample, row, traffic

import cokernel

TABLE_ROWS, ROWS, WIDTH, ROW_WINDOW = 4096, 131_072, 128, 128
SIZE, WINDOW = 1 << 20, 2048
SIDE, TILE_ROWS = 1024, 8
BINS, SORTED = 65_536, 1 << 16


def _table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a table of TABLE_ROWS, and the indices of `rows` rows of it."""
    random = np.random.default_rng(0)
    table = random.standard_normal((TABLE_ROWS, WIDTH), dtype=np.float32)
    return table, random.integers(0, TABLE_ROWS, rows, dtype=np.int32)


def _histogram(size: int, bins: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns values, where they are added, and the sums."""
    values = _uniform(size)
    indices = np.random.default_rng(1).integers(0, bins, size, dtype=np.int32)
    return values, indices, np.bincount(indices, values, bins).astype(np.float32)


def _uniform(size: int) -> np.ndarray:
    return np.random.default_rng(0).random(size, dtype=np.float32)


def _block(body: Callable, out: np.ndarray, *operands: np.ndarray, blocks: int) -> Callable:
    """Returns a `pallas_call` for JAX's HLO interpreter, which takes `out` and the first of the
    operands block by block and the other operands whole.
    """

    def spec(array: np.ndarray, is_whole: bool) -> pl.BlockSpec:
        if is_whole:
            return pl.BlockSpec(array.shape, lambda i: (0,) * array.ndim)
        block = (array.shape[0] // blocks, *array.shape[1:])
        return pl.BlockSpec(block, lambda i: (i, *(0,) * (array.ndim - 1)))

    return pl.pallas_call(
        body,
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        grid=(blocks,),
        in_specs=[spec(operand, number > 0) for number, operand in enumerate(operands)],
        out_specs=spec(out, False),
        interpret=True,
    )


def copy(limits: ctypes.CDLL) -> Case:
    """A matrix through the memory of the subcores."""
    x = _uniform(SIZE).reshape(SIDE, SIDE)

    def block(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    return row(
        "copy",
        f"Copy of {SIDE} x {SIDE} float32 in tiles of {TILE_ROWS} rows, 32 subcores",
        kernel=kernels.copy(cokernel.kernel, SIDE, SIDE, TILE_ROWS),
        plain=jnp.copy,
        interpreted=_block(block, x, x, blocks=SIDE // TILE_ROWS),
        arguments=(x,),
        expected=x,
        hand=lambda threads, out: limits.copy(
            address(x), out, SIDE, SIDE, TILE_ROWS, 1, threads, 20
        ),
        limit=traffic(limits, x.nbytes, x.nbytes),
    )


def scale(limits: ctypes.CDLL) -> Case:
    """A matrix through a pipeline that multiplies it."""
    x = _uniform(SIZE).reshape(SIDE, SIDE)

    def block(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 3

    return row(
        "scale",
        f"x * 3 on {SIDE} x {SIDE} float32 in tiles of {TILE_ROWS} rows, a pipeline on 2 cores",
        kernel=kernels.scale(cokernel.kernel, SIDE, SIDE, TILE_ROWS),
        plain=lambda x: x * 3,
        interpreted=_block(block, x, x, blocks=SIDE // TILE_ROWS),
        arguments=(x,),
        expected=x * 3,
        hand=lambda threads, out: limits.copy(
            address(x), out, SIDE, SIDE, TILE_ROWS, 3, threads, 20
        ),
        limit=traffic(limits, x.nbytes, x.nbytes),
    )


def affine(limits: ctypes.CDLL) -> Case:
    """x * 2 + 1 in steps of sixteen lanes."""
    x = _uniform(SIZE)

    def block(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2 + 1

    return row(
        "affine",
        "x * 2 + 1 on 2^20 float32 in steps of 16 lanes, 32 subcores",
        kernel=kernels.affine(cokernel.kernel, SIZE, WINDOW),
        plain=lambda x: x * 2 + 1,
        interpreted=_block(block, x, x, blocks=SIZE // WINDOW),
        arguments=(x,),
        expected=x * 2 + 1,
        hand=lambda threads, out: limits.affine(address(x), out, SIZE, WINDOW, threads, 20),
        limit=traffic(limits, x.nbytes, x.nbytes),
    )


def _gather(limits: ctypes.CDLL, key: str, rows: int) -> Case:
    table, indices = _table(rows)

    def block(indices_ref, table_ref, out_ref):
        out_ref[...] = table_ref[...][indices_ref[...]]

    interpreted = _block(block, table[indices], indices, table, blocks=rows // ROW_WINDOW)
    return row(
        key,
        f"Gather of {rows:,} rows of {WIDTH} float32 from {TABLE_ROWS:,}, 32 subcores",
        kernel=kernels.gather(cokernel.kernel, rows, WIDTH, ROW_WINDOW),
        plain=lambda table, indices: jnp.take(table, indices, axis=0),
        interpreted=lambda table, indices: interpreted(indices, table),
        arguments=(table, indices),
        expected=table[indices],
        hand=lambda threads, out: limits.gather(
            address(table), address(indices), out, rows, WIDTH, ROW_WINDOW, threads, 3
        ),
        limit=traffic(limits, table.nbytes + indices.nbytes, rows * WIDTH * 4),
        faster=2,
    )


def gather(limits: ctypes.CDLL) -> Case:
    """Rows of a table, chosen by indices, through the memory of the subcores."""
    return _gather(limits, "gather", ROWS)


def small_gather(limits: ctypes.CDLL) -> Case:
    """One window of rows for each subcore."""
    return _gather(limits, "gather_window", TABLE_ROWS)


def scatter_add(limits: ctypes.CDLL) -> Case:
    """Values added to a table at random places."""
    values, indices, expected = _histogram(SIZE, BINS)

    def block(values_ref, indices_ref, out_ref):
        out_ref[...] = jnp.zeros(BINS, jnp.float32).at[indices_ref[...]].add(values_ref[...])

    return row(
        "scatter_add",
        f"Scatter-add of 2^20 float32 into {BINS:,}, one table on each of 2 subcores",
        kernel=kernels.scatter_add(cokernel.kernel, SIZE, BINS, WINDOW),
        plain=lambda values, indices: jnp.zeros(BINS, jnp.float32).at[indices].add(values),
        interpreted=_block(block, expected, values, indices, blocks=1),
        arguments=(values, indices),
        expected=expected,
        hand=lambda threads, out: limits.scatter_add(
            address(values), address(indices), out, SIZE, BINS, WINDOW, threads, 5
        ),
        limit=traffic(limits, values.nbytes + indices.nbytes, expected.nbytes),
        faster=2,
    )


def cumulative_sum(limits: ctypes.CDLL) -> Case:
    """Running sums by sixteen lanes, in pieces."""
    x = _uniform(SIZE)
    expected = np.cumsum(x.astype(np.float64)).astype(np.float32)

    def block(x_ref, out_ref):
        out_ref[...] = jnp.cumsum(x_ref[...])

    return row(
        "cumsum",
        "Cumulative sum of 2^20 float32 in steps of 16 lanes, 16 subcores",
        kernel=kernels.cumulative_sum(cokernel.kernel, SIZE),
        plain=jnp.cumsum,
        interpreted=_block(block, x, x, blocks=1),
        arguments=(x,),
        expected=expected,
        hand=lambda threads, out: limits.cumulative_sum(address(x), out, SIZE, threads, 10),
        limit=traffic(limits, x.nbytes, x.nbytes),
        faster=2,
    )


def scalar_cumulative_sum(limits: ctypes.CDLL) -> Case:
    """Running sums, one after the other."""
    x = _uniform(SIZE)
    expected = np.cumsum(x.astype(np.float64)).astype(np.float32)

    def block(x_ref, out_ref):
        def step(i, total):
            total += x_ref[i]
            out_ref[i] = total
            return total

        lax.fori_loop(0, SIZE, step, jnp.float32(0))

    return row(
        "scalar_cumsum",
        "Cumulative sum of 2^20 float32 in a loop over scalars, one scalar subcore",
        kernel=kernels.scalar_cumulative_sum(cokernel.kernel, SIZE, WINDOW),
        plain=jnp.cumsum,
        interpreted=_block(block, x, x, blocks=1),
        arguments=(x,),
        expected=expected,
        hand=lambda threads, out: limits.scalar_cumulative_sum(address(x), out, SIZE, WINDOW, 5),
        limit=traffic(limits, x.nbytes, x.nbytes),
        faster=2,
        threads=1,
        tolerance=1e-3,
    )


def sort(limits: ctypes.CDLL) -> Case:
    """A whole array in order."""
    x = _uniform(SORTED)

    def block(x_ref, out_ref):
        out_ref[...] = jnp.sort(x_ref[...])

    return row(
        "sort",
        "Sort of 2^16 float32, one core",
        kernel=kernels.sort(cokernel.kernel, SORTED),
        plain=jnp.sort,
        interpreted=_block(block, x, x, blocks=1),
        arguments=(x,),
        expected=np.sort(x),
        hand=lambda threads, out: limits.sort(address(x), out, SORTED, 5),
        limit=traffic(limits, x.nbytes, x.nbytes),
        faster=2,
        threads=1,
    )


def _sample_gather(make, options):
    table, indices = _table(4096)
    return kernels.gather(make, 4096, WIDTH, 128, **options), (table, indices), table[indices]


def _sample_scatter_add(make, options):
    values, indices, expected = _histogram(4096, 256)
    return kernels.scatter_add(make, 4096, 256, 256, **options), (values, indices), expected


def _sample_of_array(build: Callable, expected: Callable, shape: tuple[int, ...]) -> Callable:
    def prepare(make, options):
        x = _uniform(math.prod(shape)).reshape(shape)
        return build(make, *shape, **options), (x,), expected(x)

    return prepare


def _samples() -> dict[str, Sample]:
    def build(kernel: Callable, *sizes: int) -> Callable:
        return lambda make, *shape, **options: kernel(make, *shape, *sizes, **options)

    def of_array(title: str, kernel: Callable, expected: Callable, *shape: int) -> Sample:
        return Sample(title, _sample_of_array(kernel, expected, shape))

    return {
        "copy": of_array("64 x 128", build(kernels.copy, 2), lambda x: x, 64, 128),
        "scale": of_array("64 x 128", build(kernels.scale, 8), lambda x: x * 3, 64, 128),
        "affine": of_array("2,048", build(kernels.affine, 64), lambda x: x * 2 + 1, 2048),
        "gather": Sample("4,096 rows in windows of 128", _sample_gather),
        "gather_window": Sample("4,096 rows in windows of 128", _sample_gather),
        "scatter_add": Sample("4,096 into 256", _sample_scatter_add),
        "cumsum": of_array("2,048", build(kernels.cumulative_sum), np.cumsum, 2048),
        "scalar_cumsum": of_array(
            "1,024", build(kernels.scalar_cumulative_sum, 256), np.cumsum, 1024
        ),
        "sort": of_array("2,048", build(kernels.sort), np.sort, 2048),
    }


GROUP = Group(
    cases={
        "copy": copy,
        "scale": scale,
        "affine": affine,
        "gather": gather,
        "gather_window": small_gather,
        "scatter_add": scatter_add,
        "cumsum": cumulative_sum,
        "scalar_cumsum": scalar_cumulative_sum,
        "sort": sort,
    },
    samples=_samples(),
    signatures={
        "gather": [POINTER] * 3 + [COUNT] * 3 + [INT, COUNT],
        "affine": [POINTER] * 2 + [COUNT] * 2 + [INT, COUNT],
        "copy": [POINTER] * 2 + [COUNT] * 3 + [FLOAT, INT, COUNT],
        "scatter_add": [POINTER] * 3 + [COUNT] * 3 + [INT, COUNT],
        "cumulative_sum": [POINTER] * 2 + [COUNT, INT, COUNT],
        "scalar_cumulative_sum": [POINTER] * 2 + [COUNT] * 3,
        "sort": [POINTER] * 2 + [COUNT] * 2,
    },
)
