"""Calls within a GPU program are replaced by what they call.

JAX's interpreter of GPU kernels hands a call of a jitted function to XLA as a whole, which knows
neither the program's axes nor its Refs.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from cokernel import _jax

_CALLS = (
    _jax.closed_call_p,
    _jax.custom_jvp_call_p,
    _jax.custom_vjp_call_p,
    _jax.jit_p,
    _jax.remat_p,
)


def without_calls(jaxpr: Any) -> Any:
    """Returns a jaxpr in which, at any depth, the equations of called functions stand in place of
    the calls."""
    names: dict[Any, Any] = {}
    eqns = list(_inlined(jaxpr.eqns, names, is_called=False))
    return jaxpr.replace(eqns=eqns, outvars=[_renamed(atom, names) for atom in jaxpr.outvars])


def _renamed(atom: Any, names: dict[Any, Any]) -> Any:
    return names.get(atom, atom) if isinstance(atom, _jax.Var) else atom


def _inlined(eqns: Sequence[Any], names: dict[Any, Any], *, is_called: bool) -> Iterator[Any]:
    """Yields the equations of one jaxpr in the caller's variables.

    Args:
      eqns: the equations.
      names: the caller's names for variables of the jaxpr; those of results are added.
      is_called: whether the jaxpr is that of a call. It may be called again, so its variables get
        new names.
    """
    for eqn in eqns:
        invars = [_renamed(atom, names) for atom in eqn.invars]
        body = _body(eqn)
        if body is not None:
            local = dict(zip(body.invars, invars, strict=True))
            yield from _inlined(body.eqns, local, is_called=True)
            results = [_renamed(atom, local) for atom in body.outvars]
            names.update(zip(eqn.outvars, results, strict=True))
            continue
        outvars = eqn.outvars
        if is_called:
            outvars = [
                var if isinstance(var, _jax.DropVar) else _jax.Var(var.aval) for var in outvars
            ]
            names.update(zip(eqn.outvars, outvars, strict=True))
        params = {name: _parameter(value) for name, value in eqn.params.items()}
        yield eqn.replace(invars=invars, outvars=outvars, params=params)


def _body(eqn: Any) -> Any:
    """Returns the function that an equation calls, or None if it calls none."""
    if eqn.primitive not in _CALLS:
        return None
    body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    # What is closed over is an argument of the program already.
    return None if body.consts else body


def _parameter(value: Any) -> Any:
    if isinstance(value, _jax.Jaxpr):
        return without_calls(value)
    if isinstance(value, tuple) and any(isinstance(item, _jax.Jaxpr) for item in value):
        return tuple(map(_parameter, value))
    return value
