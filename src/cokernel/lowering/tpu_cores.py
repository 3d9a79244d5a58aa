"""Kernels for some of a chip's SparseCores become kernels for all, of which the others do nothing.

Mosaic gives scalar subcores of one SparseCore or of all. A kernel written for a chip with two keeps
its two on a chip with four.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu_sc as plsc

from cokernel import _jax, primitive


def widened(
    meshes: Sequence[Any], jaxprs: Sequence[Any]
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Returns the meshes and programs of a kernel as the chip at hand can run them."""
    scalar = next((mesh for mesh in meshes if isinstance(mesh, _jax.ScalarSubcoreMesh)), None)
    if scalar is None or scalar.num_cores == 1:
        return tuple(meshes), tuple(jaxprs)
    on_chip = plsc.get_sparse_core_info().num_cores
    if scalar.num_cores >= on_chip:
        return tuple(meshes), tuple(jaxprs)
    axis, used = scalar.axis_name, scalar.num_cores
    new_meshes = tuple(
        mesh
        if isinstance(mesh, _jax.TensorCoreMesh)
        else dataclasses.replace(mesh, num_cores=on_chip)
        for mesh in meshes
    )
    new_jaxprs = tuple(
        jaxpr
        if isinstance(mesh, _jax.TensorCoreMesh)
        else _only_on_first(jaxpr, axis, used, mesh, new_meshes)
        for mesh, jaxpr in zip(new_meshes, jaxprs, strict=True)
    )
    return new_meshes, new_jaxprs


def _only_on_first(jaxpr: Any, axis: str, used: int, mesh: Any, all_meshes: Sequence[Any]) -> Any:
    """Returns the program that does what `jaxpr` does on the first `used` cores of an axis."""

    def body(*refs: Any) -> None:
        @pl.when(lax.axis_index(axis) < used)
        def _run() -> None:
            _jax.eval_jaxpr(jaxpr, (), *refs)

    tree = _jax.flatten_to_tree((tuple(var.aval for var in jaxpr.invars), {}))
    with primitive.tracing_context(mesh, all_meshes, None):
        new, _ = _jax.trace_to_jaxpr(body, tree, jaxpr.debug_info)
    assert not new.consts
    return new
