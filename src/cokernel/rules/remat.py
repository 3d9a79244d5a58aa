"""Rematerialisation: under `jax.checkpoint` a kernel's outputs are saved, or it runs again."""

from collections.abc import Callable, Sequence
from typing import Any

from cokernel import _jax
from cokernel.primitive import mpmd_map_p


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
        return None, eqn, every, every, residuals
    if any(isinstance(var.aval, _jax.AbstractRef) for var in eqn.invars):
        # The backward pass has Refs of its own, which hold what the kernel wrote only if it runs
        # there too.
        return eqn, eqn, none, every, residuals
    if _jax.partial_eval.has_effects(eqn):
        # What can be seen from outside, such as a print, happens once.
        return eqn, None, none, none, []
    policy = _jax.partial_eval.ensure_enum(
        saveable(eqn.primitive, *(var.aval for var in eqn.invars), **eqn.params)
    )
    if isinstance(policy, _jax.partial_eval.RecomputeType):
        return eqn, eqn, none, every, residuals
    # A policy that asks for outputs to be offloaded to the host has them saved: where kernels run,
    # device memory is the host's.
    return eqn, None, none, none, []


_jax.partial_eval.partial_eval_jaxpr_custom_rules[mpmd_map_p] = partial_eval
