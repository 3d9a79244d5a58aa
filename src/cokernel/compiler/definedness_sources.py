"""Which elements of a read the elements of a mask of undefined values come from.

A mask says that an element is undefined, and not why. Where an operation only moves elements, or
computes each from few others, it is known when a program is compiled which elements of a read an
element of its mask can come from. The runtime, which knows what was undefined of each read, then
names those alone. Whatever it is not known of may come from all that was read, and is told so.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from cokernel.records import record

Shape = tuple[int, ...]

# What the runtime is told of a source; see `Source` in runtime/checked/origins.h.
_KNOWN, _SURE, _EARLIER, _MOVED, _KEPT = 1, 2, 4, 8, 16


@record(frozen=True)
class Source:
    """Where in a read the elements of a mask come from."""

    # The element with the index i comes from that with the row-major number `base` + sum of
    # i[d] * strides[d]; None: from any.
    strides: Shape | None
    base: int = 0
    # If `strides` are not: the extents and strides of an array of the mask's elements under another
    # shape, in which they are.
    flat: tuple[tuple[int, int], ...] = ()
    # Further dimensions, as pairs of extent and stride: it comes from all that they lead to.
    free: tuple[tuple[int, int], ...] = ()
    # Whether what is undefined there has reached the element; else it may have been left out.
    is_sure: bool = True
    # Whether the value may have been read in an earlier iteration of a loop.
    is_earlier: bool = False
    # Whether no element of the read is more than one of the mask, where it is not known which.
    is_moved: bool = False
    # Whether it was only read in order to be written back where it was.
    is_kept: bool = False

    @property
    def is_known(self) -> bool:
        """Whether it is known where each element comes from."""
        return self.strides is not None or bool(self.flat)


ANYWHERE = Source(None, is_sure=False)

# What an operation makes of a source: (the source, the shape of the operand, that of the result).
Move = Callable[[Source, Shape, Shape], Source]


def dense(shape: Sequence[int]) -> Shape:
    """The strides of a row-major array."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def of_read(shape: Sequence[int]) -> Source:
    """The source of the mask of a read itself."""
    return Source(dense(shape))


def _with(source: Source, **changes: Any) -> Source:
    return dataclasses.replace(source, **changes)


def unsure(source: Source) -> Source:
    """The same where something else may have taken the place of the value."""
    return _with(source, is_sure=False)


def earlier(source: Source, is_sure: bool) -> Source:
    """The same where the value may come from an earlier iteration; `is_sure`: whether all that the
    read has met so far belongs to this loop.
    """
    return _with(source, is_earlier=True, is_sure=source.is_sure and is_sure)


def united(one: Source, other: Source) -> Source:
    """What is known of values that come from a read in two ways."""
    if one == other:
        return one
    is_earlier = one.is_earlier or other.is_earlier

    def place(source: Source) -> Any:
        return source.strides, source.base, source.flat, source.free

    if place(one) == place(other):
        is_sure = one.is_sure and other.is_sure
        is_moved = one.is_moved and other.is_moved
        is_kept = one.is_kept and other.is_kept
        flags = {"is_sure": is_sure, "is_moved": is_moved, "is_kept": is_kept}
        return _with(one, is_earlier=is_earlier, **flags)
    return _with(ANYWHERE, is_earlier=is_earlier)


def all_united(some: Iterable[Mapping[int, Source]]) -> dict[int, Source]:
    """What is known of values that come from reads, by their numbers, in any of several ways."""
    result: dict[int, Source] = {}
    for sources in some:
        for number, source in sources.items():
            known = result.get(number)
            result[number] = source if known is None else united(known, source)
    return result


# What operations make of sources.


def anywhere(source: Source, before: Shape, after: Shape) -> Source:
    """Of an operation that says nothing of which elements come from where."""
    return _with(ANYWHERE, is_earlier=source.is_earlier)


def moved(source: Source, before: Shape, after: Shape) -> Source:
    """Of one that moves each element to one place at most, which it does not say."""
    is_whole = source.strides == dense(before) and not source.free
    is_moved = source.is_moved or is_whole
    return _with(ANYWHERE, is_earlier=source.is_earlier, is_moved=is_moved)


def kept(source: Source, before: Shape, after: Shape) -> Source:
    """Of one whose results are only written back where they were."""
    return _with(source, is_kept=True)


def broadcast(source: Source, before: Shape, after: Shape) -> Source:
    """Of one that goes element by element, where dimensions are added in front or stretched."""
    first = len(after) - len(before)
    if first < 0 or any(a != b and a != 1 for a, b in zip(before, after[first:], strict=True)):
        return anywhere(source, before, after)
    return broadcast_in(range(first, len(after)))(source, before, after)


def perhaps(source: Source, before: Shape, after: Shape) -> Source:
    """The same of one that takes some elements of this operand, and others of another."""
    return unsure(broadcast(source, before, after))


def broadcast_in(dimensions: Sequence[int]) -> Move:
    """Of a broadcast to a shape, in which the operand has these dimensions."""

    def move(source: Source, before: Shape, after: Shape) -> Source:
        if source.strides is None:
            is_same = before == after and list(dimensions) == list(range(len(after)))
            return source if is_same else anywhere(source, before, after)
        strides = [0] * len(after)
        for axis, place in enumerate(dimensions):
            strides[place] = source.strides[axis] if before[axis] == after[place] else 0
        return _with(source, strides=tuple(strides))

    return move


