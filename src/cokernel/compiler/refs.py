"""Refs while a program is compiled: where each lives, what its transforms select, and the checks
that keep it in bounds.
"""

import dataclasses
import enum
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.pallas import tpu_sc as plsc
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32, i64, pointer, void
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Packed,
    Scalar,
    Value,
    is_small,
    load_element,
    make_packed,
    pack,
    row_major,
    store_element,
)
from cokernel.meshes import shared_memory_group


class Place(enum.Enum):
    """Whose memory a Ref lies in."""

    # An operand or result of the kernel: one for all cores of the launch.
    OPERAND = "operand"
    # An operand or result with one instance per core of a mesh.
    INSTANCES = "instances"
    # The private block of each core of one program.
    PRIVATE = "private"
    # The block shared by the cores of a SparseCore, or by a CoreMesh.
    SHARED = "shared"
    # The block shared by all cores of the launch.
    DEVICE = "device"


@dataclasses.dataclass(frozen=True, eq=False)
class RefValue:
    """A whole Ref. Two of them are the same memory exactly if their `memory` is the same object."""

    name: str
    shape: tuple[int, ...]
    dtype: Any
    space: str
    place: Place
    # The byte offset in its block, or the number of the operand.
    offset: int
    # The program whose cores own the instances, for PRIVATE and INSTANCES.
    program: int | None = None
    # The mesh whose cores own the instances, or for SHARED the mesh it is tied to, if any. It may
    # have no program in this kernel (INSTANCES only).
    mesh: Any = None
    # What keeps a scoped allocation reserved.
    owner: object = None
    # The input that this output overwrites.
    overwrites: "RefValue | None" = None

    @property
    def memory(self) -> "RefValue":
        """The Ref that stands for this memory: an output that overwrites an input is that input."""
        return self if self.overwrites is None else self.overwrites

    @property
    def itemsize(self) -> int:
        return dtypes.itemsize(self.dtype)

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def address(self, context: Context) -> ir.Value:
        """The address of the instance that this core uses."""
        function = context.function
        if self.place is Place.SHARED:
            self._check_is_shared_with(context)
            return function.advance(function.core_field("Core.shared", pointer), self.offset)
        if self.place is Place.DEVICE:
            return function.advance(function.core_field("Core.device", pointer), self.offset)
        if self.place is Place.OPERAND:
            return context.operand_address(self.offset)
        if self.program != context.program.index:
            owner = (
                "another mesh"
                if self.program is None
                else f"program {context.kernel.program_names[self.program]!r}"
            )
            raise ValueError(
                f"{context.describe()}: {self.name!r} belongs to the cores of {owner}; "
                "name one of them with device_id to reach its instance"
            )
        if self.place is Place.PRIVATE:
            return context.private_address(self.offset)
        return self.address_on(
            context, function.builder.sext(function.core_field("Core.index", i32), i64)
        )

    def _check_is_shared_with(self, context: Context) -> None:
        mesh = context.program.mesh
        if self.mesh is not None and shared_memory_group(mesh) != shared_memory_group(self.mesh):
            raise ValueError(
                f"{context.describe()}: {self.name!r} is memory that the cores of {self.mesh} "
                f"share, and this program runs on {mesh}: put it in HBM, which all cores reach"
            )

    def address_on(self, context: Context, index: Index) -> ir.Value:
        """The address of the instance of core number `index`, row-major, of the owning mesh."""
        function = context.function
        if self.place is Place.INSTANCES:
            base = context.operand_address(self.offset)
            return function.advance(base, function.multiply(index, self.nbytes))
        if self.place is Place.PRIVATE:
            core = context.kernel.core_address(context, self.program, index)
            memory = function.load_invariant(function.field(core, "Core.memory"), pointer)
            return function.advance(memory, self.offset)
        return self.address(context)


