"""Primitives that run a jaxpr under a name of their own: each is replaced by a plain call of that,
before anything looks at what a program allocates and where it may block.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from cokernel import _jax
from cokernel.compiler.analysis import with_replaced


def with_plain_calls(jaxpr: Any) -> Any:
    """The same program with plain calls only; itself if it has no others."""
    return with_replaced(jaxpr, stand_in)


def stand_in(eqn: Any) -> list[Any] | None:
    """What takes the place of an equation; None where it stays."""
    return MEANING[eqn.primitive](eqn) if eqn.primitive in MEANING else None


def _call_of(parameter: str, eqn: Any) -> list[Any]:
    """A call of what a parameter holds."""
    return [_call(eqn, eqn.params[parameter])]


def _call(eqn: Any, jaxpr: Any) -> Any:
    return eqn.replace(primitive=_jax.closed_call_p, params={"call_jaxpr": jaxpr})


def _einshape(eqn: Any) -> list[Any]:
    """Reshapes and transposes."""
    [operand] = eqn.invars
    sizes = dict(eqn.params["sizes"])

    def function(x: jax.Array) -> jax.Array:
        return _jax.einshape_by_parts(eqn.params["equation"], x, **sizes)

    aval = jax.ShapeDtypeStruct(operand.aval.shape, operand.aval.dtype)
    jaxpr = jax.make_jaxpr(function)(aval)
    eqns = [inner.replace(source_info=eqn.source_info) for inner in jaxpr.eqns]
    return [_call(eqn, jaxpr.replace(eqns=eqns))]


def _run_state(eqn: Any) -> list[Any]:
    """A new Ref for each value, the call that changes them, and what they hold at its end. A Ref of
    the program is handed on.
    """
    body = eqn.params["jaxpr"]
    before: list[Any] = []
    after: list[Any] = []
    refs: list[Any] = []
    for operand, parameter, result in zip(eqn.invars, body.invars, eqn.outvars, strict=True):
        if isinstance(operand.aval, _jax.AbstractRef):
            refs.append(operand)
            continue
        ref = _jax.Var(parameter.aval)
        refs.append(ref)
        new = {"memory_space": None, "kind": None, "pin": False}
        before.append(_new_eqn(eqn, _jax.ref_p, [operand], [ref], new))
        after.append(_new_eqn(eqn, _jax.freeze_p, [ref], [result], {}))
    call = _new_eqn(eqn, _jax.closed_call_p, refs, [], {"call_jaxpr": body})
    return [*before, call, *after]


def _new_eqn(
    eqn: Any, primitive: Any, invars: list[Any], outvars: list[Any], params: dict[str, Any]
) -> Any:
    """An equation at the source line of another one."""
    return _jax.new_jaxpr_eqn(invars, outvars, primitive, params, eqn.effects, eqn.source_info)


# The primitives that are replaced.
MEANING: dict[Any, Callable[[Any], list[Any]]] = {
    _jax.custom_vmap_p: functools.partial(_call_of, "call"),
    _jax.composite_p: functools.partial(_call_of, "call_jaxpr"),
    _jax.xla_metadata_call_p: functools.partial(_call_of, "jaxpr"),
    _jax.einshape_p: _einshape,
    _jax.run_state_p: _run_state,
}
