"""Reductions: sums, products, extremes, logic, their positions, and those with a reducer of the
user's own."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from llvmlite import ir

from cokernel.compiler import dtypes, nests, views
from cokernel.compiler.context import Context
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops.apply import apply, convert, emit_elementwise
from cokernel.compiler.ops.combine import Combiner, Fold, working_dtype
from cokernel.compiler.ops.registry import Operation, rule
from cokernel.compiler.ops.shape import positions
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Scalar,
    Value,
    concatenate_vectors,
    constant,
    is_small,
    load_element,
    make_packed,
    row_major,
    shuffle,
    store_element,
)

# So many elements are folded one after the other without a loop.
UNROLLED_FOLD = 8
# So many rows are folded together before they are added to the partial results in memory.
ROWS_AT_ONCE = 4


def _register(primitive: Any, fold: Fold) -> None:
    @rule(primitive)
    def reduction(context: Context, eqn: Any, operand: Value) -> Value:
        return reduce_value(context, fold, operand, eqn.params["axes"])


_register(lax.reduce_sum_p, Fold.ADD)
_register(lax.reduce_prod_p, Fold.MULTIPLY)
_register(lax.reduce_max_p, Fold.MAXIMUM)
_register(lax.reduce_min_p, Fold.MINIMUM)
_register(lax.reduce_and_p, Fold.AND)
_register(lax.reduce_or_p, Fold.OR)
_register(lax.reduce_xor_p, Fold.XOR)


def reduce_value(context: Context, fold: Fold, operand: Value, axes: Sequence[int]) -> Value:
    """Folds the elements along `axes`, which disappear."""
    shape = tuple(extent for dimension, extent in enumerate(operand.shape) if dimension not in axes)
    if 0 in shape:
        return views.empty(shape, operand.dtype)
    if all(operand.shape[axis] == 1 for axis in axes):
        return views.reshape(context, operand, shape)
    wide = working_dtype(operand.dtype)
    if wide != operand.dtype:
        result = reduce_value(context, fold, convert(context, operand, wide), axes)
        return convert(context, result, operand.dtype)
    combine = Combiner(fold, operand.dtype)
    if operand.size == 0:
        return views.broadcast_scalar(context, combine.identity(), shape, operand.dtype)
    if not operand.shape or is_small(operand.shape, operand.dtype):
        return _reduce_register(context, combine, operand, axes, shape)
    if fold in (Fold.MAXIMUM, Fold.MINIMUM) and operand.dtype in _INTEGERS:
        return _extreme_by_order(context, fold, operand, axes, shape)
    return in_registers_if_small(context, _reduce_large(context, combine, operand, axes, shape))


# For each float dtype whose extremes are looked for among integers, those integers.
_INTEGERS: dict[np.dtype, np.dtype] = {
    np.dtype(np.float32): np.dtype(np.int32),
    np.dtype(np.float64): np.dtype(np.int64),
}


def _extreme_by_order(
    context: Context, fold: Fold, operand: Value, axes: Sequence[int], shape: tuple[int, ...]
) -> Value:
    """The extreme of floats, found among integers of the same order: one instruction a step, where
    that of floats takes five that wait for each other on processors whose maximum of a number and
    NaN is the number."""
    integer = _INTEGERS[operand.dtype]
    bits = 8 * integer.itemsize
    rest = (1 << (bits - 1)) - 1
    # NaN wins over everything.
    nan = rest if fold is Fold.MAXIMUM else -rest - 1

    def flipped(builder: ElementBuilder, register: ir.Value) -> ir.Value:
        """Negative numbers with all bits but the sign's reversed: they then ascend as integers do.
        Its own inverse."""
        kind = dtypes.register_type(integer)
        sign = builder.builder.ashr(register, builder.constant(kind, bits - 1))
        mask = builder.builder.and_(sign, builder.constant(kind, rest))
        return builder.builder.xor(register, mask)

    def to_order(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
        kind = dtypes.register_type(integer)
        order = flipped(builder, builder.builder.bitcast(register, builder.type(kind)))
        is_nan = builder.builder.fcmp_unordered("uno", register, register)
        return builder.builder.select(is_nan, builder.constant(kind, nan), order)

    def from_order(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
        kind = dtypes.register_type(operand.dtype)
        return builder.builder.bitcast(flipped(builder, register), builder.type(kind))

    order = emit_elementwise(context, to_order, operand.shape, integer, operand)
    found = reduce_value(context, fold, order, axes)
    result = emit_elementwise(context, from_order, shape, operand.dtype, found)
    return context.materialise(result) if isinstance(result, Expression) else result


def in_registers_if_small(context: Context, value: Value) -> Value:
    """A result in memory, or in registers if it is small."""
    if isinstance(value, Buffer) and (not value.shape or is_small(value.shape, value.dtype)):
        return make_packed(value.shape, value.dtype, context.pack(value))
    return value


def _reduce_register(
    context: Context, combine: Combiner, operand: Value, axes: Sequence[int], shape: tuple[int, ...]
) -> Value:
    """Folds halves of a register until one element is left of each that are folded together."""
    function = context.function
    kept = [dimension for dimension in range(len(operand.shape)) if dimension not in axes]
    lanes = (
        np.arange(operand.size).reshape(operand.shape).transpose([*axes, *kept]).ravel().tolist()
    )
    register = shuffle(function, context.pack(operand), lanes)
    width = math.prod(shape)
    register = fold_halves(function, combine, register, operand.size // width, width)
    if combine.fold is Fold.ADD and dtypes.is_float(operand.dtype):
        # The sum of negative zeros is zero, because a sum begins with zero.
        builder = ElementBuilder(function, width)
        register = function.builder.fadd(builder.splat(combine.identity()), register)
    return make_packed(shape, operand.dtype, register)


def fold_halves(
    function: FunctionBuilder, combine: Combiner, register: ir.Value, count: int, width: int
) -> ir.Value:
    """Folds a register of `count` groups of `width` lanes into one group."""
    if width == 1 and count > 1:
        return combine.whole(ElementBuilder(function, count), register)
    while count > 1:
        half = count // 2
        low = shuffle(function, register, range(half * width))
        high = shuffle(function, register, range(half * width, 2 * half * width))
        folded = combine(ElementBuilder(function, half * width), low, high)
        if count % 2:
            rest = shuffle(function, register, range(2 * half * width, count * width))
            folded = concatenate_vectors(function, [folded, rest])
        register, count = folded, half + count % 2
    return register


def _reduce_large(
    context: Context, combine: Combiner, operand: Value, axes: Sequence[int], shape: tuple[int, ...]
) -> Value:
    if math.prod(operand.shape[axis] for axis in axes) <= UNROLLED_FOLD:
        return context.materialise(_few(combine, operand, axes, shape))
    innermost = innermost_dimension(operand)
    kept = [dimension for dimension in range(len(operand.shape)) if dimension not in axes]
    if innermost in axes:
        inner = [axis for axis in axes if axis != innermost] + [innermost]
        order = [*kept, *inner]
    else:
        order = list(range(len(operand.shape)))
    operand = views.take_view(context, operand, views.transposed(operand.shape, order))
    assert isinstance(operand, Buffer | Expression)
    target = nests.dense_buffer(context, shape, operand.dtype)
    # The results as an array of the operand's shape, in which all elements that are folded together
    # are one.
    steps = dict(zip(kept, row_major(shape), strict=True))
    spread = target.view(operand.shape, tuple(steps.get(dimension, 0) for dimension in order))
    spread, flat = nests.collapse(spread, operand)
    if innermost in axes:
        if target.size == 1:
            return make_packed(shape, operand.dtype, _fold_all(context, combine, flat))
        _fold_rows(context, combine, spread, flat)
    else:
        start = views.broadcast_scalar(context, combine.identity(), shape, operand.dtype)
        context.store(target, start, is_fresh=True)
        _fold_columns(context, combine, spread, flat)
    return target


def _few(
    combine: Combiner, operand: Value, axes: Sequence[int], shape: tuple[int, ...]
) -> Expression:
    """Every element folded from a handful, without a loop."""
    extents = [operand.shape[axis] for axis in axes]

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        result: ir.Value = combine.identity()
        for place in np.ndindex(*extents):
            full, outer = [], iter(index)
            folded = dict(zip(axes, place, strict=True))
            for dimension in range(len(operand.shape)):
                full.append(int(folded[dimension]) if dimension in folded else next(outer))
            result = combine(builder, result, operands[0].element(builder, full))
        return result

    return Expression(shape, operand.dtype, (operand,), emit)


def innermost_dimension(operand: Value) -> int:
    """The dimension for the innermost loop: the one along which most of the operand's buffers are
    read without a jump, the last of equals."""
    buffers = _buffers(operand, operand.shape)
    best, best_score = len(operand.shape) - 1, 0
    for dimension in reversed(range(len(operand.shape))):
        strides = [abs(buffer.strides[dimension]) for buffer in buffers]
        # Along a dimension that everything is repeated along there is nothing to read at all.
        if operand.shape[dimension] > 1 and any(strides):
            score = sum(1 for stride in strides if stride <= 1)
            if score > best_score:
                best, best_score = dimension, score
    return best


def _buffers(value: Value, shape: Sequence[int]) -> list[Buffer]:
    if isinstance(value, Buffer):
        return [value] if value.shape == tuple(shape) else []
    if isinstance(value, Expression) and value.elementwise:
        return [buffer for operand in value.operands for buffer in _buffers(operand, shape)]
    return []


def in_function(
    context: Context,
    name: str,
    target: Buffer | None,
    values: Sequence[Value],
    results: Sequence[ir.Type],
    build: Callable[[FunctionBuilder, Buffer | None, list[Value]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """Emits `build` as a function of its own, which writes `target` and reads `values`, and calls
    it. The target is fresh memory."""
    sources: list[Value] = [*values] if target is None else [target, *values]
    arguments = [leaf for source in sources for leaf in source.leaves()]
    inner = context.function.sibling(name, [argument.type for argument in arguments], results)
    if target is not None and target.leaves():
        inner.parameters[0].add_attribute("noalias")
    leaves = iter(inner.parameters)
    inside = [source.rebuild(leaves) for source in sources]
    with context.inside(inner):
        if target is None:
            registers = build(inner, None, inside)
        else:
            room = inside.pop(0)
            assert isinstance(room, Buffer)
            registers = build(inner, room, inside)
        inner.finish(registers)
    return context.call(inner, arguments)


def _fold_nest(
    function: FunctionBuilder,
    combine: Combiner,
    start: ir.Value,
    value: Value,
    index: list[Index],
    extents: Sequence[int],
) -> ir.Value:
    """Folds the elements at `index` followed by all the indices in a box of `extents`."""
    if not extents:
        builder = ElementBuilder(function)
        return combine(builder, start, value.element(builder, index))
    # LLVM would unroll a short loop before it vectorises, and then not vectorise what is left.
    with function.loop(0, extents[0], carry=[start], rolled=len(extents) == 1) as loop:
        folded = _fold_nest(
            function, combine, loop.carry[0], value, [*index, loop.counter], extents[1:]
        )
        loop.next = [folded]
    return loop.carry[0]


def _fold_all(context: Context, combine: Combiner, value: Value) -> ir.Value:
    """Everything folded into one register."""

    def build(
        function: FunctionBuilder, target: Buffer | None, values: list[Value]
    ) -> Sequence[ir.Value]:
        return [_fold_nest(function, combine, combine.identity(), values[0], [], value.shape)]

    kind = dtypes.register_type(combine.dtype)
    return in_function(context, "reduce", None, [value], [kind], build)[0]


def _fold_rows(context: Context, combine: Combiner, spread: Buffer, value: Value) -> None:
    """Folds along the trailing dimensions, those along which `spread` does not move."""
    outer = sum(1 for stride in spread.strides if stride)

    def build(
        function: FunctionBuilder, target: Buffer | None, values: list[Value]
    ) -> Sequence[ir.Value]:
        assert target is not None
        row_size = math.prod(value.shape[outer:])
        with function.nest(value.shape[:outer], work=row_size) as index:
            folded = _fold_nest(
                function, combine, combine.identity(), values[0], index, value.shape[outer:]
            )
            zeros = [0] * (len(value.shape) - outer)
            address = target.element_address(function, [*index, *zeros])
            store_element(function, folded, address, combine.dtype)
        return []

    in_function(context, "reduce", spread, [value], [], build)


def _fold_columns(context: Context, combine: Combiner, spread: Buffer, value: Value) -> None:
    """Folds into results in memory that hold the identity at first, so that the innermost loop can
    walk along a dimension that is kept. Several rows are folded together each time, to read and
    write the results less often."""
    row = max(dimension for dimension, stride in enumerate(spread.strides) if not stride)
    whole = value.shape[row] // ROWS_AT_ONCE

    def fold(target: Buffer, source: Value, before: list[Index], first: Index, rows: int) -> None:
        function = context.function
        with function.nest(value.shape[row + 1 :]) as after:
            builder = ElementBuilder(function)
            address = target.element_address(function, [*before, first, *after])
            elements = [
                source.element(builder, [*before, function.add(first, number), *after])
                for number in range(rows)
            ]
            folded = load_element(function, address, combine.dtype)
            for element in elements:
                folded = combine(builder, folded, element)
            store_element(function, folded, address, combine.dtype)

    def build(
        function: FunctionBuilder, target: Buffer | None, values: list[Value]
    ) -> Sequence[ir.Value]:
        assert target is not None
        with function.nest(value.shape[:row], work=math.prod(value.shape[row:])) as before:
            if whole:
                with function.loop(0, whole) as loop:
                    first = function.multiply(loop.counter, ROWS_AT_ONCE)
                    fold(target, values[0], before, first, ROWS_AT_ONCE)
            if value.shape[row] % ROWS_AT_ONCE:
                rest = value.shape[row] % ROWS_AT_ONCE
                fold(target, values[0], before, whole * ROWS_AT_ONCE, rest)
        return []

    in_function(context, "reduce", spread, [value], [], build)


def _position_of(context: Context, eqn: Any, fold: Fold, operand: Value) -> Value:
    """The index along the axis of the first NaN, or else of the first extreme element. It takes two
    passes, which are simple enough to go many elements at a time."""
    (axis,) = eqn.params["axes"]
    index_dtype = np.dtype(eqn.params["index_dtype"])
    operand = convert(context, operand, working_dtype(operand.dtype))
    if isinstance(operand, Expression) and not operand.is_cheap:
        operand = context.materialise(operand)
    shape = operand.shape
    kept = [dimension for dimension in range(len(shape)) if dimension != axis]
    extreme = reduce_value(context, fold, operand, [axis])
    extreme = views.take_view(context, extreme, views.broadcast(extreme.shape, shape, kept))
    found = apply(context, lax.eq_p, shape, np.bool_, operand, extreme)
    if dtypes.is_float(operand.dtype):
        is_nan = apply(context, lax.ne_p, shape, np.bool_, operand, operand)
        found = apply(context, lax.or_p, shape, np.bool_, found, is_nan)
    places = positions(context, shape, axis, np.int32)
    last = constant(np.iinfo(np.int32).max, np.int32).register
    nowhere = views.broadcast_scalar(context, last, shape, np.int32)
    places = apply(context, lax.select_n_p, shape, np.int32, found, nowhere, places)
    return convert(context, reduce_value(context, Fold.MINIMUM, places, [axis]), index_dtype)


@rule(lax.argmax_p)
def argmax(context: Context, eqn: Any, operand: Value) -> Value:
    """Where the greatest element is: the first of equals, and the first NaN if there is one."""
    return _position_of(context, eqn, Fold.MAXIMUM, operand)


@rule(lax.argmin_p)
def argmin(context: Context, eqn: Any, operand: Value) -> Value:
    """Where the smallest element is: the first of equals, and the first NaN if there is one."""
    return _position_of(context, eqn, Fold.MINIMUM, operand)


@rule(lax.reduce_p)
def reduce_with(context: Context, eqn: Any, *operands: Value) -> list[Value]:
    """Folds several arrays together, element by element, with a function of the user's."""
    count = len(operands) // 2
    shape = tuple(eqn.outvars[0].aval.shape)
    dtypes_ = [operand.dtype for operand in operands[:count]]
    starts = [Scalar((), operand.dtype, context.scalar(operand)) for operand in operands[count:]]
    if 0 in shape:
        return [views.empty(shape, dtype) for dtype in dtypes_]
    axes = eqn.params["dimensions"]
    kept = [dimension for dimension in range(len(operands[0].shape)) if dimension not in axes]
    view = views.transposed(operands[0].shape, [*kept, *axes])
    sources = [
        views.take_view(context, context.materialise(operand), view) for operand in operands[:count]
    ]
    targets = [nests.dense_buffer(context, shape, dtype) for dtype in dtypes_]
    jaxpr = eqn.params["jaxpr"]

    def fold(
        inside: Sequence[Value], index: list[Index], carry: list[ir.Value], extents: Sequence[int]
    ) -> list[ir.Value]:
        if extents:
            with context.function.loop(0, extents[0], carry=carry) as loop:
                loop.next = fold(inside, [*index, loop.counter], loop.carry, extents[1:])
            return loop.carry
        builder = ElementBuilder(context.function)
        scalars = [
            *(Scalar((), dtype, item) for dtype, item in zip(dtypes_, carry, strict=True)),
            *(Scalar((), item.dtype, item.element(builder, index)) for item in inside),
        ]
        return [context.scalar(result) for result in lower_jaxpr(context, jaxpr, scalars)]

    def build(
        function: FunctionBuilder, target: Buffer | None, values: list[Value]
    ) -> Sequence[ir.Value]:
        inside, begin, outputs = values[:count], values[count : 2 * count], values[2 * count :]
        with function.nest(shape) as index:
            carry = [context.scalar(value) for value in begin]
            folded = fold(inside, index, carry, view.shape[len(kept) :])
            for output, register in zip(outputs, folded, strict=True):
                assert isinstance(output, Buffer)
                address = output.element_address(function, index)
                store_element(function, register, address, output.dtype)
        return []

    in_function(context, "reduce", None, [*sources, *starts, *targets], [], build)
    return [in_registers_if_small(context, target) for target in targets]
