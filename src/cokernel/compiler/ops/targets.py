"""Which core an operation reaches: the one place that knows what `device_id` and `core_index` mean.

A Ref or semaphore that is tied to a mesh has one instance per core of it. An operation names the
instance it means by the axes of that mesh; an axis it does not name keeps the position of the core
that acts, if its own mesh has that axis too.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32, i64, pointer, void
from cokernel.compiler.function import Index
from cokernel.compiler.refs import Place, RefValue
from cokernel.compiler.values import Value
from cokernel.records import record

# What a core can do with semaphores of its own only.
_OWN_SEMAPHORE = ("semaphore_wait", "semaphore_read", "dma_wait")


@record(frozen=True)
class Target:
    """The core whose instance of a Ref is meant.

    `index` is its row-major position in the mesh that owns the Ref, or None for the instance of the
    core that acts, or for a Ref that all cores share. For memory that some cores share it is the
    position of one of them in the mesh of the core that acts.
    """

    ref: RefValue
    index: Index | None

    def address(self, context: Context) -> ir.Value:
        """Where that instance of the Ref begins."""
        if self.index is None:
            return self.ref.address(context)
        if self.ref.place is not Place.SHARED:
            return self.ref.address_on(context, self.index)
        function = context.function
        core = context.kernel.core_address(context, context.program.index, self.index)
        block = function.load_invariant(function.field(core, "Core.shared"), pointer)
        return function.advance(block, self.ref.offset)

    @property
    def is_own(self) -> bool:
        """Whether only the core that acts can be meant."""
        return self.index is None and self.ref.place in (Place.PRIVATE, Place.INSTANCES)


def find_target(
    context: Context,
    ref: RefValue,
    operation: str,
    name: str,
    *,
    device_id: Any = None,
    device_id_type: Any = None,
    core_index: Value | None = None,
) -> Target:
    """The core that `device_id` (a dict, tuple or scalar of Values, or None) and `core_index` name.

    Emits the checks that every position exists and that no other device is meant.

    Raises:
      ValueError: if an axis is unknown, or the owner of the Ref is another mesh and an axis of it
        is left open.
    """
    resolver = _Resolver(context, ref, operation, name)
    positions = resolver.positions(device_id, device_id_type)
    if core_index is not None:
        resolver.add_core_index(positions, core_index)
    if ref.place in (Place.OPERAND, Place.DEVICE):
        return Target(ref, None)
    if not positions and (ref.place is Place.SHARED or ref.program == context.program.index):
        return Target(ref, None)
    return Target(ref, resolver.linear_index(positions))


def require(
    context: Context, condition: ir.Value, operation: str, name: str, message: str, value: Index
) -> None:
    """Makes the program fail at run time unless `condition` holds. "{value}" in the message stands
    for `value`.
    """
    function = context.function

    def record() -> None:
        site = context.site(operation, name, messages=(message,))
        function.call_external(
            "cokernel_fail", void, [function.core, site, ir.Constant(i32, 0), function.index(value)]
        )

    function.check(condition, record)


class _Resolver:
    """Turns positions on named axes into the number of a core."""

    def __init__(self, context: Context, ref: RefValue, operation: str, name: str):
        self.context = context
        self.ref = ref
        self.operation = operation
        self.name = name
        owner = context.program.mesh if ref.place is Place.SHARED else ref.mesh
        self.sizes: dict[Any, int] = dict(owner.shape) if owner is not None else {}

    def positions(self, device_id: Any, device_id_type: Any) -> dict[Any, Index]:
        """The positions on axes of the owner's mesh that a `device_id` names, checked."""
        if device_id is None:
            return {}
        if isinstance(device_id, Mapping):
            return self._from_axes(device_id)
        if device_id_type is _jax.pallas_primitives.DeviceIdType.LOGICAL:
            return self._from_number(device_id)
        coordinates = list(device_id) if isinstance(device_id, tuple | list) else [device_id]
        return self._from_coordinates(coordinates)

    def add_core_index(self, positions: dict[Any, Index], core_index: Value) -> None:
        """Adds the position that `core_index` names: on the core axis of a SparseCore mesh, else in
        the whole mesh.
        """
        if not self.sizes:
            return
        index = self.context.index(core_index)
        if isinstance(self.ref.mesh, _jax.VectorSubcoreMesh | _jax.ScalarSubcoreMesh):
            given = {next(iter(self.sizes)): self._checked(index, next(iter(self.sizes)))}
        else:
            given = self._split(index, list(self.sizes))
        both = [axis for axis in given if axis in positions]
        if both:
            raise ValueError(
                f"{self._where()}: core_index and device_id both give the position on axis "
                f"{both[0]!r}; give it once"
            )
        positions.update(given)

    def linear_index(self, positions: Mapping[Any, Index]) -> Index:
        """The row-major number of a core; axes not given keep the position of this core."""
        function = self.context.function
        total: Index = 0
        for axis, size in self.sizes.items():
            position = positions.get(axis)
            if position is None:
                position = self._own_position(axis, positions)
            total = function.add(function.multiply(total, size), position)
        return total

    def _where(self) -> str:
        return f"{self.context.describe()}: {self.operation} of {self.name!r}"

    def _own_position(self, axis: Any, given: Mapping[Any, Index]) -> Index:
        if axis not in self.context.program.mesh.shape:
            belongs = f"it belongs to the cores of another mesh, {self.ref.mesh}"
            if self.operation in _OWN_SEMAPHORE:
                raise ValueError(
                    f"{self._where()}: {belongs}, and only they can wait for it or read it"
                )
            missing = [
                name
                for name in self.sizes
                if name not in given and name not in self.context.program.mesh.shape
            ]
            raise ValueError(
                f"{self._where()}: {belongs}: give a device_id that names a position on its axis "
                f"{missing[0]!r}, which this program's own mesh does not have"
            )
        return self._coordinate(axis)

    def _coordinate(self, axis: Any) -> Index:
        return self.context.builder.sext(self.context.axis_coordinate(axis), i64)

    def _from_axes(self, device_id: Mapping[Any, Value]) -> dict[Any, Index]:
        positions: dict[Any, Index] = {}
        for key, value in device_id.items():
            axes = list(key) if isinstance(key, tuple) else [key]
            for axis, position in self._split(self.context.index(value), axes).items():
                if axis in positions:
                    raise ValueError(f"{self._where()}: device_id names axis {axis!r} twice")
                positions[axis] = position
        return {axis: position for axis, position in positions.items() if axis in self.sizes}

    def _from_coordinates(self, coordinates: Sequence[Value]) -> dict[Any, Index]:
        # As in JAX a tuple without names means devices wherever there are several; a lone device
        # leaves it to the cores.
        axes = self.context.kernel.outer_axes or list(self.sizes)
        if not coordinates and not self.context.kernel.outer_axes:
            return {}
        if len(coordinates) != len(axes):
            raise ValueError(
                f"{self._where()}: device_id has {len(coordinates)} coordinates, but there are "
                f"{len(axes)} axes: "
                f"{list(axes)}"
            )
        return self._from_axes(dict(zip(axes, coordinates, strict=True)))

    def _from_number(self, number: Any) -> dict[Any, Index]:
        [number] = number if isinstance(number, tuple | list) else [number]
        axes = self.context.kernel.outer_axes or list(self.sizes)
        return self._from_axes({tuple(axes): number})

    def _split(self, index: Index, axes: Sequence[Any]) -> dict[Any, Index]:
        """The positions on each of several axes that are numbered as one, row-major. Checked."""
        sizes = [self._size(axis) for axis in axes]
        label = axes[0] if len(axes) == 1 else tuple(axes)
        index = self._checked(index, label, math.prod(sizes))
        positions = dict(zip(axes, self.context.function.unravel(index, sizes), strict=True))
        for axis, position in positions.items():
            if axis not in self.sizes and axis in self.context.kernel.outer_axes:
                self._require_own_device(axis, position)
        return positions

    def _size(self, axis: Any) -> int:
        if axis in self.sizes:
            return self.sizes[axis]
        outer = self.context.kernel.outer_axes
        if axis in outer:
            return self.context.kernel.outer_sizes[outer.index(axis)]
        if self.ref.place not in (Place.PRIVATE, Place.INSTANCES):
            # Memory that cores share is the same for every position on an axis that tells its
            # users apart.
            kernel = self.context.kernel
            for mesh in (self.context.program.mesh, *kernel.meshes, *kernel.external_meshes):
                if axis in mesh.shape:
                    return mesh.shape[axis]
        known = [*self.sizes, *outer]
        raise ValueError(
            f"{self._where()}: device_id names axis {axis!r}, but the cores that own it have the "
            f"axes {known}"
        )

    def _checked(self, index: Index, axis: Any, size: int | None = None) -> Index:
        """The index, after a check that an axis has such a position."""
        function = self.context.function
        limit = self._size(axis) if size is None else size
        if isinstance(index, int):
            if 0 <= index < limit:
                return index
            good: ir.Value = ir.Constant(dtypes.i1, 0)
        else:
            good = function.builder.icmp_unsigned("<", index, function.index(limit))
        message = f"there is no position {{value}} on axis {axis!r}, which has {limit} (device_id)"
        require(self.context, good, self.operation, self.name, message, index)
        # Behind a check that always fails the number does not matter, but arithmetic on it should
        # stay in range.
        return 0 if isinstance(index, int) else index

    def _require_own_device(self, axis: Any, position: Index) -> None:
        if self._size(axis) == 1:
            return
        function = self.context.function
        own = self._coordinate(axis)
        good = function.builder.icmp_signed("==", function.index(position), own)
        message = (
            f"device_id means device {{value}} on axis {axis!r}, but kernels on the CPU cannot "
            "reach other devices yet"
        )
        require(self.context, good, self.operation, self.name, message, position)


def static_position(target: Target) -> int | None:
    """The number of the target core where it is known at compile time."""
    return target.index if isinstance(target.index, int) else None
