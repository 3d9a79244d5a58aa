"""Cases whose time goes into moving data."""

import ctypes

import jax.numpy as jnp
import numpy as np
from kernels import movement as kernels
from measure import Case
from native import COUNT, INT, POINTER, address
from rows import Group, Sample, row, traffic

import cokernel

TABLE_ROWS, ROWS, WIDTH, ROW_WINDOW = 4096, 131_072, 128, 128
SIZE, WINDOW = 1 << 20, 2048


def _table(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a table of TABLE_ROWS, and the indices of `rows` rows of it."""
    random = np.random.default_rng(0)
    table = random.standard_normal((TABLE_ROWS, WIDTH), dtype=np.float32)
    return table, random.integers(0, TABLE_ROWS, rows, dtype=np.int32)


def _uniform(size: int) -> np.ndarray:
    return np.random.default_rng(0).random(size, dtype=np.float32)


def gather(limits: ctypes.CDLL) -> Case:
    """Rows of a table, chosen by indices, through the memory of the subcores."""
    table, indices = _table(ROWS)
    return row(
        "gather",
        f"Gather of {ROWS:,} rows of {WIDTH} float32 from {TABLE_ROWS:,}, 32 subcores",
        kernel=kernels.gather(cokernel.kernel, ROWS, WIDTH, ROW_WINDOW),
        plain=lambda table, indices: jnp.take(table, indices, axis=0),
        interpreted=None,
        arguments=(table, indices),
        expected=table[indices],
        hand=lambda threads, out: limits.gather(
            address(table), address(indices), out, ROWS, WIDTH, ROW_WINDOW, threads, 1
        ),
        limit=traffic(limits, table.nbytes + indices.nbytes, ROWS * WIDTH * 4),
        faster=2,
    )


def affine(limits: ctypes.CDLL) -> Case:
    """x * 2 + 1 in steps of sixteen lanes."""
    x = _uniform(SIZE)
    return row(
        "affine",
        "x * 2 + 1 on 2^20 float32 in steps of 16 lanes, 32 subcores",
        kernel=kernels.affine(cokernel.kernel, SIZE, WINDOW),
        plain=lambda x: x * 2 + 1,
        interpreted=None,
        arguments=(x,),
        expected=x * 2 + 1,
        hand=lambda threads, out: limits.affine(address(x), out, SIZE, WINDOW, threads, 20),
        limit=traffic(limits, x.nbytes, x.nbytes),
    )


def _sample_gather(make, options):
    table, indices = _table(4096)
    return kernels.gather(make, 4096, WIDTH, 128, **options), (table, indices), table[indices]


def _sample_affine(make, options):
    x = _uniform(2048)
    return kernels.affine(make, 2048, 64, **options), (x,), x * 2 + 1


GROUP = Group(
    cases={"gather": gather, "affine": affine},
    samples={
        "gather": Sample("4,096 rows in windows of 128", _sample_gather),
        "affine": Sample("2,048 float32 in windows of 64", _sample_affine),
    },
    signatures={
        "gather": [POINTER] * 3 + [COUNT] * 3 + [INT, COUNT],
        "affine": [POINTER] * 2 + [COUNT] * 2 + [INT, COUNT],
    },
)
