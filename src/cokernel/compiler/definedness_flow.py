"""Masks of undefined elements through control flow: what goes into a jaxpr takes its mask along."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from cokernel import _jax
from cokernel.compiler.definedness import (
    AMOUNT,
    BRANCH,
    LOOP,
    Groups,
    Inner,
    Mask,
    Scope,
    bools,
)
from cokernel.compiler.definedness_rules import rule
from cokernel.compiler.definedness_sources import (
    Source,
    all_united,
    anywhere,
    earlier,
    unsure,
)
from cokernel.records import record


def _flags(scope: Scope, atoms: Sequence[Any]) -> list[bool]:
    return [scope.mask(atom) is not None for atom in atoms]


def _masks(scope: Scope, atoms: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    """The masks of those atoms that are wanted, of zeros where an atom is defined."""
    return [scope.filled(atom) for atom, is_wanted in zip(atoms, wanted, strict=True) if is_wanted]


def _results(
    scope: Scope,
    eqn: Any,
    wanted: Sequence[bool],
    *sources: Sequence[Mask],
    initial: Sequence[Mask] | None = None,
) -> tuple[list[Any], list[Mask]]:
    """Variables for the masks of the results that are wanted, and the masks of all results. For
    each result `sources` have the masks that its own may be, and `initial`, of a loop, that which
    it is if there are no iterations.
    """
    masks: list[Mask] = [
        _jax.Var(bools(variable.aval.shape)) if is_wanted else None
        for variable, is_wanted in zip(eqn.outvars, wanted, strict=True)
    ]
    for mask, before, *inside in zip(masks, initial or [None] * len(masks), *sources, strict=True):
        if mask is None:
            continue
        known: list[Mapping[int, Source]] = []
        for one in inside:
            reads = scope.origins.of(one)
            if one is not None and one.aval.shape != mask.aval.shape:
                # The rows of a result come from one iteration each.
                reads = {
                    number: earlier(anywhere(source, (), ()), is_sure=False)
                    for number, source in reads.items()
                }
            known.append(_unsure(reads) if len(inside) > 1 else reads)
        reads = all_united(known)
        more = _unsure(scope.origins.of(before))
        scope.origins.add(mask, {**more, **reads})
    return [mask for mask in masks if mask is not None], masks


def _unsure(reads: Mapping[int, Source]) -> dict[int, Source]:
    return {number: unsure(source) for number, source in reads.items()}


def _effects(eqn: Any) -> Any:
    """The effects of an equation, none of them by the position of an operand."""
    return {
        effect.replace(eqn.invars[effect.input])
        if isinstance(effect, _jax.JaxprInputEffect) and isinstance(effect.input, int)
        else effect
        for effect in eqn.effects
    }


def _replaced(scope: Scope, eqn: Any, **changes: Any) -> None:
    scope.eqns.append(eqn.replace(effects=_effects(eqn), **changes))


@rule(
    _jax.jit_p,
    _jax.closed_call_p,
    _jax.custom_jvp_call_p,
    _jax.custom_vjp_call_p,
    _jax.remat_p,
)
def _call(scope: Scope, eqn: Any) -> list[Mask]:
    name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
    jaxpr = eqn.params[name]
    flags = _flags(scope, eqn.invars)
    inner = scope.inside(jaxpr, jaxpr.invars, eqn.invars, flags)
    wanted = [mask is not None for mask in inner.results]
    variables, masks = _results(scope, eqn, wanted, inner.results)
    body = inner.build([*jaxpr.invars, *inner.inputs], [*jaxpr.outvars, *inner.outvars(wanted)])
    _replaced(
        scope,
        eqn,
        invars=[*eqn.invars, *_masks(scope, eqn.invars, flags)],
        outvars=[*eqn.outvars, *variables],
        params={**eqn.params, name: body},
    )
    return masks


@rule(_jax.cond_p)
def _cond(scope: Scope, eqn: Any) -> list[Mask]:
    selector, *operands = eqn.invars
    scope.report(eqn, [selector], BRANCH)
    flags = _flags(scope, operands)
    inners = [
        scope.inside(branch, branch.invars, operands, flags) for branch in eqn.params["branches"]
    ]
    wanted = [any(masks) for masks in zip(*(_have(inner) for inner in inners), strict=True)]
    variables, masks = _results(scope, eqn, wanted, *(inner.results for inner in inners))
    branches = tuple(
        inner.build(
            [*inner.jaxpr.invars, *inner.inputs], [*inner.jaxpr.outvars, *inner.outvars(wanted)]
        )
        for inner in inners
    )
    _replaced(
        scope,
        eqn,
        invars=[selector, *operands, *_masks(scope, operands, flags)],
        outvars=[*eqn.outvars, *variables],
        params={**eqn.params, "branches": branches},
    )
    return masks


def _have(inner: Inner) -> list[bool]:
    return [mask is not None for mask in inner.results]


def _carried(
    scope: Scope,
    jaxpr: Any,
    inputs: Sequence[Any],
    operands: Sequence[Any],
    flags: Sequence[bool],
    carry: range,
) -> tuple[Inner, list[bool]]:
    """The body of a loop with masks for all that may be undefined in some iteration; `carry` are
    the positions of the carried values among its inputs, and they come first in its results.
    """
    known = list(flags)
    reads: list[dict[int, Source]] = [{}] * len(known)
    while True:
        inner = scope.inside(jaxpr, inputs, operands, known, reads, is_loop=True)
        following, more = list(known), list(reads)
        for number, position in enumerate(carry):
            following[position] = known[position] or inner.results[number] is not None
            carried = _carried_reads(scope, inner.results[number])
            more[position] = all_united([reads[position], carried])
        if following == known and more == reads:
            return inner, known
        known, reads = following, more


def _carried_reads(scope: Scope, mask: Mask) -> dict[int, Source]:
    """The reads that a mask comes from which is carried to the next iteration."""
    return {
        number: earlier(source, is_sure=not scope.is_repeated)
        for number, source in scope.origins.of(mask).items()
    }


@rule(_jax.scan_p)
def _scan(scope: Scope, eqn: Any) -> list[Mask]:
    params = eqn.params
    body = params["jaxpr"]
    constants, initial, _ = map(list, params["ft_in"].update(list(eqn.invars)).unpack())
    carry_out, _ = map(list, params["ft_out"].update(list(eqn.outvars)).unpack())
    first, behind = len(constants), len(constants) + len(initial)
    inner, flags = _carried(
        scope, body, body.invars, eqn.invars, _flags(scope, eqn.invars), range(first, behind)
    )
    groups = [(0, first), (first, behind), (behind, len(flags))]
    own = inner.scope.masks
    invars: list[Any] = []
    body_invars: list[Any] = []
    sizes = []
    for start, stop in groups:
        atoms, wanted = eqn.invars[start:stop], flags[start:stop]
        invars += [*atoms, *_masks(scope, atoms, wanted)]
        variables = body.invars[start:stop]
        inside = [own[v] for v, is_wanted in zip(variables, wanted, strict=True) if is_wanted]
        body_invars += [*variables, *inside]
        sizes.append(len(variables) + len(inside))
    count = len(carry_out)
    wanted = [*flags[first:behind], *(mask is not None for mask in inner.results[count:])]
    carried_in = [*map(scope.mask, initial), *[None] * (len(wanted) - count)]
    variables, masks = _results(scope, eqn, wanted, inner.results, initial=carried_in)
    masks_out = inner.outvars(wanted)
    carried = sum(wanted[:count])
    body_outvars = [
        *body.outvars[:count],
        *masks_out[:carried],
        *body.outvars[count:],
        *masks_out[carried:],
    ]
    outvars = [
        *eqn.outvars[:count],
        *variables[:carried],
        *eqn.outvars[count:],
        *variables[carried:],
    ]
    _replaced(
        scope,
        eqn,
        invars=invars,
        outvars=outvars,
        params={
            **params,
            "jaxpr": inner.build(body_invars, body_outvars),
            "ft_in": Groups(tuple(sizes)),
            "ft_out": Groups((count + carried, len(outvars) - count - carried)),
        },
    )
    return masks


@rule(_jax.while_p)
def _while(scope: Scope, eqn: Any) -> list[Mask]:
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    cond_count, body_count = params["cond_nconsts"], params["body_nconsts"]
    cond_consts = eqn.invars[:cond_count]
    body_consts = eqn.invars[cond_count : cond_count + body_count]
    initial = eqn.invars[cond_count + body_count :]
    operands = [*body_consts, *initial]
    inner, flags = _carried(
        scope,
        body,
        body.invars,
        operands,
        _flags(scope, operands),
        range(body_count, len(operands)),
    )
    carry_flags = flags[body_count:]
    cond_flags = [*_flags(scope, cond_consts), *carry_flags]
    carried_reads = [_carried_reads(scope, mask) for mask in inner.results]
    test = scope.inside(
        condition,
        condition.invars,
        [*cond_consts, *initial],
        cond_flags,
        [*[{}] * cond_count, *carried_reads],
        is_loop=True,
    )
    test.scope.report(eqn, condition.outvars, LOOP)
    carried_in = [scope.mask(atom) for atom in initial]
    variables, masks = _results(scope, eqn, carry_flags, inner.results, initial=carried_in)
    condition_masks = sum(cond_flags[:cond_count])
    new_condition = test.build(
        [
            *condition.invars[:cond_count],
            *test.inputs[:condition_masks],
            *condition.invars[cond_count:],
            *test.inputs[condition_masks:],
        ],
        condition.outvars,
    )
    body_masks = sum(flags[:body_count])
    new_body = inner.build(
        [
            *body.invars[:body_count],
            *inner.inputs[:body_masks],
            *body.invars[body_count:],
            *inner.inputs[body_masks:],
        ],
        [*body.outvars, *inner.outvars(carry_flags)],
    )
    _replaced(
        scope,
        eqn,
        invars=[
            *cond_consts,
            *_masks(scope, cond_consts, cond_flags[:cond_count]),
            *body_consts,
            *_masks(scope, body_consts, flags[:body_count]),
            *initial,
            *_masks(scope, initial, carry_flags),
        ],
        outvars=[*eqn.outvars, *variables],
        params={
            **params,
            "cond_jaxpr": new_condition,
            "body_jaxpr": new_body,
            "cond_nconsts": cond_count + condition_masks,
            "body_nconsts": body_count + body_masks,
        },
    )
    return masks


@rule(_jax.pallas_primitives.run_scoped_p)
def _run_scoped(scope: Scope, eqn: Any) -> list[Mask]:
    body = eqn.params["jaxpr"]
    flags = [*_flags(scope, eqn.invars), *[False] * len(body.invars)]
    operands = [*eqn.invars, *[None] * len(body.invars)]
    inner = scope.inside(body, [*body.constvars, *body.invars], operands, flags)
    wanted = _have(inner)
    variables, masks = _results(scope, eqn, wanted, inner.results)
    new_body = inner.build(
        body.invars,
        [*body.outvars, *inner.outvars(wanted)],
        constvars=[*body.constvars, *inner.inputs],
        # What is captured comes as operands; these only say how many there are.
        consts=[*body.consts, *inner.inputs],
    )
    _replaced(
        scope,
        eqn,
        invars=[*eqn.invars, *_masks(scope, eqn.invars, flags[: len(eqn.invars)])],
        outvars=[*eqn.outvars, *variables],
        params={**eqn.params, "jaxpr": new_body},
    )
    return masks


@rule(_jax.sc_primitives.parallel_loop_p)
def _parallel_loop(scope: Scope, eqn: Any) -> list[Mask]:
    body = _jax.partial_eval.convert_constvars_jaxpr(eqn.params["jaxpr"])
    lower, upper, step, constants, initial = eqn.params["tree"].unflatten(eqn.invars)
    scope.report(eqn, [lower, upper, step], LOOP)
    constants, initial = list(constants), list(initial)
    count = len(constants)
    # The body is given the constants, the number of the iteration, and what is carried.
    operands = [*constants, None, *initial]
    flags = [*_flags(scope, constants), False, *_flags(scope, initial)]
    inner, flags = _carried(
        scope, body, body.invars, operands, flags, range(count + 1, len(operands))
    )
    carry_flags = flags[count + 1 :]
    held = sum(flags[:count])
    new_body = inner.build(
        [
            *body.invars[:count],
            *inner.inputs[:held],
            *body.invars[count:],
            *inner.inputs[held:],
        ],
        [*body.outvars, *inner.outvars(carry_flags)],
    )
    carried_in = [scope.mask(atom) for atom in initial]
    variables, masks = _results(scope, eqn, carry_flags, inner.results, initial=carried_in)
    invars, tree = jax.tree.flatten(
        (
            lower,
            upper,
            step,
            [*constants, *_masks(scope, constants, flags[:count])],
            [*initial, *_masks(scope, initial, carry_flags)],
        )
    )
    _replaced(
        scope,
        eqn,
        invars=invars,
        outvars=[*eqn.outvars, *variables],
        params={**eqn.params, "jaxpr": new_body, "tree": tree},
    )
    return masks


@rule(_jax.pipeline_body_p)
def _pipeline_body(scope: Scope, eqn: Any) -> list[Mask]:
    position, constants, _ = eqn.params["in_tree"].unflatten(eqn.invars)
    old = eqn.params["jaxpr"]
    body = _jax.partial_eval.convert_constvars_jaxpr(old)
    # Behind what the body closes over, the constants hold the extents of the grid.
    own = len(old.constvars)
    held = list(constants)[:own]
    rest = len(body.invars) - own
    flags = [*_flags(scope, held), *[False] * rest]
    inner = scope.inside(body, body.invars, [*held, *[None] * rest], flags, is_loop=True)
    new_body = inner.build(
        body.invars[own:],
        body.outvars,
        constvars=[*body.invars[:own], *inner.inputs],
        # What is closed over comes as operands; these only say how many there are.
        consts=[*old.consts, *inner.inputs],
    )
    masks = _masks(scope, held, flags[:own])
    # In the tree the constants come after the position, and in front of the Refs.
    place = len(jax.tree.leaves(position)) + own
    tree = _WithMasks(eqn.params["in_tree"], place, len(masks), own)
    _replaced(
        scope,
        eqn,
        invars=[*eqn.invars[:place], *masks, *eqn.invars[place:]],
        params={**eqn.params, "jaxpr": new_body, "in_tree": tree},
    )
    return [None] * len(eqn.outvars)


@record(frozen=True)
class _WithMasks:
    """The tree of a pipeline's body with masks behind what it closes over."""

    tree: Any
    # The number of the first mask among all leaves, how many there are, and how many constants of
    # the body's own stand in front of them.
    place: int
    count: int
    own: int

    def unflatten(self, leaves: Sequence[Any]) -> tuple[Any, list[Any], Any]:
        """The position, the constants with their masks, and the Refs."""
        behind = self.place + self.count
        masks = leaves[self.place : behind]
        position, constants, refs = self.tree.unflatten([*leaves[: self.place], *leaves[behind:]])
        constants = list(constants)
        return position, [*constants[: self.own], *masks, *constants[self.own :]], refs


@rule(_jax.pallas_primitives.delay_p)
def _delay(scope: Scope, eqn: Any) -> list[Mask]:
    scope.report(eqn, eqn.invars, AMOUNT)
    scope.eqns.append(eqn)
    return []


@rule(_jax.pallas_primitives.program_id_p, _jax.axis_index_p)
def _position(scope: Scope, eqn: Any) -> list[Mask]:
    scope.eqns.append(eqn)
    return []
