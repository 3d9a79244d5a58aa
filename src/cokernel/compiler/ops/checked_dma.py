"""DMAs in checked mode: each becomes a function that the runtime calls when the copy takes effect.

Until then the program goes on. So all that the copy needs, including indices that are values of the
program, is put together in a block of arguments, which the runtime copies at the start. Indices in
a Ref are read when the copy takes effect, as on the chip.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes, nests, padding
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1, i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.memory import Allocation
from cokernel.compiler.ops import copies
from cokernel.compiler.ops.copies import Block, MoveRun, Picks, Side
from cokernel.compiler.ops.definedness import AT_ONCE, FROM_PADDING, mark_one, read_numbers
from cokernel.compiler.ops.sync import SemaphoreAt
from cokernel.compiler.probes import (
    Access,
    is_probed,
    one_access,
    probe_block,
    probe_run,
    table,
)
from cokernel.compiler.transforms import smaller
from cokernel.records import record

# How the runtime is told that undefined elements are used as indices.
USED_AS_INDEX = 1
# The runtime moves pieces from this size on, as `kStreamedBytes` in checked/state.cc.
STREAMED_BYTES = 4096


@record(frozen=True)
class Signals:
    """The semaphores that a DMA adds to when it is complete, and the bytes each is given."""

    arrival: SemaphoreAt | None
    moved: Index
    departure: SemaphoreAt | None
    sent: Index

    @property
    def any(self) -> bool:
        return self.arrival is not None or self.departure is not None


def start(
    context: Context, block: Block, operation: str, site: ir.Constant, signals: Signals
) -> None:
    """Starts a DMA. Without a semaphore nobody could wait for it, so then it is done at once."""
    if not signals.any:
        return _copy(context, block, operation)
    function, builder = context.function, context.builder
    arguments = _Arguments(context)
    packed = dataclasses.replace(
        block,
        target=arguments.side(block.target),
        source=arguments.side(block.source),
    )
    inner = function.sibling("checked_copy", arguments.types)
    inside = _Inside(inner.parameters)
    with context.inside(inner):
        unpacked = dataclasses.replace(
            packed,
            target=inside.side(inner, packed.target),
            source=inside.side(inner, packed.source),
        )
        _copy(context, unpacked, operation)
        inner.finish()
    address, _owner = arguments.store()
    nothing = ir.Constant(pointer, None)
    arrival = nothing if signals.arrival is None else signals.arrival.address
    departure = nothing if signals.departure is None else signals.departure.address
    thunk = _thunk(function, inner, arguments.types)
    callee = function.external(
        "cokernel_checked_dma",
        void,
        [pointer, i32, pointer, pointer, i64, pointer, i64, pointer, i64],
    )
    builder.call(
        callee,
        [
            function.core,
            site,
            thunk,
            address,
            ir.Constant(i64, arguments.size),
            arrival,
            function.index(signals.moved),
            departure,
            function.index(signals.sent),
        ],
    )


def _thunk(
    function: FunctionBuilder, inner: FunctionBuilder, types: Sequence[ir.Type]
) -> ir.Function:
    """What the runtime calls with the core and the block of arguments."""
    module = function.module
    kind = ir.FunctionType(void, [pointer, pointer])
    thunk = ir.Function(module, kind, module.get_unique_name("checked_dma"))
    thunk.linkage = "internal"
    builder = ir.IRBuilder(thunk.append_basic_block("entry"))
    core, block = thunk.args
    values = []
    for number, wanted in enumerate(types):
        place = builder.gep(block, [ir.Constant(i64, 8 * number)], source_etype=dtypes.i8)
        # The last argument is the block itself, for the indices that lie in it.
        is_last = number == len(types) - 1
        values.append(block if is_last else builder.load(place, typ=wanted, align=8))
    builder.call(inner.function, [core, *values])
    builder.ret_void()
    return thunk


# What travels in the block of arguments.


@record(frozen=True)
class _Argument:
    """Stands for the value of that number in the block."""

    number: int


@record(frozen=True)
class _Stored:
    """Stands for the address of indices that lie in the block, so many bytes from its start."""

    offset: int


class _Arguments:
    """Collects what a copy needs. First come values of 8 bytes each, then indices."""

    def __init__(self, context: Context):
        self.context = context
        self.values: list[ir.Value] = []
        # Indices to copy: where they are, and how many bytes.
        self.arrays: list[tuple[ir.Value, int]] = []
        self.array_bytes = 0

    @property
    def types(self) -> list[ir.Type]:
        """The types of the values, and behind them that of the block's own address."""
        return [*(value.type for value in self.values), pointer]

    def value(self, value: Index) -> Any:
        if isinstance(value, int):
            return value
        self.values.append(value)
        return _Argument(len(self.values) - 1)

    def side(self, side: Side) -> Side:
        """The side with arguments in place of values."""
        return dataclasses.replace(
            side,
            address=self.value(side.address),
            extents=tuple(self.value(extent) for extent in side.extents),
            picks=tuple(self._picks(pick) for pick in side.picks),
            inside=None if side.inside is None else tuple(map(self.value, side.inside)),
            window=None if side.window is None else side.window.map(self.value),
        )

    def _picks(self, pick: Picks) -> Picks:
        if pick.ref is not None:
            address = self.value(pick.address)
        else:
            size = pick.owner.size * pick.dtype.itemsize
            address = _Stored(self.array_bytes)
            self.arrays.append((pick.address, size))
            self.array_bytes += -(-size // 8) * 8
        return dataclasses.replace(pick, address=address, extent=self.value(pick.extent))

    @property
    def size(self) -> int:
        """The bytes of the block."""
        return 8 * len(self.values) + self.array_bytes

    def store(self) -> tuple[ir.Value, Allocation]:
        """Writes the block to memory of the core; returns its address and what keeps it."""
        context = self.context
        function, builder = context.function, context.builder
        owner = context.program.arena.allocate(self.size)
        address = context.private_address(owner.offset)
        for number, value in enumerate(self.values):
            builder.store(value, function.advance(address, 8 * number), align=8)
        offset = 8 * len(self.values)
        for source, size in self.arrays:
            nests.copy_dense(function, function.advance(address, offset), source, size)
            offset += -(-size // 8) * 8
        return address, owner


class _Inside:
    """Puts sides together again from the parameters of the function that copies."""

    def __init__(self, parameters: Sequence[ir.Value]):
        *self.values, self.block = parameters

    def value(self, function: FunctionBuilder, item: Any) -> Any:
        if isinstance(item, _Argument):
            return self.values[item.number]
        if isinstance(item, _Stored):
            return function.advance(self.block, 8 * len(self.values) + item.offset)
        return item

    def side(self, function: FunctionBuilder, side: Side) -> Side:
        picks = tuple(
            dataclasses.replace(
                pick,
                address=self.value(function, pick.address),
                extent=self.value(function, pick.extent),
            )
            for pick in side.picks
        )
        inside, window = side.inside, side.window
        if inside is not None:
            inside = tuple(self.value(function, extent) for extent in inside)
        if window is not None:
            window = window.map(lambda number: self.value(function, number))
        return dataclasses.replace(
            side,
            address=self.value(function, side.address),
            extents=tuple(self.value(function, extent) for extent in side.extents),
            picks=picks,
            inside=inside,
            window=window,
        )


# The copy itself, with its probes.


def _copy(context: Context, block: Block, operation: str) -> None:
    target, source = block.target, block.source
    if any(isinstance(extent, int) and extent == 0 for extent in target.extents):
        return
    itemsize = dtypes.itemsize(block.dtype)
    access = Access.WRITE
    if block.add:
        access = Access.ATOMIC if block.is_atomic else Access.UPDATE
    if target.inside is not None or source.inside is not None:
        return _copy_with_padding(context, block, access, operation)
    watch: Callable[[MoveRun], MoveRun] | None = None
    is_picked = bool(target.picks or source.picks)
    if is_probed(context):
        for side in (source, target):
            _probe_indices(context, side, operation)
        if is_picked:

            def watch(move: MoveRun) -> MoveRun:
                return _watched(context, block, access, operation, move)

        else:
            reads, writes = _site(context, source, operation), _site(context, target, operation)
            strides = [_plain(source), _plain(target)]
            probe_block(
                context, reads, Access.READ, source.address, source.extents, strides[0], itemsize
            )
            probe_block(
                context, writes, access, target.address, target.extents, strides[1], itemsize
            )
    # Sums may meet in one place, and do so one after the other.
    is_scatter = bool(target.picks) and not block.add
    group = one_access(context, is_scatter=is_scatter)
    with contextlib.nullcontext() if watch is None else group:
        if watch is None and not block.add:
            watch = _moved
        copies.copy_block(context, block, operation, watch)
    if not is_picked:
        _carry_undefined(
            context,
            block,
            target.address,
            source.address,
            target.extents,
            _plain(target),
            _plain(source),
        )


def _moved(move: MoveRun) -> MoveRun:
    """Has the runtime move long runs: it knows what is too large for the caches."""

    def moved(function: FunctionBuilder, target: ir.Value, source: ir.Value, size: Index) -> None:
        if isinstance(size, int) and size < STREAMED_BYTES:
            return move(function, target, source, size)
        arguments = [function.core, target, source, function.index(size)]
        return function.call_external("cokernel_checked_move", void, arguments)

    return moved


def _copy_with_padding(context: Context, block: Block, access: Access, operation: str) -> None:
    """Copies between sides of which either may reach into the padding of tiles. What comes from
    there is made up, and what goes there is lost.
    """
    function = context.function
    target, source = block.target, block.source
    read = source.extents if source.inside is None else source.inside
    written = target.extents if target.inside is None else target.inside
    common = tuple(smaller(function, *pair) for pair in zip(read, written, strict=True))
    itemsize = dtypes.itemsize(block.dtype)
    if is_probed(context):
        reads, writes = _site(context, source, operation), _site(context, target, operation)
        probe_block(context, reads, Access.READ, source.address, read, _plain(source), itemsize)
        probe_block(context, writes, access, target.address, written, _plain(target), itemsize)
    _make_up(context, block, common, written, operation)
    cut = dataclasses.replace(
        block,
        target=dataclasses.replace(target, extents=common),
        source=dataclasses.replace(source, extents=common),
    )
    copies.copy_block(context, cut, operation)
    _carry_undefined(
        context, block, target.address, source.address, common, _plain(target), _plain(source)
    )


def _make_up(
    context: Context,
    block: Block,
    common: Sequence[Index],
    written: Sequence[Index],
    operation: str,
) -> None:
    """Writes what a copy takes from the padding: it is arbitrary, and undefined."""
    checked = context.kernel.checked
    assert checked is not None
    itemsize = dtypes.itemsize(block.dtype)
    if checked.uninitialised and block.source.window is not None:
        site = _site(context, block.source, operation)
        window = block.source.window
        padding.tell_if_cut(context, common, written, window, site, FROM_PADDING)
    content = bytes([padding.fill_byte(checked)] * itemsize)
    kind = ir.IntType(8 * itemsize)
    known = [extent for extent in (*common, *written) if not isinstance(extent, int)]
    arguments = [block.target.address, *known]
    inner = context.function.sibling("make_up", [argument.type for argument in arguments])
    base, *rest = inner.parameters
    incoming = iter(rest)
    limits, extents = (
        [extent if isinstance(extent, int) else next(incoming) for extent in given]
        for given in (common, written)
    )
    with context.inside(inner):
        with inner.nest(extents) as index:
            builder = inner.builder
            is_copied: ir.Value = ir.Constant(i1, 1)
            for position, limit in zip(index, limits, strict=True):
                is_inside = builder.icmp_signed("<", inner.index(position), inner.index(limit))
                is_copied = builder.and_(is_copied, is_inside)
            with builder.if_then(builder.not_(is_copied)):
                address = inner.advance(base, inner.linear_index(index, _plain(block.target)))
                builder.store(ir.Constant(kind, int.from_bytes(content)), address, align=1)
                if checked.uninitialised:
                    mark_one(inner, address, itemsize, (FROM_PADDING,))
        inner.finish()
    context.call(inner, arguments)


def _plain(side: Side) -> list[int]:
    """The strides of a side that has no indices."""
    return [stride for stride in side.strides if stride is not None]


def _site(context: Context, side: Side, operation: str) -> ir.Constant:
    return context.site(operation, side.name, shape=side.shape, rank=len(side.extents))


def _watched(
    context: Context, block: Block, access: Access, operation: str, move: MoveRun
) -> MoveRun:
    """Moves a run after telling of it."""
    itemsize = dtypes.itemsize(block.dtype)
    reads, writes = (
        _site(context, block.source, operation),
        _site(context, block.target, operation),
    )

    def watched(function: FunctionBuilder, target: ir.Value, source: ir.Value, size: Index) -> None:
        probe_run(context, reads, Access.READ, source, size, itemsize)
        probe_run(context, writes, access, target, size, itemsize)
        move(function, target, source, size)
        count = function.divide(size, itemsize)
        _carry_undefined(context, block, target, source, [count], [itemsize], [itemsize])

    return watched


def _carry_undefined(
    context: Context,
    block: Block,
    target: ir.Value,
    source: ir.Value,
    extents: Sequence[Index],
    target_strides: Sequence[int],
    source_strides: Sequence[int],
) -> None:
    """Makes undefined at the target what is so at the source; a sum has both to thank for it."""
    checked = context.kernel.checked
    if checked is None or not checked.uninitialised:
        return
    name = "cokernel_checked_merge_undefined" if block.add else "cokernel_checked_copy_undefined"
    function = context.function
    function.call_external(
        name,
        void,
        [
            function.core,
            target,
            source,
            ir.Constant(i64, dtypes.itemsize(block.dtype)),
            ir.Constant(i64, len(extents)),
            table(context, extents),
            table(context, target_strides),
            table(context, source_strides),
        ],
    )


def _probe_indices(context: Context, side: Side, operation: str) -> None:
    """Tells of the reads of indices that lie in Refs, which must not be undefined."""
    picked = [
        extent for extent, stride in zip(side.extents, side.strides, strict=True) if stride is None
    ]
    for pick in side.picks:
        if pick.ref is None:
            continue
        tail = picked[len(picked) - len(pick.strides) :]
        # Where the index array is broadcast its stride is zero.
        extents = [
            extent if stride else 1 for extent, stride in zip(tail, pick.strides, strict=True)
        ]
        itemsize = np.dtype(pick.dtype).itemsize
        site = context.site(operation, pick.ref, is_index=True)
        probe_block(context, site, Access.READ, pick.address, extents, pick.strides, itemsize)
        _report_undefined_indices(context, pick, extents, itemsize, site)


def _report_undefined_indices(
    context: Context, pick: Picks, extents: Sequence[Index], itemsize: int, site: ir.Constant
) -> None:
    checked = context.kernel.checked
    if checked is None or not checked.uninitialised:
        return
    function, builder = context.function, context.builder
    found = function.call_external(
        "cokernel_checked_undefined",
        i32,
        [
            function.core,
            pick.address,
            ir.Constant(i64, itemsize),
            ir.Constant(i64, len(extents)),
            table(context, extents),
            table(context, pick.strides),
            ir.Constant(pointer, None),
            ir.Constant(i32, AT_ONCE),
        ],
    )
    with builder.if_then(builder.icmp_signed("!=", found, ir.Constant(i32, 0)), likely=False):
        function.call_external(
            "cokernel_checked_report_undefined",
            void,
            [
                function.core,
                site,
                ir.Constant(i32, USED_AS_INDEX),
                *read_numbers(function, (AT_ONCE,)),
            ],
        )
