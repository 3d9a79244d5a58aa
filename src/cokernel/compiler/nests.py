"""Loop nests over large arrays: each becomes a function of its own, because LLVM's time grows with
the square of the loops in one function.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.dtypes import i1, i8, i64, pointer, void
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.values import Buffer, Expression, Scalar, Value, row_major, store_element

if TYPE_CHECKING:
    from cokernel.compiler.context import Context

Body = Callable[[ElementBuilder, Sequence[Index], Buffer, Value], None]


def store_nest(context: "Context", target: Buffer, value: Value, *, is_fresh: bool) -> None:
    """Stores every element of `value` to `target` in a nest of its own. `is_fresh`: nothing that
    `value` reads overlaps the target, so LLVM may vectorise without checking.
    """

    def body(builder: ElementBuilder, index: Sequence[Index], out: Buffer, source: Value) -> None:
        register = source.element(builder, index)
        store_element(
            builder.function, register, out.element_address(builder.function, index), out.dtype
        )

    target, value = collapse(target, value)
    nest(context, "store", target, value, body, is_fresh=is_fresh)


def nest(
    context: "Context",
    name: str,
    target: Buffer,
    value: Value,
    body: Body,
    *,
    is_fresh: bool = False,
) -> None:
    """Runs `body` for every index of `target` in a function of its own."""
    outer = context.function
    arguments = [*target.leaves(), *value.leaves()]
    inner = outer.sibling(name, [argument.type for argument in arguments])
    if is_fresh and inner.parameters:
        inner.parameters[0].add_attribute("noalias")
    leaves = iter(inner.parameters)
    inner_target, inner_value = target.rebuild(leaves), value.rebuild(leaves)
    with inner.nest(target.shape) as index:
        body(ElementBuilder(inner), index, inner_target, inner_value)
    inner.finish()
    context.call(inner, arguments)


def collapse(target: Buffer, value: Value) -> tuple[Buffer, Value]:
    """Merges dimensions that every operand walks through without a jump, so that the innermost loop
    is long.
    """
    buffers = _plain_operands(value, target.shape)
    if buffers is None:
        return target, value
    groups = _merge(target.shape, [target.strides, *(buffer.strides for buffer in buffers)])
    if len(groups) == len(target.shape):
        return target, value
    merged = _regroup(target, target.shape, groups)
    assert isinstance(merged, Buffer)
    return merged, _regroup(value, target.shape, groups)


def _plain_operands(value: Value, shape: Sequence[int]) -> list[Buffer] | None:
    """The buffers read by a tree of elementwise expressions, or None where an index is changed on
    the way.
    """
    if isinstance(value, Scalar):
        return []
    if isinstance(value, Buffer):
        return [value] if value.shape == tuple(shape) else ([] if value.shape == () else None)
    if isinstance(value, Expression) and value.elementwise and value.shape == tuple(shape):
        found: list[Buffer] = []
        for operand in value.operands:
            inner = _plain_operands(operand, shape)
            if inner is None:
                return None
            found += inner
        return found
    return None


def _merge(shape: Sequence[int], all_strides: Sequence[Sequence[int]]) -> list[list[int]]:
    """Groups of adjacent dimensions that can become one; dimensions of extent one disappear."""
    groups: list[list[int]] = []
    for dimension, extent in enumerate(shape):
        if extent == 1:
            continue
        if groups and all(
            strides[groups[-1][-1]] == strides[dimension] * extent for strides in all_strides
        ):
            groups[-1].append(dimension)
        else:
            groups.append([dimension])
    return groups or [[0]] if shape else []


def _regroup(value: Value, shape: Sequence[int], groups: Sequence[Sequence[int]]) -> Value:
    merged = tuple(math.prod(shape[dimension] for dimension in group) for group in groups)
    if isinstance(value, Buffer) and value.shape == tuple(shape):
        return value.view(merged, tuple(value.strides[group[-1]] for group in groups))
    if isinstance(value, Expression):
        operands = tuple(_regroup(operand, shape, groups) for operand in value.operands)
        return dataclasses.replace(value, shape=merged, operands=operands)
    return value


def copy_dense(function: FunctionBuilder, target: ir.Value, source: ir.Value, size: Index) -> None:
    """Copies `size` bytes between blocks that do not overlap."""
    arguments = [target, source, function.index(size), ir.Constant(i1, 0)]
    callee = function.external(
        "llvm.memcpy.p0.p0.i64", void, [pointer, pointer, arguments[2].type, i1]
    )
    function.builder.call(callee, arguments)


def dense_buffer(context: "Context", shape: Sequence[int], dtype: Any) -> Buffer:
    """Room for a temporary array in the core's arena."""
    shape = tuple(shape)
    owner = context.program.arena.allocate(math.prod(shape) * dtypes.itemsize(dtype))
    return Buffer(
        shape, dtype, context.private_address(owner.offset), row_major(shape), owner=owner
    )


def fill_zero(context: "Context", address: ir.Value, size: Index) -> None:
    """Clears a block of memory."""
    function = context.function
    arguments = [
        address,
        ir.Constant(i8, 0),
        function.index(size),
        ir.Constant(i1, 0),
    ]
    callee = function.external("llvm.memset.p0.i64", void, [pointer, i8, i64, i1])
    function.builder.call(callee, arguments)
