"""Reductions over windows that slide along an array, and what selects one element of each window.

The windows are a view of the padded array: its strides appear twice, once for the place of a window
and once for the place in it.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from cokernel.compiler import views
from cokernel.compiler.context import Context
from cokernel.compiler.ops import floats
from cokernel.compiler.ops.apply import apply, apply_many, convert
from cokernel.compiler.ops.combine import Combiner, Fold, working_dtype
from cokernel.compiler.ops.reduce import reduce_value
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.ops.traced import traced
from cokernel.compiler.values import Scalar, Value

Pair = tuple[int, int]


def padded(
    context: Context,
    operand: Value,
    fill: Value,
    padding: Sequence[Pair],
    dilation: Sequence[int],
) -> Value:
    """The operand with `fill` around it, and between its elements where it is dilated."""
    config = tuple(
        (low, high, step - 1) for (low, high), step in zip(padding, dilation, strict=True)
    )
    if all(item == (0, 0, 0) for item in config):
        return operand
    shape = tuple(
        max(0, low + high + extent + max(extent - 1, 0) * between)
        for extent, (low, high, between) in zip(operand.shape, config, strict=True)
    )
    return apply(context, lax.pad_p, shape, operand.dtype, operand, fill, padding_config=config)


def sliding(
    context: Context,
    operand: Value,
    window: Sequence[int],
    strides: Sequence[int],
    dilation: Sequence[int],
) -> Value:
    """An array of the shape (*places, *window): the windows of an array that is padded already."""
    places = tuple(
        max(0, (extent - ((size - 1) * apart + 1)) // step + 1)
        for extent, size, step, apart in zip(operand.shape, window, strides, dilation, strict=True)
    )
    shape = (*places, *window)
    if 0 in shape:
        return views.empty(shape, operand.dtype)
    buffer = context.materialise(operand)
    along = tuple(stride * step for stride, step in zip(buffer.strides, strides, strict=True))
    inside = tuple(stride * apart for stride, apart in zip(buffer.strides, dilation, strict=True))
    return buffer.view(shape, (*along, *inside))


def _windows(context: Context, params: dict[str, Any], operand: Value, fill: Value) -> Value:
    whole = padded(context, operand, fill, params["padding"], params["base_dilation"])
    window, strides = params["window_dimensions"], params["window_strides"]
    return sliding(context, whole, window, strides, params["window_dilation"])


def _register(primitive: Any, fold: Fold) -> None:
    @rule(primitive)
    def reduction(context: Context, eqn: Any, operand: Value) -> Value:
        # Not every narrow float has the infinity that leaves an extreme as it is.
        wide = convert(context, operand, working_dtype(operand.dtype))
        nothing = Scalar((), wide.dtype, Combiner(fold, wide.dtype).identity())
        windows = _windows(context, eqn.params, wide, nothing)
        rank = len(operand.shape)
        result = reduce_value(context, fold, windows, range(rank, 2 * rank))
        return convert(context, result, operand.dtype)


_register(lax.reduce_window_sum_p, Fold.ADD)
_register(lax.reduce_window_max_p, Fold.MAXIMUM)
_register(lax.reduce_window_min_p, Fold.MINIMUM)


@rule(lax.reduce_window_p)
def reduce_window(context: Context, eqn: Any, *operands: Value) -> list[Value]:
    """Folds the windows of several arrays together, with a function of the user's."""
    count = len(operands) // 2
    if eqn.params["consts"]:
        raise NotImplementedError(
            f"{context.describe()}: a reduction over windows by a function that closes over arrays"
        )
    pairs = zip(operands[:count], operands[count:], strict=True)
    windows = [_windows(context, eqn.params, operand, start) for operand, start in pairs]
    rank = len(operands[0].shape)
    return apply_many(
        context,
        lax.reduce_p,
        [(variable.aval.shape, variable.aval.dtype) for variable in eqn.outvars],
        *windows,
        *operands[count:],
        dimensions=tuple(range(rank, 2 * rank)),
        jaxpr=eqn.params["jaxpr"],
    )


