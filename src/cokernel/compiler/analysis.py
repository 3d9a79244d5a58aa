"""What a jaxpr tells about a program before any code is emitted: where it may block, what it
allocates and reaches.
"""

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cokernel import _jax
from cokernel.compiler import dtypes

# Primitives at which a core can block, or must let others run.
SUSPENDING = frozenset(
    {
        _jax.pallas_primitives.semaphore_wait_p,
        _jax.pallas_primitives.semaphore_read_p,
        _jax.tpu_primitives.dma_wait_p,
        _jax.sc_primitives.barrier_p,
    }
)
# Put in front of a store to memory that others poll, and given its Ref: see `polling.py`.
before_polled_store_p = _jax.Primitive("before_polled_store")
before_polled_store_p.multiple_results = True
# Primitives in front of which the scheduler of checked mode may let others go first.
STEPS = frozenset(
    {
        _jax.pallas_primitives.semaphore_signal_p,
        _jax.tpu_primitives.dma_start_p,
        _jax.sc_primitives.fetch_and_add_p,
        before_polled_store_p,
    }
)
# Primitives that run a jaxpr as it is.
CALLS = frozenset(
    {
        _jax.jit_p,
        _jax.closed_call_p,
        _jax.custom_jvp_call_p,
        _jax.custom_vjp_call_p,
        _jax.remat_p,
    }
)


def inner_jaxprs(eqn: Any) -> Iterable[Any]:
    """The jaxprs among an equation's parameters."""
    for parameter in eqn.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, _jax.Jaxpr):
                yield item


def called_jaxprs(eqn: Any) -> list[tuple[Any, Sequence[Any]]] | None:
    """The jaxprs that an equation runs, each with what it is given; None if that is not known."""
    if eqn.primitive is _jax.cond_p:
        return [(branch, eqn.invars[1:]) for branch in inner_jaxprs(eqn)]
    if eqn.primitive is _jax.scan_p or eqn.primitive in CALLS:
        return [(body, eqn.invars) for body in inner_jaxprs(eqn)]
    if eqn.primitive is _jax.while_p:
        condition, body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        constants, rest = eqn.invars[: condition + body], eqn.invars[condition + body :]
        return [
            (eqn.params["cond_jaxpr"], [*constants[:condition], *rest]),
            (eqn.params["body_jaxpr"], [*constants[condition:], *rest]),
        ]
    if eqn.primitive is _jax.sc_primitives.parallel_loop_p and not eqn.params["jaxpr"].constvars:
        lower, *_, constants, initial = eqn.params["tree"].unflatten(eqn.invars)
        # The counter is something between the bounds.
        return [(eqn.params["jaxpr"], [*constants, lower, *initial])]
    return None


def is_known(atom: Any, names: Mapping[Any, Any]) -> bool:
    """Whether an atom is a variable among those of the jaxpr at hand that `names` knows."""
    return isinstance(atom, _jax.Var) and atom in names


def passed_on(
    arguments: Sequence[Any], parameters: Sequence[Any], names: Mapping[Any, Any]
) -> dict[Any, Any]:
    """What `names` knows of the arguments of a jaxpr, by the parameters that they become."""
    return {
        parameter: names[argument]
        for argument, parameter in zip(arguments, parameters, strict=True)
        if is_known(argument, names)
    }


def over_jaxprs(parameter: Any, function: Callable[[Any], Any]) -> Any:
    """A parameter of an equation with a function applied to the jaxprs in it."""
    if isinstance(parameter, _jax.Jaxpr):
        return function(parameter)
    if isinstance(parameter, tuple | list) and any(
        isinstance(item, _jax.Jaxpr) for item in parameter
    ):
        return type(parameter)(over_jaxprs(item, function) for item in parameter)
    return parameter


def with_replaced(jaxpr: Any, stand_in: Callable[[Any], list[Any] | None]) -> Any:
    """The same program with other equations for some, also in the jaxprs that its equations run;
    itself if there are none to replace.

    Args:
      jaxpr: the program.
      stand_in: gives the equations that stand for one, None for one that stays as it is. What that
        one runs has been dealt with before.
    """

    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        inside = {id(inner): with_replaced(inner, stand_in) for inner in inner_jaxprs(eqn)}
        if any(id(inner) != before for before, inner in inside.items()):
            eqn = with_inner(eqn, inside)
        others = stand_in(eqn)
        eqns += [eqn] if others is None else others
    is_same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if is_same else jaxpr.replace(eqns=eqns)


