"""Operands for the tests of elementwise rules: every form that a value takes, filled with the
values that rules get wrong."""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from tests.compiler.harness import run

# A scalar, vectors of a few lanes and of many, a loop over memory, and nothing at all.
SHAPES = ((), (5,), (16,), (3, 130), (0, 4))

SIGNED = (jnp.int8, jnp.int16, jnp.int32, jnp.int64)
UNSIGNED = (jnp.uint8, jnp.uint16, jnp.uint32, jnp.uint64)
INTEGERS = SIGNED + UNSIGNED
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
FLOAT8 = (
    jnp.float8_e5m2,
    jnp.float8_e4m3fn,
    jnp.float8_e4m3b11fnuz,
    jnp.float8_e4m3fnuz,
    jnp.float8_e5m2fnuz,
    jnp.float8_e4m3,
    jnp.float8_e3m4,
)
NARROW_INTEGERS = (jnp.int4, jnp.uint4, jnp.int2, jnp.uint2)


def name_of(dtype: Any) -> str:
    return np.dtype(dtype).name


def hard_values(dtype: Any) -> np.ndarray:
    """Limits, zeros, ties, infinities and NaN. No denormals: whether they count is a setting of the
    processor."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return np.array([False, True])
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        width = limits.bits
        near = [0, 1, 2, 3, 7, width - 1, width, width + 1]
        values = {limits.min, limits.max, limits.min + 1, limits.max - 1, limits.max // 3, *near}
        values |= {-value for value in near if limits.min < 0}
        return np.array(sorted(values), dtype=dtype)
    limits = ml_dtypes.finfo(dtype)
    with np.errstate(all="ignore"):
        exact = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 7.0, -100.0]
        special = [math.inf, -math.inf, math.nan, float(limits.max), float(limits.min)]
        tiny = [float(limits.smallest_normal), -float(limits.smallest_normal)]
        return np.array([*exact, *special, *tiny, 0.1, -1 / 3], dtype=dtype)


def operands(dtype: Any, count: int, shape: Sequence[int], seed: int) -> list[np.ndarray]:
    """Arrays of one dtype and shape that meet as many pairs of hard values as there is room for."""
    values = hard_values(dtype)
    generator = np.random.default_rng(seed)
    size = math.prod(shape)
    tuples = list(itertools.product(range(len(values)), repeat=min(count, 2)))
    order = generator.permutation(len(tuples))
    picks = [tuples[order[position % len(tuples)]] for position in range(size)]
    columns = np.array(picks, dtype=int).reshape(size, min(count, 2)).T
    arrays = [values[column].reshape(shape) for column in columns]
    while len(arrays) < count:
        arrays.append(values[generator.integers(0, len(values), shape)].reshape(shape))
    return arrays


def in_every_form(
    function: Callable[..., Any], dtype: Any, count: int, seed: int = 0
) -> list[tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]]:
    """For operands of each shape: the operands, the kernel's results and jitted XLA's."""
    groups = [
        operands(dtype, count, shape, seed + number)
        for number, shape in enumerate([(), (), *SHAPES])
    ]

    def whole(*arrays: Any) -> list[Any]:
        return [
            jax.tree.leaves(function(*arrays[start : start + count]))
            for start in range(0, len(arrays), count)
        ]

    flat = [array for group in groups for array in group]
    ours = run(whole, *flat)
    theirs = [np.asarray(result) for result in jax.tree.leaves(jax.jit(whole)(*flat))]
    each = len(ours) // len(groups)
    return [
        (group, ours[start : start + each], theirs[start : start + each])
        for group, start in zip(groups, range(0, len(ours), each), strict=True)
    ]


def as_bits(array: np.ndarray) -> np.ndarray:
    """The bits of an array, with all NaNs made the same one."""
    array = np.asarray(array)
    if array.dtype.kind in "biu":
        return array
    if array.dtype in (np.dtype(item) for item in NARROW_INTEGERS):
        return array.astype(np.int8)
    with np.errstate(invalid="ignore"):
        is_nan = np.isnan(array.astype(np.float64))
    bits = np.atleast_1d(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)
    return np.where(is_nan, np.iinfo(bits.dtype).max, bits)


def expect_same_bits(function: Callable[..., Any], dtype: Any, count: int, seed: int = 0) -> None:
    """Asserts that a function of `count` operands gives XLA's bits in every form, NaNs aside."""
    for arrays, ours, theirs in in_every_form(function, dtype, count, seed):
        for our, their in zip(ours, theirs, strict=True):
            assert our.dtype == their.dtype
            assert our.shape == their.shape
            different = np.argwhere(as_bits(our) != as_bits(their))
            where = tuple(different[0]) if len(different) else ()
            assert not len(different), (
                f"{name_of(dtype)}{arrays[0].shape} to {our.dtype} at {where}: "
                f"f{tuple(str(array[where]) for array in arrays)} = {our[where]}, "
                f"and by XLA {their[where]}"
            )
