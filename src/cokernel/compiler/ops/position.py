"""Where a program is: on its mesh, in the grid of a pipeline, on which platform."""

from typing import Any

import numpy as np

from cokernel import _jax
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.values import Value, array_constant, make_packed


@rule(_jax.axis_index_p)
def _axis_index(context: Context, eqn: Any) -> Value:
    return make_packed((), np.dtype(np.int32), context.axis_coordinate(eqn.params["axis_name"]))


@rule(_jax.platform_index_p)
def _platform_index(context: Context, eqn: Any) -> Value:
    platforms = eqn.params["platforms"]
    for number, names in enumerate(platforms):
        # None stands for the default branch, which comes last.
        if names is None or "cpu" in names:
            return array_constant(context.function, np.asarray(number, np.int32))
    raise NotImplementedError(
        f"{context.describe()}: no branch for the CPU among those for {platforms}"
    )


@rule(_jax.pallas_primitives.multiple_of_p, _jax.stage_p)
def _identity(context: Context, eqn: Any, value: Value) -> Value:
    return value


@rule(_jax.pallas_primitives.program_id_p)
def _program_id(context: Context, eqn: Any) -> Value:
    axis = eqn.params["axis"]
    if _is_in_pipeline(context, axis):
        return _of_pipeline(context, 0, axis)
    names = list(context.program.mesh.shape)
    if axis >= len(names):
        raise ValueError(f"{context.describe()}: program_id({axis}) on a mesh of {len(names)} axes")
    return make_packed((), np.dtype(np.int32), context.axis_coordinate(names[axis]))


@rule(_jax.pallas_primitives.num_programs_p)
def _num_programs(context: Context, eqn: Any) -> Value:
    axis = eqn.params["axis"]
    if _is_in_pipeline(context, axis):
        return _of_pipeline(context, 1, axis)
    sizes = list(context.program.mesh.shape.values())
    return array_constant(context.function, np.asarray(sizes[axis], np.int32))


def _is_in_pipeline(context: Context, axis: int) -> bool:
    """Whether an axis is one of the grid of a pipeline, rather than of the mesh behind those."""
    grid = context.pipeline_position
    return grid is not None and axis < grid.shape[1]


def _of_pipeline(context: Context, row: int, axis: int) -> Value:
    """The position in the grid of the pipeline (row 0), or its extent (row 1), along an axis."""
    grid = context.pipeline_position
    assert grid is not None
    offset = grid.owner.offset + 4 * (row * grid.shape[1] + axis)
    register = context.builder.load(context.private_address(offset), typ=i32)
    return make_packed((), np.dtype(np.int32), register)