def with_inner(eqn: Any, others: Mapping[int, Any]) -> Any:
    """An equation with other jaxprs in place of some of its own, by the identities of those."""
    params = {
        name: over_jaxprs(parameter, lambda inner: others.get(id(inner), inner))
        for name, parameter in eqn.params.items()
    }
    return eqn.replace(params=params)


def may_suspend(jaxpr: Any, *, is_checked: bool) -> bool:
    """Whether running the jaxpr can suspend the core; in checked mode there are more places."""
    silent = frozenset() if is_checked else finished_copies(jaxpr)
    return any(
        equation_may_suspend(eqn, is_checked=is_checked)
        for number, eqn in enumerate(jaxpr.eqns)
        if number not in silent
    )


def finished_copies(jaxpr: Any) -> frozenset[int]:
    """The equations that start a DMA of this core and wait for it straight away, as numbers.

    A DMA is complete once it has been started, so such a wait takes what the start has just added,
    whatever the semaphore counted before: neither needs to touch the semaphore.
    """
    numbers: set[int] = set()
    for number, (start, wait) in enumerate(itertools.pairwise(jaxpr.eqns)):
        if (
            start.primitive is _jax.tpu_primitives.dma_start_p
            and wait.primitive is _jax.tpu_primitives.dma_wait_p
            and not wait.params["is_wait_send"]
            and _same_operands(start, wait)
        ):
            _, _, _, source_semaphore, device_id = start.params["tree"].unflatten(start.invars)
            if source_semaphore is None and device_id is None:
                numbers |= {number, number + 1}
    return frozenset(numbers)


def _same_operands(one: Any, other: Any) -> bool:
    if one.params["tree"] != other.params["tree"]:
        return False
    return all(
        a is b or (isinstance(a, _jax.Literal) and isinstance(b, _jax.Literal) and a.val == b.val)
        for a, b in zip(one.invars, other.invars, strict=True)
    )


def equation_may_suspend(eqn: Any, *, is_checked: bool) -> bool:
    """Whether an equation can suspend the core, itself or in a jaxpr it runs."""
    from cokernel.compiler.polling import polls_by_reading

    return (
        eqn.primitive in SUSPENDING
        or (is_checked and eqn.primitive in STEPS)
        # In checked mode other loops do not let others run: each time costs a decision.
        or (polls_by_reading(eqn) if is_checked else is_polling(eqn))
        or any(may_suspend(inner, is_checked=is_checked) for inner in inner_jaxprs(eqn))
    )


def is_polling(eqn: Any) -> bool:
    """Whether an equation is a loop that may wait for another core's write: a `while` that reads
    memory others can reach. Such a loop lets other cores run every so often. Memory of the core's
    own counts where others write to that (see `with_reached_memory`) and the loop does not.
    """
    if eqn.primitive is not _jax.while_p:
        return False
    is_reached = eqn.params.get(_REACHED, False)
    read = [effect for effect in eqn.effects if isinstance(effect, _jax.ReadEffect)]
    changed = {
        _effect_operand(eqn, effect)
        for effect in eqn.effects
        if isinstance(effect, _jax.JaxprInputEffect) and not isinstance(effect, _jax.ReadEffect)
    }
    for ref in (_effect_operand(eqn, effect) for effect in read):
        if not is_private(ref.aval) or (is_reached and ref not in changed):
            return True
    return False


def is_private(aval: Any) -> bool:
    """Whether a Ref is of a kind of memory that each core has for itself."""
    return _plain_space(aval.memory_space) in (_jax.TpuMemorySpace.VMEM, _jax.TpuMemorySpace.SMEM)


# What the loops of a kernel are marked with whose cores write to each other's own memory.
_REACHED = "is_reached"