def reshaped(source: Source, before: Shape, after: Shape) -> Source:
    """Of a reshape to the same elements in their order."""
    if not source.is_known or before == after:
        return source
    if math.prod(before) == 0:
        return moved(source, before, after)
    flat = source.flat
    if source.strides is not None:
        flat = tuple(zip(before, source.strides, strict=True))
    strides = _reshaped(flat, after)
    if strides is None:
        return _with(source, strides=None, flat=flat)
    return _with(source, strides=strides, flat=())


def _reshaped(before: Sequence[tuple[int, int]], after: Shape) -> Shape | None:
    """The strides of an array, given with its extents, under another shape; None if there are
    none.
    """
    sides = [side for side in before if side[0] != 1]
    result: list[int] = []
    rest = list(after)
    while rest:
        if rest[0] == 1:
            result.append(0)
            rest.pop(0)
            continue
        # The fewest dimensions of both that have the same elements.
        group, extents = [sides.pop(0)], [rest.pop(0)]
        while (old := math.prod(extent for extent, _ in group)) != (new := math.prod(extents)):
            if old < new:
                group.append(sides.pop(0))
            else:
                extents.append(rest.pop(0))
        pairs = itertools.pairwise(group)
        if any(one[1] != other[0] * other[1] for one, other in pairs):
            return None
        step = group[-1][1]
        result += [step * inner for inner in dense(extents)]
    return tuple(result)


def transposed(order: Sequence[int]) -> Move:
    """Of a transpose."""

    def move(source: Source, before: Shape, after: Shape) -> Source:
        if source.strides is None:
            return moved(source, before, after)
        return _with(source, strides=tuple(source.strides[axis] for axis in order))

    return move


def sliced(starts: Sequence[int], steps: Sequence[int] | None = None) -> Move:
    """Of a slice whose place is known."""

    def move(source: Source, before: Shape, after: Shape) -> Source:
        if source.strides is None:
            return moved(source, before, after)
        strides = source.strides
        base = source.base + sum(a * b for a, b in zip(starts, strides, strict=True))
        if steps is not None:
            strides = tuple(a * b for a, b in zip(strides, steps, strict=True))
        return _with(source, strides=strides, base=base)

    return move


def reversed_along(axes: Sequence[int]) -> Move:
    """Of one that reverses dimensions."""

    def move(source: Source, before: Shape, after: Shape) -> Source:
        if source.strides is None:
            return moved(source, before, after)
        base = source.base + sum((before[axis] - 1) * source.strides[axis] for axis in axes)
        strides = [-step if axis in axes else step for axis, step in enumerate(source.strides)]
        return _with(source, strides=tuple(strides), base=base)

    return move


def reduced(axes: Sequence[int]) -> Move:
    """Of a reduction: each element comes from all that it is computed from."""

    def move(source: Source, before: Shape, after: Shape) -> Source:
        if source.strides is None:
            return anywhere(source, before, after)
        dimensions = [
            (before[axis], source.strides[axis]) for axis in axes if source.strides[axis] != 0
        ]
        kept = [step for axis, step in enumerate(source.strides) if axis not in axes]
        free = tuple(sorted((*source.free, *dimensions), key=lambda side: -abs(side[1])))
        return _with(source, strides=tuple(kept), free=free)

    return move


def whole(source: Source, before: Shape, after: Shape) -> Source:
    """Of one whose results come from all elements."""
    one = reduced(range(len(before)))(source, before, ())
    return broadcast(one, (), after)


def then(*moves: Move | tuple[Move, Shape]) -> Move:
    """One move after the other; with each but the last the shape that it leads to."""

    def move(source: Source, before: Shape, after: Shape) -> Source:
        for item in moves:
            step, shape = item if isinstance(item, tuple) else (item, after)
            source = step(source, before, shape)
            before = shape
        return source

    return move


# For the runtime.


def words(reads: Sequence[tuple[int, Source]], before: Shape, after: Shape) -> list[int]:
    """What the runtime is told of the sources of a mask, which is broadcast from one shape to
    another.
    """
    result = [len(reads)]
    for number, given in reads:
        source = broadcast(given, before, after)
        flags = _SURE * source.is_sure | _EARLIER * source.is_earlier | _MOVED * source.is_moved
        flags |= _KEPT * source.is_kept
        dimensions = source.flat
        if source.strides is not None:
            dimensions = tuple(zip(after, source.strides, strict=True))
        flags |= _KNOWN * source.is_known
        dimensions = _merged(dimensions)
        result += [number, flags, source.base, len(dimensions), *sum(dimensions, ())]
        result += [len(source.free), *sum(source.free, ())]
    return result


def _merged(dimensions: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The same dimensions, where those that lie dense are one."""
    result: list[tuple[int, int]] = []
    for extent, step in dimensions:
        if extent == 1:
            continue
        if result and result[-1][1] == extent * step:
            extent *= result.pop()[0]
        result.append((extent, step))
    return tuple(result)
