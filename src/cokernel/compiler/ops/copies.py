"""Moving a block of elements between two places in memory, as a DMA does: contiguous, strided, or
picked by indices.

What needs a loop becomes a function of its own, so that the coroutine stays small.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes, padding
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1, i8, i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index, is_same_index
from cokernel.compiler.ops.locks import in_locked_pieces, locked
from cokernel.compiler.ops.state import add_values
from cokernel.compiler.refs import IndexArrays, View
from cokernel.compiler.spots import Layout, layout_of
from cokernel.compiler.values import load_element, make_packed, store_element
from cokernel.records import record

# A contiguous run of a known size up to this many bytes is moved through vector registers, without
# a call.
INLINE_BYTES = 512
WIDEST_REGISTER = 64


@record(frozen=True)
class Picks:
    """Indices in memory, and what they index."""

    address: ir.Value
    dtype: np.dtype
    # Of the index array, in bytes, aligned with the last of the picked dimensions.
    strides: tuple[int, ...]
    # What one step of the index moves, in bytes, and where the indexed dimension ends.
    step: int
    extent: Index
    dimension: int
    # The Ref that holds the indices, by its name; None for a value of the program, whose bytes
    # lie one after the other in checked mode.
    ref: str | None
    # What keeps the memory of such a value reserved.
    owner: Any
    # Given where the window of that Ref may reach into the padding of tiles.
    layout: Layout | None = None
    room: tuple[int, ...] | None = None
    inside: tuple[Index, ...] | None = None
    window: padding.Window | None = None


@record(frozen=True)
class Side:
    """The source or the target of a copy. Strides are in bytes, None where `picks` choose the
    position.
    """

    name: str
    shape: str
    address: ir.Value
    extents: tuple[Index, ...]
    strides: tuple[int | None, ...]
    picks: tuple[Picks, ...] = ()
    ignored: int | None = None
    # How much of each dimension lies in the Ref, where the rest may lie in the padding of tiles.
    inside: tuple[Index, ...] | None = None
    # Given with `inside`.
    window: padding.Window | None = None
    # Where `picks` choose, or the other side has `picks`: the padded shape of a Ref into whose
    # padding the side may reach, the dimensions along which it may, and where its elements lie, for
    # which `picks` may also be a table of offsets.
    room: tuple[int, ...] | None = None
    hanging: tuple[bool, ...] = ()
    layout: Layout | None = None

    @property
    def is_table(self) -> bool:
        """Whether a table of offsets says what lies in the padding."""
        return self.room is not None and self.layout is None

    @property
    def picks_padding(self) -> bool:
        """Whether elements must be looked at one by one for those that lie in the padding."""
        return self.room is not None or any(pick.layout is not None for pick in self.picks)

    def map(self, function: Callable[[Any], Any]) -> "Side":
        """The side with something else in place of what is known only at run time. The addresses
        of the indices are left alone.
        """
        return dataclasses.replace(
            self,
            address=function(self.address),
            extents=tuple(map(function, self.extents)),
            picks=tuple(_map_picks(pick, function) for pick in self.picks),
            inside=None if self.inside is None else tuple(map(function, self.inside)),
            window=None if self.window is None else self.window.map(function),
            layout=None if self.layout is None else self.layout.map(function),
        )


def _map_picks(pick: Picks, function: Callable[[Any], Any]) -> Picks:
    return dataclasses.replace(
        pick,
        extent=function(pick.extent),
        layout=None if pick.layout is None else pick.layout.map(function),
        inside=None if pick.inside is None else tuple(map(function, pick.inside)),
        window=None if pick.window is None else pick.window.map(function),
    )


def side_of(context: Context, view: View) -> Side:
    """The view as one side of a copy; index arrays are put in memory."""
    shape = str(tuple(view.ref.shape))
    if view.indices is None:
        return Side(view.ref.name, shape, view.address, view.extents, tuple(view.strides))
    indices = view.indices
    before, after = view.extents[: indices.position], view.extents[indices.position :]
    extents = (*before, *indices.shape, *after)
    none = (None,) * len(indices.shape)
    strides = (*view.strides[: indices.position], *none, *view.strides[indices.position :])
    picks = tuple(_picks(context, indices, number) for number in range(len(indices.arrays)))
    return Side(view.ref.name, shape, view.address, extents, strides, picks, indices.ignored)


def with_layout(context: Context, side: Side, view: View) -> Side:
    """A side that picks elements, or whose other side does, and may reach into the padding."""
    if not view.hangs:
        return side
    over = view.overhang
    ends = iter(view.extents if over is None else over.inside)
    extents = iter(view.extents)
    hanging = tuple(
        stride is not None and not is_same_index(next(ends), next(extents))
        for stride in side.strides
    )
    room = padding.padded_shape(context, view.ref)
    return dataclasses.replace(side, room=room, hanging=hanging, layout=layout_of(context, view))


def _picks(context: Context, indices: IndexArrays, number: int) -> Picks:
    array = indices.arrays[number]
    hanging: dict[str, Any] = {}
    if isinstance(array, View) and array.hangs:
        hanging = {
            "layout": layout_of(context, array),
            "room": padding.padded_shape(context, array.ref),
            "inside": array.reach()[0],
            "window": padding.window_of(context.function, array),
        }
    if isinstance(array, View):
        address, extents, strides = array.address, array.extents, tuple(array.strides)
        dtype, owner, name = np.dtype(array.dtype), None, array.ref.name
    else:
        buffer = context.dense(array) if context.is_checked else context.materialise(array)
        dtype, owner, name = buffer.dtype, buffer, None
        address, extents = buffer.address, buffer.shape
        strides = tuple(stride * dtype.itemsize for stride in buffer.strides)
    # An extent of one is broadcast.
    strides = tuple(
        0 if isinstance(extent, int) and extent == 1 else stride
        for extent, stride in zip(extents, strides, strict=True)
    )
    return Picks(
        address,
        dtype,
        strides,
        indices.strides[number],
        indices.extents[number],
        indices.dimensions[number],
        name,
        owner,
        **hanging,
    )


@record(frozen=True)
class Block:
    """What a DMA copies, or adds to what is there; `is_atomic` says that other cores may add to it
    at the same time.
    """

    target: Side
    source: Side
    dtype: Any
    add: bool
    is_atomic: bool


@record(frozen=True)
class _Plan:
    """A copy as loops over contiguous runs."""

    # The dimensions that need a loop: first those that an index picks on either side, then the
    # others.
    picked: tuple[int, ...]
    strided: tuple[int, ...]
    # How many bytes lie together on both sides.
    run: Index


def _plan(function: FunctionBuilder, target: Side, source: Side, itemsize: int) -> _Plan:
    run: Index = itemsize
    rank = len(target.extents)
    outer = rank
    for dimension in reversed(range(rank)):
        extent = target.extents[dimension]
        strides = target.strides[dimension], source.strides[dimension]
        is_single = isinstance(extent, int) and extent == 1 and None not in strides
        if not is_single and not (isinstance(run, int) and strides == (run, run)):
            break
        if not is_single:
            run = function.multiply(extent, run)
        outer = dimension
    picked, strided = [], []
    for dimension in range(outer):
        if None in (target.strides[dimension], source.strides[dimension]):
            picked.append(dimension)
        elif not (isinstance(target.extents[dimension], int) and target.extents[dimension] == 1):
            strided.append(dimension)
    return _Plan(tuple(picked), tuple(strided), run)


# Moves or adds one run: (function, target address, source address, bytes).
MoveRun = Callable[[FunctionBuilder, ir.Value, ir.Value, Index], None]


def mover(context: Context, dtype: Any, *, add: bool, is_atomic: bool) -> MoveRun:
    """What moves, or adds, a run of elements of a dtype."""
    if not add:
        return move_run
    if dtypes.kind(dtype) is dtypes.Kind.BOOL:
        raise NotImplementedError(f"{context.describe()}: a DMA cannot add values of dtype {dtype}")

    def add_elements(
        function: FunctionBuilder, to: ir.Value, origin: ir.Value, size: Index
    ) -> None:
        add_run = _add_run_locked if is_atomic else _add_run
        add_run(context, function, to, origin, size, np.dtype(dtype))

    return add_elements


def copy(
    context: Context,
    target: Side,
    source: Side,
    dtype: Any,
    operation: str,
    *,
    add: bool = False,
    is_atomic: bool = False,
    watch: Callable[[MoveRun], MoveRun] | None = None,
) -> None:
    """Copies `source` to `target`, of the same extents, or adds it there. Indices are checked as
    they are used.

    `is_atomic` says that other cores may add to the target at the same time. `watch` wraps what
    moves one run; checked mode watches the runs that indices pick.
    """
    itemsize = dtypes.itemsize(dtype)
    if any(isinstance(extent, int) and extent == 0 for extent in target.extents):
        return
    plan = _plan(context.function, target, source, itemsize)
    move = mover(context, dtype, add=add, is_atomic=is_atomic)
    if watch is not None:
        move = watch(move)
    is_picked = bool(source.picks or target.picks)
    if not plan.picked and not plan.strided and not add and not is_picked:
        return move(context.function, target.address, source.address, plan.run)
    _copy_in_loops(context, target, source, plan, operation, move)


def copy_block(
    context: Context,
    block: Block,
    operation: str,
    watch: Callable[[MoveRun], MoveRun] | None = None,
) -> None:
    """Copies a block, or adds it. Indices are checked as they are used. `watch` wraps what moves
    one run; checked mode watches the runs that indices pick.
    """
    copy(
        context,
        block.target,
        block.source,
        block.dtype,
        operation,
        add=block.add,
        is_atomic=block.is_atomic,
        watch=watch,
    )


def _copy_in_loops(
    context: Context, target: Side, source: Side, plan: _Plan, operation: str, move: MoveRun
) -> None:
    outer = context.function
    passed = Passed()
    target, source = pass_side(passed, target), pass_side(passed, source)
    extents = [passed.index(extent) for extent in target.extents]
    run = passed.index(plan.run)
    inner = outer.sibling("dma", [value.type for value in passed.values])
    passed.enter(inner.parameters)
    with context.inside(inner):
        picked_extents = [value_inside(extents[dimension]) for dimension in plan.picked]
        with inner.nest(picked_extents) as picked_index, Skip(inner) as skip:
            place = dict(zip(plan.picked, picked_index, strict=True))
            to = _picked_base(context, target, place, operation, skip)
            origin = _picked_base(context, source, place, operation, skip)
            with inner.nest(
                [value_inside(extents[dimension]) for dimension in plan.strided]
            ) as strided_index:
                place.update(zip(plan.strided, strided_index, strict=True))
                move(
                    inner,
                    inner.advance(to, _strided_offset(inner, target, place, plan.strided)),
                    inner.advance(origin, _strided_offset(inner, source, place, plan.strided)),
                    value_inside(run),
                )
        inner.finish()
    context.call(inner, passed.values)


@record
class Slot:
    """A value that becomes a parameter of the function with the loops."""

    value: ir.Value | None = None


class Passed:
    """The values that a function under construction will be given."""

    def __init__(self) -> None:
        self.values: list[ir.Value] = []
        self.slots: list[Slot] = []

    def value(self, value: ir.Value) -> Slot:
        self.values.append(value)
        self.slots.append(Slot())
        return self.slots[-1]

    def index(self, index: Index) -> int | Slot:
        return index if isinstance(index, int) else self.value(index)

    def enter(self, parameters: Sequence[ir.Value]) -> None:
        """Fills the slots, inside the function."""
        for slot, parameter in zip(self.slots, parameters, strict=True):
            slot.value = parameter


def value_inside(index: Any) -> Any:
    """What a slot stands for, inside the function."""
    return index.value if isinstance(index, Slot) else index


def pass_side(passed: Passed, side: Side) -> Side:
    """A side with slots for the values that the function will be given."""
    picks = tuple(
        dataclasses.replace(pick, address=passed.value(pick.address)) for pick in side.picks
    )
    extents = side.extents
    side = dataclasses.replace(side, picks=picks, extents=(), inside=None, window=None)
    return dataclasses.replace(side.map(passed.index), extents=extents)


class Skip(contextlib.AbstractContextManager["Skip"]):
    """A place behind the body of a loop, to which an iteration may jump."""

    def __init__(self, function: FunctionBuilder):
        self.function = function
        self.block: ir.Block | None = None

    def when(self, condition: ir.Value) -> None:
        """Leaves the iteration if the condition holds."""
        function = self.function
        if self.block is None:
            self.block = function.function.append_basic_block("skipped")
        proceed = function.function.append_basic_block("not_skipped")
        function.builder.cbranch(condition, self.block, proceed)
        function.builder.position_at_end(proceed)

    def __exit__(self, *exception: object) -> None:
        if self.block is not None and exception[0] is None:
            self.function.builder.branch(self.block)
            self.function.builder.position_at_end(self.block)


def _picked_base(
    context: Context, side: Side, place: dict[int, Index], operation: str, skip: Skip
) -> ir.Value:
    """The address of a side at a position of the picked dimensions, after looking up and checking
    its indices.
    """
    function = context.function
    offset: Index = 0
    positions = []
    for dimension, position in place.items():
        stride = side.strides[dimension]
        if stride is None:
            positions.append(position)
        else:
            offset = function.add(offset, function.multiply(position, stride))
    for pick in side.picks:
        index = picked_index(context, side, pick, positions, operation, skip)
        offset = function.add(offset, function.multiply(index, pick.step))
    return function.advance(value_inside(side.address), offset)


def picked_index(
    context: Context,
    side: Side,
    pick: Picks,
    positions: Sequence[Index],
    operation: str,
    skip: Skip,
) -> ir.Value:
    """The index at a position of the picked dimensions, looked up and checked."""
    function = context.function
    tail = positions[len(positions) - len(pick.strides) :]
    where = function.advance(value_inside(pick.address), function.linear_index(tail, pick.strides))
    if pick.layout is not None:
        # Of what is broadcast there is one.
        place = [one if step else 0 for one, step in zip(tail, pick.strides, strict=True)]
        layout = pick.layout.map(value_inside)
        where = layout.spot(context, function, where, place).address
    register = load_element(function, where, pick.dtype)
    index = register if register.type == i64 else _extend(function, register, pick.dtype)
    if side.ignored is not None:
        skip.when(function.builder.icmp_signed("==", index, ir.Constant(i64, side.ignored)))
    if context.kernel.bounds_checks and not side.is_table:
        position = tail[0] if len(tail) == 1 else _number(function, tail, pick)
        _check(context, side, pick, index, position, operation)
    return index


def _extend(function: FunctionBuilder, register: ir.Value, dtype: np.dtype) -> ir.Value:
    if dtypes.kind(dtype) is dtypes.Kind.SIGNED:
        return function.builder.sext(register, i64)
    return function.builder.zext(register, i64)


def _number(function: Any, tail: Sequence[Index], pick: Picks) -> Index:
    """The row-major number of an index in an array of them, whose rows lie one after the other."""
    offset = function.linear_index(tail, pick.strides)
    return function.builder.sdiv(function.index(offset), ir.Constant(i64, pick.dtype.itemsize))


def _check(
    context: Context,
    side: Side,
    pick: Picks,
    index: ir.Value,
    position: Index,
    operation: str,
) -> None:
    function = context.function
    extent = function.index(value_inside(pick.extent))

    def record() -> None:
        site = context.site(
            operation,
            side.name,
            shape=side.shape,
            rank=len(side.extents),
            is_index=True,
            indices=pick.ref or "",
        )
        arguments = [ir.Constant(i32, pick.dimension), index, extent, function.index(position)]
        function.call_external("cokernel_fail_picked", void, [function.core, site, *arguments])

    function.check(function.builder.icmp_unsigned("<", index, extent), record)


def _strided_offset(
    function: FunctionBuilder, side: Side, place: dict[int, Index], dimensions: Sequence[int]
) -> Index:
    strides = [side.strides[dimension] or 0 for dimension in dimensions]
    return function.linear_index([place[dimension] for dimension in dimensions], strides)


# Runs.


def move_run(function: FunctionBuilder, target: ir.Value, source: ir.Value, size: Index) -> None:
    """Copies `size` bytes that lie together; the two blocks may overlap."""
    if isinstance(size, int) and size <= INLINE_BYTES:
        return _move_through_registers(function, target, source, size)
    callee = function.external("llvm.memmove.p0.p0.i64", void, [pointer, pointer, i64, i1])
    function.builder.call(callee, [target, source, function.index(size), ir.Constant(i1, 0)])


def _move_through_registers(
    function: FunctionBuilder, target: ir.Value, source: ir.Value, size: int
) -> None:
    # All loads come before all stores, so that an overlap does no harm.
    builder = function.builder
    loaded = [
        (offset, builder.load(function.advance(source, offset), typ=kind, align=1))
        for offset, kind in _chunks(size)
    ]
    for offset, register in loaded:
        builder.store(register, function.advance(target, offset), align=1)


def _chunks(size: int) -> Iterator[tuple[int, ir.Type]]:
    """Registers that together hold `size` bytes, widest first, and where in the block each goes."""
    offset, width = 0, WIDEST_REGISTER
    while offset < size:
        while width > size - offset:
            width //= 2
        yield offset, ir.IntType(8 * width) if width <= 8 else ir.VectorType(i8, width)
        offset += width


def _add_run(
    context: Context,
    function: FunctionBuilder,
    target: ir.Value,
    source: ir.Value,
    size: Index,
    dtype: np.dtype,
) -> None:
    """Adds elements that lie together to others that do."""
    itemsize = dtypes.itemsize(dtype)
    with function.nest([function.divide(size, itemsize)]) as [position]:
        offset = function.multiply(position, itemsize)
        amount = load_element(function, function.advance(source, offset), dtype)
        add_in_place(context, function.advance(target, offset), amount, dtype, is_atomic=False)


def _add_run_locked(
    context: Context,
    function: FunctionBuilder,
    target: ir.Value,
    source: ir.Value,
    size: Index,
    dtype: np.dtype,
) -> None:
    """The same where other cores may add at the same time."""

    def add(offset: ir.Value, part: ir.Value) -> None:
        to, origin = function.advance(target, offset), function.advance(source, offset)
        _add_run(context, function, to, origin, part, dtype)

    in_locked_pieces(function, target, size, add)


def add_in_place(
    context: Context, target: ir.Value, amount: ir.Value, dtype: np.dtype, *, is_atomic: bool
) -> None:
    """Adds a register to an element in memory; `is_atomic` says that other cores may do so at the
    same time.
    """
    function = context.function
    with locked(function, target) if is_atomic else contextlib.nullcontext():
        before = make_packed((), dtype, load_element(function, target, dtype))
        total = add_values(context, before, make_packed((), dtype, amount))
        store_element(function, context.scalar(total), target, dtype)
