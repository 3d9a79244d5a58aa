"""Forward mode: the derivative of a kernel is a kernel whose programs compute tangents as well.

Reverse mode would have to run the programs backwards, communication included. Who needs it writes
the backward kernel and joins the two with `jax.custom_vjp`.
"""

import types
from collections.abc import Callable, Sequence
from typing import Any

import jax

from cokernel import _jax
from cokernel.meshes import is_gpu_mesh
from cokernel.primitive import all_equations, mpmd_map_p, tracing_context
from cokernel.rules.body_jvp import is_bitwise_access, is_differentiable, jvp_of_jaxpr, select
from cokernel.rules.discharge import written_inputs

_Zero = _jax.ad.Zero


def jvp(
    primals: Sequence[Any], tangents: Sequence[Any], **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the kernel's outputs and their tangents, from one launch."""
    if all(isinstance(t, _Zero) for t in tangents):
        outs = mpmd_map_p.bind(*primals, **params)
        return outs, [_jax.ad.p2tz(out) for out in outs]
    new_params, nonzero_in, nonzero_out = _jvp_params(
        [jax.typeof(x) for x in primals], tangents, params
    )
    outs = mpmd_map_p.bind(*primals, *_instantiated(primals, tangents, nonzero_in), **new_params)
    num_outputs = len(nonzero_out)
    primal_outs, tangent_outs = outs[:num_outputs], iter(outs[num_outputs:])
    return primal_outs, [
        next(tangent_outs) if nonzero else _jax.ad.p2tz(out)
        for out, nonzero in zip(primal_outs, nonzero_out, strict=True)
    ]


def _instantiated(
    primals: Sequence[Any], tangents: Sequence[Any], nonzero_in: Sequence[bool]
) -> list[Any]:
    values = []
    for primal, tangent in select(list(zip(primals, tangents, strict=True)), nonzero_in):
        if not isinstance(tangent, _Zero):
            values.append(tangent)
            continue
        aval = jax.typeof(primal)
        if isinstance(aval, _jax.AbstractRef):
            # It is only read, so an array will do in its place.
            aval = aval.inner_aval
        values.append(_jax.ad.instantiate_zeros(_Zero(aval.to_tangent_aval())))
    return values


def _jvp_params(
    in_avals: Sequence[Any], tangents: Sequence[Any], params: dict[str, Any]
) -> tuple[dict[str, Any], list[bool], list[bool]]:
    """Returns the parameters of the derivative, and which inputs and outputs carry tangents.

    Every float does, be its tangent zero, so that no data moves between a Ref that has tangents
    and one that has not.
    """
    jaxprs, out_avals = params["jaxprs"], params["out_avals"]
    nonzero_in = [is_differentiable(aval) for aval in in_avals]
    nonzero_out = [is_differentiable(aval) for aval in out_avals]
    names = jaxprs[0].debug_info.arg_names
    for index, tangent in enumerate(tangents):
        if not nonzero_in[index] and not isinstance(tangent, _Zero):
            raise NotImplementedError(
                f"kernel {params['name']!r} cannot be differentiated by {names[index]!r}, which is "
                f"of type {in_avals[index]}"
            )
    for index in written_inputs(in_avals, jaxprs):
        if nonzero_in[index] and isinstance(tangents[index], _Zero):
            raise ValueError(
                f"kernel {params['name']!r} is differentiated and writes to the Ref "
                f"{names[index]!r}, which has no place for tangents: make the Ref inside the "
                "function that is differentiated, or pass it as an argument"
            )
    new_jaxprs = tuple(
        _jvp_program(
            jaxpr,
            mesh,
            (*params["meshes"], *params["external_meshes"]),
            params["target"],
            tuple(nonzero_in),
            tuple(nonzero_out),
        )
        for jaxpr, mesh in zip(jaxprs, params["meshes"], strict=True)
    )
    in_position = _positions(nonzero_in)
    out_position = _positions(nonzero_out)
    aliases = list(params["input_output_aliases"])
    aliases += [
        (in_position[i], out_position[o]) for i, o in aliases if nonzero_in[i] and nonzero_out[o]
    ]
    cost = params["cost_estimate"]
    if cost is not None:
        cost = _jax.CostEstimate(
            flops=2 * cost.flops,
            transcendentals=2 * cost.transcendentals,
            bytes_accessed=2 * cost.bytes_accessed,
            remote_bytes_transferred=2 * cost.remote_bytes_transferred,
        )
    new_params = {
        **params,
        "jaxprs": new_jaxprs,
        "out_avals": (*out_avals, *select(out_avals, nonzero_out)),
        "input_output_aliases": tuple(sorted(aliases)),
        "cost_estimate": cost,
        "name": f"jvp_{params['name']}",
        # Batching can then launch the kernel itself once where only tangents are batched.
        "derivative_of": _jax.FrozenDict({**params, "num_inputs": len(in_avals)}),
    }
    return new_params, nonzero_in, nonzero_out


def _positions(nonzero: Sequence[bool]) -> dict[int, int]:
    """Returns where among all primals and then tangents the tangent of each primal is."""
    with_tangents = [index for index, flag in enumerate(nonzero) if flag]
    return {index: len(nonzero) + place for place, index in enumerate(with_tangents)}


def _has_barriers(jaxpr: Any) -> bool:
    scopes = [
        eqn.params["jaxpr"]
        for eqn in all_equations(jaxpr)
        if eqn.primitive is _jax.pallas_primitives.run_scoped_p
    ]
    variables = [var for scope in (jaxpr, *scopes) for var in scope.invars]
    dtypes = [getattr(getattr(var.aval, "inner_aval", None), "dtype", None) for var in variables]
    # Barriers have types of their own, as semaphores and random keys have.
    return any(
        jax.dtypes.issubdtype(dtype, jax.dtypes.extended)
        and not isinstance(dtype, _jax.AbstractSemaphoreTy)
        and not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key)
        for dtype in dtypes
        if dtype is not None
    )


