"""What the transforms of a Ref select: indexing, transposing, reshaping, other dtypes."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu_sc as plsc
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.access import read
from cokernel.compiler.bounds import check_array, check_slice
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i64
from cokernel.compiler.function import Index
from cokernel.compiler.refs import AnyRef, IndexArrays, View, root_of
from cokernel.compiler.values import Value, row_major


def resolve(
    context: Context,
    ref: Any,
    transforms: Sequence[Any],
    operation: str,
    *,
    at: ir.Value | None = None,
    is_dma: bool = False,
) -> View:
    """What `transforms` select of a Ref, with every dynamic index checked. `at` is the base address
    of the instance, this core's own if None. With `is_dma` arrays of indices are neither read nor
    checked here.
    """
    ref, inner = root_of(ref)
    transforms = (*inner, *transforms)
    strides = tuple(stride * ref.itemsize for stride in row_major(ref.shape))
    address = ref.address(context) if at is None else at
    view = View(ref, address, ref.dtype, ref.shape, strides)
    for transform in transforms:
        view = _apply(context, view, transform, operation, is_dma)
    return view


def _apply(context: Context, view: View, transform: Any, operation: str, is_dma: bool) -> View:
    match transform:
        case _jax.NDIndexer():
            return _index(context, view, transform, operation, is_dma)
        case _jax.TransposeTransform(permutation=permutation) if view.indices is None:
            return dataclasses.replace(
                view,
                extents=tuple(view.extents[axis] for axis in permutation),
                strides=tuple(view.strides[axis] for axis in permutation),
            )
        case _jax.ReshapeTransform(shape=shape) if view.indices is None:
            return _reshape(context, view, shape)
        case _jax.BitcastTransform(dtype=dtype) if view.indices is None:
            return _bitcast(context, view, dtype)
        case _jax.SharedMemRefSliceTransform() if view.indices is None:
            return _subcore_slice(context, view)
        case _jax.MemorySpaceCastTransform() | _jax.AccessAssumptionTransform():
            return view
        case _:
            raise NotImplementedError(
                f"{context.describe()}: {type(transform).__name__} of {view.ref.name!r} is not "
                "supported here"
            )


def _reshape(context: Context, view: View, shape: Sequence[int]) -> View:
    itemsize = dtypes.itemsize(view.dtype)
    dense = tuple(stride * itemsize for stride in row_major(view.shape))
    if any(
        extent != 1 and stride != expected
        for extent, stride, expected in zip(view.shape, view.strides, dense, strict=True)
    ):
        raise NotImplementedError(
            f"{context.describe()}: reshape of a part of {view.ref.name!r} that is not contiguous"
        )
    return dataclasses.replace(
        view, extents=tuple(shape), strides=tuple(stride * itemsize for stride in row_major(shape))
    )


def _bitcast(context: Context, view: View, dtype: Any) -> View:
    old, new = dtypes.itemsize(view.dtype), dtypes.itemsize(dtype)
    if old == new:
        return dataclasses.replace(view, dtype=np.dtype(dtype))
    # Pallas packs along the second minor dimension, which in row-major memory is contiguous only if
    # the minor one is 1 or absent.
    if len(view.shape) != 1 or view.strides[0] != old:
        raise NotImplementedError(
            f"{context.describe()}: bitcast of {view.ref.name!r} from {view.dtype} to {dtype} "
            "packs elements that are not neighbours in memory"
        )
    return dataclasses.replace(
        view, dtype=np.dtype(dtype), extents=(view.shape[0] * old // new,), strides=(new,)
    )


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
    *_, minor = view.shape
    part = minor // subcores_of_chip()
    subcore = function.builder.sext(context.axis_coordinate(mesh.subcore_axis_name), i64)
    offset = function.multiply(subcore, part * view.strides[-1])
    return dataclasses.replace(
        view, address=function.advance(view.address, offset), extents=(*view.extents[:-1], part)
    )


def _index(
    context: Context, view: View, indexer: Any, operation: str, is_dma: bool = False
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
    for dimension, (index, extent, stride) in enumerate(
        zip(indexer.indices, view.extents, view.strides, strict=True)
    ):
        if isinstance(index, _jax.Slice):
            start = _as_index(context, index.start)
            size = _as_index(context, index.size)
            check_slice(context, view, dimension, start, size, index.stride, extent, operation)
            offset = function.add(offset, function.multiply(start, stride))
            extents.append(size)
            strides.append(stride * index.stride)
            continue
        if isinstance(index, _jax.Indices):
            ignored, index = index.ignored_value, index.values
        positions.append(len(extents))
        if isinstance(index, AnyRef):
            index_view = resolve(context, index, (), "read")
            index = index_view if is_dma else read(context, index_view)
        elif isinstance(index, Value | int) and not getattr(index, "shape", ()):
            start = _as_index(context, index)
            check_slice(context, view, dimension, start, 1, 1, extent, operation)
            offset = function.add(offset, function.multiply(start, stride))
            continue
        arrays.append(index)
        array_strides.append(stride)
        array_extents.append(extent)
        array_dimensions.append(dimension)
    address = function.advance(view.address, offset)
    if not arrays:
        return dataclasses.replace(
            view, address=address, extents=tuple(extents), strides=tuple(strides)
        )
    shape = _broadcast_extents(arrays)
    # NumPy's rule, as JAX has it: indices that stand together leave their dimensions in place,
    # others go to the front.
    kinds = [not isinstance(index, _jax.Slice) for index in indexer.indices]
    first = kinds.index(True)
    together = all(kinds[first : first + sum(kinds)])
    position = positions[0] if together else 0
    if not is_dma:
        for array, extent in zip(arrays, array_extents, strict=True):
            check_array(context, view, array, extent, ignored, operation)
    indices = IndexArrays(
        position,
        shape,
        tuple(arrays),
        tuple(array_strides),
        tuple(array_dimensions),
        tuple(array_extents),
        ignored,
    )
    return dataclasses.replace(
        view, address=address, extents=tuple(extents), strides=tuple(strides), indices=indices
    )


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
        raise NotImplementedError(
            f"{context.describe()}: indexing {view.ref.name!r} again in a dimension that an "
            "array has indexed"
        )
    plain = dataclasses.replace(view, indices=None)
    inner = _jax.NDIndexer(rest, tuple(view.extents), ())
    return dataclasses.replace(_index(context, plain, inner, operation), indices=indices)


def _as_index(context: Context, index: Any) -> Index:
    # An index that was known when the program was traced may come as an array.
    is_known = isinstance(index, int | np.integer | jax.Array)
    return int(index) if is_known else context.index(index)
