"""DMAs in checked mode: each becomes a function that the runtime calls when the copy takes effect.

Until then the program goes on. So all that the copy needs, including indices that are values of the
program, is put together in a block of arguments, which the runtime copies at the start. Indices in
a Ref are read when the copy takes effect, as on the chip.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from cokernel.compiler import dtypes, nests
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.memory import Allocation
from cokernel.compiler.ops import copies, padded_dma
from cokernel.compiler.ops.copies import Block, MoveRun, Picks, Side
from cokernel.compiler.ops.sync import SemaphoreAt
from cokernel.compiler.ops.watched_copies import (
    carry_undefined,
    plain,
    probe_indices,
    site_of,
    streamed,
    watched,
)
from cokernel.compiler.probes import (
    Access,
    is_probed,
    one_access,
    probe_block,
)
from cokernel.records import record


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
        mapped = side.map(self.value)
        picks = tuple(
            dataclasses.replace(pick, address=self._indices(pick)) for pick in mapped.picks
        )
        return dataclasses.replace(mapped, picks=picks)

    def _indices(self, pick: Picks) -> Any:
        """Where the indices are."""
        if pick.ref is not None:
            return self.value(pick.address)
        size = pick.owner.size * pick.dtype.itemsize
        address = _Stored(self.array_bytes)
        self.arrays.append((pick.address, size))
        self.array_bytes += -(-size // 8) * 8
        return address

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
        mapped = side.map(lambda item: self.value(function, item))
        picks = tuple(
            dataclasses.replace(pick, address=self.value(function, pick.address))
            for pick in mapped.picks
        )
        return dataclasses.replace(mapped, picks=picks)


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
        return padded_dma.copy_windows(context, block, access, operation)
    if target.picks_padding or source.picks_padding:
        return padded_dma.copy_picked(context, block, access, operation)
    watch: Callable[[MoveRun], MoveRun] | None = None
    is_picked = bool(target.picks or source.picks)
    if is_probed(context):
        for side in (source, target):
            probe_indices(context, side, operation)
        if is_picked:

            def watch(move: MoveRun) -> MoveRun:
                return watched(context, block, access, operation, move)

        else:
            reads, writes = site_of(context, source, operation), site_of(context, target, operation)
            strides = [plain(source), plain(target)]
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
            watch = streamed
        copies.copy_block(context, block, operation, watch)
    if not is_picked:
        carry_undefined(
            context,
            block,
            target.address,
            source.address,
            target.extents,
            plain(target),
            plain(source),
        )
