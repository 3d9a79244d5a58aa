"""Copies in checked mode of which a side may reach into the padding of tiles. What comes from there
is made up, and what goes there is lost.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from llvmlite import ir

from cokernel.compiler import dtypes, padding
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1
from cokernel.compiler.function import Index
from cokernel.compiler.ops import copies
from cokernel.compiler.ops.copies import Block, MoveRun, Side
from cokernel.compiler.ops.undefined_elements import FROM_PADDING, mark_from_padding
from cokernel.compiler.ops.watched_copies import (
    carry_undefined,
    plain,
    probe_indices,
    site_of,
    watched,
)
from cokernel.compiler.probes import Access, is_probed, one_access, probe_block, probe_run
from cokernel.compiler.spots import Spot, spot_of_offset, tell_read
from cokernel.compiler.transforms import smaller

if TYPE_CHECKING:
    from cokernel.checking.options import Checked


def copy_windows(context: Context, block: Block, access: Access, operation: str) -> None:
    """Copies between windows."""
    function = context.function
    target, source = block.target, block.source
    read = source.extents if source.inside is None else source.inside
    written = target.extents if target.inside is None else target.inside
    common = tuple(smaller(function, *pair) for pair in zip(read, written, strict=True))
    itemsize = dtypes.itemsize(block.dtype)
    if is_probed(context):
        reads, writes = site_of(context, source, operation), site_of(context, target, operation)
        probe_block(context, reads, Access.READ, source.address, read, plain(source), itemsize)
        probe_block(context, writes, access, target.address, written, plain(target), itemsize)
    _make_up(context, block, common, written, operation)
    cut = dataclasses.replace(
        block,
        target=dataclasses.replace(target, extents=common),
        source=dataclasses.replace(source, extents=common),
    )
    copies.copy_block(context, cut, operation)
    carry_undefined(
        context, block, target.address, source.address, common, plain(target), plain(source)
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
        site = site_of(context, block.source, operation)
        window = block.source.window
        padding.tell_if_cut(context, common, written, window, site, FROM_PADDING)
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
                address = inner.advance(base, inner.linear_index(index, plain(block.target)))
                builder.store(_made_up(checked, itemsize), address, align=1)
                if checked.uninitialised:
                    mark_from_padding(inner, address, itemsize)
        inner.finish()
    context.call(inner, arguments)


def copy_picked(context: Context, block: Block, access: Access, operation: str) -> None:
    """Copies between sides of which index arrays pick elements on one, looking at each element, or
    at each row that lies together, for what lies in the padding.
    """
    target, source = block.target, block.source
    move = copies.mover(context, block.dtype, add=block.add, is_atomic=block.is_atomic)
    if is_probed(context):
        for side in (source, target):
            probe_indices(context, side, operation)
        move = watched(context, block, access, operation, move)
    itemsize = dtypes.itemsize(block.dtype)
    # Whether the elements along the last dimension lie together, on both sides, or nowhere.
    has_rows = all(
        side.strides[-1] == itemsize and True not in side.hanging[-1:] for side in (target, source)
    )
    passed = copies.Passed()
    extents = [passed.index(extent) for extent in target.extents]
    to_side, origin_side = (copies.pass_side(passed, side) for side in (target, source))
    inner = context.function.sibling("padded_dma", [value.type for value in passed.values])
    passed.enter(inner.parameters)
    # Sums may meet in one place, and do so one after the other.
    is_scatter = bool(target.picks) and not block.add
    with one_access(context, is_scatter=is_scatter):
        with context.inside(inner):
            bounds = [copies.value_inside(extent) for extent in extents]
            count = bounds.pop() if has_rows else 1
            with inner.nest(bounds) as index, copies.Skip(inner) as skip:
                place = [*index, 0] if has_rows else list(index)
                to = _spot(context, to_side, place, operation, skip)
                origin = _spot(context, origin_side, place, operation, skip)
                with to.written(inner):
                    _move_or_make_up(context, block, access, operation, (to, origin), count, move)
            inner.finish()
        context.call(inner, passed.values)


def _spot(
    context: Context, side: Side, place: Sequence[Index], operation: str, skip: copies.Skip
) -> Spot:
    """Where the element of a side is, after looking up and checking its indices."""
    function = context.function
    positions, own = [], []
    offset: Index = 0
    for position, stride in zip(place, side.strides, strict=True):
        if stride is None:
            positions.append(position)
        else:
            own.append(position)
            offset = function.add(offset, function.multiply(position, stride))
    picked = [
        copies.picked_index(context, side, pick, positions, operation, skip) for pick in side.picks
    ]
    base = copies.value_inside(side.address)
    if side.is_table:
        return spot_of_offset(context, function, function.advance(base, offset), picked[0])
    for pick, index in zip(side.picks, picked, strict=True):
        offset = function.add(offset, function.multiply(index, pick.step))
    address = function.advance(base, offset)
    if side.layout is None:
        return Spot(address)
    layout = side.layout.map(copies.value_inside)
    return layout.spot(context, function, address, [*own, *picked])


def _move_or_make_up(
    context: Context,
    block: Block,
    access: Access,
    operation: str,
    spots: tuple[Spot, Spot],
    count: Index,
    move: MoveRun,
) -> None:
    """Copies so many elements to one spot from another. What lies in the padding there is
    arbitrary, and undefined.
    """
    to, origin = spots
    function, source = context.function, block.source
    itemsize = dtypes.itemsize(block.dtype)
    size = function.multiply(count, itemsize)
    if origin.number is None:
        return move(function, to.address, origin.address, size)
    checked = context.kernel.checked
    assert checked is not None
    assert source.room is not None
    with function.builder.if_else(origin.in_padding(function)) as (padded, there):
        with there:
            move(function, to.address, origin.address, size)
        with padded:
            if is_probed(context):
                writes = site_of(context, block.target, operation)
                probe_run(context, writes, access, to.address, size, itemsize)
            # Only a row has more than one, and ends with a dimension of its own.
            own = sum(stride is not None for stride in source.strides)
            step = 1 if source.layout is None or not own else source.layout.number_step(own - 1)
            reads = site_of(context, source, operation)
            with function.nest([count]) as [position]:
                address = function.advance(to.address, function.multiply(position, itemsize))
                function.builder.store(_made_up(checked, itemsize), address, align=1)
                if checked.uninitialised:
                    number = function.add(origin.number, function.multiply(position, step))
                    tell_read(context, function.index(number), source.room, reads, FROM_PADDING)
                    mark_from_padding(function, address, itemsize)
    return None


def _made_up(checked: "Checked", itemsize: int) -> ir.Constant:
    """What an element of the padding is read as."""
    content = bytes([padding.fill_byte(checked)] * itemsize)
    return ir.Constant(ir.IntType(8 * itemsize), int.from_bytes(content))
