"""How each primitive carries masks of undefined elements from its operands to its results."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from cokernel import _jax
from cokernel.compiler.definedness import Mask, Scope, is_array
from cokernel.compiler.definedness_sources import (
    anywhere,
    broadcast,
    broadcast_in,
    moved,
    perhaps,
    reduced,
    reshaped,
    reversed_along,
    sliced,
    then,
    transposed,
    whole,
)
from cokernel.compiler.definedness_sources import (
    kept as kept_as_it_is,
)
from cokernel.compiler.few_bits import copied_bits_p

PL, TPU, SC = _jax.pallas_primitives, _jax.tpu_primitives, _jax.sc_primitives

# A rule adds the equation to the scope, with those that compute masks, and returns the masks of the
# results; an empty list if there are none.
MaskRule = Callable[[Scope, Any], list[Mask]]
RULES: dict[Any, MaskRule] = {}


def rule(*primitives: Any) -> Callable[[MaskRule], MaskRule]:
    """Registers a function as the rule of primitives."""

    def register(function: MaskRule) -> MaskRule:
        RULES.update(dict.fromkeys(primitives, function))
        return function

    return register


def of_values(*primitives: Any) -> Callable[[MaskRule], MaskRule]:
    """Registers the rule of primitives that only compute: it is asked only where an operand has a
    mask, and the equation is added for it.
    """

    def register(function: MaskRule) -> MaskRule:
        def with_equation(scope: Scope, eqn: Any) -> list[Mask]:
            scope.eqns.append(eqn)
            return function(scope, eqn) if scope.has_masks(eqn.invars) else []

        rule(*primitives)(with_equation)
        return function

    return register


def any_element(scope: Scope, eqn: Any) -> list[Mask]:
    """All elements of all results are undefined if any element of an operand is: the rule of
    primitives without one.
    """
    masks = [mask for mask in map(scope.mask, eqn.invars) if mask is not None]

    def spread(shape: tuple[int, ...]) -> Mask:
        def function(*parts: Any) -> Any:
            total = parts[0].any()
            for part in parts[1:]:
                total = total | part.any()
            return jnp.broadcast_to(total, shape)

        return scope.call(eqn, function, masks, shape)

    return [
        spread(tuple(variable.aval.shape)) if is_array(variable.aval) else None
        for variable in eqn.outvars
    ]


def _shape(eqn: Any) -> tuple[int, ...]:
    return tuple(eqn.outvars[0].aval.shape)


# Element by element.


def elementwise(scope: Scope, eqn: Any) -> list[Mask]:
    """An element is undefined if one that it is computed from is."""
    return [scope.union(eqn, [scope.mask(atom) for atom in eqn.invars], _shape(eqn))]


of_values(
    lax.convert_element_type_p,
    lax.reduce_precision_p,
    lax.clamp_p,
    lax.copy_p,
    PL.multiple_of_p,
    _jax.stage_p,
)(elementwise)


@of_values(
    lax.optimization_barrier_p,
    _jax.pvary_p,
    _jax.reduced_vary_cast_p,
    _jax.stop_gradient_p,
    _jax.name_p,
    _jax.device_put_p,
    _jax.reshard_p,
    _jax.sharding_constraint_p,
    _jax.xla_metadata_value_p,
)
def _identity(scope: Scope, eqn: Any) -> list[Mask]:
    return [scope.mask(atom) for atom in eqn.invars]


@of_values(lax.select_n_p)
def _select(scope: Scope, eqn: Any) -> list[Mask]:
    which, *cases = eqn.invars
    shape = _shape(eqn)
    chosen: Mask = None
    if scope.has_masks(cases):
        filled = [scope.filled(case) for case in cases]
        chosen = scope.call(
            eqn, lambda which, *masks: lax.select_n(which, *masks), [which, *filled], shape, perhaps
        )
    return [scope.union(eqn, [chosen, scope.mask(which)], shape)]


@of_values(lax.bitcast_convert_type_p)
def _bitcast(scope: Scope, eqn: Any) -> list[Mask]:
    mask = scope.mask(eqn.invars[0])
    before, after = tuple(mask.aval.shape), _shape(eqn)

    def function(mask: Any) -> Any:
        if len(after) > len(before):
            mask = mask[..., None]
        if len(after) < len(before):
            mask = mask.any(axis=-1)
        return jnp.broadcast_to(mask, after)

    if len(after) > len(before):
        move = broadcast_in(range(len(before)))
    else:
        move = reduced((len(after),)) if len(after) < len(before) else broadcast
    return [scope.call(eqn, function, [mask], after, move)]


@of_values(copied_bits_p)
def _copied_bits(scope: Scope, eqn: Any) -> list[Mask]:
    after = _shape(eqn)

    def function(mask: Any) -> Any:
        *outer, rows, columns = mask.shape
        if after[-2] > rows:
            return jnp.repeat(mask, after[-2] // rows, axis=-2)
        return mask.reshape(*outer, after[-2], rows // after[-2], columns).all(axis=-2)

    mask = scope.mask(eqn.invars[0])
    *outer, rows, columns = mask.aval.shape
    if after[-2] > rows:
        parts = (*outer, rows, after[-2] // rows, columns)
        kept = [axis for axis in range(len(parts)) if axis != len(parts) - 2]
        move = then((broadcast_in(kept), parts), reshaped)
    else:
        parts = (*outer, after[-2], rows // after[-2], columns)
        move = then((reshaped, parts), reduced((len(parts) - 2,)))
    if eqn.params["is_read"]:
        move = then((move, after), kept_as_it_is)
    return [scope.call(eqn, function, [mask], after, move)]


# Operations that only move elements do the same to masks.


def _moving(data: int | None = None, moves: Callable[[Any], Any] | None = None) -> MaskRule:
    """The rule of a primitive whose first `data` operands (all if None) are moved, as the others
    say. `moves`, of its equation, says from where to where, if that is known.
    """

    def function(scope: Scope, eqn: Any) -> list[Mask]:
        count = len(eqn.invars) if data is None else data
        moved_atoms, others = eqn.invars[:count], eqn.invars[count:]
        params = dict(eqn.params)
        if "fill_value" in params:
            params["fill_value"] = False
        shape = _shape(eqn)
        result: Mask = None
        if scope.has_masks(moved_atoms):
            filled = [scope.filled(atom) for atom in moved_atoms]
            result = scope.call(
                eqn,
                lambda *items: eqn.primitive.bind(*items, **params),
                [*filled, *others],
                shape,
                anywhere if moves is None else moves(eqn),
            )
        return [scope.union(eqn, [result, *_anything(scope, eqn, others)], shape)]

    return function


def _anything(scope: Scope, eqn: Any, atoms: Sequence[Any]) -> list[Mask]:
    """For each atom that has a mask, whether any of its elements is undefined."""
    return [
        mask if not mask.aval.shape else scope.call(eqn, lambda mask: mask.any(), [mask], (), whole)
        for mask in map(scope.mask, atoms)
        if mask is not None
    ]


def _moves(primitive: Any, moves: Callable[[Any], Any], data: int | None = None) -> None:
    of_values(primitive)(_moving(data, moves))


_moves(lax.broadcast_in_dim_p, lambda eqn: broadcast_in(eqn.params["broadcast_dimensions"]), data=1)
_moves(lax.reshape_p, lambda eqn: reshaped, data=1)
_moves(lax.squeeze_p, lambda eqn: reshaped)
_moves(lax.transpose_p, lambda eqn: transposed(eqn.params["permutation"]))
_moves(lax.rev_p, lambda eqn: reversed_along(eqn.params["dimensions"]))
_moves(lax.slice_p, lambda eqn: sliced(eqn.params["start_indices"], eqn.params["strides"]))
for _primitive in (lax.concatenate_p, lax.stack_p, lax.pad_p):
    _moves(_primitive, lambda eqn: moved)
of_values(lax.tile_p)(_moving())
of_values(lax.gather_p)(_moving(1))
_moves(lax.dynamic_slice_p, lambda eqn: moved, 1)
_moves(
    lax.dynamic_update_slice_p,
    # What is overwritten of the first operand is left out, and the second one takes its place.
    lambda eqn: (perhaps, moved, *[anywhere] * (len(eqn.invars) - 2)),
    2,
)


@of_values(lax.split_p, lax.unstack_p)
def _split(scope: Scope, eqn: Any) -> list[Mask]:
    mask = scope.mask(eqn.invars[0])
    axis, rank = eqn.params["axis"], len(mask.aval.shape)
    results: list[Mask] = []
    start = 0
    for number, variable in enumerate(eqn.outvars):
        shape = tuple(variable.aval.shape)
        starts = [start if side == axis else 0 for side in range(rank)]
        kept = (*shape[:axis], 1, *shape[axis:]) if len(shape) < rank else shape
        start += kept[axis]
        results.append(
            scope.call(
                eqn,
                lambda mask, number=number: eqn.primitive.bind(mask, **eqn.params)[number],
                [mask],
                shape,
                then((sliced(starts), kept), reshaped),
            )
        )
    return results


# Reductions.


@of_values(
    lax.reduce_sum_p,
    lax.reduce_max_p,
    lax.reduce_min_p,
    lax.reduce_prod_p,
    lax.reduce_and_p,
    lax.reduce_or_p,
    lax.reduce_xor_p,
    lax.argmax_p,
    lax.argmin_p,
)
def _reduction(scope: Scope, eqn: Any) -> list[Mask]:
    axes = eqn.params["axes"]
    return [
        scope.call(
            eqn,
            lambda mask: mask.any(axis=tuple(axes)),
            [scope.mask(eqn.invars[0])],
            _shape(eqn),
            reduced(tuple(axes)),
        )
    ]


@of_values(lax.cumsum_p, lax.cumprod_p, lax.cummax_p, lax.cummin_p, lax.cumlogsumexp_p)
def _cumulative(scope: Scope, eqn: Any) -> list[Mask]:
    axis, reverse = eqn.params["axis"], eqn.params["reverse"]

    def function(mask: Any) -> Any:
        return lax.cummax(mask.astype(jnp.int32), axis, reverse) > 0

    return [scope.call(eqn, function, [scope.mask(eqn.invars[0])], _shape(eqn))]


@of_values(lax.sort_p)
def _sort(scope: Scope, eqn: Any) -> list[Mask]:
    dimension, key_count = eqn.params["dimension"], eqn.params["num_keys"]
    keys = [mask for mask in map(scope.mask, eqn.invars[:key_count]) if mask is not None]

    def along(*masks: Any) -> Any:
        total = masks[0].any(axis=dimension, keepdims=True)
        for mask in masks[1:]:
            total = total | mask.any(axis=dimension, keepdims=True)
        return jnp.broadcast_to(total, masks[0].shape)

    def moved(*operands: Any) -> Any:
        # The rule of `sort` is stable whatever is asked for, so that this is how it moves elements.
        *keys, mask = operands
        whole = (*keys, mask.astype(jnp.int32))
        return lax.sort(whole, dimension=dimension, num_keys=key_count, is_stable=True)[-1] != 0

    found: list[Mask] = []
    for number, atom in enumerate(eqn.invars):
        own, shape = scope.mask(atom), tuple(atom.aval.shape)
        if keys:
            masks = keys if own is None else [*keys, own]
            found.append(scope.call(eqn, along, masks, shape))
        elif own is not None and number >= key_count:
            found.append(scope.call(eqn, moved, [*eqn.invars[:key_count], own], shape))
        else:
            found.append(None)
    return found


@of_values(lax.dot_general_p)
def _dot_general(scope: Scope, eqn: Any) -> list[Mask]:
    contracted, batch = eqn.params["dimension_numbers"]
    parts = []
    ranks = [len(atom.aval.shape) for atom in eqn.invars[:2]]
    free = [rank - len(c) - len(b) for rank, c, b in zip(ranks, contracted, batch, strict=True)]
    shape = _shape(eqn)
    for side, atom in enumerate(eqn.invars[:2]):
        mask = scope.mask(atom)
        if mask is None:
            continue

        def function(mask: Any, side: int = side) -> Any:
            rest = [
                axis
                for axis in range(mask.ndim)
                if axis not in contracted[side] and axis not in batch[side]
            ]
            order = [*batch[side], *rest, *contracted[side]]
            mask = jnp.transpose(mask, order)
            kept = len(batch[side]) + len(rest)
            mask = mask.any(axis=tuple(range(kept, mask.ndim)))
            # The free dimensions of the left side come before those of the right.
            first = len(batch[side])
            if side == 0:
                mask = mask.reshape(*mask.shape, *[1] * free[1])
            else:
                mask = mask.reshape(*mask.shape[:first], *[1] * free[0], *mask.shape[first:])
            return jnp.broadcast_to(mask, shape)

        others = [axis for axis in range(mask.aval.ndim) if axis not in (*contracted[side],)]
        order = [*batch[side], *(axis for axis in others if axis not in batch[side])]
        # Where those dimensions are in the result.
        first = len(batch[side]) + (0 if side == 0 else free[0])
        places = [*range(len(batch[side])), *range(first, first + free[side])]
        kept = tuple(mask.aval.shape[axis] for axis in others)
        move = then(
            (reduced(contracted[side]), kept),
            (
                transposed([others.index(axis) for axis in order]),
                tuple(mask.aval.shape[axis] for axis in order),
            ),
            broadcast_in(places),
        )
        parts.append(scope.call(eqn, function, [mask], shape, move))
    return [scope.union(eqn, parts, shape)]


@of_values(TPU.roll_p)
def _roll(scope: Scope, eqn: Any) -> list[Mask]:
    operand, shift = eqn.invars
    if scope.mask(operand) is None:
        return any_element(scope, eqn)
    shape = _shape(eqn)
    rolled = scope.call(
        eqn,
        lambda mask, shift: TPU.roll_p.bind(mask.astype(jnp.int32), shift, **eqn.params) != 0,
        [scope.mask(operand), shift],
        shape,
        moved,
    )
    return [scope.union(eqn, [rolled, *_anything(scope, eqn, [shift])], shape)]


@of_values(
    lax.scatter_p,
    lax.scatter_add_p,
    lax.scatter_sub_p,
    lax.scatter_mul_p,
    lax.scatter_min_p,
    lax.scatter_max_p,
)
def _scatter(scope: Scope, eqn: Any) -> list[Mask]:
    from cokernel.compiler.ops.indexing import overwrites

    operand, indices, updates = eqn.invars
    shape = _shape(eqn)
    # With a function of the user's what is written also comes from what was there.
    replaces = eqn.primitive is lax.scatter_p and overwrites(eqn.params["update_jaxpr"])
    result = scope.mask(operand)
    if scope.mask(updates) is not None or (replaces and result is not None):
        # What is overwritten is defined anew; of a sum both parts count.
        scatter = lax.scatter if replaces else lax.scatter_max

        def function(mask: Any, indices: Any, updates: Any) -> Any:
            scattered = scatter(
                mask.astype(jnp.int32),
                indices,
                updates.astype(jnp.int32),
                eqn.params["dimension_numbers"],
                indices_are_sorted=eqn.params["indices_are_sorted"],
                unique_indices=eqn.params["unique_indices"],
                mode=eqn.params["mode"],
            )
            return scattered != 0

        operands = [scope.filled(operand), indices, scope.filled(updates)]
        result = scope.call(eqn, function, operands, shape, (perhaps, anywhere, anywhere))
    return [scope.union(eqn, [result, *_anything(scope, eqn, [indices])], shape)]


def load() -> None:
    """Registers the rules of all primitives that are computed element by element."""
    from cokernel.compiler import (  # noqa: F401
        definedness_flow,
        definedness_matrix_units,
        definedness_memory,
        definedness_mixing,
    )
    from cokernel.compiler.ops import load_rules
    from cokernel.compiler.ops.registry import ELEMENT_RULES

    load_rules()
    of_values(*(primitive for primitive in ELEMENT_RULES if primitive not in RULES))(elementwise)
