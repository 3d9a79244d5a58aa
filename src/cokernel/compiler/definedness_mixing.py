"""Masks of undefined elements through operations that mix elements: which elements of a result
depend on which of the operands, for windows, convolutions, sorting, prefix sums and packing.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu_sc as plsc

from cokernel import _jax
from cokernel.compiler.definedness import AMOUNT, Mask, Scope
from cokernel.compiler.definedness_rules import any_element, elementwise, of_values, rule
from cokernel.compiler.definedness_sources import broadcast
from cokernel.compiler.dtypes import bit_width

PL, TPU, SC = _jax.pallas_primitives, _jax.tpu_primitives, _jax.sc_primitives

# Numbers that are put together bit by bit, or computed from several operands element by element, by
# a function that has no element rule of its own.
of_values(
    _jax.threefry2x32_p,
    PL.reciprocal_p,
    TPU.stochastic_round_p,
    TPU.pack_elementwise_p,
    TPU.unpack_elementwise_p,
    lax.igamma_p,
    lax.igammac_p,
    lax.igamma_grad_a_p,
    lax.regularized_incomplete_beta_p,
    lax.bessel_i0e_p,
)(lambda scope, eqn: elementwise(scope, eqn) * len(eqn.outvars))

# Here each element of the result depends on all elements of the operands: a count of all lanes, the
# first of all lanes, and random bits of one state.
of_values(
    SC.all_reduce_population_count_p,
    SC.all_reduce_ffs_p,
    lax.rng_bit_generator_p,
)(any_element)


def _shape(variable: Any) -> tuple[int, ...]:
    return tuple(variable.aval.shape)


def _known(scope: Scope, atoms: Sequence[Any]) -> list[Any]:
    return [mask for mask in map(scope.mask, atoms) if mask is not None]


# The generator of a core starts from the seed, and nothing follows what it holds: so the seed is
# where an undefined value matters.
@rule(TPU.prng_seed_p)
def _prng_seed(scope: Scope, eqn: Any) -> list[Mask]:
    scope.report(eqn, eqn.invars, AMOUNT)
    scope.eqns.append(eqn)
    return []


@of_values(_jax.tie_p)
def _tie(scope: Scope, eqn: Any) -> list[Mask]:
    return [scope.mask(eqn.invars[1])]


@of_values(_jax.broadcast_to_p)
def _broadcast_to(scope: Scope, eqn: Any) -> list[Mask]:
    shape = _shape(eqn.outvars[0])
    mask = scope.mask(eqn.invars[0])
    return [scope.call(eqn, lambda mask: jnp.broadcast_to(mask, shape), [mask], shape, broadcast)]


# Windows.


def _any_in_windows(
    mask: Any,
    window: Sequence[int],
    strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> Any:
    """For each window that slides along a mask, whether it has an undefined element."""
    steps = zip(padding, base_dilation, strict=True)
    # What stands around the elements and between them is defined.
    whole = lax.pad(mask, False, [(low, high, step - 1) for (low, high), step in steps])
    least = np.iinfo(np.int32).min
    folded = lax.reduce_window(
        whole.astype(jnp.int32),
        np.int32(least),
        lax.max,
        tuple(window),
        tuple(strides),
        "VALID",
        window_dilation=tuple(window_dilation),
    )
    return folded > 0


def _windows(mask: Any, params: dict[str, Any]) -> Any:
    rank = mask.ndim
    return _any_in_windows(
        mask,
        params["window_dimensions"],
        params["window_strides"],
        params["padding"],
        params.get("base_dilation") or (1,) * rank,
        params.get("window_dilation") or (1,) * rank,
    )


@of_values(lax.reduce_window_sum_p, lax.reduce_window_max_p, lax.reduce_window_min_p)
def _reduce_window(scope: Scope, eqn: Any) -> list[Mask]:
    mask = scope.mask(eqn.invars[0])
    shape = _shape(eqn.outvars[0])
    return [scope.call(eqn, lambda mask: _windows(mask, eqn.params), [mask], shape)]


@of_values(lax.reduce_window_p, lax.reduce_p)
def _fold(scope: Scope, eqn: Any) -> list[Mask]:
    # The user's function may make each result of all operands.
    count = len(eqn.invars) // 2
    arrays, starts = _known(scope, eqn.invars[:count]), _known(scope, eqn.invars[count:])
    shape = _shape(eqn.outvars[0])

    def folded(mask: Any) -> Any:
        if eqn.primitive is lax.reduce_p:
            return mask.any(axis=tuple(eqn.params["dimensions"]))
        return _windows(mask, eqn.params)

    parts = [scope.call(eqn, folded, [mask], shape) for mask in arrays]
    return [scope.union(eqn, [*parts, *starts], shape)] * len(eqn.outvars)


@of_values(lax.select_and_gather_add_p)
def _select_and_gather(scope: Scope, eqn: Any) -> list[Mask]:
    shape = _shape(eqn.outvars[0])
    bad = scope.union(eqn, list(map(scope.mask, eqn.invars)), _shape(eqn.invars[0]))
    return [scope.call(eqn, lambda mask: _windows(mask, eqn.params), [bad], shape)]


@of_values(lax.select_and_scatter_add_p)
def _select_and_scatter(scope: Scope, eqn: Any) -> list[Mask]:
    """Undefined is what lies in a window from which an undefined element is selected, or to whose
    selected element, which may be any, something undefined is added."""
    source, operand = eqn.invars
    params = eqn.params
    window, strides = params["window_dimensions"], params["window_strides"]
    shape = _shape(operand)
    parts = [scope.mask(source)]
    if scope.mask(operand) is not None:
        found = scope.call(
            eqn, lambda mask: _windows(mask, params), [scope.mask(operand)], _shape(source)
        )
        parts.append(found)
    bad = scope.union(eqn, parts, _shape(source))

    def spread(mask: Any) -> Any:
        # An element lies in the windows that begin at it, or so far in front of it as they reach.
        padding = []
        rows = zip(shape, mask.shape, window, strides, params["padding"], strict=True)
        for extent, count, size, step, (low, _) in rows:
            before = size - 1 - low
            reached = (count - 1) * step + 1 + before
            padding.append((before, extent + size - 1 - reached))
        ones = (1,) * mask.ndim
        return _any_in_windows(mask, window, ones, padding, strides, ones)

    return [scope.call(eqn, spread, [bad], shape)]


# Convolutions and products.


def _convolution(scope: Scope, eqn: Any) -> list[Mask]:
    left, right, *accumulator = eqn.invars
    params = eqn.params
    numbers = params["dimension_numbers"]
    shape = _shape(eqn.outvars[0])
    features, batches = params["feature_group_count"], params["batch_group_count"]
    order = np.argsort(numbers.out_spec).tolist()
    # (outputs, inputs, *window)
    outputs, _, *window = (_shape(right)[axis] for axis in numbers.rhs_spec)
    along = (1,) * (2 + len(window))

    def from_left(mask: Any) -> Any:
        mask = jnp.transpose(mask, numbers.lhs_spec)
        batch, inputs, *space = mask.shape
        mask = mask.reshape(batches, batch // batches, features, inputs // features, *space)
        # In front the groups, of features or of the batch: one of the two kinds has one member.
        mask = jnp.swapaxes(mask.any(axis=3), 1, 2)
        mask = mask.reshape(batches * features, batch // batches, *space)
        places = _any_in_windows(
            mask,
            (1, 1, *window),
            (1, 1, *params["window_strides"]),
            ((0, 0), (0, 0), *params["padding"]),
            (1, 1, *params["lhs_dilation"]),
            (1, 1, *params["rhs_dilation"]),
        )
        each = jnp.repeat(places, outputs // (batches * features), axis=0)
        return jnp.transpose(jnp.swapaxes(each, 0, 1), order)

    def from_right(mask: Any) -> Any:
        # Padding is multiplied as well: with an undefined weight its product is undefined.
        mask = jnp.transpose(mask, numbers.rhs_spec)
        feature = mask.any(axis=tuple(range(1, mask.ndim))).reshape(1, outputs, *along[2:])
        return jnp.broadcast_to(jnp.transpose(feature, order), shape)

    parts = [
        scope.call(eqn, function, [scope.mask(atom)], shape)
        for function, atom in ((from_left, left), (from_right, right))
        if scope.mask(atom) is not None
    ]
    return [scope.union(eqn, [*parts, *map(scope.mask, accumulator)], shape)]


of_values(lax.conv_general_dilated_p, TPU.conv_p)(_convolution)


@of_values(_jax.ragged_dot_general_p)
def _ragged_dot(scope: Scope, eqn: Any) -> list[Mask]:
    left, right, *sizes = eqn.invars
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    (_, summed), (_, batch) = numbers.dot_dimension_numbers
    shape = _shape(eqn.outvars[0])
    parts = []
    if scope.mask(left) is not None:
        ones = _shape(right)

        def from_left(mask: Any, *sizes: Any) -> Any:
            # Rows that belong to no group are not multiplied.
            params = {**eqn.params, "preferred_element_type": np.dtype(np.float32)}
            count = mask.astype(jnp.float32), jnp.ones(ones, jnp.float32), *sizes
            return _jax.ragged_dot_general_impl(*count, **params) > 0

        parts.append(scope.call(eqn, from_left, [scope.mask(left), *sizes], shape))
    if scope.mask(right) is not None:
        free = [
            axis
            for axis in range(len(_shape(right)))
            if axis not in (*summed, *batch, *numbers.rhs_group_dimensions)
        ]

        def from_right(mask: Any) -> Any:
            # All groups, since those of other rows are multiplied with zeros. The columns are last
            # in the result.
            others = tuple(axis for axis in range(mask.ndim) if axis not in free)
            return jnp.broadcast_to(mask.any(axis=others), shape)

        parts.append(scope.call(eqn, from_right, [scope.mask(right)], shape))
    counts = [scope.call(eqn, lambda mask: mask.any(), [mask], ()) for mask in _known(scope, sizes)]
    return [scope.union(eqn, [*parts, *counts], shape)]


# Order.


@of_values(lax.top_k_p, lax.approx_top_k_p)
def _top_k(scope: Scope, eqn: Any) -> list[Mask]:
    mask, shape = scope.mask(eqn.invars[0]), _shape(eqn.outvars[0])
    axis = eqn.params["axis" if eqn.primitive is lax.top_k_p else "reduction_dimension"]

    def function(mask: Any) -> Any:
        return jnp.broadcast_to(mask.any(axis=axis, keepdims=True), shape)

    return [scope.call(eqn, function, [mask], shape)] * 2


@of_values(SC.masked_sort_p)
def _masked_sort(scope: Scope, eqn: Any) -> list[Mask]:
    keys, values, *taken = eqn.invars
    shape = _shape(keys)

    def permutation_is_bad(bad: Any, *taken: Any) -> Any:
        # Lanes that do not take part go behind the others, whatever their keys are.
        return (bad & taken[0]).any() if taken else bad.any()

    decides = [
        scope.call(eqn, lambda mask: mask.any(), [mask], ()) for mask in _known(scope, taken)
    ]
    if scope.mask(keys) is not None:
        decides.append(scope.call(eqn, permutation_is_bad, [scope.mask(keys), *taken], ()))

    def moved(mask: Any, keys: Any, *taken: Any) -> Any:
        lanes = mask.astype(jnp.int32)
        return eqn.primitive.bind(keys, lanes, *taken, **eqn.params)[1] != 0

    results = []
    for atom in (keys, values):
        own = scope.mask(atom)
        if own is not None:
            own = scope.call(eqn, moved, [own, keys, *taken], shape)
        results.append(scope.union(eqn, [own, *decides], shape))
    # How many lanes take part does not depend on the keys.
    return [
        *results,
        *(scope.union(eqn, decides[: len(_known(scope, taken))], shape) for _ in taken),
    ]


# Prefixes.


def _so_far(mask: Any) -> Any:
    return lax.cummax(mask.astype(jnp.int32), axis=mask.ndim - 1) > 0


@of_values(SC.masked_cumsum_p, SC.masked_cummax_p, SC.masked_cummin_p)
def _masked_prefix(scope: Scope, eqn: Any) -> list[Mask]:
    operand, taken = eqn.invars
    passes = eqn.primitive is not SC.masked_cumsum_p

    def function(bad: Any, unknown: Any, taken: Any) -> Any:
        result = _so_far((bad & taken) | unknown)
        # Of an extreme, elements in front of the first that takes part stay as they are.
        return result | (bad & ~_so_far(taken)) if passes else result

    operands = [scope.filled(operand), scope.filled(taken), taken]
    return [scope.call(eqn, function, operands, _shape(operand))]


@of_values(SC.scan_count_p)
def _scan_count(scope: Scope, eqn: Any) -> list[Mask]:
    operand, taken = eqn.invars
    shape = _shape(operand)
    operands = [scope.filled(operand), scope.filled(taken), taken]

    def count(bad: Any, unknown: Any, taken: Any) -> Any:
        earlier = _so_far(((bad & taken) | unknown).ravel()).reshape(shape)
        return earlier | bad

    def is_last(bad: Any, unknown: Any, taken: Any) -> Any:
        return jnp.broadcast_to(((bad & taken) | unknown).any(), shape)

    return [scope.call(eqn, function, operands, shape) for function in (count, is_last)]


# Packing.


@of_values(SC.pack_p)
def _pack(scope: Scope, eqn: Any) -> list[Mask]:
    shape = _shape(eqn.outvars[0])
    axis = 1 if eqn.params["format"] is plsc.PackFormat.INTERLEAVED else 0
    halves = [scope.filled(atom) for atom in eqn.invars]
    return [
        scope.call(eqn, lambda a, b: jnp.stack([a, b], axis=axis).reshape(shape), halves, shape)
    ]


@of_values(SC.unpack_p)
def _unpack(scope: Scope, eqn: Any) -> list[Mask]:
    mask, shape = scope.mask(eqn.invars[0]), _shape(eqn.outvars[0])
    is_interleaved = eqn.params["format"] is plsc.PackFormat.INTERLEAVED

    def half(mask: Any, number: int) -> Any:
        pairs = mask.reshape(-1, 2).T if is_interleaved else mask.reshape(2, -1)
        return pairs[number].reshape(shape)

    return [
        scope.call(eqn, lambda mask, number=number: half(mask, number), [mask], shape)
        for number in (0, 1)
    ]


@of_values(TPU.bitcast_p)
def _bitcast(scope: Scope, eqn: Any) -> list[Mask]:
    [operand], [result] = eqn.invars, eqn.outvars
    axis, shape = eqn.params["dim"], _shape(result)
    before, after = bit_width(operand.aval.dtype), bit_width(result.aval.dtype)

    def function(mask: Any) -> Any:
        if before >= after:
            return jnp.repeat(mask, before // after, axis=axis)
        parts = (*shape[: axis + 1], after // before, *shape[axis + 1 :])
        return mask.reshape(parts).any(axis=axis + 1)

    return [scope.call(eqn, function, [scope.mask(operand)], shape)]
