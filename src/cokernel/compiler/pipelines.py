"""`emit_pipeline` as a primitive: each is replaced by the loops and copies that it stands for,
before anything looks at what a program allocates and where it may block.
"""

from typing import Any

from cokernel import _jax
from cokernel.compiler.analysis import inner_jaxprs


def without_pipelines(jaxpr: Any, mesh: Any) -> Any:
    """The same program with its pipelines written out; itself if it has none."""
    if not _has_pipeline(jaxpr):
        return jaxpr
    return jaxpr.replace(eqns=[written_out(eqn, mesh) for eqn in jaxpr.eqns])


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
    # What JAX itself expands a pipeline to; the sizes of the mesh stand for those of a grid.
    body = _jax.emit_pipeline_to_jaxpr(
        [atom.aval for atom in eqn.invars],
        grid_names=tuple(mesh.shape),
        grid_sizes=tuple(mesh.shape.values()),
        **eqn.params,
    )
    return eqn.replace(
        primitive=_jax.closed_call_p, params={"call_jaxpr": without_pipelines(body, mesh)}
    )


def _map_jaxprs(parameter: Any, mesh: Any) -> Any:
    if isinstance(parameter, _jax.Jaxpr):
        return without_pipelines(parameter, mesh)
    if isinstance(parameter, tuple | list) and any(
        isinstance(item, _jax.Jaxpr) for item in parameter
    ):
        return type(parameter)(_map_jaxprs(item, mesh) for item in parameter)
    return parameter
