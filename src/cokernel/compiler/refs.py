"""Refs while a program is compiled: where each lives, and what its transforms leave of it."""

import dataclasses
import enum
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32, i64, pointer
from cokernel.compiler.function import Index
from cokernel.compiler.values import Buffer, Value
from cokernel.compiler.window_names import Slots
from cokernel.meshes import shared_memory_group
from cokernel.records import record

POINTER_BYTES = 8


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


@record(frozen=True, eq=False)
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
    # Where a Ref has addresses instead of itself, because it is borrowed from an operand or
    # computed in place: the strides, in bytes, of what the addresses are of.
    borrowed: tuple[int, ...] | None = None
    # Whether what is borrowed or in place are slots, along the first dimension of the Ref.
    has_slots: bool = False
    # The Ref's own memory, if it is computed in place. It has one address for all slots.
    unplaced: "RefValue | None" = None
    # The input that this output overwrites.
    overwrites: "RefValue | None" = None
    # Of a pipeline's window: what the body of the pipeline sees is one of these.
    slots: Slots | None = None

    @property
    def told_shape(self) -> tuple[int, ...]:
        """The shape in the words of the user, who gives a pipeline blocks and knows of no slots."""
        if self.slots is None:
            return self.shape
        return self.shape[1:] or (self.shape[0] // self.slots.count,)

    @property
    def memory(self) -> "RefValue":
        """The Ref that stands for this memory: an output that overwrites an input is that input."""
        return self if self.overwrites is None else self.overwrites

    @property
    def is_in_place(self) -> bool:
        """Whether the Ref is computed where it will be copied to."""
        return self.unplaced is not None

    def own_address(self, context: Context) -> ir.Value:
        """Where the Ref would be if it were not in place."""
        return (self.unplaced or self).address(context)

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


@record(frozen=True, eq=False)
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


@record(frozen=True, eq=False)
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
    # Whether what is picked may lie in the padding of tiles; if so, which dimension of the Ref each
    # array walks along, and how far apart the elements lie there.
    hangs: bool = False
    axes: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()


@record(frozen=True)
class Pieces:
    """Where the parts of one element lie: each of dtype `dtype`, `stride` bytes after the one
    before, the lowest bits first.
    """

    dtype: Any
    stride: int
    # Where some may lie in the padding of tiles: the dimension of the Ref that the parts lie along.
    axis: int | None = None


@record(frozen=True, eq=False)
class Overhang:
    """How much of a view lies in its Ref, where the rest may lie in the padding of tiles."""

    # Of each dimension, so many elements from its start on.
    inside: tuple[Index, ...]
    # 0 if an index that is no slice lies in the padding, and with it everything; else 1.
    is_there: Index


@record(frozen=True, eq=False)
class Origin:
    """Where a view begins in its Ref, and the dimension there that each of its own walks along."""

    starts: tuple[Index, ...]
    axes: tuple[int, ...]


@record(frozen=True, eq=False)
class View:
    """Part of a Ref: what is left of it after its transforms. Strides are in bytes. Extents are
    ints, but for DMAs of dynamic size. Where `indices` is given, `shape` and `strides` describe the
    other dimensions only. Where `pieces` is given, no element lies in one place.
    """

    ref: RefValue
    address: ir.Value
    dtype: Any
    extents: tuple[Index, ...]
    strides: tuple[int, ...]
    indices: IndexArrays | None = None
    pieces: Pieces | None = None
    # See `padding.py`: up to where each dimension may be indexed, if not up to its extent, and what
    # of the view is in the padding.
    room: tuple[Index, ...] | None = None
    overhang: Overhang | None = None
    # Known where `room` or `overhang` is.
    origin: Origin | None = None
    # Where the Ref begins; None if that is not known.
    start: ir.Value | None = None

    @property
    def hangs(self) -> bool:
        """Whether something of the view may lie in the padding of tiles."""
        return self.overhang is not None or (self.indices is not None and self.indices.hangs)

    def limit(self, dimension: int) -> Index:
        """Where a dimension ends for an index."""
        return self.extents[dimension] if self.room is None else self.room[dimension]

    def reach(self) -> tuple[tuple[Index, ...], tuple[int, ...]]:
        """The extents and strides of what lies in the Ref."""
        if self.overhang is None:
            return self.extents, self.strides
        return (self.overhang.is_there, *self.overhang.inside), (0, *self.strides)

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
        return dataclasses.replace(self, address=address, start=None)

    def buffer(self) -> Buffer:
        """The view as a buffer. Raises NotImplementedError if no strides describe it."""
        if self.indices is not None:
            raise NotImplementedError(
                f"this operation on a part of {self.ref.name!r} that no strides describe"
            )
        return self.strided_part()

    def strided_part(self) -> Buffer:
        """What strides describe of the view as a buffer, index arrays left out."""
        if self.pieces is not None:
            raise NotImplementedError(
                f"this operation on {self.ref.name!r} under the wider dtype {self.dtype}"
            )
        itemsize = dtypes.itemsize(self.dtype)
        if any(stride % itemsize for stride in self.strides):
            raise NotImplementedError(
                f"a view of {self.ref.name!r} whose elements are not aligned to their own size"
            )
        shape = tuple(extent for extent in self.extents if isinstance(extent, int))
        strides = tuple(stride // itemsize for stride in self.strides)
        # Nobody writes to what is borrowed.
        root = self.ref.memory if self.ref.borrowed is None else None
        return Buffer(shape, np.dtype(self.dtype), self.address, strides, root=root)
