"""What a copy in checked mode tells of what it reads and writes, and of undefined elements that it
moves.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes, padding
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index
from cokernel.compiler.ops.copies import Block, MoveRun, Picks, Side
from cokernel.compiler.ops.definedness import report_read
from cokernel.compiler.ops.undefined_elements import AT_ONCE
from cokernel.compiler.probes import Access, probe_block, probe_run, table

# How the runtime is told that undefined elements are used as indices.
USED_AS_INDEX = 1
# The runtime moves pieces from this size on, as `kStreamedBytes` in checked/state.cc.
STREAMED_BYTES = 4096


def streamed(move: MoveRun) -> MoveRun:
    """Has the runtime move long runs: it knows what is too large for the caches."""

    def moved(function: FunctionBuilder, target: ir.Value, source: ir.Value, size: Index) -> None:
        if isinstance(size, int) and size < STREAMED_BYTES:
            return move(function, target, source, size)
        arguments = [function.core, target, source, function.index(size)]
        return function.call_external("cokernel_checked_move", void, arguments)

    return moved


def plain(side: Side) -> list[int]:
    """The strides of a side that has no indices."""
    return [stride for stride in side.strides if stride is not None]


def site_of(context: Context, side: Side, operation: str) -> ir.Constant:
    """The site of what a copy does to a side."""
    return context.site(operation, side.name, shape=side.shape, rank=len(side.extents))


def watched(
    context: Context, block: Block, access: Access, operation: str, move: MoveRun
) -> MoveRun:
    """Moves a run after telling of it."""
    itemsize = dtypes.itemsize(block.dtype)
    reads, writes = (
        site_of(context, block.source, operation),
        site_of(context, block.target, operation),
    )

    def tell_and_move(
        function: FunctionBuilder, target: ir.Value, source: ir.Value, size: Index
    ) -> None:
        probe_run(context, reads, Access.READ, source, size, itemsize)
        probe_run(context, writes, access, target, size, itemsize)
        move(function, target, source, size)
        count = function.divide(size, itemsize)
        carry_undefined(context, block, target, source, [count], [itemsize], [itemsize])

    return tell_and_move


def carry_undefined(
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


def probe_indices(context: Context, side: Side, operation: str) -> None:
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
        if pick.window is not None:
            assert pick.inside is not None
            _report_if_cut(context, pick.inside, (1, *extents), pick.window, site)
            pick = dataclasses.replace(pick, strides=(0, *pick.strides))
            extents = list(pick.inside or ())
        probe_block(context, site, Access.READ, pick.address, extents, pick.strides, itemsize)
        _report_undefined_indices(context, pick, extents, itemsize, site)


def _report_if_cut(
    context: Context,
    inside: Sequence[Index],
    extents: Sequence[Index],
    window: padding.Window,
    site: ir.Constant,
) -> None:
    """Reports indices that come from the padding of tiles."""
    checked = context.kernel.checked
    if checked is None or not checked.uninitialised:
        return
    padding.tell_if_cut(context, inside, extents, window, site, AT_ONCE)
    with context.builder.if_then(padding.is_cut(context, inside, extents), likely=False):
        report_read(context.function, site, USED_AS_INDEX)


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
            ir.Constant(i64, 0),
        ],
    )
    with builder.if_then(builder.icmp_signed("!=", found, ir.Constant(i32, 0)), likely=False):
        report_read(context.function, site, USED_AS_INDEX)
