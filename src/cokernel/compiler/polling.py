"""Which reads of a program poll: they are made again and again until another core has written.

Pallas has no other way to look at a flag in memory, so such a read does not count as a race with
the write that it waits for. Checked mode tells them from other reads by where they lead: to the
condition of a loop.
"""

from collections.abc import Iterable
from typing import Any

from cokernel import _jax
from cokernel.compiler.analysis import inner_jaxprs, is_polling

_READS = frozenset(
    {
        _jax.get_p,
        _jax.pallas_primitives.load_p,
        _jax.sc_primitives.load_p,
        _jax.sc_primitives.gather_p,
    }
)


def polling_reads(jaxpr: Any) -> set[Any]:
    """The results of the reads that the loops among a jaxpr's equations poll by, inside these and
    in front of them. Loops further inside are not looked into.
    """
    found: set[Any] = set()
    for eqn in jaxpr.eqns:
        if not is_polling(eqn):
            continue
        inside, initial = _polled_inside(eqn)
        if inside:
            found |= inside | _sources(jaxpr, initial)[1]
    return found


def polls_by_reading(eqn: Any) -> bool:
    """Whether a loop ends when something that it reads from a Ref again and again has changed."""
    return is_polling(eqn) and bool(_polled_inside(eqn)[0])


def _polled_inside(eqn: Any) -> tuple[set[Any], list[Any]]:
    """The reads inside a `while` that its condition depends on, and the initial values of what it
    carries that the condition depends on.
    """
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    cond_count, body_count = params["cond_nconsts"], params["body_nconsts"]
    needed, reads = _sources(condition, condition.outvars)
    carried = condition.invars[cond_count:]
    deciding = {position for position, variable in enumerate(carried) if variable in needed}
    while True:
        results = [body.outvars[position] for position in deciding]
        needed, more = _sources(body, results)
        carried = body.invars[body_count:]
        following = deciding | {
            position for position, variable in enumerate(carried) if variable in needed
        }
        if following == deciding:
            break
        deciding = following
    initial = eqn.invars[cond_count + body_count :]
    return reads | more, [initial[position] for position in deciding]


def _sources(jaxpr: Any, atoms: Iterable[Any]) -> tuple[set[Any], set[Any]]:
    """The variables that some atoms of a jaxpr depend on, and those of them that are read from
    Refs.
    """
    needed = {atom for atom in atoms if isinstance(atom, _jax.Var)}
    reads: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        if not needed.intersection(eqn.outvars):
            continue
        needed.update(atom for atom in eqn.invars if isinstance(atom, _jax.Var))
        if eqn.primitive in _READS:
            reads.update(eqn.outvars)
        for inner in inner_jaxprs(eqn):
            reads |= _all_reads(inner)
    return needed, reads


def _all_reads(jaxpr: Any) -> set[Any]:
    reads: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive in _READS:
            reads.update(eqn.outvars)
        for inner in inner_jaxprs(eqn):
            reads |= _all_reads(inner)
    return reads
