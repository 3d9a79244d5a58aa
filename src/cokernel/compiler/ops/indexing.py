"""Reading and writing at positions known only at run time: dynamic slices, gather and scatter.

Where a box would stick out of the array, XLA moves it inside; gather and scatter may also ask for a
fill value, or for nothing to be written. No access ever leaves the array.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from jax import lax
from llvmlite import ir

from cokernel.compiler import dtypes, views
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import Kind, i1, i64
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops.apply import apply
from cokernel.compiler.ops.reduce import in_function, in_registers_if_small
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Packed,
    Scalar,
    Value,
    constant,
    is_small,
    make_packed,
    row_major,
    store_element,
)


def _as_index(function: FunctionBuilder, register: ir.Value, dtype: np.dtype) -> Index:
    """An element of an integer array as an index."""
    if isinstance(register, ir.Constant) and isinstance(register.constant, int):
        return register.constant
    if register.type == i64:
        return register
    is_signed = dtypes.kind(dtype) is Kind.SIGNED
    return (function.builder.sext if is_signed else function.builder.zext)(register, i64)


def clamp_index(function: FunctionBuilder, position: Index, dtype: np.dtype, limit: int) -> Index:
    """The position moved into [0, limit]; `dtype` is the one that the position had."""
    if limit == 0:
        return 0
    if isinstance(position, int):
        return min(max(position, 0), limit)
    if dtypes.kind(dtype) is not Kind.SIGNED:
        return function.intrinsic("llvm.umin", i64, [position, ir.Constant(i64, limit)])
    position = function.intrinsic("llvm.smax", i64, [position, ir.Constant(i64, 0)])
    return function.intrinsic("llvm.smin", i64, [position, ir.Constant(i64, limit)])


def _is_within(function: FunctionBuilder, position: Index, limit: int) -> ir.Value:
    """Whether 0 <= position <= limit, with one comparison of unsigned numbers."""
    if isinstance(position, int):
        return ir.Constant(i1, int(0 <= position <= limit))
    return function.builder.icmp_unsigned("<=", position, ir.Constant(i64, limit))


def _starts(
    context: Context, shape: Sequence[int], sizes: Sequence[int], positions: Sequence[Value]
) -> list[Index]:
    return [
        clamp_index(context.function, context.index(position), position.dtype, extent - size)
        for extent, size, position in zip(shape, sizes, positions, strict=True)
    ]


@rule(lax.dynamic_slice_p)
def dynamic_slice(context: Context, eqn: Any, operand: Value, *positions: Value) -> Value:
    """A box of static size, moved into the operand if it would stick out."""
    sizes = eqn.params["slice_sizes"]
    starts = _starts(context, operand.shape, sizes, positions)
    return views.take_view(context, operand, views.sliced(starts, sizes))


@rule(lax.dynamic_update_slice_p)
def dynamic_update_slice(
    context: Context, eqn: Any, operand: Value, update: Value, *positions: Value
) -> Value:
    """The operand with a box of it replaced; the box is moved inside if it would stick out."""
    if operand.size == 0 or update.size == 0:
        return operand
    if update.shape == operand.shape:
        return update
    starts = _starts(context, operand.shape, update.shape, positions)
    if is_small(operand.shape, operand.dtype) and update.size == 1:
        flat = context.function.linear_index(starts, row_major(operand.shape))
        register = context.builder.insert_element(
            context.pack(operand), context.scalar(update), context.function.index(flat)
        )
        return make_packed(operand.shape, operand.dtype, register)
    target = context.copy_or_overwrite(operand)
    address = target.element_address(context.function, starts)
    context.store(target.view(update.shape, target.strides, address), update, is_fresh=True)
    return in_registers_if_small(context, target)


class _Positions:
    """How a gather or a scatter finds its boxes: both describe it by the same numbers."""

    def __init__(
        self,
        shape: Sequence[int],
        sizes: Sequence[int],
        indices: Value,
        index_map: Sequence[int],
        batching: Sequence[int],
        indices_batching: Sequence[int],
    ):
        self.shape, self.sizes = tuple(shape), tuple(sizes)
        self.dtype = indices.dtype
        self.index_map = tuple(index_map)
        self.batching = tuple(zip(batching, indices_batching, strict=True))

    def box(
        self, builder: ElementBuilder, indices: Value, batch: Sequence[Index], *, clamp: bool
    ) -> tuple[list[Index], ir.Value]:
        """The first index of the box for one index vector, and whether the box lies inside the
        operand.

        With `clamp` the index is one that may be used even if it does not.
        """
        function = builder.function
        starts: list[Index] = [0] * len(self.shape)
        is_inside: ir.Value = ir.Constant(i1, 1)
        for component, dimension in enumerate(self.index_map):
            element = indices.element(builder, [*batch, component])
            position = _as_index(function, element, self.dtype)
            limit = self.shape[dimension] - self.sizes[dimension]
            within = _is_within(function, position, limit)
            is_inside = within if component == 0 else function.builder.and_(is_inside, within)
            if clamp:
                position = clamp_index(function, position, self.dtype, limit)
            starts[dimension] = position
        for dimension, batch_dimension in self.batching:
            starts[dimension] = batch[batch_dimension]
        return starts, is_inside


def _addressable(context: Context, value: Value) -> Value:
    """A form whose elements can be read at indices known only at run time, more than once."""
    if isinstance(value, Packed) and value.size > 1:
        return context.materialise(value)
    if isinstance(value, Expression) and not value.is_cheap:
        return context.materialise(value)
    return value


@rule(lax.gather_p)
def gather(context: Context, eqn: Any, operand: Value, indices: Value) -> Value:
    """Boxes of the operand at the positions that the last dimension of the indices holds."""
    params = eqn.params
    numbers, sizes, mode = params["dimension_numbers"], params["slice_sizes"], params["mode"]
    shape = tuple(eqn.outvars[0].aval.shape)
    dtype = operand.dtype
    if 0 in shape:
        return views.empty(shape, dtype)
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    fill = constant(_fill_value(params["fill_value"], dtype), dtype)
    positions = _Positions(
        operand.shape,
        sizes,
        indices,
        numbers.start_index_map,
        numbers.operand_batching_dims,
        numbers.start_indices_batching_dims,
    )
    offset_dims = tuple(numbers.offset_dims)
    batch_dims = [dimension for dimension in range(len(shape)) if dimension not in offset_dims]
    dropped = (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)
    window_dims = [dimension for dimension in range(len(sizes)) if dimension not in dropped]

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        table, places = operands
        batch = [index[dimension] for dimension in batch_dims]
        source, is_inside = positions.box(builder, places, batch, clamp=True)
        for dimension, offset in zip(window_dims, offset_dims, strict=True):
            source[dimension] = builder.function.add(source[dimension], index[offset])
        element = table.element(builder, source)
        if not fills:
            return element
        return builder.builder.select(is_inside, element, fill.register)

    table = _addressable(context, operand)
    if is_small(shape, dtype):
        # Indices in a register may stay there, because without a loop their lanes are known.
        if not isinstance(indices, Packed):
            indices = _addressable(context, indices)
        return make_packed(
            shape, dtype, _unrolled(context, Expression(shape, dtype, (table, indices), emit))
        )
    return Expression(shape, dtype, (table, _addressable(context, indices)), emit)


def _unrolled(context: Context, value: Expression) -> ir.Value:
    """The elements in one register, each computed at an index known at compile time."""
    function = context.function
    builder = ElementBuilder(function)
    if value.size == 1:
        return value.element(builder, [0] * len(value.shape))
    kind = ir.VectorType(dtypes.register_type(value.dtype), value.size)
    register: ir.Value = ir.Constant(kind, ir.Undefined)
    for lane, index in enumerate(itertools.product(*map(range, value.shape))):
        element = value.element(builder, list(index))
        register = function.builder.insert_element(register, element, ir.Constant(dtypes.i32, lane))
    return register


def _fill_value(given: Any, dtype: np.dtype) -> Any:
    """What a gather gives where it reads outside: NaN, the least signed integer, the greatest
    unsigned one."""
    if given is not None:
        return given
    if dtypes.is_float(dtype):
        return np.nan
    if dtype == np.bool_:
        return True
    info = ml_dtypes.iinfo(dtype)
    return info.min if dtypes.kind(dtype) is Kind.SIGNED else info.max


def overwrites(update_jaxpr: Any) -> bool:
    """Whether the function of a `scatter` returns what is new, whatever was there."""
    if update_jaxpr is None:
        return True
    return not update_jaxpr.eqns and update_jaxpr.outvars[0] is update_jaxpr.invars[1]


@rule(lax.scatter_p)
def scatter(context: Context, eqn: Any, operand: Value, indices: Value, updates: Value) -> Value:
    """The operand with boxes replaced by updates, or by what a function makes of the old and the
    new."""
    jaxpr, constants = eqn.params["update_jaxpr"], eqn.params["update_consts"]

    def combine(old: Value, new: Value) -> Value:
        if overwrites(jaxpr):
            return new
        held = [constant(np.asarray(item), np.asarray(item).dtype) for item in constants]
        return lower_jaxpr(context, jaxpr, [old, new], held)[0]

    return _scatter(context, eqn, operand, indices, updates, combine)


def _register(primitive: Any, arithmetic: Any) -> None:
    @rule(primitive)
    def scatter_with(
        context: Context, eqn: Any, operand: Value, indices: Value, updates: Value
    ) -> Value:
        def combine(old: Value, new: Value) -> Value:
            return apply(context, arithmetic, (), operand.dtype, old, new)

        return _scatter(context, eqn, operand, indices, updates, combine)


_register(lax.scatter_add_p, lax.add_p)
_register(lax.scatter_sub_p, lax.sub_p)
_register(lax.scatter_mul_p, lax.mul_p)
_register(lax.scatter_min_p, lax.min_p)
_register(lax.scatter_max_p, lax.max_p)


def _scatter(
    context: Context, eqn: Any, operand: Value, indices: Value, updates: Value, combine: Any
) -> Value:
    """Combines each box of the updates with the operand, in the order of the indices."""
    if operand.size == 0 or updates.size == 0:
        return operand
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    clips = mode == lax.GatherScatterMode.CLIP
    window_dims = tuple(numbers.update_window_dims)
    batch_dims = [d for d in range(len(updates.shape)) if d not in window_dims]
    inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    kept = [dimension for dimension in range(len(operand.shape)) if dimension not in inserted]
    sizes = [1] * len(operand.shape)
    for dimension, window in zip(kept, window_dims, strict=True):
        sizes[dimension] = updates.shape[window]
    positions = _Positions(
        operand.shape,
        sizes,
        indices,
        numbers.scatter_dims_to_operand_dims,
        numbers.operand_batching_dims,
        numbers.scatter_indices_batching_dims,
    )
    if updates.size == 1 and is_small(operand.shape, operand.dtype):
        return _scatter_one(context, positions, operand, indices, updates, combine, clips=clips)
    target = context.copy_or_overwrite(operand)
    batch_shape = [updates.shape[dimension] for dimension in batch_dims]
    window_shape = [updates.shape[dimension] for dimension in window_dims]
    dtype = operand.dtype

    def build(
        function: FunctionBuilder, out: Buffer | None, values: list[Value]
    ) -> Sequence[ir.Value]:
        assert out is not None
        places, source = values

        def write(starts: Sequence[Index], batch: Sequence[Index]) -> None:
            with function.nest(window_shape) as window:
                index: list[Index] = [0] * len(updates.shape)
                for dimension, position in zip(batch_dims, batch, strict=True):
                    index[dimension] = position
                goal = list(starts)
                for dimension, update, position in zip(kept, window_dims, window, strict=True):
                    index[update] = position
                    goal[dimension] = function.add(goal[dimension], position)
                element = ElementBuilder(function)
                new = Scalar((), dtype, source.element(element, index))
                old = Scalar((), dtype, out.element(element, goal))
                result = context.scalar(combine(old, new))
                store_element(function, result, out.element_address(function, goal), dtype)

        with function.nest(batch_shape) as batch:
            builder = ElementBuilder(function)
            starts, is_inside = positions.box(builder, places, batch, clamp=clips)
            if clips or not positions.index_map:
                write(starts, batch)
            else:
                with function.builder.if_then(is_inside):
                    write(starts, batch)
        return []

    sources = [_addressable(context, item) for item in (indices, updates)]
    in_function(context, "scatter", target, sources, [], build)
    return in_registers_if_small(context, target)


def _scatter_one(
    context: Context,
    positions: _Positions,
    operand: Value,
    indices: Value,
    updates: Value,
    combine: Any,
    *,
    clips: bool,
) -> Value:
    """A scatter of one element into an array in a register."""
    function = context.function
    builder = ElementBuilder(function)
    register = context.pack(operand)
    batch = [0] * (len(indices.shape) - 1)
    starts, is_inside = positions.box(builder, indices, batch, clamp=True)
    flat = function.index(function.linear_index(starts, row_major(operand.shape)))
    new = Scalar((), operand.dtype, context.scalar(updates))
    if operand.size == 1:
        result = context.scalar(combine(Scalar((), operand.dtype, register), new))
    else:
        old = Scalar((), operand.dtype, function.builder.extract_element(register, flat))
        element = context.scalar(combine(old, new))
        result = function.builder.insert_element(register, element, flat)
    if not clips and positions.index_map:
        result = function.builder.select(is_inside, result, register)
    return make_packed(operand.shape, operand.dtype, result)
