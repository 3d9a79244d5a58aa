"""Runs a function of arrays as the body of a kernel with one core, to compare rules with XLA."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import pytest

import cokernel
from cokernel.compiler import kernel as kernel_module

MESH = cokernel.CoreMesh(core=1)


def kernel_of(function: Callable[..., Any], *types: Any, **params: Any) -> Callable[..., Any]:
    """A kernel that computes `function` of arrays of these types, and returns its results flat.

    Inputs are read whole from Refs, results written whole to output Refs. `params` go to
    cokernel.CompilerParams.
    """
    shapes = jax.tree.leaves(jax.eval_shape(function, *types))
    out_types = [jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in shapes]

    def body(*refs: Any) -> None:
        inputs, outputs = refs[: len(types)], refs[len(types) :]
        results = jax.tree.leaves(function(*(ref[...] for ref in inputs)))
        for output, result in zip(outputs, results, strict=True):
            output[...] = result

    return cokernel.mpmd_map(
        [(MESH, body)], out_types, compiler_params=cokernel.CompilerParams(**params)
    )


def run(function: Callable[..., Any], *arrays: Any, **params: Any) -> list[np.ndarray]:
    """The results of `function(*arrays)` computed inside a kernel, as numpy arrays."""
    arrays = tuple(jax.numpy.asarray(array) for array in arrays)
    kernel = kernel_of(function, *arrays, **params)
    return [np.asarray(result) for result in kernel(*arrays)]


def expect_same(function: Callable[..., Any], *arrays: Any) -> None:
    """Asserts that the kernel's results have the same bits as jitted XLA's (NaNs may differ)."""
    ours = run(function, *arrays)
    theirs = jax.tree.leaves(jax.jit(function)(*arrays))
    for our, their in zip(ours, theirs, strict=True):
        their = np.asarray(their)
        assert our.dtype == their.dtype
        np.testing.assert_array_equal(_as_numbers(our), _as_numbers(their))


def expect_close(function: Callable[..., Any], *arrays: Any, ulps: float) -> None:
    """Asserts that float results are within so many units in the last place of XLA's."""
    ours = run(function, *arrays)
    theirs = jax.tree.leaves(jax.jit(function)(*arrays))
    for our, their in zip(ours, theirs, strict=True):
        their = np.asarray(their)
        assert our.dtype == their.dtype
        eps = float(jax.numpy.finfo(their.dtype).eps)
        tiny = float(jax.numpy.finfo(their.dtype).tiny)
        np.testing.assert_allclose(
            our.astype(np.float64),
            their.astype(np.float64),
            rtol=ulps * eps,
            atol=ulps * eps * tiny,
        )


def numbers(*shape: int) -> np.ndarray:
    """Small integers in float32, whose sums are exact."""
    return np.random.default_rng(0).integers(-9, 10, shape).astype(np.float32)


def counts_of_plans(
    monkeypatch: pytest.MonkeyPatch, planner: str, count: Callable[[Any], int]
) -> list[int]:
    """Collects what `count` says of the plans that a function the kernel calls by the name
    `planner` makes, one for each program; programs are compiled afresh.
    """
    monkeypatch.setenv("COKERNEL_CACHE", "")
    counts: list[int] = []
    original = getattr(kernel_module, planner)

    def counting(*arguments: Any) -> Any:
        plan = original(*arguments)
        counts.append(count(plan))
        return plan

    monkeypatch.setattr(kernel_module, planner, counting)
    return counts


def _as_numbers(array: np.ndarray) -> np.ndarray:
    """Values that numpy can compare exactly; the sign beside them tells -0.0 from 0.0."""
    if array.dtype.kind in "fV":
        wide = array.astype(np.float64)
        return np.stack([wide, np.where(np.isnan(wide), 0.0, np.copysign(1.0, wide))])
    return array


__all__: Sequence[str] = [
    "MESH",
    "counts_of_plans",
    "expect_close",
    "expect_same",
    "kernel_of",
    "numbers",
    "run",
]
