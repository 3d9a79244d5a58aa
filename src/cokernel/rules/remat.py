"""Rematerialisation: under `jax.checkpoint` a kernel's outputs are saved, or it runs again."""

from collections.abc import Callable, Sequence
from typing import Any

from cokernel import _jax
from cokernel.primitive import abstract_eval, mpmd_map_p
from cokernel.rules.discharge import written_inputs


def partial_eval(
    saveable: Callable[..., Any],
    unknown_in: Sequence[bool],
    instantiated_in: Sequence[bool],
    eqn: Any,
) -> tuple[Any | None, Any | None, list[bool], list[bool], list[Any]]:
    """Decides in which of the two passes, forward and backward, the kernel runs.

    Returns the equation for the forward pass, the one for the backward pass, for each output
    whether it is unknown in the forward pass and whether the backward pass computes it, and the
    inputs that the backward pass needs from the forward pass.
    """
    num_outputs = len(eqn.outvars)
    none, every = [False] * num_outputs, [True] * num_outputs
    residuals = [
        var
        for var, instantiated in zip(eqn.invars, instantiated_in, strict=True)
        if isinstance(var, _jax.Var) and not instantiated
    ]
    if any(unknown_in):
        halves = _halves_of_derivative(saveable, unknown_in, eqn, residuals)
        if halves is None:
            _check_written_refs(eqn, unknown_in, 0)
            return None, eqn, every, every, residuals
        return halves
    if any(isinstance(var.aval, _jax.AbstractRef) for var in eqn.invars):
        # The backward pass has Refs of its own, which hold what the kernel wrote only if it runs
        # there too.
        return eqn, eqn, none, every, residuals
    if _jax.partial_eval.has_effects(eqn):
        # What can be seen from outside, such as a print, happens once.
        return eqn, None, none, none, []
    if _is_recomputed(saveable, eqn):
        return eqn, eqn, none, every, residuals
    return eqn, None, none, none, []


def _is_recomputed(saveable: Callable[..., Any], eqn: Any) -> bool:
    # A policy that asks for outputs to be offloaded to the host has them saved: where kernels run,
    # device memory is the host's.
    policy = _jax.partial_eval.ensure_enum(
        saveable(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
    )
    return isinstance(policy, _jax.partial_eval.RecomputeType)


def _halves_of_derivative(
    saveable: Callable[..., Any], unknown_in: Sequence[bool], eqn: Any, residuals: list[Any]
) -> Any | None:
    """Splits a derivative into the kernel itself, which runs at once, and the tangents.

    Returns what `partial_eval` does, or None if the equation cannot be split.
    """
    original = eqn.params.get("derivative_of")
    if original is None:
        return None
    num_inputs, num_outputs = original["num_inputs"], len(original["out_avals"])
    if any(unknown_in[:num_inputs]):
        return None
    _check_written_refs(eqn, unknown_in, num_inputs)
    invars = eqn.invars[:num_inputs]
    params = {name: value for name, value in original.items() if name != "num_inputs"}
    _, effects = abstract_eval(*(var.aval for var in invars), **params)
    kernel = eqn.replace(
        invars=invars,
        outvars=eqn.outvars[:num_outputs],
        params=params,
        effects=_jax.resolve_input_effects(effects, invars),
    )
    tangents = len(eqn.outvars) - num_outputs
    unknown_out = [False] * num_outputs + [True] * tangents
    has_refs = any(isinstance(var.aval, _jax.AbstractRef) for var in eqn.invars)
    if has_refs or _is_recomputed(saveable, kernel):
        return kernel, eqn, unknown_out, [True] * len(eqn.outvars), residuals
    unused = [_jax.DropVar(var.aval) for var in eqn.outvars[:num_outputs]]
    derivative = eqn.replace(outvars=[*unused, *eqn.outvars[num_outputs:]])
    return kernel, derivative, unknown_out, unknown_out, residuals


def _check_written_refs(eqn: Any, unknown_in: Sequence[bool], start: int) -> None:
    """Refuses a kernel of the backward pass that writes to a Ref of the forward pass.

    Only inputs from `start` on are looked at.
    """
    in_avals = [var.aval for var in eqn.invars]
    for index in written_inputs(in_avals, eqn.params["jaxprs"]):
        if index >= start and not unknown_in[index]:
            name = eqn.params["jaxprs"][0].debug_info.arg_names[index]
            raise NotImplementedError(
                f"kernel {eqn.params['name']!r} is differentiated under jax.checkpoint and writes "
                f"to {name!r}, a Ref whose first value does not depend on what is differentiated: "
                "give the result back as an output of the kernel, or fill the Ref from its inputs"
            )


_jax.partial_eval.partial_eval_jaxpr_custom_rules[mpmd_map_p] = partial_eval
