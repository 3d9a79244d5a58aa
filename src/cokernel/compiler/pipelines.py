"""`emit_pipeline` as a primitive: each is replaced by the loops and copies that it stands for,
before anything looks at what a program allocates and where it may block.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from cokernel import _jax
from cokernel.compiler.analysis import inner_jaxprs, over_jaxprs


def without_pipelines(jaxpr: Any, mesh: Any) -> Any:
    """The same program with its pipelines written out; itself if it has none."""
    if not _has_pipeline(jaxpr):
        return jaxpr
    return jaxpr.replace(eqns=[written_out(eqn, mesh) for eqn in jaxpr.eqns])


def is_written_by_pipeline(eqns: Sequence[Any]) -> bool:
    """Whether JAX's pipeline has written an equation, rather than its user; `eqns` are the equation
    and then those around it.
    """
    # A traceback holds a few frames only; where those are all of helpers, the equation around says
    # more.
    for eqn in eqns:
        traceback = eqn.source_info.traceback
        for code in traceback.raw_frames()[0] if traceback else []:
            if code.co_filename == _jax.pipeline_file:
                return True
            if _jax.is_user_filename(code.co_filename):
                return False
    return False


def _has_pipeline(jaxpr: Any) -> bool:
    return any(
        eqn.primitive is _jax.emit_pipeline_p or any(map(_has_pipeline, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


def written_out(eqn: Any, mesh: Any) -> Any:
    """An equation with its pipelines, or those in the jaxprs it runs, written out."""
    if eqn.primitive is not _jax.emit_pipeline_p:
        params = {name: _map_jaxprs(parameter, mesh) for name, parameter in eqn.params.items()}
        return eqn.replace(params=params)
    eqn = _with_extents(eqn)
    # What JAX itself expands a pipeline to; the sizes of the mesh stand for those of a grid.
    body = _jax.emit_pipeline_to_jaxpr(
        [atom.aval for atom in eqn.invars],
        grid_names=tuple(mesh.shape),
        grid_sizes=tuple(mesh.shape.values()),
        **eqn.params,
    )
    body = without_pipelines(_at(body, eqn.source_info), mesh)
    return eqn.replace(primitive=_jax.closed_call_p, params={"call_jaxpr": body})


def _at(jaxpr: Any, source_info: Any) -> Any:
    """The jaxpr with all of its equations at one place in the source, but for those of the body of
    the pipeline, which have places of their own.
    """

    def placed(eqn: Any) -> Any:
        eqn = eqn.replace(source_info=source_info)
        if eqn.primitive is _jax.pipeline_body_p:
            return eqn
        params = {
            name: over_jaxprs(parameter, lambda inner: _at(inner, source_info))
            for name, parameter in eqn.params.items()
        }
        return eqn.replace(params=params)

    return jaxpr.replace(eqns=[placed(eqn) for eqn in jaxpr.eqns])


def _with_extents(eqn: Any) -> Any:
    """The pipeline with the extents of its grid passed to its body behind the constants of that:
    a dynamic one is a value which the body may ask for.
    """
    grid = eqn.params["grid_mapping"]
    arguments = eqn.params["args_tree"].unflatten(eqn.invars)
    dynamic = iter(arguments.dynamic_grid_spec)
    extents = [
        _jax.Literal(np.int32(extent), _jax.ShapedArray((), np.int32))
        if isinstance(extent, int)
        else next(dynamic)
        for extent in grid.grid
    ]
    kept = [extent for axis, extent in enumerate(extents) if axis not in grid.vmapped_dims]
    arguments = dataclasses.replace(arguments, body_consts=(*arguments.body_consts, *kept))
    flat, tree = jax.tree.flatten(arguments)
    return eqn.replace(invars=flat, params={**eqn.params, "args_tree": tree})


def _map_jaxprs(parameter: Any, mesh: Any) -> Any:
    return over_jaxprs(parameter, lambda jaxpr: without_pipelines(jaxpr, mesh))
