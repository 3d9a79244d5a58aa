"""Other ways to index a value: transposing, slicing, reversing, broadcasting and reshaping without
touching an element.

Every such operation is a `View`: an affine map from the index of the result to the index of the
operand. What it costs depends on the form of the operand: nothing for a buffer, whose strides
absorb it; one shuffle for a small array; an index computation for an expression.
"""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Packed,
    Scalar,
    Shape,
    Value,
    is_small,
    make_packed,
    row_major,
    shuffle,
)
from cokernel.records import record

if TYPE_CHECKING:
    from cokernel.compiler.context import Context


@record(frozen=True)
class View:
    """Which element of an operand each element of a result is.

    `first` is the operand's index of the result's first element; its entries may be LLVM values.
    `steps` has, for each dimension of the result, the dimension of the operand that it walks along
    and by how much (negative to walk backwards), or None if the elements are repeated along it. No
    two dimensions of the result walk along the same one.
    """

    shape: Shape
    first: tuple[Index, ...]
    steps: tuple[tuple[int, int] | None, ...]

    def source(self, function: FunctionBuilder, index: Sequence[Index]) -> list[Index]:
        """The operand's index of the result's element at `index`."""
        source = list(self.first)
        for position, step in zip(index, self.steps, strict=True):
            if step is not None:
                dimension, stride = step
                source[dimension] = function.add(
                    source[dimension], function.multiply(position, stride)
                )
        return source

    @property
    def repeats(self) -> bool:
        """Whether an element of the operand appears more than once in the result."""
        return any(
            step is None and extent > 1 for step, extent in zip(self.steps, self.shape, strict=True)
        )


def empty(shape: Sequence[int], dtype: Any) -> Expression:
    """An array without elements."""

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        return ir.Constant(dtypes.register_type(dtype), ir.Undefined)

    return Expression(tuple(shape), np.dtype(dtype), (), emit, elementwise=True, is_cheap=True)


def broadcast_scalar(
    context: "Context", register: ir.Value, shape: Sequence[int], dtype: Any
) -> Value:
    """An array that has one value everywhere."""
    shape = tuple(shape)
    if not shape or is_small(shape, dtype):
        count = int(np.prod(shape, dtype=int))
        return make_packed(shape, dtype, ElementBuilder(context.function, count).splat(register))

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        return operands[0].element(builder, ())

    scalar = Scalar((), np.dtype(dtype), register)
    return Expression(shape, np.dtype(dtype), (scalar,), emit, elementwise=True, is_cheap=True)


def take_view(context: "Context", operand: Value, view: View) -> Value:
    """The array that a view of `operand` shows."""
    if 0 in view.shape:
        return empty(view.shape, operand.dtype)
    if isinstance(operand, Scalar | Packed):
        return _view_register(context, operand, view)
    if isinstance(operand, Expression):
        if view.repeats and not operand.is_cheap:
            operand = context.materialise(operand)
        else:
            return context.settle(_view_expression(context, operand, view, {}))
    assert isinstance(operand, Buffer)
    return _view_buffer(context.function, operand, view)


def _view_buffer(function: FunctionBuilder, operand: Buffer, view: View) -> Buffer:
    strides = tuple(
        0 if step is None else operand.strides[step[0]] * step[1] for step in view.steps
    )
    return operand.view(view.shape, strides, operand.element_address(function, view.first))


def _view_register(context: "Context", operand: Scalar | Packed, view: View) -> Value:
    function = context.function
    if operand.size == 1:
        return broadcast_scalar(context, operand.register, view.shape, operand.dtype)
    is_static = all(isinstance(position, int) for position in view.first)
    result_is_small = not view.shape or is_small(view.shape, operand.dtype)
    if result_is_small and is_static:
        strides = row_major(operand.shape)
        lanes = [
            int(function.linear_index(view.source(function, index), strides))
            for index in itertools.product(*map(range, view.shape))
        ]
        return make_packed(view.shape, operand.dtype, shuffle(function, operand.register, lanes))
    if result_is_small and all(extent == 1 for extent in view.shape):
        register = operand.element(ElementBuilder(function), view.first)
        return make_packed(view.shape, operand.dtype, register)
    return _view_buffer(function, context.materialise(operand), view)


def _view_expression(
    context: "Context", operand: Expression, view: View, seen: dict[int, Expression]
) -> Expression:
    """Moves the view to the operands where possible, because loops over plain buffers are the ones
    that can be flattened. `seen` keeps what two operands share shared.
    """
    if id(operand) in seen:
        return seen[id(operand)]
    if operand.elementwise:
        inner = tuple(
            _view_operand(context, item, view, seen) if item.shape else item
            for item in operand.operands
        )
        result = dataclasses.replace(operand, shape=view.shape, operands=inner)
    else:
        result = _indexed(operand, view)
    seen[id(operand)] = result
    return result


def _view_operand(
    context: "Context", operand: Value, view: View, seen: dict[int, Expression]
) -> Value:
    if isinstance(operand, Expression):
        return _view_expression(context, operand, view, seen)
    if isinstance(operand, Packed) and operand.size > 1:
        operand = context.materialise(operand)
    if isinstance(operand, Buffer):
        return _view_buffer(context.function, operand, view)
    return broadcast_scalar(context, context.scalar(operand), view.shape, operand.dtype)


