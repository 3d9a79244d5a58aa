"""Discharge: a kernel that writes to Ref arguments becomes one that returns their new values."""

from collections.abc import Sequence
from typing import Any

from cokernel import _jax
from cokernel.primitive import mpmd_map_p, used_semaphores
from cokernel.signature import default_memory_space


def written_inputs(in_avals: Sequence[Any], jaxprs: Sequence[Any]) -> list[int]:
    """Returns the positions of the Ref arguments that any of the programs writes to, sorted."""
    written = used_semaphores(in_avals, jaxprs)
    for jaxpr in jaxprs:
        position = {var: index for index, var in enumerate(jaxpr.invars)}
        for effect in jaxpr.effects:
            if not isinstance(effect, _jax.WriteEffect | _jax.AccumEffect):
                continue
            index = position[effect.input]
            if index < len(in_avals) and isinstance(in_avals[index], _jax.AbstractRef):
                written.add(index)
    return sorted(written)


@_jax.register_discharge_rule(mpmd_map_p)
def discharge(
    ctx: Any,
    *args: Any,
    jaxprs: Sequence[Any],
    meshes: Sequence[Any],
    input_output_aliases: Sequence[tuple[int, int]],
    out_avals: Sequence[Any],
    **params: Any,
) -> tuple[list[Any], list[Any]]:
    """Passes Refs' values as arrays and returns those that were written as further outputs."""
    in_avals = ctx.in_avals
    default_space = default_memory_space(meshes)
    spaces = [_jax.get_memory_space_aval(aval) or default_space for aval in in_avals]

    def placed(value: Any, in_index: int) -> Any:
        # A Ref in HBM is a plain array outside; a Ref in any other space stays in it.
        if not ctx.should_discharge[in_index]:
            return value
        return _jax.constrain_memory_space(
            value, spaces[in_index], ctx.strip_memory_space, neutral_ms=(default_space,)
        )

    returned = [index for index in written_inputs(in_avals, jaxprs) if ctx.should_discharge[index]]
    num_outputs = len(out_avals)
    new_avals = [
        _jax.discharged_aval(
            in_avals[index], discharge=True, strip_memory_space=ctx.strip_memory_space
        )
        for index in returned
    ]
    new_aliases = [(index, num_outputs + i) for i, index in enumerate(returned)]

    results = mpmd_map_p.bind(
        *(placed(arg, index) for index, arg in enumerate(args)),
        jaxprs=tuple(_with_outputs(jaxpr, in_avals, num_outputs, returned) for jaxpr in jaxprs),
        meshes=meshes,
        input_output_aliases=tuple(sorted((*input_output_aliases, *new_aliases))),
        out_avals=(*out_avals, *new_avals),
        **params,
    )
    new_values: list[Any] = [None] * len(in_avals)
    for index, value in zip(returned, results[num_outputs:], strict=True):
        new_values[index] = placed(value, index)
    return new_values, list(results[:num_outputs])


def _with_outputs(
    jaxpr: Any, in_avals: Sequence[Any], num_outputs: int, returned: Sequence[int]
) -> Any:
    """Returns the jaxpr with an unused output Ref for each of the inputs that are returned.

    The new outputs are aliased to inputs, and the program goes on writing to those.
    """
    if not returned:
        return jaxpr
    end = len(in_avals) + num_outputs
    new_vars = [_jax.Var(in_avals[index]) for index in returned]
    names = jaxpr.debug_info.arg_names
    if names is not None:
        new_names = [names[index] for index in returned]
        names = (*names[:end], *new_names, *names[end:])
    return jaxpr.replace(
        invars=[*jaxpr.invars[:end], *new_vars, *jaxpr.invars[end:]],
        debug_info=jaxpr.debug_info._replace(arg_names=names),
    )
