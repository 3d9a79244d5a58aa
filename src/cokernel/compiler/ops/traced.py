"""Rules written as JAX functions: what a primitive means, said in primitives that have rules."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from cokernel import _jax
from cokernel.compiler.context import Context
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.values import Value


def lower_traced(context: Context, function: Callable[..., Any], *operands: Value) -> list[Value]:
    """Traces `function` for arrays like the operands and emits what it does to them; returns its
    results, flat.

    The equations count as parts of the user's line that is being compiled.
    """
    avals = [jax.ShapeDtypeStruct(operand.shape, operand.dtype) for operand in operands]
    jaxpr = jax.make_jaxpr(function)(*avals)
    return lower_jaxpr(context, without_lines(jaxpr), operands)


def traced(primitive: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers `function(*arrays, **params)`, written in JAX, as the rule of a primitive."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        def compose(context: Context, eqn: Any, *operands: Value) -> list[Value]:
            return lower_traced(context, functools.partial(function, **eqn.params), *operands)

        rule(primitive)(compose)
        return function

    return register


def without_lines(jaxpr: Any) -> Any:
    """The jaxpr without source lines, which would be those of the caller of the kernel."""
    return jaxpr.replace(eqns=[_without_line(eqn) for eqn in jaxpr.eqns])


def _without_line(eqn: Any) -> Any:
    params = {name: _map_jaxprs(parameter) for name, parameter in eqn.params.items()}
    return eqn.replace(params=params, source_info=_jax.new_source_info())


def _map_jaxprs(parameter: Any) -> Any:
    if isinstance(parameter, _jax.Jaxpr):
        return without_lines(parameter)
    if isinstance(parameter, tuple | list):
        return (
            type(parameter)(map(_map_jaxprs, parameter)) if _holds_jaxpr(parameter) else parameter
        )
    return parameter


def _holds_jaxpr(items: Any) -> bool:
    return any(isinstance(item, _jax.Jaxpr) for item in items)
