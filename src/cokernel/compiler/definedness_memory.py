"""Masks of undefined elements to and from memory, where the runtime keeps them."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cokernel import _jax
from cokernel.compiler.definedness import (
    AMOUNT,
    BRANCH,
    CALLBACK,
    INDEX,
    Mask,
    Scope,
    is_array,
    mark_undefined_p,
    undefined_p,
    unwritten_p,
)
from cokernel.compiler.definedness_rules import rule
from cokernel.compiler.definedness_sources import perhaps
from cokernel.compiler.few_bits import copied_part_p

PL, TPU, SC = _jax.pallas_primitives, _jax.tpu_primitives, _jax.sc_primitives

# How a primitive selects elements of a Ref: all that transforms show; of those the ones in a mask;
# as many of the first as a mask has true elements; or those that index arrays pick.
VIEW, MASKED, FRONT, LANES = "view", "masked", "front", "lanes"


def undefined(scope: Scope, eqn: Any, form: str, selection: Any, shape: Sequence[int]) -> Mask:
    """The mask of what is read from a Ref; `selection` are the operands that say from where."""
    [ref, *_] = jax.tree.leaves(selection)
    if ref in scope.defined:
        return None
    leaves, tree = jax.tree.flatten(selection)
    number, result = scope.read(eqn, shape)
    params = {"form": form, "tree": tree, "operation": eqn.primitive.name, "read": number}
    scope.emit(eqn, undefined_p, leaves, [result], params)
    return result


def mark(scope: Scope, eqn: Any, form: str, selection: Any, mask: Mask) -> None:
    """Tells the runtime which of the elements just written are undefined."""
    if mask is None:
        return
    leaves, tree = jax.tree.flatten((selection, mask))
    params = {
        "form": form,
        "tree": tree,
        "operation": eqn.primitive.name,
        "reads": scope.reads(mask),
    }
    scope.emit(eqn, mark_undefined_p, leaves, [], params)


def _values(scope: Scope, tree: Any) -> list[Any]:
    """The leaves of some operands that are values."""
    return [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf.aval)]


def _report_indices(scope: Scope, eqn: Any, tree: Any) -> None:
    scope.report(eqn, _values(scope, tree), INDEX)


# Refs in general.


@rule(_jax.get_p)
def _get(scope: Scope, eqn: Any) -> list[Mask]:
    ref, *flat = eqn.invars
    transforms = jax.tree.unflatten(eqn.params["tree"], flat)
    _report_indices(scope, eqn, transforms)
    scope.eqns.append(eqn)
    return [undefined(scope, eqn, VIEW, (ref, transforms), eqn.outvars[0].aval.shape)]


@rule(_jax.swap_p)
def _swap(scope: Scope, eqn: Any) -> list[Mask]:
    ref, value, *flat = eqn.invars
    transforms = jax.tree.unflatten(eqn.params["tree"], flat)
    _report_indices(scope, eqn, transforms)
    [result] = eqn.outvars
    old: Mask = None
    if scope.is_used(result):
        # What is written becomes defined, so that what was there is read first.
        scope.emit(eqn, _jax.get_p, [ref, *flat], [result], {"tree": eqn.params["tree"]})
        old = undefined(scope, eqn, VIEW, (ref, transforms), result.aval.shape)
        eqn = eqn.replace(outvars=[_jax.DropVar(result.aval)])
    scope.eqns.append(eqn)
    mark(scope, eqn, VIEW, (ref, transforms), scope.mask(value))
    return [old]


@rule(_jax.addupdate_p)
def _addupdate(scope: Scope, eqn: Any) -> list[Mask]:
    ref, value, *flat = eqn.invars
    transforms = jax.tree.unflatten(eqn.params["tree"], flat)
    _report_indices(scope, eqn, transforms)
    scope.eqns.append(eqn)
    mark(scope, eqn, VIEW, (ref, transforms), scope.mask(value))
    return []


@rule(PL.load_p)
def _masked_load(scope: Scope, eqn: Any) -> list[Mask]:
    ref, transforms, mask, other = eqn.params["args_tree"].unflatten(eqn.invars)
    _report_indices(scope, eqn, transforms)
    scope.eqns.append(eqn)
    shape = tuple(eqn.outvars[0].aval.shape)
    if mask is None:
        return [undefined(scope, eqn, VIEW, (ref, transforms), shape)]
    read = undefined(scope, eqn, MASKED, (ref, transforms, mask), shape)
    # Where the mask is false there is the other value, or none.
    left_out = None if other is None else scope.mask(other)
    if other is None:
        left_out = scope.call(eqn, lambda mask: jnp.broadcast_to(~mask, shape), [mask], shape)
    elif left_out is not None:
        left_out = scope.call(
            eqn,
            lambda mask, other: jnp.broadcast_to(~mask & other, shape),
            [mask, left_out],
            shape,
            perhaps,
        )
    return [scope.union(eqn, [read, left_out, scope.mask(mask)], shape)]


@rule(PL.swap_p)
def _masked_swap(scope: Scope, eqn: Any) -> list[Mask]:
    ref, transforms, value, mask = eqn.params["args_tree"].unflatten(eqn.invars)
    _report_indices(scope, eqn, transforms)
    shape = tuple(eqn.outvars[0].aval.shape)
    old: Mask = None
    form = VIEW if mask is None else MASKED
    selection = (ref, transforms) if mask is None else (ref, transforms, mask)
    if scope.is_used(eqn.outvars[0]):
        old = undefined(scope, eqn, form, selection, shape)
    scope.eqns.append(eqn)
    if mask is not None:
        scope.report(eqn, [mask], BRANCH)
    mark(scope, eqn, form, selection, scope.mask(value))
    return [old]


@rule(_jax.empty_p)
def _empty(scope: Scope, eqn: Any) -> list[Mask]:
    [result] = eqn.outvars
    ref = _jax.Var(_jax.AbstractRef(result.aval))
    scope.emit(eqn, unwritten_p, [], [ref], {})
    scope.emit(eqn, _jax.get_p, [ref], [result], {"tree": jax.tree.structure(())})
    return [undefined(scope, eqn, VIEW, (ref, ()), result.aval.shape)]


@rule(_jax.empty_ref_p)
def _empty_ref(scope: Scope, eqn: Any) -> list[Mask]:
    scope.eqns.append(eqn)
    return []


@rule(_jax.ref_p)
@rule(copied_part_p)
def _new_ref(scope: Scope, eqn: Any) -> list[Mask]:
    scope.eqns.append(eqn)
    [ref] = eqn.outvars
    mark(scope, eqn, VIEW, (ref, ()), scope.mask(eqn.invars[-1]))
    return []


@rule(_jax.freeze_p)
def _freeze(scope: Scope, eqn: Any) -> list[Mask]:
    [ref] = eqn.invars
    scope.eqns.append(eqn)
    return [undefined(scope, eqn, VIEW, (ref, ()), eqn.outvars[0].aval.shape)]


# Vector subcores.


def _of_compressed(eqn: Any, flat: Sequence[Any]) -> tuple[Any, Any]:
    *flat, mask = flat if eqn.params["has_mask"] else (*flat, None)
    return jax.tree.unflatten(eqn.params["tree"], flat), mask


@rule(SC.load_p)
def _load_expanded(scope: Scope, eqn: Any) -> list[Mask]:
    ref, *flat = eqn.invars
    transforms, mask = _of_compressed(eqn, flat)
    _report_indices(scope, eqn, transforms)
    scope.eqns.append(eqn)
    shape = tuple(eqn.outvars[0].aval.shape)
    if mask is None:
        return [undefined(scope, eqn, VIEW, (ref, transforms), shape)]
    scope.report(eqn, [mask], INDEX)
    read = undefined(scope, eqn, FRONT, (ref, transforms, mask), shape)
    left_out = scope.call(eqn, lambda mask: ~mask, [mask], shape)
    return [scope.union(eqn, [read, left_out], shape)]


@rule(SC.swap_p)
def _store_compressed(scope: Scope, eqn: Any) -> list[Mask]:
    ref, value, *flat = eqn.invars
    transforms, mask = _of_compressed(eqn, flat)
    _report_indices(scope, eqn, transforms)
    scope.eqns.append(eqn)
    if mask is None:
        mark(scope, eqn, VIEW, (ref, transforms), scope.mask(value))
    else:
        scope.report(eqn, [mask], INDEX)
        mark(scope, eqn, FRONT, (ref, transforms, mask), scope.mask(value))
    return [scope.mask(value)]


@rule(SC.gather_p)
def _load_gather(scope: Scope, eqn: Any) -> list[Mask]:
    ref, transforms, indices, mask = eqn.params["tree"].unflatten(eqn.invars)
    _report_indices(scope, eqn, transforms)
    shape = tuple(eqn.outvars[0].aval.shape)
    # In front of it, as an undefined index is often a bad one as well, which ends the launch.
    picks = [mask_of for mask_of in map(scope.mask, indices) if mask_of is not None]
    if picks:
        _report_lanes(scope, eqn, picks, mask)
    scope.eqns.append(eqn)
    read = undefined(scope, eqn, LANES, (ref, transforms, tuple(indices), mask), shape)
    left_out = None
    if mask is not None:
        left_out = scope.call(eqn, lambda mask: ~mask, [mask], shape)
    return [scope.union(eqn, [read, left_out], shape)]


@rule(SC.scatter_p)
def _store_scatter(scope: Scope, eqn: Any) -> list[Mask]:
    ref, transforms, indices, value, mask = eqn.params["tree"].unflatten(eqn.invars)
    _report_indices(scope, eqn, transforms)
    picks = [mask_of for mask_of in map(scope.mask, indices) if mask_of is not None]
    if picks:
        _report_lanes(scope, eqn, picks, mask)
    scope.eqns.append(eqn)
    selection = (ref, transforms, tuple(indices), mask)
    mark(scope, eqn, LANES, selection, scope.mask(value))
    return []


def _report_lanes(scope: Scope, eqn: Any, picks: Sequence[Any], mask: Any) -> None:
    """Reports undefined indices in the lanes that a mask selects."""
    shape = max((tuple(pick.aval.shape) for pick in picks), key=len)
    bad = scope.union(eqn, picks, shape)
    if mask is not None:
        bad = scope.call(eqn, lambda bad, mask: bad & mask, [bad, mask], mask.aval.shape, perhaps)
        scope.report_masks(eqn, [scope.mask(mask)], INDEX)
    scope.report_masks(eqn, [bad], INDEX)


# What other cores and the outside see.


@rule(TPU.dma_start_p)
def _dma_start(scope: Scope, eqn: Any) -> list[Mask]:
    # The runtime follows what a copy moves.
    _report_indices(scope, eqn, eqn.invars)
    scope.eqns.append(eqn)
    return []


@rule(TPU.dma_wait_p)
def _dma_wait(scope: Scope, eqn: Any) -> list[Mask]:
    scope.report(eqn, [atom for atom in eqn.invars if is_array(atom.aval)], AMOUNT)
    scope.eqns.append(eqn)
    return []


@rule(PL.semaphore_signal_p, PL.semaphore_wait_p)
def _semaphore(scope: Scope, eqn: Any) -> list[Mask]:
    _, transforms, amount, *rest = eqn.params["args_tree"].unflatten(eqn.invars)
    scope.report(eqn, _values(scope, amount), AMOUNT)
    _report_indices(scope, eqn, (transforms, rest))
    scope.eqns.append(eqn)
    return []


@rule(PL.semaphore_read_p)
def _semaphore_read(scope: Scope, eqn: Any) -> list[Mask]:
    _report_indices(scope, eqn, list(eqn.invars))
    scope.eqns.append(eqn)
    return []


@rule(SC.fetch_and_add_p)
def _fetch_and_add(scope: Scope, eqn: Any) -> list[Mask]:
    _, value, *indices = eqn.invars
    scope.report(eqn, [value], AMOUNT)
    _report_indices(scope, eqn, indices)
    scope.eqns.append(eqn)
    # Whether the counter itself is defined is looked at where it is added to.
    return []


@rule(_jax.debug_print_p, _jax.debug_callback_p, _jax.pure_callback_p, _jax.io_callback_p)
def _callback(scope: Scope, eqn: Any) -> list[Mask]:
    scope.report(eqn, [atom for atom in eqn.invars if is_array(atom.aval)], CALLBACK)
    scope.eqns.append(eqn)
    return [None] * len(eqn.outvars)


@rule(_jax.check_p)
def _check(scope: Scope, eqn: Any) -> list[Mask]:
    scope.report(eqn, [atom for atom in eqn.invars if is_array(atom.aval)], BRANCH)
    scope.eqns.append(eqn)
    return []
