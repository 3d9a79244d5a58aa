"""Views of Refs that no strides describe: every element is found by a table of byte offsets, which
is an array value like any other, computed where it is needed.

What is left of a view when its rows, picked by an array, are indexed again, when dimensions are
merged that do not follow each other in memory, or when the elements of its rows are split into
narrower ones.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import padding, views
from cokernel.compiler.access import broadcast_index, read
from cokernel.compiler.bounds import check_array, check_slice, widen_index
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i64
from cokernel.compiler.function import ElementBuilder, Index
from cokernel.compiler.probes import Access, probe
from cokernel.compiler.refs import IndexArrays, View
from cokernel.compiler.spots import Spots, offset_of
from cokernel.compiler.values import Expression, Packed, Value

# An offset is checked before it goes into the table, so that no later check can refuse it.
ANY_OFFSET = 1 << 62
# The offset of an element that an ignored index has picked.
NOWHERE = -1
OFFSET = np.dtype(np.int64)


def is_scattered(view: View) -> bool:
    """Whether all dimensions of the view are found by a table of offsets."""
    return view.indices is not None and view.indices.extents == (ANY_OFFSET,)


def scattered(context: Context, view: View, operation: str) -> View:
    """The same view, its elements found by a table. Index arrays that nobody has checked yet are
    read and checked.
    """
    if is_scattered(view):
        return view
    if view.hangs and view.pieces is not None:
        raise padding.refused(context, view, f"{operation} under the wider dtype {view.dtype}")
    indices = view.indices
    if indices is None:
        return _with_offsets(view, _strided_offsets(context, view), hangs=view.hangs)
    if not all(isinstance(extent, int) for extent in (*indices.shape, *view.extents)):
        raise NotImplementedError(
            f"{context.describe()}: a part of {view.ref.name!r} whose size is known only at run "
            "time, indexed or reshaped again"
        )
    for item in indices.arrays:
        if isinstance(item, View):
            probe(context, item, Access.READ, operation)
    arrays = [read(context, item) if isinstance(item, View) else item for item in indices.arrays]
    for dimension, array, extent in zip(indices.dimensions, arrays, indices.extents, strict=True):
        check_array(context, view, dimension, array, extent, indices.ignored, operation)
    arrays = [in_memory(context, array) for array in arrays]
    end = indices.position + len(indices.shape)
    spots = Spots(context, view) if view.hangs else None
    starts = [] if spots is None else spots.operands

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        function = builder.function
        rest = [*index[: indices.position], *index[end:]]
        offset = function.linear_index(rest, view.strides)
        ignored: ir.Value | None = None
        picked: list[Index] = []
        for array, stride in zip(operands[len(starts) :], indices.strides, strict=True):
            place = broadcast_index(index[indices.position : end], array.shape)
            position = widen_index(function, array.element(builder, place), array.dtype)
            picked.append(position)
            offset = function.add(offset, function.multiply(position, stride))
            if indices.ignored is not None:
                skipped = function.builder.icmp_signed(
                    "==", position, ir.Constant(i64, indices.ignored)
                )
                ignored = skipped if ignored is None else function.builder.or_(ignored, skipped)
        if spots is not None:
            spot = spots.at(function, operands[: len(starts)], None, [*rest, *picked])
            offset = offset_of(function, spot, offset)
        if ignored is None:
            return function.index(offset)
        return function.builder.select(ignored, ir.Constant(i64, NOWHERE), function.index(offset))

    offsets = Expression(view.shape, OFFSET, (*starts, *arrays), emit)
    has_ignored = indices.ignored is not None
    return _with_offsets(view, context.settle(offsets), has_ignored, view.hangs)


def _strided_offsets(context: Context, view: View) -> Value:
    spots = Spots(context, view) if view.hangs else None
    strides = view.strides

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        offset = builder.function.index(builder.function.linear_index(index, strides))
        if spots is None:
            return offset
        spot = spots.at(builder.function, operands, None, index)
        return offset_of(builder.function, spot, offset)

    starts = () if spots is None else tuple(spots.operands)
    return Expression(view.shape, OFFSET, starts, emit, is_cheap=True)


def _with_offsets(
    view: View, offsets: Value, has_ignored: bool = False, hangs: bool = False
) -> View:
    ignored = NOWHERE if has_ignored else None
    indices = IndexArrays(0, offsets.shape, (offsets,), (1,), (0,), (ANY_OFFSET,), ignored, hangs)
    view = dataclasses.replace(view, extents=(), strides=(), indices=indices)
    return dataclasses.replace(view, room=None, overhang=None, origin=None)


def _offsets(view: View) -> tuple[Value, bool, bool]:
    """The table of a view, and whether something in it is ignored, or lies in the padding."""
    assert view.indices is not None
    [offsets] = view.indices.arrays
    return offsets, view.indices.ignored is not None, view.indices.hangs


def in_memory(context: Context, value: Value) -> Value:
    """The value in a form that can be read at any index: vectors can not."""
    return context.materialise(value) if isinstance(value, Packed) and value.size > 1 else value


def reshaped(context: Context, view: View, shape: Sequence[int], operation: str) -> View:
    """The view under another shape."""
    whole = scattered(context, view, operation)
    offsets, *marks = _offsets(whole)
    return _with_offsets(whole, views.reshape(context, offsets, shape), *marks)


def transposed(context: Context, view: View, permutation: Sequence[int], operation: str) -> View:
    """The view with its dimensions in another order."""
    whole = scattered(context, view, operation)
    offsets, *marks = _offsets(whole)
    turned = views.take_view(context, offsets, views.transposed(offsets.shape, permutation))
    return _with_offsets(whole, turned, *marks)


def split_elements(
    context: Context, view: View, dimension: int, dtype: Any, operation: str
) -> View:
    """The view with each element split into narrower ones, lowest first, along a dimension."""
    whole = scattered(context, view, operation)
    offsets, *marks = _offsets(whole)
    itemsize = np.dtype(dtype).itemsize
    parts = np.dtype(view.dtype).itemsize // itemsize
    has_ignored, hangs = marks
    if has_ignored:
        raise NotImplementedError(
            f"{context.describe()}: bitcast of rows of {view.ref.name!r} that an index may ignore"
        )
    shape = list(offsets.shape)
    shape[dimension] *= parts

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        function = builder.function
        source = list(index)
        part = function.remainder(source[dimension], parts)
        source[dimension] = function.divide(source[dimension], parts)
        start = operands[0].element(builder, source)
        place = function.index(function.add(start, function.multiply(part, itemsize)))
        if not hangs:
            return place
        # The parts of what lies in the padding lie there as one element.
        is_in_padding = function.builder.icmp_signed("<", start, ir.Constant(i64, 0))
        return function.builder.select(is_in_padding, start, place)

    offsets = Expression(tuple(shape), OFFSET, (in_memory(context, offsets),), emit)
    part = _with_offsets(whole, offsets, hangs=hangs)
    return dataclasses.replace(part, dtype=np.dtype(dtype))


def indexed(
    context: Context, view: View, indexer: Any, positions: Sequence[Any], operation: str
) -> View:
    """The view indexed. `positions` are the indexer's indices: slices as they are, integers as
    Index, arrays as Values.
    """
    whole = scattered(context, view, operation)
    offsets, *marks = _offsets(whole)
    first: list[Index] = []
    shape: list[int] = []
    steps: list[tuple[int, int] | None] = []
    arrays: list[tuple[int, Value]] = []
    for dimension, index in enumerate(positions):
        extent = offsets.shape[dimension]
        if isinstance(index, _jax.Slice):
            start, size, step = index.start, index.size, index.stride
            check_slice(context, whole, dimension, start, size, step, extent, operation)
        elif isinstance(index, Value):
            check_array(context, whole, dimension, index, extent, None, operation)
            arrays.append((len(shape), index))
            start, size, step = 0, extent, 1
        else:
            check_slice(context, whole, dimension, index, 1, 1, extent, operation)
            first.append(index)
            continue
        if not isinstance(size, int):
            raise NotImplementedError(
                f"{context.describe()}: a part of {view.ref.name!r} that no strides describe, "
                "indexed by a slice whose size is known only at run time"
            )
        first.append(start)
        shape.append(size)
        steps.append((dimension, step))
    part = views.View(tuple(shape), tuple(first), tuple(steps))
    offsets = views.take_view(context, offsets, part)
    if arrays:
        together = _stand_together(indexer)
        offsets = _picked(context, offsets, arrays, together)
    return _with_offsets(whole, offsets, *marks)


def _stand_together(indexer: Any) -> bool:
    kinds = [not isinstance(index, _jax.Slice) for index in indexer.indices]
    first = kinds.index(True)
    return all(kinds[first : first + sum(kinds)])


def _picked(
    context: Context, offsets: Value, arrays: Sequence[tuple[int, Value]], together: bool
) -> Value:
    """The elements of a table at arrays of positions along some of its dimensions."""
    dimensions = [dimension for dimension, _ in arrays]
    common = np.broadcast_shapes(*(array.shape for _, array in arrays))
    others = [n for n in range(len(offsets.shape)) if n not in dimensions]
    position = dimensions[0] if together else 0
    rest = [offsets.shape[dimension] for dimension in others]
    shape = (*rest[:position], *common, *rest[position:])
    end = position + len(common)
    operands = [in_memory(context, item) for item in (offsets, *(array for _, array in arrays))]

    def emit(
        builder: ElementBuilder, index: Sequence[Index], inside: tuple[Value, ...]
    ) -> ir.Value:
        table, *chosen = inside
        source: dict[int, Index] = dict(zip(others, [*index[:position], *index[end:]], strict=True))
        for dimension, array in zip(dimensions, chosen, strict=True):
            place = broadcast_index(index[position:end], array.shape)
            register = array.element(builder, place)
            source[dimension] = widen_index(builder.function, register, array.dtype)
        return table.element(builder, [source[n] for n in range(len(table.shape))])

    return context.settle(Expression(shape, OFFSET, tuple(operands), emit))
