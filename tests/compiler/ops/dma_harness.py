"""Runs kernels whose DMAs tests compare with numpy's indexing."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import cokernel

ONE = cokernel.CoreMesh(core=1)
FOUR = cokernel.CoreMesh(core=4)
DMA = pltpu.SemaphoreType.DMA
WORKERS = pytest.mark.parametrize("workers", [1, 2, 4])


def launch(
    body: Callable[..., Any],
    out_types: Any,
    *arrays: Any,
    mesh: Any = ONE,
    scratch: Sequence[Any] = (),
    workers: int = 1,
    **params: Any,
) -> Any:
    """What a kernel on one mesh returns, as numpy arrays."""
    kernel = cokernel.kernel(
        body,
        out_types,
        mesh=mesh,
        scratch_types=scratch,
        compiler_params=cokernel.CompilerParams(num_workers=workers, time_limit_s=60, **params),
    )
    return jax.tree.map(np.asarray, kernel(*arrays))


def like(array: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array."""
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def numbers(shape: Sequence[int], dtype: Any = np.float32) -> np.ndarray:
    """Small numbers in order, which every dtype holds."""
    return (np.arange(np.prod(shape)) % 113).reshape(shape).astype(dtype)
