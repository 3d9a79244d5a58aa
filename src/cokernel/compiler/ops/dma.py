"""Copies between Refs that signal semaphores in bytes. A copy is complete once it has started."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, padding
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i64
from cokernel.compiler.function import Index
from cokernel.compiler.in_place import aim_p
from cokernel.compiler.ops import checked_dma, copies
from cokernel.compiler.ops.registry import added_rule, rule
from cokernel.compiler.ops.sync import SemaphoreAt, semaphore_at, signal, wait, written_name
from cokernel.compiler.ops.targets import find_target, require
from cokernel.compiler.ops.window_rests import forget_rest
from cokernel.compiler.pieces import spread
from cokernel.compiler.pipelines import is_written_by_pipeline
from cokernel.compiler.probes import Access, step
from cokernel.compiler.refs import AnyRef, Place, RefValue, View, root_of
from cokernel.compiler.transforms import resolve, slot_address, smaller, subcores_of_chip
from cokernel.compiler.values import Value
from cokernel.records import record

# A Ref and the transforms on it.
Selected = tuple[RefValue, tuple[Any, ...]]


@record(frozen=True)
class Choice:
    """One Ref, or several of one type among which `index` selects at run time."""

    options: tuple[Selected, ...]
    index: Value | None = None


def _choice(ref: Any) -> Choice:
    if isinstance(ref, _jax.TransformedRef) and isinstance(ref.ref, tuple | list):
        select, *rest = ref.transforms
        if not isinstance(select, _jax.SelectTransform):
            raise NotImplementedError(
                f"a transform of several Refs at once: {type(select).__name__}"
            )
        roots = [root_of(option) for option in ref.ref]
        options = tuple((root, (*transforms, *rest)) for root, transforms in roots)
        return Choice(options, select.idx)
    return Choice((root_of(ref),))


def _for_chosen(
    context: Context, choice: Choice, operation: str, emit: Callable[[Selected], None]
) -> None:
    """Emits code for the Ref that is chosen at run time, once for each that may be."""
    if choice.index is None:
        return emit(choice.options[0])
    function, builder = context.function, context.builder
    count = len(choice.options)
    index = context.index(choice.index)
    if isinstance(index, int) and 0 <= index < count:
        return emit(choice.options[index])
    names = ", ".join(root.name for root, _ in choice.options)
    message = f"select_ref has {count} Refs ({names}), but the index is {{value}}"
    good = builder.icmp_unsigned("<", function.index(index), function.index(count))
    require(context, good, operation, choice.options[0][0].name, message, index)
    blocks = [function.function.append_basic_block(f"selected{number}") for number in range(count)]
    done = function.function.append_basic_block("selection_done")
    switch = builder.switch(function.index(index), blocks[-1])
    for number, block in enumerate(blocks[:-1]):
        switch.add_case(ir.Constant(i64, number), block)
    for block, option in zip(blocks, choice.options, strict=True):
        builder.position_at_end(block)
        emit(option)
        builder.branch(done)
    builder.position_at_end(done)


def _extents(context: Context, selected: Selected) -> tuple[tuple[Index, ...], int]:
    """The extents of what transforms select, and the bytes of one element. Looks at no index."""
    root, transforms = selected
    extents: tuple[Index, ...] = root.shape
    itemsize = root.itemsize
    for transform in transforms:
        match transform:
            case _jax.NDIndexer():
                extents = _indexed_extents(context, transform)
            case _jax.TransposeTransform(permutation=permutation):
                extents = tuple(extents[axis] for axis in permutation)
            case _jax.ReshapeTransform(shape=shape):
                extents = tuple(shape)
            case _jax.BitcastTransform(dtype=dtype):
                new = dtypes.itemsize(dtype)
                if new != itemsize:
                    dimension = max(len(extents) - 2, 0)
                    extent = extents[dimension]
                    assert isinstance(extent, int)
                    extents = (
                        *extents[:dimension],
                        extent * itemsize // new,
                        *extents[dimension + 1 :],
                    )
                itemsize = new
            case _jax.SharedMemRefSliceTransform():
                assert isinstance(extents[-1], int)
                extents = (*extents[:-1], extents[-1] // subcores_of_chip())
    return extents, itemsize


def _indexed_extents(context: Context, indexer: Any) -> tuple[Index, ...]:
    plain: list[Index] = []
    arrays: list[tuple[Index, ...]] = []
    for index in indexer.indices:
        if isinstance(index, _jax.Indices):
            index = index.values
        if isinstance(index, _jax.Slice):
            size = index.size
            plain.append(int(size) if isinstance(size, int | np.integer) else context.index(size))
        elif isinstance(index, AnyRef):
            arrays.append(_extents(context, root_of(index))[0])
        elif getattr(index, "shape", ()):
            arrays.append(index.shape)
    if len(arrays) <= 1:
        return (*(arrays[0] if arrays else ()), *plain)
    return (*np.broadcast_shapes(*arrays), *plain)


def byte_count(context: Context, selected: Selected) -> Index:
    """How many bytes a DMA of a view moves, ignored indices included."""
    extents, itemsize = _extents(context, selected)
    total: Index = itemsize
    for extent in extents:
        total = context.function.multiply(total, extent)
    return total


@rule(_jax.tpu_primitives.dma_start_p)
def _dma_start(context: Context, eqn: Any, *operands: Any) -> None:
    operation = "dma_start"
    source, target, target_semaphore, source_semaphore, device_id = eqn.params["tree"].unflatten(
        operands
    )
    address = {"device_id": device_id, "device_id_type": eqn.params["device_id_type"]}
    sources, targets = _choice(source), _choice(target)
    arrival: SemaphoreAt | None = None
    departure: SemaphoreAt | None = None
    if target_semaphore is not None and not context.is_silent:
        arrival = semaphore_at(context, target_semaphore, operation, **address)
    if source_semaphore is not None:
        departure = semaphore_at(context, source_semaphore, operation)

    add, clips = eqn.params["add"], _is_of_pipeline(context)

    def for_chosen(copy: Callable[[Selected, Selected], None]) -> None:
        _for_chosen(
            context,
            sources,
            operation,
            lambda origin: _for_chosen(context, targets, operation, lambda to: copy(origin, to)),
        )

    def block(origin: Selected, to: Selected) -> copies.Block:
        return _block(context, origin, to, operation, address, add=add, clips=clips)

    keys = tuple(semaphore.key for semaphore in (arrival, departure) if semaphore is not None)
    name = written_name(*targets.options[0])
    written_source = written_name(*sources.options[0])
    if context.is_checked:
        site = context.site(operation, name, signals=keys, source=written_source)
        moved = byte_count(context, targets.options[0])
        _count_dma(context, moved)
        signals = checked_dma.Signals(
            arrival, moved, departure, byte_count(context, sources.options[0])
        )
        if signals.any:
            step(context, site)

        def begin(origin: Selected, to: Selected) -> None:
            moving = block(origin, to)
            if clips:
                forget_rest(context, to, moving, target_semaphore, operation)
            checked_dma.start(context, moving, operation, site, signals)

        for_chosen(begin)
        return

    def copy(origin: Selected, to: Selected) -> None:
        if origin[0].is_in_place:
            # It has been written there.
            return
        if to[0].borrowed is None or to[0].is_in_place:
            copies.copy_block(context, block(origin, to), operation)
        else:
            _lend(context, origin, to, operation)

    for_chosen(copy)
    moved = byte_count(context, targets.options[0])
    _count_dma(context, moved)
    site = context.site(operation, name, signals=keys, source=written_source)
    if arrival is not None:
        signal(context, arrival, moved, site)
    if departure is not None:
        signal(context, departure, byte_count(context, sources.options[0]), site)


def _is_of_pipeline(context: Context) -> bool:
    """Whether JAX's pipeline has written the copy at hand, rather than its user.

    The last block of a grid may hang over the end of an array. JAX rounds it up to whole tiles and
    copies those, since on the chip an array ends with a whole tile: what is read from there is
    anything, and what is written there is lost. Here nothing is there, and such copies are cut off.
    """
    return is_written_by_pipeline([eqn for eqn in reversed(context.equations) if eqn])


def _lend(context: Context, origin: Selected, to: Selected, operation: str) -> None:
    """Notes for a slot of a borrowed Ref where the block lies that would be copied to it."""
    block = resolve(context, *origin, operation, access=Access.READ, is_dma=True)
    slot = to[1][0].indices[0] if to[0].has_slots else None
    context.builder.store(block.address, slot_address(context, to[0], slot, operation))


@added_rule(aim_p)
def _aim(context: Context, eqn: Any, *operands: Any) -> None:
    """Notes where a Ref that is computed in place lies from now on."""
    placed, target = eqn.params["tree"].unflatten(operands)
    operation = "dma_start"
    if target is None:
        address = placed.own_address(context)
    else:
        ref, transforms = target
        view = resolve(context, ref, transforms, operation, access=Access.NONE, is_dma=True)
        address = view.address
    context.builder.store(address, slot_address(context, placed, None, operation))


def _block(
    context: Context,
    origin: Selected,
    to: Selected,
    operation: str,
    address: dict[str, Any],
    *,
    add: bool,
    clips: bool,
) -> copies.Block:
    """Where a DMA copies from and to."""
    (source_root, source_transforms), (target_root, target_transforms) = origin, to
    source_target = find_target(context, source_root, operation, written_name(*origin))
    target = find_target(context, target_root, operation, written_name(*to), **address)
    source_view = resolve(
        context,
        source_root,
        source_transforms,
        operation,
        access=Access.NONE,
        at=source_target.address(context),
        is_dma=True,
        clips=clips,
    )
    target_view = resolve(
        context,
        target_root,
        target_transforms,
        operation,
        access=Access.NONE,
        at=target.address(context),
        is_dma=True,
        clips=clips,
    )
    if source_view.dtype != target_view.dtype or dtypes.is_semaphore(source_view.dtype):
        raise ValueError(
            f"{context.describe()}: a DMA cannot copy {source_view.dtype} "
            f"({written_name(*origin)!r}) to "
            f"{target_view.dtype} ({written_name(*to)!r})"
        )
    views = source_view, target_view
    is_in_pieces = any(view.pieces is not None for view in views)
    source_view, target_view = _in_common_pieces(context, source_view, target_view, add)
    source_side, target_side = (
        copies.side_of(context, source_view),
        copies.side_of(context, target_view),
    )
    if clips and len(source_side.extents) == len(target_side.extents):
        pairs = zip(source_side.extents, target_side.extents, strict=True)
        common = tuple(smaller(context.function, one, other) for one, other in pairs)
        target_side = dataclasses.replace(target_side, extents=common)
    else:
        target_side = _same_extents(context, source_side, target_side, operation, origin, to)
    if any(map(_may_hang, (source_view, target_view))):
        is_picked = is_in_pieces or any(view.indices is not None for view in views)
        laid_out = copies.with_layout if is_picked else _with_overhang
        source_side = laid_out(context, source_side, source_view)
        target_side = laid_out(context, target_side, target_view)
    is_atomic = not (target.ref.place is Place.PRIVATE and target.is_own)
    return copies.Block(target_side, source_side, target_view.dtype, add, is_atomic)


def _may_hang(view: View) -> bool:
    """Whether a side of a copy, or the indices of one, may lie in the padding of tiles."""
    arrays = () if view.indices is None else view.indices.arrays
    return view.hangs or any(isinstance(array, View) and array.hangs for array in arrays)


def _with_overhang(context: Context, side: copies.Side, view: View) -> copies.Side:
    """A side with a dimension of one element in front, for indices that lie in the padding."""
    inside = window = None
    if view.overhang is not None:
        inside, window = view.reach()[0], padding.window_of(context.function, view)
    extents, strides = (1, *side.extents), (0, *side.strides)
    return dataclasses.replace(side, extents=extents, strides=strides, inside=inside, window=window)


def _in_common_pieces(context: Context, source: View, target: View, add: bool) -> tuple[View, View]:
    """Both views in the dtype of the pieces that the elements of either lie in."""
    given = [view.pieces for view in (source, target) if view.pieces is not None]
    if not given:
        return source, target
    dtype = min((pieces.dtype for pieces in given), key=dtypes.itemsize)
    if add or any(dtypes.itemsize(pieces.dtype) != dtypes.itemsize(dtype) for pieces in given):
        raise NotImplementedError(
            f"{context.describe()}: this DMA between {source.ref.name!r} and {target.ref.name!r} "
            f"under the wider dtype {target.dtype}"
        )
    return spread(source, dtype), spread(target, dtype)


def _same_extents(
    context: Context,
    source: copies.Side,
    target: copies.Side,
    operation: str,
    origin: Selected,
    to: Selected,
) -> copies.Side:
    """The target with the extents that both sides are found to share."""
    names = f"{written_name(*origin)!r} to {written_name(*to)!r}"
    if len(source.extents) != len(target.extents):
        raise ValueError(
            f"{context.describe()}: a DMA from {names} needs equal shapes, but the ranks are "
            f"{len(source.extents)} and "
            f"{len(target.extents)}"
        )
    common: list[Index] = []
    for dimension, (one, other) in enumerate(zip(source.extents, target.extents, strict=True)):
        if isinstance(one, int) and isinstance(other, int):
            if one != other:
                raise ValueError(
                    f"{context.describe()}: a DMA from {names} needs equal shapes, but "
                    f"dimension {dimension} has "
                    f"{one} and {other} elements"
                )
        elif one is not other:
            message = (
                f"a DMA from {names} needs equal sizes; dimension {dimension} of the source "
                "has {value}"
            )
            same = context.builder.icmp_signed(
                "==", context.function.index(one), context.function.index(other)
            )
            require(context, same, operation, written_name(*to), message, one)
        common.append(one if isinstance(one, int) else other)
    return dataclasses.replace(target, extents=tuple(common))


def _count_dma(context: Context, moved: Index) -> None:
    function, builder = context.function, context.builder
    for name, amount in (("Core.dma_count", 1), ("Core.dma_bytes", moved)):
        place = function.field(function.core, name)
        builder.store(builder.add(builder.load(place, typ=i64), function.index(amount)), place)


@rule(_jax.tpu_primitives.dma_wait_p)
def _dma_wait(context: Context, eqn: Any, *operands: Any) -> None:
    # A wait for the source comes with source and target exchanged, so what counts is always in
    # the target's place.
    _, target, semaphore, _, _ = eqn.params["tree"].unflatten(operands)
    if semaphore is None or context.is_silent:
        # A DMA is complete once it has been started.
        return
    selected = _choice(target).options[0]
    amount = byte_count(context, selected)
    at = semaphore_at(context, semaphore, "dma_wait")
    details: dict[str, Any] = {"bytes": amount} if isinstance(amount, int) else {}
    site = context.site(
        "dma_wait", at.name, waits=at.key, target=written_name(*selected), **details
    )
    wait(context, at, amount, True, site, is_dma=True)
