"""Elements whose bits lie in several places: what a bitcast to a wider dtype makes of a Ref, whose
rows hold the parts of one element under each other.
"""

import dataclasses
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import padding
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import f32, f64, half, register_type
from cokernel.compiler.function import ElementBuilder
from cokernel.compiler.ops.registry import Operation, apply_elementwise
from cokernel.compiler.refs import Origin, Overhang, View
from cokernel.compiler.values import Value
from cokernel.records import record


@record(frozen=True)
class _Aval:
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))


def piece(context: Context, view: View, number: int) -> View:
    """The view of one piece of each element; piece 0 holds the lowest bits."""
    pieces = view.pieces
    assert pieces is not None
    address = context.function.advance(view.address, number * pieces.stride)
    part = dataclasses.replace(view, dtype=pieces.dtype, address=address, pieces=None)
    if pieces.axis is None:
        return part
    # Each piece has a row of its own, of which the padding has some.
    assert view.origin is not None
    starts = list(view.origin.starts)
    distance = number * padding.steps_along(view, pieces.axis, pieces.stride)
    starts[pieces.axis] = context.function.add(starts[pieces.axis], distance)
    part = dataclasses.replace(part, origin=Origin(tuple(starts), view.origin.axes))
    return dataclasses.replace(part, overhang=padding.overhang_of(context.function, part))


def spread(view: View, dtype: Any) -> View:
    """The view of the pieces of dtype `dtype` of all elements, along one more dimension at the
    end. The elements may lie together.
    """
    itemsize = np.dtype(dtype).itemsize
    count = np.dtype(view.dtype).itemsize // itemsize
    stride = itemsize if view.pieces is None else view.pieces.stride
    overhang, origin = view.overhang, view.origin
    axis = None if view.pieces is None else view.pieces.axis
    if overhang is not None:
        # The parts of one element may lie on either side of the end, so no extent along them tells
        # how many lie in front of it.
        overhang = Overhang((*overhang.inside, count if axis is None else 0), overhang.is_there)
    if origin is not None:
        last = len(view.ref.shape) - 1 if axis is None else axis
        origin = Origin(origin.starts, (*origin.axes, last))
    return dataclasses.replace(
        view,
        room=None,
        overhang=overhang,
        origin=origin,
        dtype=np.dtype(dtype),
        extents=(*view.extents, count),
        strides=(*view.strides, stride),
        pieces=None,
    )


def joined(context: Context, pieces: list[Value], dtype: Any) -> Value:
    """The elements whose pieces, lowest first, are given."""

    def emit(builder: ElementBuilder, operation: Operation, *registers: ir.Value) -> ir.Value:
        wide = ir.IntType(8 * operation.result_dtype.itemsize)
        width = 8 * operation.operand_dtypes[0].itemsize
        total: ir.Value | None = None
        for number, register in enumerate(registers):
            bits = _to_integer(builder, operation.operand_dtypes[0], register)
            bits = builder.builder.zext(bits, builder.type(wide))
            bits = builder.builder.shl(bits, builder.constant(wide, number * width))
            total = bits if total is None else builder.builder.or_(total, bits)
        assert total is not None
        return _from_integer(builder, operation.result_dtype, total)

    aval = _Aval(pieces[0].shape, np.dtype(dtype))
    return apply_elementwise(context, emit, {}, aval, pieces)


def part_of(context: Context, value: Value, number: int, dtype: Any) -> Value:
    """One piece, of a narrower dtype, of each element."""

    def emit(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
        bits = _to_integer(builder, operation.operand_dtypes[0], register)
        width = 8 * operation.result_dtype.itemsize
        wide = ir.IntType(8 * operation.operand_dtypes[0].itemsize)
        bits = builder.builder.lshr(bits, builder.constant(wide, number * width))
        bits = builder.builder.trunc(bits, builder.type(ir.IntType(width)))
        return _from_integer(builder, operation.result_dtype, bits)

    aval = _Aval(value.shape, np.dtype(dtype))
    return apply_elementwise(context, emit, {}, aval, [value])


def _to_integer(builder: ElementBuilder, dtype: np.dtype, register: ir.Value) -> ir.Value:
    if register_type(dtype) not in (half, f32, f64):
        return register
    return builder.builder.bitcast(register, builder.type(ir.IntType(8 * dtype.itemsize)))


def _from_integer(builder: ElementBuilder, dtype: np.dtype, bits: ir.Value) -> ir.Value:
    if register_type(dtype) not in (half, f32, f64):
        return bits
    return builder.builder.bitcast(bits, builder.type(register_type(dtype)))