# Remembered, so that a kernel that is differentiated again, outside of jit, is not compiled again.
@_jax.weakref_lru_cache
def _jvp_program(
    jaxpr: Any,
    mesh: Any,
    all_meshes: tuple[Any, ...],
    target: str | None,
    nonzero_in: tuple[bool, ...],
    nonzero_out: tuple[bool, ...],
) -> Any:
    num_inputs, num_outputs = len(nonzero_in), len(nonzero_out)
    scratch = jaxpr.invars[num_inputs + num_outputs :]
    nonzero = [*nonzero_in, *nonzero_out, *(is_differentiable(var.aval) for var in scratch)]
    program = f"program {jaxpr.debug_info.func_src_info} cannot be differentiated: "
    for eqn in all_equations(jaxpr):
        if is_bitwise_access(eqn):
            raise NotImplementedError(
                f"{program}{eqn.primitive} of a float Ref seen as another type has no derivative "
                f"(at {_jax.summarize_source(eqn.source_info)})"
            )
    if is_gpu_mesh(mesh) and _has_barriers(jaxpr):
        raise NotImplementedError(
            f"{program}it uses barriers of a GPU, and the copies that arrive there have no "
            "derivative: give the function that calls the kernel one with jax.custom_jvp or "
            "jax.custom_vjp"
        )
    with tracing_context(mesh, all_meshes, target):
        try:
            new, _ = jvp_of_jaxpr(jaxpr, nonzero, [])
        except Exception as error:
            # The rules of JAX's primitives refuse with errors of any type.
            raise NotImplementedError(f"{program}{error}{_line_of(error)}") from error
    for eqn in all_equations(new):
        if eqn.primitive is _jax.ad.custom_lin_p:
            raise NotImplementedError(
                f"{program}it calls a function with jax.custom_vjp, which serves reverse mode "
                f"only; jax.custom_jvp serves both (at {_jax.summarize_source(eqn.source_info)})"
            )
    # The inputs come in three groups, and each has its tangents at its end.
    num_primals = len(nonzero)
    ends = [num_inputs, num_inputs + num_outputs, num_primals]
    names = jaxpr.debug_info.arg_names or ("",) * num_primals
    all_names = [*names, *(f"tangent of {name}" for name in select(names, nonzero))]
    tangent_place = iter(range(num_primals, len(new.invars)))
    place_of_tangent = [next(tangent_place) if flag else None for flag in nonzero]
    order: list[int] = []
    start = 0
    for end in ends:
        order += range(start, end)
        order += [place for place in place_of_tangent[start:end] if place is not None]
        start = end
    info = jaxpr.debug_info._replace(arg_names=tuple(all_names[place] for place in order))
    return new.replace(invars=[new.invars[place] for place in order], debug_info=info)


