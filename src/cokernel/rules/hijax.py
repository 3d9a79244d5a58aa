"""Hijax: values that stand for several arrays become those arrays before a kernel is lowered."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax

from cokernel import _jax
from cokernel.primitive import mpmd_map_p, tracing_context


def is_high(*in_avals: Any, jaxprs: Sequence[Any], **params: Any) -> bool:
    """Returns whether any type in the kernel stands for others."""
    del in_avals, params
    return any(jaxpr.is_high for jaxpr in jaxprs)


def to_lojax(
    *args: Any,
    jaxprs: Sequence[Any],
    meshes: Sequence[Any],
    out_avals: Sequence[Any],
    input_output_aliases: Sequence[tuple[int, int]],
    **params: Any,
) -> list[Any]:
    """Runs the kernel on the arrays that its inputs stand for, and puts its results together."""
    in_avals = [jax.typeof(arg) for arg in args]
    low_args = [
        low for aval, arg in zip(in_avals, args, strict=True) for low in aval.lower_val(arg)
    ]
    in_places, out_places = _places(in_avals), _places(out_avals)
    low_aliases = [
        pair
        for in_index, out_index in input_output_aliases
        for pair in zip(in_places[in_index], out_places[out_index], strict=True)
    ]
    all_meshes = (*meshes, *params["external_meshes"])
    low_jaxprs = []
    for mesh, jaxpr in zip(meshes, jaxprs, strict=True):
        with tracing_context(mesh, all_meshes, params["target"]):
            low_jaxprs.append(_lowered(jaxpr))
    # What it is the derivative of mattered to transformations, which are over now.
    params.pop("derivative_of", None)
    outs = mpmd_map_p.bind(
        *low_args,
        jaxprs=tuple(low_jaxprs),
        meshes=meshes,
        out_avals=tuple(low for aval in out_avals for low in aval.lo_ty()),
        input_output_aliases=tuple(sorted(low_aliases)),
        **params,
    )
    return _jax.partial_eval.raise_lo_outs(out_avals, outs)


def _places(avals: Sequence[Any]) -> list[range]:
    """Returns for each value where the arrays that it stands for are among all arrays."""
    ends = list(itertools.accumulate((len(aval.lo_ty()) for aval in avals), initial=0))
    return [range(start, end) for start, end in itertools.pairwise(ends)]


@_jax.weakref_lru_cache
def _lowered(jaxpr: Any) -> Any:
    low = _jax.partial_eval.lower_jaxpr2(jaxpr)
    if low.consts:
        raise NotImplementedError(
            f"program {jaxpr.debug_info.func_src_info} uses a type whose operations hold "
            f"{len(low.consts)} arrays as constants, which a program cannot"
        )
    names: list[str] = []
    for var, name in zip(jaxpr.invars, jaxpr.debug_info.arg_names, strict=True):
        count = len(var.aval.lo_ty())
        names += [name] if count == 1 else [f"{name}.{part}" for part in range(count)]
    return low.replace(debug_info=jaxpr.debug_info._replace(arg_names=tuple(names)))


mpmd_map_p.is_high = is_high
mpmd_map_p.to_lojax = to_lojax
