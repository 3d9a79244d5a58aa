"""What the transforms of a Ref select: indexing, transposing, reshaping, other dtypes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu_sc as plsc
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, padding, scattered, views
from cokernel.compiler.access import read
from cokernel.compiler.bounds import check_array, check_slice
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i64, pointer
from cokernel.compiler.function import FunctionBuilder, Index, is_same_index
from cokernel.compiler.probes import Access, probe
from cokernel.compiler.refs import (
    POINTER_BYTES,
    AnyRef,
    IndexArrays,
    Origin,
    Overhang,
    Pieces,
    RefValue,
    View,
    root_of,
)
from cokernel.compiler.values import Value, row_major


def resolve(
    context: Context,
    ref: Any,
    transforms: Sequence[Any],
    operation: str,
    *,
    access: Access,
    at: ir.Value | None = None,
    is_dma: bool = False,
    clips: bool = False,
) -> View:
    """What `transforms` select of a Ref, with every dynamic index checked. `access` says what the
    rule goes on to do with all of it; checked mode reports that here. `at` is the base address
    of the instance, this core's own if None. With `is_dma` arrays of indices are neither read nor
    checked here. With `clips` a slice that begins inside and ends outside is cut off.
    """
    ref, inner = root_of(ref)
    transforms = (*inner, *transforms)
    strides = tuple(stride * ref.itemsize for stride in row_major(ref.shape))
    address = ref.address(context) if at is None else at
    view = View(ref, address, ref.dtype, ref.shape, strides, start=address)
    if ref.borrowed is not None:
        view, transforms = _borrowed(context, view, transforms, operation)
    elif not clips:
        room = padding.padded_shape(context, ref)
        rank = len(ref.shape)
        origin = None if room is None else Origin((0,) * rank, tuple(range(rank)))
        view = dataclasses.replace(view, room=room, origin=origin)
    for transform in transforms:
        view = _apply(context, view, transform, operation, is_dma, clips)
    if view.indices is not None and view.hangs and not is_dma:
        view = scattered.scattered(context, view, operation)
    probe(context, view, access, operation)
    return view


def slot_address(context: Context, ref: RefValue, slot: Value | None, operation: str) -> ir.Value:
    """Where a Ref that is borrowed or in place has the address of a slot, or the only address."""
    function = context.function
    assert ref.borrowed is not None
    address = ref.address(context)
    if slot is None:
        return address
    strides = (POINTER_BYTES, *ref.borrowed)
    table = View(ref, address, ref.dtype, ref.shape, strides)
    index = _as_index(context, slot)
    check_slice(context, table, 0, index, 1, 1, ref.shape[0], operation)
    if ref.is_in_place:
        return address
    return function.advance(address, function.multiply(index, POINTER_BYTES))


def _borrowed(
    context: Context, view: View, transforms: Sequence[Any], operation: str
) -> tuple[View, Sequence[Any]]:
    """The slot of a borrowed Ref that the first transform picks, and what is left to apply."""
    strides = view.ref.borrowed
    assert strides is not None
    if not view.ref.has_slots:
        address = context.builder.load(
            slot_address(context, view.ref, None, operation), typ=pointer
        )
        view = dataclasses.replace(view, address=address, strides=strides, start=None)
        return view, transforms
    first, *rest = transforms
    slot, *indices = first.indices
    address = context.builder.load(slot_address(context, view.ref, slot, operation), typ=pointer)
    shape = view.ref.shape[1:]
    view = dataclasses.replace(view, address=address, extents=shape, strides=strides, start=None)
    return view, [_jax.NDIndexer(tuple(indices), shape, first.int_indexer_shape), *rest]


def _apply(
    context: Context, view: View, transform: Any, operation: str, is_dma: bool, clips: bool
) -> View:
    match transform:
        case _jax.NDIndexer():
            return _index(context, view, transform, operation, is_dma, clips)
        case _jax.TransposeTransform(permutation=permutation):
            return _transpose(context, view, permutation, operation)
        case _jax.ReshapeTransform(shape=shape):
            return _reshape(context, view, shape, operation)
        case _jax.BitcastTransform(dtype=dtype):
            return _bitcast(context, view, dtype, operation)
        case _jax.SharedMemRefSliceTransform() if view.indices is None:
            return _subcore_slice(context, view)
        case _jax.MemorySpaceCastTransform() | _jax.AccessAssumptionTransform():
            return view
        case _:
            raise NotImplementedError(
                f"{context.describe()}: {type(transform).__name__} of {view.ref.name!r} is not "
                "supported here"
            )


def _transpose(context: Context, view: View, permutation: Sequence[int], operation: str) -> View:
    if view.indices is not None:
        return scattered.transposed(context, view, permutation, operation)
    room, overhang, origin = view.room, view.overhang, view.origin
    if origin is not None:
        axes = tuple(origin.axes[axis] for axis in permutation)
        origin = dataclasses.replace(origin, axes=axes)
    if room is not None:
        room = tuple(room[axis] for axis in permutation)
    if overhang is not None:
        inside = tuple(overhang.inside[axis] for axis in permutation)
        overhang = dataclasses.replace(overhang, inside=inside)
    return dataclasses.replace(
        view,
        extents=tuple(view.extents[axis] for axis in permutation),
        strides=tuple(view.strides[axis] for axis in permutation),
        room=room,
        overhang=overhang,
        origin=origin,
    )


def _reshape(context: Context, view: View, shape: Sequence[int], operation: str) -> View:
    view = _without_room(view)
    if view.indices is None and not view.hangs and 0 not in shape:
        strides = views.reshaped_strides(view.shape, view.strides, shape)
        if strides is not None:
            return dataclasses.replace(view, extents=tuple(shape), strides=strides)
    return scattered.reshaped(context, view, shape, operation)


def _bitcast(context: Context, view: View, dtype: Any, operation: str) -> View:
    """Pallas packs along the second minor dimension: the parts of a wide element lie under each
    other. Of a vector they are neighbours.
    """
    dtype = np.dtype(dtype)
    old, new = dtypes.bit_width(view.dtype), dtypes.bit_width(dtype)
    if old == new and view.pieces is None:
        return dataclasses.replace(view, dtype=dtype)
    view = _without_room(view)
    if min(old, new) < 8 or view.pieces is not None:
        raise NotImplementedError(
            f"{context.describe()}: bitcast of {view.ref.name!r} from {view.dtype} to {dtype}"
        )
    if view.hangs and new < old:
        dimension = max(len(view.shape) - 2, 0)
        return scattered.split_elements(context, view, dimension, dtype, operation)
    if view.indices is not None and len(view.extents) - view.indices.position < 2:
        if new > old:
            raise NotImplementedError(
                f"{context.describe()}: bitcast of {view.ref.name!r}, indexed by an array, to the "
                f"wider dtype {dtype}"
            )
        rank = len(view.shape)
        return scattered.split_elements(context, view, max(rank - 2, 0), dtype, operation)
    dimension = max(len(view.extents) - 2, 0)
    extents, strides = list(view.extents), list(view.strides)
    extent, stride = extents[dimension], strides[dimension]
    assert isinstance(extent, int)
    extents[dimension] = extent * old // new
    axis: int | None = None
    if view.hangs:
        if view.indices is not None:
            raise padding.refused(context, view, f"{operation} under the wider dtype {dtype}")
        assert view.origin is not None
        axis = view.origin.axes[dimension]
    elif stride == old // 8:
        # The elements of the dimension are neighbours, and stay so.
        strides[dimension] = new // 8
        return dataclasses.replace(
            view, dtype=dtype, extents=tuple(extents), strides=tuple(strides)
        )
    if new < old:
        rank = len(view.shape)
        return scattered.split_elements(context, view, max(rank - 2, 0), dtype, operation)
    strides[dimension] = stride * (new // old)
    return dataclasses.replace(
        view,
        dtype=dtype,
        extents=tuple(extents),
        strides=tuple(strides),
        pieces=Pieces(np.dtype(view.dtype), stride, axis),
        room=None,
        overhang=_overhang_of_pieces(context, view, dimension, new // old),
    )


def _overhang_of_pieces(
    context: Context, view: View, dimension: int, count: int
) -> Overhang | None:
    """How much of a view lies in its Ref once so many of its elements are one, counting those of
    which a part does.
    """
    over = view.overhang
    if over is None:
        return None
    function, inside = context.function, list(over.inside)
    inside[dimension] = function.divide(function.add(inside[dimension], count - 1), count)
    return Overhang(tuple(inside), over.is_there)


def _without_room(view: View) -> View:
    """The view, into whose padding no index leads from now on: only the Ref as it is has tiles that
    are known.
    """
    if view.hangs or view.room is None:
        return view
    return dataclasses.replace(view, room=None, origin=None)


def subcores_of_chip() -> int:
    """Among how many subcores the shared memory of a SparseCore is split."""
    return plsc.get_sparse_core_info().num_subcores


def _subcore_slice(context: Context, view: View) -> View:
    """The part of a Ref in shared memory that is this subcore's own: the minor dimension is split
    among the subcores of the chip, whether the mesh uses all of them or not.
    """
    mesh = context.program.mesh
    if not isinstance(mesh, _jax.VectorSubcoreMesh):
        raise ValueError(
            f"{context.describe()}: only a vector subcore has a part of its own in "
            f"{view.ref.name!r}, and this program runs "
            f"on {mesh}"
        )
    function = context.function
    *others, minor = view.shape
    part = minor // subcores_of_chip()
    subcore = function.builder.sext(context.axis_coordinate(mesh.subcore_axis_name), i64)
    offset = function.multiply(subcore, part * view.strides[-1])
    start = function.multiply(subcore, part)
    extents = (*others, part)
    cut = _Cut(function, view)
    for dimension, extent in enumerate(others):
        cut.slice(dimension, 0, extent, 1)
    cut.slice(len(others), start, part, 1)
    return dataclasses.replace(
        view,
        address=function.advance(view.address, offset),
        extents=extents,
        room=cut.room,
        overhang=cut.overhang(extents),
        origin=cut.origin,
    )


def _index(
    context: Context,
    view: View,
    indexer: Any,
    operation: str,
    is_dma: bool = False,
    clips: bool = False,
) -> View:
    if view.indices is not None:
        return _index_after_arrays(context, view, indexer, operation)
    function = context.function
    extents: list[Index] = []
    strides: list[int] = []
    offset: Index = 0
    arrays: list[Any] = []
    array_strides: list[int] = []
    array_extents: list[Index] = []
    array_dimensions: list[int] = []
    ignored: int | None = None
    positions: list[int] = []
    cut = _Cut(function, view)
    for dimension, (index, extent, stride) in enumerate(
        zip(indexer.indices, view.extents, view.strides, strict=True)
    ):
        limit = view.limit(dimension)
        if isinstance(index, _jax.Slice):
            start = _as_index(context, index.start)
            size = _as_index(context, index.size)
            if clips and index.stride == 1:
                size = _clipped(context, view, dimension, start, size, extent, operation)
            else:
                check_slice(context, view, dimension, start, size, index.stride, limit, operation)
            cut.slice(dimension, start, size, index.stride)
            offset = function.add(offset, function.multiply(start, stride))
            extents.append(size)
            strides.append(stride * index.stride)
            continue
        if isinstance(index, _jax.Indices):
            ignored, index = index.ignored_value, index.values
        positions.append(len(extents))
        if isinstance(index, AnyRef):
            access = Access.NONE if is_dma else Access.READ
            index_view = resolve(context, index, (), "read", access=access)
            if is_dma and (index_view.indices is not None or index_view.pieces is not None):
                raise NotImplementedError(
                    f"{context.describe()}: {operation} with indices that lie apart in "
                    f"{index_view.ref.name!r}, where an array has picked them or a bitcast joins "
                    "them; read them first, and index with their values"
                )
            index = index_view if is_dma else read(context, index_view)
        elif isinstance(index, Value | int) and not getattr(index, "shape", ()):
            start = _as_index(context, index)
            check_slice(context, view, dimension, start, 1, 1, limit, operation)
            cut.position(dimension, start)
            offset = function.add(offset, function.multiply(start, stride))
            continue
        arrays.append(index)
        array_strides.append(stride)
        array_extents.append(limit)
        array_dimensions.append(dimension)
        cut.array(dimension)
    address = function.advance(view.address, offset)
    if not arrays:
        return dataclasses.replace(
            view,
            address=address,
            extents=tuple(extents),
            strides=tuple(strides),
            room=cut.room,
            overhang=cut.overhang(extents),
            origin=cut.origin,
        )
    shape = _broadcast_extents(arrays)
    # NumPy's rule, as JAX has it: indices that stand together leave their dimensions in place,
    # others go to the front.
    kinds = [not isinstance(index, _jax.Slice) for index in indexer.indices]
    first = kinds.index(True)
    together = all(kinds[first : first + sum(kinds)])
    position = positions[0] if together else 0
    if not is_dma:
        for dimension, array, extent in zip(array_dimensions, arrays, array_extents, strict=True):
            check_array(context, view, dimension, array, extent, ignored, operation)
    indices = IndexArrays(
        position,
        shape,
        tuple(arrays),
        tuple(array_strides),
        tuple(array_dimensions),
        tuple(array_extents),
        ignored,
        *cut.arrays,
    )
    return dataclasses.replace(
        view,
        address=address,
        extents=tuple(extents),
        strides=tuple(strides),
        indices=indices,
        room=cut.room,
        overhang=cut.overhang(extents),
        origin=cut.origin,
    )


class _Cut:
    """What an indexer leaves of the room and the overhang of a view."""

    def __init__(self, function: FunctionBuilder, view: View):
        self.function = function
        self.view = view
        self.is_there: Index = 1 if view.overhang is None else view.overhang.is_there
        self._inside: list[Index] = []
        self._room: list[Index] = []
        self._starts = [] if view.origin is None else list(view.origin.starts)
        self._axes: list[int] = []
        self._picked: list[tuple[int, int]] = []
        self._is_picked_beyond = False

    def _end(self, dimension: int) -> Index:
        """Where it ends in the Ref."""
        view = self.view
        over = view.overhang
        return view.extents[dimension] if over is None else over.inside[dimension]

    def slice(self, dimension: int, start: Index, size: Index, step: int) -> None:
        """Notes a slice, which has been checked."""
        self._move(dimension, start, stays=True)
        end, limit = self._end(dimension), self.view.limit(dimension)
        is_all = is_same_index(size, self.view.extents[dimension])
        is_whole = isinstance(start, int) and start == 0 and step == 1 and is_all
        self._room.append(limit if is_whole else size)
        if is_same_index(end, limit):
            self._inside.append(size)
        else:
            self._inside.append(padding.inside(self.function, start, size, step, end))

    def position(self, dimension: int, start: Index) -> None:
        """Notes an index that is no slice, and has been checked."""
        self._move(dimension, start, stays=False)
        end, limit = self._end(dimension), self.view.limit(dimension)
        if not is_same_index(end, limit):
            is_inside = padding.is_inside(self.function, start, end)
            self.is_there = self.function.multiply(self.is_there, is_inside)

    def array(self, dimension: int) -> None:
        """Notes an array of indices, which is checked or will be."""
        if self.view.origin is None:
            return
        self._picked.append((self.view.origin.axes[dimension], padding.step(self.view, dimension)))
        if not is_same_index(self._end(dimension), self.view.limit(dimension)):
            self._is_picked_beyond = True

    @property
    def arrays(self) -> tuple[bool, tuple[int, ...], tuple[int, ...]]:
        """What IndexArrays tell of the padding."""
        axes, steps = (tuple(pair[n] for pair in self._picked) for n in range(2))
        return self._is_picked_beyond, axes, steps

    def _move(self, dimension: int, start: Index, *, stays: bool) -> None:
        origin = self.view.origin
        if origin is None:
            return
        axis, function = origin.axes[dimension], self.function
        distance = function.multiply(start, padding.step(self.view, dimension))
        self._starts[axis] = function.add(self._starts[axis], distance)
        if stays:
            self._axes.append(axis)

    @property
    def origin(self) -> Origin | None:
        """Where what is left begins in the Ref."""
        if self.view.origin is None:
            return None
        return Origin(tuple(self._starts), tuple(self._axes))

    @property
    def room(self) -> tuple[Index, ...] | None:
        """Up to where the dimensions that are left may be indexed."""
        return None if self.view.room is None else tuple(self._room)

    def overhang(self, extents: Sequence[Index]) -> Overhang | None:
        """What is left in the padding, if anything may be."""
        is_there = isinstance(self.is_there, int) and self.is_there == 1
        pairs = zip(self._inside, extents, strict=True)
        if is_there and all(is_same_index(one, other) for one, other in pairs):
            return None
        return Overhang(tuple(self._inside), self.is_there)


def _clipped(
    context: Context,
    view: View,
    dimension: int,
    start: Index,
    size: Index,
    extent: Index,
    operation: str,
) -> Index:
    """The size of a slice without what lies past the end. Where it begins is checked."""
    function = context.function
    if isinstance(size, int) and isinstance(extent, int):
        if isinstance(start, int) and 0 <= start < extent:
            return min(size, extent - start)
        if extent % size == 0:
            # Only a block among equal ones, none of which hangs over.
            check_slice(context, view, dimension, start, size, 1, extent, operation)
            return size
    check_slice(context, view, dimension, start, 1, 1, extent, operation)
    return smaller(function, size, function.subtract(extent, start))


def smaller(function: FunctionBuilder, one: Index, other: Index) -> Index:
    """The smaller of two numbers."""
    if isinstance(one, int) and isinstance(other, int):
        return min(one, other)
    return function.intrinsic("llvm.smin", i64, [function.index(one), function.index(other)])


def _broadcast_extents(arrays: Sequence[Any]) -> tuple[Index, ...]:
    """The common shape of index arrays. A lone one may have dynamic extents."""
    if len(arrays) == 1 and isinstance(arrays[0], View):
        return arrays[0].extents
    return tuple(np.broadcast_shapes(*(array.shape for array in arrays)))


def _index_after_arrays(context: Context, view: View, indexer: Any, operation: str) -> View:
    """Indexing of a view that index arrays have made: of the strided dimensions only."""
    indices = view.indices
    assert indices is not None
    rank = len(indices.shape)
    picked = indexer.indices[indices.position : indices.position + rank]
    whole = all(
        isinstance(index, _jax.Slice)
        and index.start == 0
        and index.stride == 1
        and index.size == extent
        for index, extent in zip(picked, indices.shape, strict=True)
    )
    rest = (*indexer.indices[: indices.position], *indexer.indices[indices.position + rank :])
    if not whole or not all(isinstance(index, _jax.Slice) for index in rest):
        positions = [_position(context, index) for index in indexer.indices]
        view = _with_room(view)
        return scattered.indexed(context, view, indexer, positions, operation)
    plain = dataclasses.replace(view, indices=None)
    inner = _jax.NDIndexer(rest, tuple(view.extents), ())
    return dataclasses.replace(_index(context, plain, inner, operation), indices=indices)


def _with_room(view: View) -> View:
    """A view that also shows what an index into it may lead to in the padding."""
    if view.room is None or all(map(is_same_index, view.room, view.extents)):
        return view
    known = Overhang(view.extents, 1) if view.overhang is None else view.overhang
    return dataclasses.replace(view, extents=view.room, overhang=known)


def _position(context: Context, index: Any) -> Any:
    """An index as a slice of Index, an Index, or an array of indices."""
    if isinstance(index, _jax.Slice):
        start, size = (_as_index(context, item) for item in (index.start, index.size))
        return _jax.Slice(start, size, index.stride)
    if isinstance(index, _jax.Indices):
        raise NotImplementedError(
            f"{context.describe()}: Indices in a dimension of a Ref that an array has indexed"
        )
    if isinstance(index, AnyRef):
        return read(context, resolve(context, index, (), "read", access=Access.READ))
    if isinstance(index, Value) and index.shape:
        return index
    return _as_index(context, index)


def _as_index(context: Context, index: Any) -> Index:
    # An index that was known when the program was traced may come as an array.
    is_known = isinstance(index, int | np.integer | jax.Array)
    return int(index) if is_known else context.index(index)
