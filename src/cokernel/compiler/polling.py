"""Which reads of a program poll: they are made again and again until another core has written.

Pallas has no other way to look at a flag in memory, so such a read does not count as a race with
the write that it waits for. Checked mode tells them from other reads by where they lead: to the
condition of a loop. Others get their turn in front of each plain store to such memory, because
what it overwrites is something that they might have seen.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cokernel import _jax
from cokernel.compiler.analysis import (
    STEPS,
    SUSPENDING,
    before_polled_store_p,
    called_jaxprs,
    inner_jaxprs,
    is_known,
    is_polling,
    is_private,
    passed_on,
    with_inner,
)

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


def reads_memory(jaxpr: Any) -> bool:
    """Whether a jaxpr reads a Ref in a way that can poll it."""
    return bool(_all_reads(jaxpr))


def _polled_inside(eqn: Any) -> tuple[set[Any], list[Any]]:
    """The reads inside a `while` that its condition depends on, and the initial values of what it
    carries that the condition depends on.
    """
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    cond_count, body_count = params["cond_nconsts"], params["body_nconsts"]
    needed, reads = _sources(condition, condition.outvars, _fixed(condition, cond_count))
    carried = condition.invars[cond_count:]
    deciding = {position for position, variable in enumerate(carried) if variable in needed}
    fixed = _fixed(body, body_count)
    while True:
        results = [body.outvars[position] for position in deciding]
        needed, more = _sources(body, results, fixed)
        carried = body.invars[body_count:]
        following = deciding | {
            position for position, variable in enumerate(carried) if variable in needed
        }
        if following == deciding:
            break
        deciding = following
    initial = eqn.invars[cond_count + body_count :]
    return reads | more, [initial[position] for position in deciding]


def _fixed(jaxpr: Any, count: int) -> set[Any]:
    """The variables of a loop's jaxpr that are the same in each iteration, of which the first
    `count` parameters are.
    """
    fixed = set(jaxpr.invars[:count])
    for eqn in jaxpr.eqns:
        is_pure = all(isinstance(effect, _jax.NamedAxisEffect) for effect in eqn.effects)
        if is_pure and all(atom in fixed for atom in eqn.invars if isinstance(atom, _jax.Var)):
            fixed.update(eqn.outvars)
    return fixed


def _sources(
    jaxpr: Any, atoms: Iterable[Any], fixed: set[Any] | None = None
) -> tuple[set[Any], set[Any]]:
    """The variables that some atoms of a jaxpr depend on, and those of them that are read from
    Refs. `fixed` is what an iteration of a loop is, if it is one: see `_may_poll`.
    """
    needed = {atom for atom in atoms if isinstance(atom, _jax.Var)}
    reads: set[Any] = set()
    for eqn in reversed(jaxpr.eqns):
        if not needed.intersection(eqn.outvars):
            continue
        needed.update(atom for atom in eqn.invars if isinstance(atom, _jax.Var))
        if eqn.primitive in _READS and (fixed is None or _may_poll(eqn, fixed)):
            reads.update(eqn.outvars)
        for inner in inner_jaxprs(eqn):
            reads |= _all_reads(inner)
    return needed, reads


def _all_reads(jaxpr: Any) -> set[Any]:
    reads: set[Any] = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive in _READS and _may_poll(eqn, set()):
            reads.update(eqn.outvars)
        for inner in inner_jaxprs(eqn):
            reads |= _all_reads(inner)
    return reads


def _may_poll(eqn: Any, fixed: set[Any]) -> bool:
    """Whether a read in a loop may wait for a write. In what a core has for itself only a read
    that looks at the same place again does; others search there.
    """
    ref, *indices = eqn.invars
    return not is_private(ref.aval) or all(
        atom in fixed for atom in indices if isinstance(atom, _jax.Var)
    )


# A Ref variable of the jaxpr at hand, and the memory that it is.
Names = Mapping[Any, Any]


def with_steps(jaxprs: Sequence[Any], named: Sequence[Names]) -> tuple[Any, ...]:
    """The programs of a kernel with `before_polled_store_p` in front of the plain stores to memory
    that one of them polls; themselves if there are none. `named` holds, for each, the memory of
    those of its parameters that are Refs which several cores reach.
    """
    polled: set[Any] = set()
    for jaxpr, names in zip(jaxprs, named, strict=True):
        polled |= _polled_memory(jaxpr, names, set())
    if not polled:
        return tuple(jaxprs)
    return tuple(
        _with_steps(jaxpr, names, polled) for jaxpr, names in zip(jaxprs, named, strict=True)
    )


def _polled_memory(jaxpr: Any, names: Names, reads: set[Any]) -> set[Any]:
    """What a jaxpr polls of the memory in `names`, or of what its scopes share with other cores.
    `reads` are the polling reads of the jaxprs around it.
    """
    found: set[Any] = set()
    reads = reads | polling_reads(jaxpr)
    for eqn in jaxpr.eqns:
        if not reads.isdisjoint(eqn.outvars) and eqn.primitive in _READS:
            found |= {names[atom] for atom in eqn.invars if is_known(atom, names)}
        for body, inside in _entered(eqn, names):
            found |= _polled_memory(body, inside, reads)
    return found


def _with_steps(jaxpr: Any, names: Names, polled: set[Any]) -> Any:
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        inside = {id(body): _with_steps(body, few, polled) for body, few in _entered(eqn, names)}
        if inside:
            eqns.append(with_inner(eqn, inside))
            continue
        for ref in _stored(eqn, names):
            if names[ref] in polled:
                eqns.append(_step_before(eqn, ref))
        eqns.append(eqn)
    return jaxpr.replace(eqns=eqns)


def _step_before(eqn: Any, ref: Any) -> Any:
    return eqn.replace(
        primitive=before_polled_store_p,
        invars=[ref],
        outvars=[],
        params={"operation": eqn.primitive.name},
        effects=set(),
    )


def _stored(eqn: Any, names: Names) -> Iterator[Any]:
    """The Refs among `names` that an equation changes by itself and at once."""
    if eqn.primitive in STEPS or eqn.primitive in SUSPENDING:
        # Others get their turn there already.
        return
    for effect in eqn.effects:
        if isinstance(effect, _jax.JaxprInputEffect) and not isinstance(effect, _jax.ReadEffect):
            target = effect.input
            ref = eqn.invars[target] if isinstance(target, int) else target
            if is_known(ref, names):
                yield ref


def _entered(eqn: Any, names: Names) -> Iterator[tuple[Any, Names]]:
    """The jaxprs that an equation runs, each with what is known of its variables."""
    if eqn.primitive is _jax.pallas_primitives.run_scoped_p:
        body = eqn.params["jaxpr"]
        shared = {var: var for var in body.invars if eqn.params["collective_axes"]}
        yield body, {**passed_on(eqn.invars, body.constvars, names), **shared}
        return
    if eqn.primitive is _jax.sc_primitives.parallel_loop_p:
        body = eqn.params["jaxpr"]
        lower, *_, constants, initial = eqn.params["tree"].unflatten(eqn.invars)
        yield (
            body,
            passed_on([*constants, lower, *initial], [*body.constvars, *body.invars], names),
        )
        return
    for body, arguments in called_jaxprs(eqn) or ():
        yield body, passed_on(arguments, body.invars, names)