# One element of each window.


class _Selection:
    """The windows of an array, and which element of each is selected."""

    def __init__(
        self,
        operand: jax.Array,
        selects: Callable[[jax.Array, jax.Array], jax.Array],
        window: Sequence[int],
        strides: Sequence[int],
        padding: Sequence[Pair],
    ):
        self.window, self.strides, self.padding = window, strides, padding
        self.config = [(low, high, 0) for low, high in padding]
        values = self.pad(operand)
        exists = lax.pad(jnp.ones(operand.shape, bool), jnp.asarray(False), self.config)
        self.padded_shape = values.shape
        self.places = list(itertools.product(*map(range, window)))
        selected = self.part(values, self.places[0])
        self.shape = selected.shape
        found = self.part(exists, self.places[0])
        self.number = jnp.zeros(self.shape, jnp.int32)
        for number, place in enumerate(self.places[1:], start=1):
            candidate = self.part(values, place)
            takes = self.part(exists, place) & ~(found & selects(selected, candidate))
            selected = jnp.where(takes, candidate, selected)
            self.number = jnp.where(takes, number, self.number)
            found = found | takes

    def pad(self, array: jax.Array) -> jax.Array:
        return lax.pad(array, jnp.zeros((), array.dtype), self.config)

    def part(self, array: jax.Array, place: Sequence[int]) -> jax.Array:
        """The elements at one place of all windows."""
        extents = [
            (extent - size) // step + 1
            for extent, size, step in zip(self.padded_shape, self.window, self.strides, strict=True)
        ]
        limits = [
            start + (extent - 1) * step + 1
            for start, extent, step in zip(place, extents, self.strides, strict=True)
        ]
        return lax.slice(array, place, limits, self.strides)

    def spread(self, part: jax.Array, place: Sequence[int]) -> jax.Array:
        """An array of the operand's shape with one element of each window at its place."""
        config = []
        for start, extent, step, whole, (low, high) in zip(
            place, part.shape, self.strides, self.padded_shape, self.padding, strict=True
        ):
            used = start + (extent - 1) * step + 1
            config.append((start - low, whole - used - high, step - 1))
        return lax.pad(part, jnp.zeros((), part.dtype), config)


@traced(lax.select_and_scatter_add_p)
def select_and_scatter_add(
    source: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[Pair],
) -> jax.Array:
    """Adds each element of the source where the element of its window lies that is selected."""
    dtype = operand.dtype
    if dtype == floats.POWERS_OF_TWO:
        # Which has no zero for the elements that nothing is added to.
        source = source.astype(jnp.float32)
    total = jnp.zeros(operand.shape, source.dtype)
    if 0 in source.shape or math.prod(window_dimensions) == 0:
        return total.astype(dtype)
    chosen = _Selection(operand, select_prim.bind, window_dimensions, window_strides, padding)
    for number, place in enumerate(chosen.places):
        part = jnp.where(chosen.number == number, source, jnp.zeros((), source.dtype))
        total = total + chosen.spread(part, place)
    return total.astype(dtype)


@traced(lax.select_and_gather_add_p)
def select_and_gather_add(
    tangents: jax.Array,
    operand: jax.Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[Pair],
    base_dilation: Sequence[int],
    window_dilation: Sequence[int],
) -> jax.Array:
    """The element of `tangents` where the element of each window lies that is selected."""
    if any(step != 1 for step in (*base_dilation, *window_dilation)):
        raise NotImplementedError("select_and_gather_add with dilated windows")
    chosen = _Selection(operand, select_prim.bind, window_dimensions, window_strides, padding)
    whole = chosen.pad(tangents)
    result = jnp.zeros(chosen.shape, tangents.dtype)
    for number, place in enumerate(chosen.places):
        result = jnp.where(chosen.number == number, chosen.part(whole, place), result)
    return result
