"""Where single elements of a Ref are, of which some may lie in the padding of its tiles.

An index array, a mask or a lane picks elements one by one, so that no block of extents says which
of them lie in the Ref. What lies in the padding has no place in memory: it is read from a constant
of the module, is never written, and is known by its number in the padded Ref.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import padding
from cokernel.compiler.dtypes import i1, i8, i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index, is_same_index
from cokernel.compiler.values import Scalar, Value, row_major
from cokernel.records import record

if TYPE_CHECKING:
    from cokernel.compiler.context import Context
    from cokernel.compiler.refs import View

# A table of offsets holds those of elements in the padding as this less their number.
FIRST_IN_PADDING = -2
# No element is wider.
FILL_BYTES = 16


@record(frozen=True, eq=False)
class Spot:
    """Where one element is."""

    # For one in the padding the address of what is read there.
    address: ir.Value
    # Its row-major number in the padded Ref if it lies in the padding, else below zero; None where
    # no element can lie there.
    number: ir.Value | None = None

    def in_padding(self, function: FunctionBuilder) -> ir.Value:
        """Whether it lies in the padding."""
        if self.number is None:
            return ir.Constant(i1, 0)
        return function.builder.icmp_signed(">=", self.number, ir.Constant(i64, 0))

    @contextlib.contextmanager
    def written(self, function: FunctionBuilder) -> Iterator[None]:
        """Around what writes there: nothing is written to the padding."""
        if self.number is None:
            yield
            return
        with function.builder.if_then(function.builder.not_(self.in_padding(function))):
            yield


def fill_address(context: "Context", function: FunctionBuilder) -> ir.Value:
    """Where a value lies that the padding is read as."""
    checked = context.kernel.checked
    assert checked is not None
    address = function.constant_data(i8, [padding.fill_byte(checked)] * FILL_BYTES)
    # llvmlite gives it a typed pointer, which LLVM no longer has.
    address.type = pointer
    return address


def may_hang(view: "View") -> bool:
    """Whether an element of a view, or one that an index into it picks, may lie in the padding."""
    if view.hangs:
        return True
    if view.room is None:
        return False
    return not all(map(is_same_index, view.room, view.extents))


@record(frozen=True, eq=False)
class Layout:
    """Where the elements of a view lie in its Ref, of which some may lie in the padding."""

    # Where the view begins, by the dimensions of the Ref, and the extents of those without and with
    # the padding.
    starts: tuple[Index, ...]
    shape: tuple[int, ...]
    room: tuple[int, ...]
    # For each dimension of the view, and then for each of its index arrays, the dimension of the
    # Ref that it walks along, and how far apart the elements lie there.
    steps: tuple[tuple[int, int], ...]

    def map(self, function: Callable[[Index], Any]) -> "Layout":
        """The layout with something else in place of where it begins."""
        return dataclasses.replace(self, starts=tuple(map(function, self.starts)))

    def number_step(self, dimension: int) -> int:
        """How far apart the numbers are of what follows each other along a dimension."""
        axis, step = self.steps[dimension]
        return step * row_major(self.room)[axis]

    def spot(
        self,
        context: "Context",
        function: FunctionBuilder,
        address: ir.Value | None,
        positions: Sequence[Index],
    ) -> Spot:
        """The spot of an element at an index of the view and at the positions that its index arrays
        have. `address` is where it lies in the Ref if it does; None if nobody asks.
        """
        builder = function.builder
        coordinates = list(self.starts)
        for (axis, step), position in zip(self.steps, positions, strict=True):
            distance = function.multiply(position, step)
            coordinates[axis] = function.add(coordinates[axis], distance)
        is_out: ir.Value = ir.Constant(i1, 0)
        for coordinate, extent, room in zip(coordinates, self.shape, self.room, strict=True):
            if room != extent:
                limit = ir.Constant(i64, extent)
                beyond = builder.icmp_signed(">=", function.index(coordinate), limit)
                is_out = builder.or_(is_out, beyond)
        number = function.index(function.linear_index(coordinates, row_major(self.room)))
        number = builder.select(is_out, number, ir.Constant(i64, -1))
        if address is None:
            return Spot(ir.Constant(pointer, None), number)
        return Spot(builder.select(is_out, fill_address(context, function), address), number)


def layout_of(context: "Context", view: "View") -> Layout | None:
    """The layout of a view into whose padding an index may lead; None for one without, and for a
    table of offsets.
    """
    if view.origin is None or not may_hang(view):
        return None
    room = padding.padded_shape(context, view.ref)
    assert room is not None
    steps = [(axis, padding.step(view, n)) for n, axis in enumerate(view.origin.axes)]
    if view.indices is not None:
        steps += zip(view.indices.axes, view.indices.steps, strict=True)
    return Layout(view.origin.starts, tuple(view.ref.shape), room, tuple(steps))


class Spots:
    """Finds the spots of the elements of a view. What depends on the program's values is handed to
    the function that looks for them as `operands`.
    """

    def __init__(self, context: "Context", view: "View"):
        self.context = context
        self.layout = layout_of(context, view)
        self.operands: list[Value] = []
        if self.layout is not None:
            function = context.function
            self.operands = [
                Scalar((), np.dtype(np.int64), function.index(start))
                for start in self.layout.starts
            ]

    def at(
        self,
        function: FunctionBuilder,
        operands: Sequence[Value],
        address: ir.Value | None,
        positions: Sequence[Index],
    ) -> Spot:
        """The spot of an element; see `Layout.spot`."""
        if self.layout is None:
            assert address is not None
            return Spot(address)
        layout = dataclasses.replace(self.layout, starts=tuple(map(_register, operands)))
        return layout.spot(self.context, function, address, positions)


def _register(operand: Value) -> Index:
    assert isinstance(operand, Scalar)
    register = operand.register
    return int(register.constant) if isinstance(register, ir.Constant) else register


def offset_of(function: FunctionBuilder, spot: Spot, offset: Index) -> ir.Value:
    """What a table of offsets holds for a spot: its offset in the Ref, or one that says where in
    the padding it lies.
    """
    if spot.number is None:
        return function.index(offset)
    builder = function.builder
    beyond = builder.sub(ir.Constant(i64, FIRST_IN_PADDING), spot.number)
    return builder.select(spot.in_padding(function), beyond, function.index(offset))


def spot_of_offset(
    context: "Context", function: FunctionBuilder, base: ir.Value, offset: ir.Value
) -> Spot:
    """The spot that a table of offsets tells of."""
    builder = function.builder
    number = builder.sub(ir.Constant(i64, FIRST_IN_PADDING), offset)
    is_out = builder.icmp_signed(">=", number, ir.Constant(i64, 0))
    inside = function.advance(base, offset)
    return Spot(builder.select(is_out, fill_address(context, function), inside), number)


def tell_if_read(
    context: "Context", view: "View", spot: Spot, site: ir.Constant, read: int
) -> ir.Value:
    """Tells the runtime that a value comes from the padding, if it does; returns whether it does,
    as an i32.
    """
    function, builder = context.function, context.builder
    if spot.number is None:
        return ir.Constant(i32, 0)
    room = padding.padded_shape(context, view.ref)
    assert room is not None
    is_out = spot.in_padding(function)
    with builder.if_then(is_out, likely=False):
        tell_read(context, spot.number, room, site, read)
    return builder.zext(is_out, i32)


def tell_read(
    context: "Context", number: ir.Value, room: Sequence[int], site: ir.Constant, read: int
) -> None:
    """Tells the runtime that a value comes from the padding of a Ref; `number` is that of the
    element.
    """
    from cokernel.compiler.probes import table

    function = context.function
    arguments = [number, ir.Constant(i64, len(room)), table(context, room)]
    function.call_external(
        "cokernel_checked_pick_padding",
        void,
        [function.core, site, ir.Constant(i32, read), *arguments],
    )
