"""Loops that write all of a Ref: each iteration a part of its own, and together every element."""

from typing import Any

import numpy as np

from cokernel import _jax
from cokernel.compiler.moves import Expressions, expressions_of, is_single_index, is_whole


def covers(eqn: Any, place: int) -> bool:
    """Whether an equation is a loop that stores to every element of the Ref that is its operand
    number `place`, and does nothing else with it.
    """
    if eqn.primitive is _jax.scan_p:
        return _scan_covers(eqn, place)
    if eqn.primitive is _jax.sc_primitives.parallel_loop_p:
        return _parallel_loop_covers(eqn, place)
    return False


def unused_results(jaxpr: Any) -> set[Any]:
    """The variables of a jaxpr that nobody reads."""
    read = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, _jax.Var)}
    read.update(atom for atom in jaxpr.outvars if isinstance(atom, _jax.Var))
    return {variable for eqn in jaxpr.eqns for variable in eqn.outvars if variable not in read}


def _scan_covers(eqn: Any, place: int) -> bool:
    body = eqn.params["jaxpr"]
    constants, carry, _ = map(list, eqn.params["ft_in"].update(list(body.invars)).unpack())
    _, initial, _ = map(list, eqn.params["ft_in"].update(list(eqn.invars)).unpack())
    if place >= len(constants):
        return False
    expressions = expressions_of(body)
    counters = {
        expressions.number(variable)
        for variable, start, after in zip(carry, initial, body.outvars[: len(carry)], strict=True)
        if _is_zero(start)
        and _counts_to(variable, body.invars[place].aval.shape[0])
        and expressions.is_sum(after, variable, 1)
    }
    length = eqn.params["length"]
    return _stores_cover(body, body.invars[place], expressions, counters, length, None)


def _parallel_loop_covers(eqn: Any, place: int) -> bool:
    body = _jax.partial_eval.convert_constvars_jaxpr(eqn.params["jaxpr"])
    lower, upper, step, constants, _ = eqn.params["tree"].unflatten(eqn.invars)
    stop, stride = _integer(upper), _integer(step)
    if not _is_zero(lower) or stop is None or stride is None or stride <= 0 or stop % stride:
        return False
    # Behind the bounds.
    first = 3
    if not first <= place < first + len(constants):
        return False
    expressions = expressions_of(body)
    counter, ref = body.invars[len(constants)], body.invars[place - first]
    if not _counts_to(counter, ref.aval.shape[0]):
        return False
    index = expressions.number(counter)
    return _stores_cover(body, ref, expressions, {index}, stop // stride, stride)


def _stores_cover(
    body: Any,
    ref: Any,
    expressions: Expressions,
    counters: set[int],
    length: int,
    stride: int | None,
) -> bool:
    """Whether the iterations of a body store to all of a Ref and only do that with it. A counter
    counts iterations, or grows by `stride`.
    """
    users = [eqn for eqn in body.eqns if ref in _variables(eqn)]
    unused = unused_results(body)
    if not all(_is_store(eqn, ref, unused) for eqn in users) or ref in body.outvars:
        return False
    for eqn in users:
        transforms = eqn.params["tree"].unflatten(eqn.invars[2:])
        if len(transforms) != 1 or not isinstance(transforms[0], _jax.NDIndexer):
            continue
        first, *rest = transforms[0].indices
        if not is_whole(tuple(rest), ref.aval.shape[1:]):
            continue
        if is_single_index(first):
            start, size = first, 1
        elif isinstance(first, _jax.Slice) and first.stride == 1:
            start, size = first.start, first.size
        else:
            continue
        if not isinstance(size, int | np.integer) or size * length != ref.aval.shape[0]:
            continue
        if stride is None:
            if any(expressions.is_product(start, counter, int(size)) for counter in counters):
                return True
        elif size == stride and expressions.number(start) in counters:
            return True
    return False


def _is_store(eqn: Any, ref: Any, unused: set[Any]) -> bool:
    return (
        eqn.primitive is _jax.swap_p
        and eqn.invars[0] is ref
        and ref not in eqn.invars[1:]
        and eqn.outvars[0] in unused
    )


def _variables(eqn: Any) -> set[Any]:
    return {atom for atom in eqn.invars if isinstance(atom, _jax.Var)}


def _counts_to(variable: Any, extent: int) -> bool:
    """Whether a variable is a scalar that holds every integer up to this one; a narrow one would
    begin again."""
    aval = variable.aval
    if getattr(aval, "shape", None) != () or not np.issubdtype(aval.dtype, np.integer):
        return False
    return bool(np.iinfo(aval.dtype).max >= extent)


def _is_zero(atom: Any) -> bool:
    return _integer(atom) == 0


def _integer(atom: Any) -> int | None:
    if isinstance(atom, int | np.integer):
        return int(atom)
    if isinstance(atom, _jax.Literal) and np.issubdtype(atom.aval.dtype, np.integer):
        return int(atom.val)
    return None