def with_reached_memory(jaxprs: Sequence[Any]) -> tuple[Any, ...]:
    """The programs of a kernel, their loops marked if one of them writes to the own memory of
    other cores: any of them may wait for that.
    """
    if not any(map(writes_to_other_cores, jaxprs)):
        return tuple(jaxprs)

    def marked(eqn: Any) -> list[Any] | None:
        if eqn.primitive is not _jax.while_p:
            return None
        return [eqn.replace(params={**eqn.params, _REACHED: True})]

    return tuple(with_replaced(jaxpr, marked) for jaxpr in jaxprs)


def _effect_operand(eqn: Any, effect: Any) -> Any:
    target = effect.input
    return eqn.invars[target] if isinstance(target, int) else target


def _plain_space(space: Any) -> Any:
    return space.memory_space if isinstance(space, _jax.CoreMemorySpace) else space


def writes_memory(eqn: Any, *, is_checked: bool) -> bool:
    """Whether memory may change while the equation runs, by its own doing or, as it may suspend, by
    another core's.
    """
    return equation_may_suspend(eqn, is_checked=is_checked) or any(
        not isinstance(effect, _jax.ReadEffect | _jax.NamedAxisEffect) for effect in eqn.effects
    )


def semaphore_count(jaxpr: Any) -> int:
    """How many semaphores the scopes in a jaxpr allocate, each scope counted as often as it is
    written.
    """
    count = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive is _jax.pallas_primitives.run_scoped_p:
            allocated = eqn.params["jaxpr"].invars
        elif eqn.primitive in (_jax.empty_ref_p, _jax.ref_p):
            allocated = eqn.outvars
        else:
            allocated = []
        count += sum(v.aval.size for v in allocated if dtypes.is_semaphore(v.aval.dtype))
        if eqn.primitive is _jax.tpu_primitives.get_barrier_semaphore_p:
            count += 1
        count += sum(map(semaphore_count, inner_jaxprs(eqn)))
    return count


def barrier_tags(jaxpr: Any) -> set[Any]:
    """The tags of the barrier semaphores that a jaxpr asks for."""
    tags = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive is _jax.tpu_primitives.get_barrier_semaphore_p:
            tags.add(eqn.params["tag"])
        tags.update(*map(barrier_tags, inner_jaxprs(eqn)))
    return tags


def has_equation(jaxpr: Any, is_wanted: Callable[[Any], bool]) -> bool:
    """Whether there is such an equation in a jaxpr, or in one that its equations run."""
    return any(
        is_wanted(eqn) or any(has_equation(inner, is_wanted) for inner in inner_jaxprs(eqn))
        for eqn in jaxpr.eqns
    )


def writes_to_other_cores(jaxpr: Any) -> bool:
    """Whether a jaxpr adds to, or copies into, what other cores have for themselves."""
    return has_equation(jaxpr, _writes_remotely)


def reaches_other_cores(jaxpr: Any) -> bool:
    """Whether a jaxpr signals semaphores of other cores, or writes to their memory."""
    return has_equation(jaxpr, lambda eqn: _writes_remotely(eqn) or _signals_remotely(eqn))


def _writes_remotely(eqn: Any) -> bool:
    if eqn.primitive is _jax.tpu_primitives.dma_start_p:
        *_, device_id = eqn.params["tree"].unflatten(eqn.invars)
        return device_id is not None
    return eqn.primitive is _jax.sc_primitives.fetch_and_add_p


def _signals_remotely(eqn: Any) -> bool:
    if eqn.primitive is not _jax.pallas_primitives.semaphore_signal_p:
        return False
    *_, device_id, core_index = eqn.params["args_tree"].unflatten(eqn.invars)
    return device_id is not None or core_index is not None


def uses_barrier(jaxpr: Any) -> bool:
    """Whether a jaxpr joins the barrier of its subcores."""
    return has_equation(jaxpr, lambda eqn: eqn.primitive is _jax.sc_primitives.barrier_p)


def argument_names(jaxpr: Any, count: int, default: str) -> list[str]:
    """The user's names of the last `count` parameters of a jaxpr."""
    names = list(jaxpr.debug_info.arg_names or ()) if jaxpr.debug_info is not None else []
    names = names[-count:] if count else []
    if len(names) != count:
        return [f"{default}{number}" for number in range(count)]
    return [name or f"{default}{number}" for number, name in enumerate(names)]
