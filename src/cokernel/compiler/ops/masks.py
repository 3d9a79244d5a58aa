"""Vectors of truth values: what they count, and loads and stores of the lanes they select."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32, i64, pointer, void
from cokernel.compiler.function import ElementBuilder, Index
from cokernel.compiler.ops.control import outlined
from cokernel.compiler.refs import View
from cokernel.compiler.values import Buffer, Value, is_small, lane_count


def lanes_of(context: Context, mask: Value) -> ir.Value:
    """A small mask as one vector, also if it has one element."""
    register = context.pack(mask)
    if isinstance(register.type, ir.VectorType):
        return register
    vector = ir.Constant(ir.VectorType(register.type, 1), ir.Undefined)
    return context.builder.insert_element(vector, register, ir.Constant(i32, 0))


def mask_bits(context: Context, mask: ir.Value) -> ir.Value:
    """A vector of truth values as the bits of one integer, lane 0 lowest."""
    return context.builder.bitcast(mask, ir.IntType(mask.type.count))


def count_true(context: Context, mask: Value) -> ir.Value:
    """How many elements of a mask are true, as an i64."""
    if not is_small(mask.shape, mask.dtype):
        return _count_in_loop(context, mask)
    bits = mask_bits(context, lanes_of(context, mask))
    count = context.function.intrinsic("llvm.ctpop", bits.type, [bits])
    return resize(context.builder, count, i64)


def resize(builder: ir.IRBuilder, value: ir.Value, kind: ir.IntType) -> ir.Value:
    """A non-negative integer in another width."""
    if value.type.width < kind.width:
        return builder.zext(value, kind)
    return value if value.type == kind else builder.trunc(value, kind)


def _count_in_loop(context: Context, mask: Value) -> ir.Value:
    def build(inside: list[Any]) -> Sequence[ir.Value]:
        function = context.function
        with function.loop(0, mask.size, carry=[ir.Constant(i64, 0)]) as loop:
            index = function.unravel(loop.counter, mask.shape)
            taken = inside[0].element(ElementBuilder(function), index)
            loop.next = [function.builder.add(loop.carry[0], function.builder.zext(taken, i64))]
        return loop.carry

    [count] = outlined(context, "count_true", [context.materialise(mask)], [i64], build)
    return count


def prefix_mask(context: Context, mask: ir.Value) -> ir.Value:
    """As many true lanes as the mask has, all at the front."""
    bits = mask_bits(context, mask)
    function, builder = context.function, context.builder
    count = function.intrinsic("llvm.ctpop", bits.type, [bits])
    # In twice the width a shift by the number of lanes is still a shift.
    wide = ir.IntType(2 * bits.type.width)
    ones = builder.sub(
        builder.shl(ir.Constant(wide, 1), builder.zext(count, wide)), ir.Constant(wide, 1)
    )
    return builder.bitcast(builder.trunc(ones, bits.type), mask.type)


def in_memory_type(context: Context, register: ir.Value, dtype: np.dtype) -> ir.Value:
    """A vector as it lies in memory, where a truth value takes a byte."""
    if dtype != np.bool_:
        return register
    return context.builder.zext(register, ir.VectorType(dtypes.i8, lane_count(register)))


def from_memory_type(context: Context, register: ir.Value, dtype: np.dtype) -> ir.Value:
    """The register of a vector as it lies in memory."""
    if dtype != np.bool_:
        return register
    return context.builder.icmp_unsigned("!=", register, ir.Constant(register.type, None))


def masked_load(
    context: Context, name: str, address: ir.Value, mask: ir.Value, dtype: np.dtype
) -> ir.Value:
    """A vector load of the lanes in a mask; the others are zero."""
    kind = ir.VectorType(dtypes.memory_type(dtype), mask.type.count)
    zero = ir.Constant(kind, None)
    overloads = [kind] if name == "llvm.masked.expandload" else [kind, pointer]
    loaded = context.function.intrinsic(name, kind, [address, mask, zero], overloads=overloads)
    return from_memory_type(context, loaded, dtype)


def masked_store(
    context: Context, register: ir.Value, address: ir.Value, mask: ir.Value, dtype: np.dtype
) -> None:
    """A vector store of the lanes in a mask."""
    register = in_memory_type(context, register, dtype)
    context.function.intrinsic(
        "llvm.masked.store", void, [register, address, mask], overloads=[register.type, pointer]
    )


def fits_a_register(buffer: Buffer) -> bool:
    """Whether one vector load or store reaches all of a buffer."""
    return is_small(buffer.shape, buffer.dtype) and buffer.size > 1 and buffer.is_dense


def fail_index(
    context: Context,
    view: View,
    dimension: int,
    index: ir.Value,
    extent: Index,
    operation: str,
    position: Index = -1,
) -> None:
    """Records that an index into one dimension of a view is out of bounds. `position` is where an
    array of indices has it, below zero for an index that stands alone.
    """
    function = context.function
    shape = str(tuple(view.ref.shape))
    site = context.site(
        operation, view.ref.name, shape=shape, rank=len(view.extents), is_index=True
    )
    arguments = [index, function.index(extent), function.index(position)]
    function.call_external(
        "cokernel_fail_picked",
        void,
        [function.core, site, ir.Constant(i32, dimension), *arguments],
    )
