"""Reading, writing and adding to the part of a Ref that a view shows."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import padding
from cokernel.compiler.bounds import widen_index
from cokernel.compiler.context import Context
from cokernel.compiler.function import ElementBuilder, Index
from cokernel.compiler.pieces import joined, part_of, piece
from cokernel.compiler.refs import IndexArrays, View
from cokernel.compiler.spots import Spot, spot_of_offset
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Packed,
    Value,
    is_small,
    load_element,
    make_packed,
    pack,
    store_element,
)


def read(context: Context, view: View) -> Value:
    """The contents of a view. Small ones are loaded at once; large ones stay in place until
    something would change them.
    """
    if view.pieces is not None:
        parts = [read(context, piece(context, view, number)) for number in _numbers(view)]
        return joined(context, parts, view.dtype)
    if view.overhang is not None:
        return padding.read(context, view)
    if view.indices is None:
        buffer = view.buffer()
        if not buffer.shape or is_small(buffer.shape, buffer.dtype):
            return make_packed(buffer.shape, buffer.dtype, pack(context.function, buffer))
        return buffer
    base, arrays = (
        view.strided_part(),
        tuple(in_memory(context, array) for array in view.indices.arrays),
    )
    indices = view.indices

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        address = picked_spot(context, builder, indices, operands[0], operands[1:], index).address
        return load_element(builder.function, address, base.dtype)

    return context.settle(Expression(view.shape, base.dtype, (base, *arrays), emit))


def _numbers(view: View) -> range:
    """The numbers of the pieces of each element."""
    assert view.pieces is not None
    return range(np.dtype(view.dtype).itemsize // np.dtype(view.pieces.dtype).itemsize)


def in_memory(context: Context, array: Value) -> Value:
    """An array of indices in a form in which a loop reads it quickly."""
    # A lane of a vector picked by a loop counter would go through the stack each time.
    return context.materialise(array) if isinstance(array, Packed) and array.size > 8 else array


def picked_spot(
    context: Context,
    builder: ElementBuilder,
    indices: IndexArrays,
    base: Value,
    arrays: Sequence[Value],
    index: Sequence[Index],
) -> Spot:
    """Where the element is at an index of a view that index arrays have made. If some may lie in
    the padding of tiles, these are a table of offsets.
    """
    assert isinstance(base, Buffer)
    function = builder.function
    end = indices.position + len(indices.shape)
    picked, rest = index[indices.position : end], [*index[: indices.position], *index[end:]]
    offset: Index = 0
    for array, stride in zip(arrays, indices.strides, strict=True):
        register = array.element(builder, broadcast_index(picked, array.shape))
        wide = widen_index(function, register, array.dtype)
        offset = function.add(offset, function.multiply(wide, stride))
    start = base.element_address(function, rest)
    if indices.hangs:
        return spot_of_offset(context, function, start, function.index(offset))
    return Spot(function.advance(start, offset))


def broadcast_index(index: Sequence[Index], shape: Sequence[int]) -> list[Index]:
    """The index into an array of `shape` that is broadcast to a larger shape."""
    tail = index[len(index) - len(shape) :]
    return [0 if extent == 1 else position for position, extent in zip(tail, shape, strict=True)]


def write(context: Context, view: View, value: Value) -> None:
    """Stores a value of the view's shape to the view."""
    if view.pieces is not None:
        value = context.copy(value) if view.ref.memory in value.roots() else value
        for number in _numbers(view):
            part = part_of(context, value, number, view.pieces.dtype)
            write(context, piece(context, view, number), part)
        return None
    if view.overhang is not None:
        return padding.write(context, view, value)
    if view.indices is not None:
        return _write_picked(context, view, value, add=None)
    target = view.buffer()
    if view.ref.memory in value.roots() and not _reads_in_place(value, target):
        value = context.copy(value)
    context.store(target, value, is_fresh=False)


def _reads_in_place(value: Value, target: Buffer) -> bool:
    """Whether a value reads the target's Ref only at the place it is about to be stored to."""
    if target.root not in value.roots():
        return True
    if isinstance(value, Buffer):
        return is_same_place(value, target)
    if isinstance(value, Expression) and value.elementwise:
        return all(_reads_in_place(operand, target) for operand in value.operands)
    return False


def is_same_place(value: Value, target: Buffer) -> bool:
    """Whether a value is the contents of just this part of memory."""
    return (
        isinstance(value, Buffer)
        and value.address is target.address
        and value.strides == target.strides
        and value.shape == target.shape
    )


def accumulate(context: Context, view: View, value: Value, add: Any) -> None:
    """Adds a value to the view. `add(left, right)` sums two values of the view's dtype."""
    if view.indices is not None and view.pieces is not None:
        raise NotImplementedError(
            f"{context.describe()}: a sum into {view.ref.name!r} under the wider dtype "
            f"{view.dtype}, indexed by an array"
        )
    if view.indices is not None:
        return _write_picked(context, view, value, add=add)
    write(context, view, add(read(context, view), value))


def _write_picked(context: Context, view: View, value: Value, add: Any) -> None:
    """Stores through index arrays, element by element in order, so that of equal indices the last
    one wins and sums add up.
    """
    indices = view.indices
    assert indices is not None
    base = view.strided_part()
    arrays = [in_memory(context, array) for array in indices.arrays]
    if view.ref.memory in value.roots():
        value = context.copy(value)
    value = in_memory(context, value)
    operands: list[Value] = [base, value, *arrays]
    leaves = [leaf for operand in operands for leaf in operand.leaves()]
    inner = context.function.sibling("scatter", [leaf.type for leaf in leaves])
    incoming = iter(inner.parameters)
    base_in, value_in, *arrays_in = (operand.rebuild(incoming) for operand in operands)
    with context.inside(inner), inner.nest(view.shape) as index:
        builder = ElementBuilder(inner)
        spot = picked_spot(context, builder, indices, base_in, arrays_in, index)
        register = value_in.element(builder, index)
        with spot.written(inner):
            if add is not None:
                old = make_packed((), base.dtype, load_element(inner, spot.address, base.dtype))
                register = context.scalar(add(old, make_packed((), base.dtype, register)))
            store_element(inner, register, spot.address, base.dtype)
    inner.finish()
    context.call(inner, leaves)