def _indexed(operand: Expression, view: View) -> Expression:
    """The view of an expression that does more than pass its index on."""
    dynamic = tuple(
        Scalar((), np.dtype(np.int64), position)
        for position in view.first
        if isinstance(position, ir.Value)
    )

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        positions = iter(operands[1:])
        first = tuple(
            position if isinstance(position, int) else next(positions).element(builder, ())
            for position in view.first
        )
        source = dataclasses.replace(view, first=first).source(builder.function, index)
        return operands[0].element(builder, source)

    return Expression(
        view.shape, operand.dtype, (operand, *dynamic), emit, is_cheap=operand.is_cheap
    )


def reshape(context: "Context", operand: Value, shape: Sequence[int]) -> Value:
    """The same elements in row-major order under another shape."""
    shape = tuple(shape)
    if shape == operand.shape:
        return operand
    if 0 in shape:
        return empty(shape, operand.dtype)
    if isinstance(operand, Scalar | Packed):
        return make_packed(shape, operand.dtype, operand.register)
    if not shape:
        return Scalar((), operand.dtype, context.scalar(operand))
    if isinstance(operand, Expression):
        pushed = _reshape_expression(operand, shape, {})
        if pushed is not None:
            return pushed
        operand = context.materialise(operand)
    assert isinstance(operand, Buffer)
    strides = reshaped_strides(operand.shape, operand.strides, shape)
    if strides is None:
        operand = context.copy(operand)
        strides = row_major(shape)
    return operand.view(shape, strides)


def _reshape_expression(
    operand: Expression, shape: Shape, seen: dict[int, Expression]
) -> Expression | None:
    """Reshapes what an elementwise expression reads instead, or gives None where that takes a
    copy."""
    if not operand.elementwise:
        return None
    if id(operand) in seen:
        return seen[id(operand)]
    inner: list[Value] = []
    for item in operand.operands:
        reshaped: Value | None = item
        if isinstance(item, Expression):
            reshaped = _reshape_expression(item, shape, seen)
        elif isinstance(item, Buffer) and item.shape:
            strides = reshaped_strides(item.shape, item.strides, shape)
            reshaped = None if strides is None else item.view(shape, strides)
        elif item.shape:
            reshaped = None
        if reshaped is None:
            return None
        inner.append(reshaped)
    result = dataclasses.replace(operand, shape=shape, operands=tuple(inner))
    seen[id(operand)] = result
    return result


def reshaped_strides(
    shape: Sequence[int], strides: Sequence[int], target: Sequence[int]
) -> tuple[int, ...] | None:
    """The strides under which the same memory has the shape `target`, or None if no strides do
    that. The array is not empty.
    """
    # Dimensions of extent one say nothing, so both shapes are compared without them.
    source = [
        (extent, stride) for extent, stride in zip(shape, strides, strict=True) if extent != 1
    ]
    result = [0] * len(target)
    wanted = [dimension for dimension, extent in enumerate(target) if extent != 1]
    while wanted:
        # The shortest runs of dimensions, from the left, that hold the same number of elements on
        # both sides.
        group, run = [wanted.pop(0)], [source.pop(0)]
        have, want = run[0][0], target[group[0]]
        while have != want:
            if have < want:
                run.append(source.pop(0))
                have *= run[-1][0]
            else:
                group.append(wanted.pop(0))
                want *= target[group[-1]]
        if any(before[1] != after[0] * after[1] for before, after in itertools.pairwise(run)):
            return None
        step = run[-1][1]
        for dimension in reversed(group):
            result[dimension] = step
            step *= target[dimension]
    return tuple(result)


# The views that have a name.


def whole(operand_shape: Sequence[int]) -> View:
    """The view that changes nothing."""
    return View(
        tuple(operand_shape),
        (0,) * len(operand_shape),
        tuple((dimension, 1) for dimension in range(len(operand_shape))),
    )


def broadcast(
    operand_shape: Sequence[int], shape: Sequence[int], dimensions: Sequence[int]
) -> View:
    """Dimension d of the operand becomes dimension `dimensions[d]` of the result, all others repeat
    it.
    """
    steps: list[tuple[int, int] | None] = [None] * len(shape)
    for dimension, position in enumerate(dimensions):
        if operand_shape[dimension] == shape[position]:
            steps[position] = (dimension, 1)
    return View(tuple(shape), (0,) * len(operand_shape), tuple(steps))


def transposed(operand_shape: Sequence[int], permutation: Sequence[int]) -> View:
    """Dimension d of the result is dimension `permutation[d]` of the operand."""
    shape = tuple(operand_shape[dimension] for dimension in permutation)
    return View(shape, (0,) * len(shape), tuple((dimension, 1) for dimension in permutation))


def sliced(
    starts: Sequence[Index], shape: Sequence[int], strides: Sequence[int] | None = None
) -> View:
    """A box of the operand that begins at `starts`, with a step per dimension."""
    steps = strides if strides is not None else [1] * len(shape)
    return View(tuple(shape), tuple(starts), tuple(enumerate(steps)))


def reversed_along(operand_shape: Sequence[int], dimensions: Sequence[int]) -> View:
    """The operand with the order turned round along some dimensions."""
    first = tuple(
        extent - 1 if dimension in dimensions else 0
        for dimension, extent in enumerate(operand_shape)
    )
    steps = tuple(
        (dimension, -1 if dimension in dimensions else 1) for dimension in range(len(operand_shape))
    )
    return View(tuple(operand_shape), first, steps)