@dataclasses.dataclass(frozen=True, eq=False)
class BoundRef(Value):
    """Part of a Ref that a jaxpr knows as a Ref: the body of a pipeline receives its blocks so."""

    ref: RefValue
    transforms: tuple[Any, ...]

    def leaves(self) -> list[ir.Value]:
        items = jax.tree.leaves(self.transforms)
        return [leaf for item in items if isinstance(item, Value) for leaf in item.leaves()]

    def rebuild(self, leaves: Iterator[ir.Value]) -> "BoundRef":
        transforms = jax.tree.map(
            lambda item: item.rebuild(leaves) if isinstance(item, Value) else item, self.transforms
        )
        return dataclasses.replace(self, transforms=transforms)


# What a rule may be given where a primitive takes a Ref.
AnyRef = RefValue | BoundRef | _jax.TransformedRef


def root_of(ref: Any) -> tuple[RefValue, tuple[Any, ...]]:
    """A Ref and the transforms on it, from either a Ref or a transformed Ref."""
    if isinstance(ref, BoundRef | _jax.TransformedRef):
        root, inner = root_of(ref.ref)
        return root, (*inner, *ref.transforms)
    return ref, ()


@dataclasses.dataclass(frozen=True, eq=False)
class IndexArrays:
    """Dimensions picked by arrays of indices: element i of the new dimensions lies at the sum of
    array[i] times stride.
    """

    # Where the new dimensions stand among those of the view, and their shape: ints, but for DMAs of
    # dynamic size.
    position: int
    shape: tuple[Index, ...]
    # Values; for a DMA, which reads and checks the indices itself, also the Views of Refs that hold
    # indices.
    arrays: tuple[Any, ...]
    # For each array the stride in bytes, the number of the dimension it indexes, and the extent of
    # that.
    strides: tuple[int, ...]
    dimensions: tuple[int, ...]
    extents: tuple[Index, ...]
    # An index with this value selects nothing (DMAs only).
    ignored: int | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class View:
    """Part of a Ref: what is left of it after its transforms. Strides are in bytes. Extents are
    ints, but for DMAs of dynamic size. Where `indices` is given, `shape` and `strides` describe the
    other dimensions only.
    """

    ref: RefValue
    address: ir.Value
    dtype: Any
    extents: tuple[Index, ...]
    strides: tuple[int, ...]
    indices: IndexArrays | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The static shape. Raises ValueError if an extent is dynamic."""
        if not all(isinstance(extent, int) for extent in self.extents):
            raise ValueError("the extents of this view are not static")
        rest = tuple(extent for extent in self.extents if isinstance(extent, int))
        if self.indices is None:
            return rest
        position = self.indices.position
        picked = tuple(extent for extent in self.indices.shape if isinstance(extent, int))
        return rest[:position] + picked + rest[position:]

    def on(self, address: ir.Value) -> "View":
        """The same part of another instance, whose Ref starts so many bytes away."""
        return dataclasses.replace(self, address=address)

    def buffer(self) -> Buffer:
        """The strided part as a buffer, index arrays left out."""
        itemsize = dtypes.itemsize(self.dtype)
        if any(stride % itemsize for stride in self.strides):
            raise NotImplementedError(
                f"a view of {self.ref.name!r} whose elements are not aligned to their own size"
            )
        shape = tuple(extent for extent in self.extents if isinstance(extent, int))
        strides = tuple(stride // itemsize for stride in self.strides)
        return Buffer(shape, np.dtype(self.dtype), self.address, strides, root=self.ref.memory)


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
            _check_slice(context, view, dimension, start, size, index.stride, extent, operation)
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
            _check_slice(context, view, dimension, start, 1, 1, extent, operation)
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
            _check_array(context, view, array, extent, ignored, operation)
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


def _check_slice(
    context: Context,
    view: View,
    dimension: int,
    start: Index,
    size: Index,
    step: int,
    extent: Index,
    operation: str,
) -> None:
    """Makes the program fail unless `size` elements from `start`, `step` apart, lie within the
    extent.
    """
    function = context.function
    if isinstance(start, int) and isinstance(size, int) and isinstance(extent, int):
        if start >= 0 and size >= 0 and (size == 0 or start + (size - 1) * step < extent):
            return
        good: ir.Value = ir.Constant(dtypes.i1, 0)
    elif not context.kernel.bounds_checks:
        return
    elif isinstance(size, int) and isinstance(extent, int):
        last = extent - ((size - 1) * step + 1 if size else 0)
        if last < 0:
            good = ir.Constant(dtypes.i1, 0)
        else:
            good = function.builder.icmp_unsigned("<=", function.index(start), function.index(last))
    else:
        # With a dynamic size each part is checked on its own, so that no sum can overflow.
        builder = function.builder
        used = (
            function.add(function.multiply(function.subtract(size, 1), step), 1)
            if step != 1
            else size
        )
        fits = builder.icmp_signed("<=", function.index(used), function.index(extent))
        known = builder.icmp_signed(">=", function.index(size), function.index(0))
        room = builder.sub(function.index(extent), function.index(used))
        inside = builder.icmp_unsigned("<=", function.index(start), room)
        good = builder.and_(builder.and_(fits, known), inside)

    def record() -> None:
        site = context.site(
            operation, view.ref.name, shape=str(tuple(view.ref.shape)), rank=len(view.extents)
        )
        span = function.add(function.multiply(function.subtract(size, 1), step), 1)
        arguments = [function.index(start), function.index(span), function.index(extent)]
        function.call_external(
            "cokernel_fail_index",
            void,
            [function.core, site, ir.Constant(i32, dimension), *arguments],
        )

    function.check(good, record)


def _check_array(
    context: Context, view: View, array: Value, extent: Index, ignored: int | None, operation: str
) -> None:
    """Makes the program fail if an element of an index array lies outside the extent."""
    if not context.kernel.bounds_checks or array.size == 0:
        return
    site = context.site(
        operation, view.ref.name, shape=str(tuple(view.ref.shape)), rank=len(view.extents)
    )

    def check_one(function: FunctionBuilder, register: ir.Value) -> None:
        wide = _widen_index(function, register, array.dtype)
        good = function.builder.icmp_unsigned("<", wide, function.index(extent))
        if ignored is not None:
            good = function.builder.or_(
                good, function.builder.icmp_signed("==", wide, function.index(ignored))
            )

        def record() -> None:
            arguments = [wide, function.index(1), function.index(extent)]
            function.call_external(
                "cokernel_fail_index", void, [function.core, site, ir.Constant(i32, 0), *arguments]
            )

        function.check(good, record)

    if isinstance(array, Scalar | Packed) and array.size > 1:
        _check_packed(context, array, extent, ignored, check_one)
        return
    if array.size == 1:
        return check_one(context.function, context.scalar(array))
    buffer = context.materialise(array)
    inner = context.function.sibling("check_indices", [pointer])
    inside = dataclasses.replace(buffer, address=inner.parameters[0])
    with inner.nest(buffer.shape) as index:
        check_one(inner, inside.element(ElementBuilder(inner), index))
    inner.finish()
    context.call(inner, [buffer.address])


def _check_packed(
    context: Context, array: Value, extent: Index, ignored: int | None, check_one: Any
) -> None:
    """One comparison of all lanes; which lane was bad is looked for only once one is."""
    function = context.function
    builder = ElementBuilder(function, array.size)
    register = pack(function, array)
    limit = function.index(extent)
    wide_type = builder.type(i64)
    signed = dtypes.kind(array.dtype) is dtypes.Kind.SIGNED
    extend = function.builder.sext if signed else function.builder.zext
    wide = register if register.type == wide_type else extend(register, wide_type)
    good = function.builder.icmp_unsigned("<", wide, builder.splat(limit))
    if ignored is not None:
        skipped = function.builder.icmp_signed("==", wide, builder.constant(i64, ignored))
        good = function.builder.or_(good, skipped)
    all_good = function.intrinsic(
        "llvm.vector.reduce.and", dtypes.i1, [good], overloads=[good.type]
    )
    bad = function.function.append_basic_block("bad_lane")
    fine = function.function.append_basic_block("lanes_checked")
    function.builder.cbranch(all_good, fine, bad).set_weights([1 << 20, 1])
    function.builder.position_at_end(bad)
    for lane in range(array.size):
        check_one(function, function.builder.extract_element(register, ir.Constant(i32, lane)))
    function.builder.branch(fine)
    function.builder.position_at_end(fine)


def _widen_index(function: FunctionBuilder, register: ir.Value, dtype: Any) -> ir.Value:
    if register.type == i64:
        return register
    if dtypes.kind(dtype) is dtypes.Kind.SIGNED:
        return function.builder.sext(register, i64)
    return function.builder.zext(register, i64)


def read(context: Context, view: View) -> Value:
    """The contents of a view. Small ones are loaded at once; large ones stay in place until
    something would change them.
    """
    if view.indices is None:
        buffer = view.buffer()
        if not buffer.shape or is_small(buffer.shape, buffer.dtype):
            return make_packed(buffer.shape, buffer.dtype, pack(context.function, buffer))
        return buffer
    base, arrays = view.buffer(), tuple(_in_memory(context, array) for array in view.indices.arrays)
    indices = view.indices

    def emit(
        builder: ElementBuilder, index: Sequence[Index], operands: tuple[Value, ...]
    ) -> ir.Value:
        address = picked_address(builder, indices, operands[0], operands[1:], index)
        return load_element(builder.function, address, base.dtype)

    return context.settle(Expression(view.shape, base.dtype, (base, *arrays), emit))


def _in_memory(context: Context, array: Value) -> Value:
    # A lane of a vector picked by a loop counter would go through the stack each time.
    return context.materialise(array) if isinstance(array, Packed) and array.size > 8 else array


def picked_address(
    builder: ElementBuilder,
    indices: IndexArrays,
    base: Value,
    arrays: Sequence[Value],
    index: Sequence[Index],
) -> ir.Value:
    """The address of the element at an index of a view that index arrays have made."""
    assert isinstance(base, Buffer)
    function = builder.function
    end = indices.position + len(indices.shape)
    picked, rest = index[indices.position : end], [*index[: indices.position], *index[end:]]
    offset: Index = 0
    for array, stride in zip(arrays, indices.strides, strict=True):
        register = array.element(builder, broadcast_index(picked, array.shape))
        wide = _widen_index(function, register, array.dtype)
        offset = function.add(offset, function.multiply(wide, stride))
    return function.advance(base.element_address(function, rest), offset)


def broadcast_index(index: Sequence[Index], shape: Sequence[int]) -> list[Index]:
    """The index into an array of `shape` that is broadcast to a larger shape."""
    tail = index[len(index) - len(shape) :]
    return [0 if extent == 1 else position for position, extent in zip(tail, shape, strict=True)]


def write(context: Context, view: View, value: Value) -> None:
    """Stores a value of the view's shape to the view."""
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
        return (
            value.address is target.address
            and value.strides == target.strides
            and value.shape == target.shape
        )
    if isinstance(value, Expression) and value.elementwise:
        return all(_reads_in_place(operand, target) for operand in value.operands)
    return False