def _line_of(error: BaseException) -> str:
    """Says where in the user's program an error arose, if JAX has noted it."""
    cause: BaseException | None = error.__cause__
    frames = []
    while cause is not None and cause.__traceback__ is not None:
        trace: types.TracebackType | None = cause.__traceback__
        while trace is not None:
            frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
            trace = trace.tb_next
        cause = cause.__cause__
    for file, line in reversed(frames):
        if _jax.is_user_filename(file):
            return f" (at {file}:{line})"
    return ""


def linearize(
    is_vjp: bool, nonzero_tangents: Sequence[bool], *primals: Any, **params: Any
) -> tuple[Any, list[bool], Any, None, Callable[..., Any]]:
    """Runs the kernel now, and its derivative on the same inputs when tangents are there."""
    in_avals = [jax.typeof(x) for x in primals]
    name = params["name"]
    if not any(nonzero_tangents):
        outs = mpmd_map_p.bind(*primals, **params)
        zeros = [_jax.ad.p2tz(out) for out in outs]
        return outs, [False] * len(outs), (), None, lambda *_: zeros
    if is_vjp:
        raise NotImplementedError(_no_reverse_mode(name))
    # The derivative runs later and must see the Refs as they are now.
    residuals = [
        x[...] if isinstance(aval, _jax.AbstractRef) else x
        for x, aval in zip(primals, in_avals, strict=True)
    ]
    outs = mpmd_map_p.bind(*primals, **params)
    nonzero_out = [is_differentiable(jax.typeof(out)) for out in outs]
    zeros = [_jax.ad.p2tz(out) for out in outs]

    def linearized(residuals: Sequence[Any], _: None, *tangents: Any) -> list[Any]:
        new_params, nonzero_in, _unused = _jvp_params(in_avals, tangents, params)
        values = _instantiated(residuals, tangents, nonzero_in)
        results = iter(mpmd_map_p.bind(*residuals, *values, **new_params)[len(outs) :])
        return [
            next(results) if nonzero else zero
            for nonzero, zero in zip(nonzero_out, zeros, strict=True)
        ]

    return outs, nonzero_out, residuals, None, linearized


def _no_reverse_mode(name: str) -> str:
    return (
        f"kernel {name!r} has no reverse mode: give the function that calls it a derivative with "
        "jax.custom_vjp, whose backward pass can call kernels too (forward mode, as in jax.jvp, "
        "works)"
    )


def _transpose(cotangents: Any, *primals: Any, **params: Any) -> Any:
    # Only derivatives are ever transposed, and it is the kernel that the user knows.
    raise NotImplementedError(_no_reverse_mode(params.get("derivative_of", params)["name"]))


_jax.ad.primitive_jvps[mpmd_map_p] = jvp
_jax.ad.primitive_linearizations[mpmd_map_p] = linearize
_jax.ad.primitive_transposes[mpmd_map_p] = _transpose