def accumulate(context: Context, view: View, value: Value, add: Any) -> None:
    """Adds a value to the view. `add(left, right)` sums two values of the view's dtype."""
    if view.indices is not None:
        return _write_picked(context, view, value, add=add)
    write(context, view, add(read(context, view), value))


def _write_picked(context: Context, view: View, value: Value, add: Any) -> None:
    """Stores through index arrays, element by element in order, so that of equal indices the last
    one wins and sums add up.
    """
    indices = view.indices
    assert indices is not None
    base = view.buffer()
    arrays = [_in_memory(context, array) for array in indices.arrays]
    if view.ref.memory in value.roots():
        value = context.copy(value)
    value = _in_memory(context, value)
    operands: list[Value] = [base, value, *arrays]
    leaves = [leaf for operand in operands for leaf in operand.leaves()]
    inner = context.function.sibling("scatter", [leaf.type for leaf in leaves])
    incoming = iter(inner.parameters)
    base_in, value_in, *arrays_in = (operand.rebuild(incoming) for operand in operands)
    with context.inside(inner), inner.nest(view.shape) as index:
        builder = ElementBuilder(inner)
        address = picked_address(builder, indices, base_in, arrays_in, index)
        register = value_in.element(builder, index)
        if add is not None:
            old = make_packed((), base.dtype, load_element(inner, address, base.dtype))
            register = context.scalar(add(old, make_packed((), base.dtype, register)))
        store_element(inner, register, address, base.dtype)
    inner.finish()
    context.call(inner, leaves)
