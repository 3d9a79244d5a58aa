"""Which elements of a Ref a finding is about."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

# For each dimension the first index and the one behind the last.
Box = tuple[tuple[int, int], ...]
# The first element and the one behind the last, in row-major order.
Run = tuple[int, int]

# A sentence names at most so many boxes.
BOXES_NAMED = 4


@dataclasses.dataclass(frozen=True)
class Elements:
    """Some elements of a Ref.

    Attributes:
      name: the Ref, as the program names it.
      shape, dtype: of the whole Ref, or, of what a pipeline keeps of an operand, of one block.
      runs: the elements by their row-major numbers, as runs of neighbours in ascending order.
      is_complete: False if there were more pieces than a finding keeps.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    runs: tuple[Run, ...]
    is_complete: bool = True

    @property
    def count(self) -> int:
        """How many elements these are."""
        return sum(stop - first for first, stop in self.runs)

    @property
    def boxes(self) -> list[Box]:
        """The same elements as boxes that do not overlap."""
        return joined(box for run in self.runs for box in boxes_of(run, self.shape))

    @property
    def parts(self) -> list[str]:
        """The boxes in words, as in "[2, 0:16]"; nothing for a Ref without dimensions."""
        return [written(box) for box in self.boxes if box]

    @property
    def text(self) -> str:
        """What stands behind the name of the Ref: "[2, 0:16]", or "[0], [3] and 7 more parts"."""
        parts = self.parts
        if not self.is_complete:
            return f"{', '.join(parts[:BOXES_NAMED])} and more"
        if len(parts) > BOXES_NAMED:
            left_out = len(parts) - BOXES_NAMED + 1
            parts = [*parts[: BOXES_NAMED - 1], f"{left_out} more parts"]
        return " and ".join([", ".join(parts[:-1]), *parts[-1:]] if len(parts) > 1 else parts)

    def to_dict(self) -> dict[str, Any]:
        """The elements as plain data, for JSON; `parts` says in words what `runs` says."""
        return {
            "name": self.name,
            "shape": list(self.shape),
            "dtype": self.dtype,
            "runs": [list(run) for run in self.runs],
            "parts": self.parts,
            "is_complete": self.is_complete,
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Elements":
        """The elements that `to_dict`, and JSON after it, made plain data of."""
        return cls(
            name=plain["name"],
            shape=tuple(plain["shape"]),
            dtype=plain["dtype"],
            runs=tuple((first, stop) for first, stop in plain["runs"]),
            is_complete=plain["is_complete"],
        )


def elements_of(ref: Mapping[str, Any], memory: Mapping[str, Any]) -> Elements:
    """The elements of a Ref that hold some bytes of the block of memory it lies in.

    Args:
      ref: its "name", "shape", "dtype" and "itemsize", and its "offset" and "bytes" in that block.
      memory: "parts", pairs of the first byte in the block and the number of bytes, in ascending
        order, and whether it "is_cut_off".
    """
    size = ref["itemsize"]
    count = math.prod(ref["shape"])
    runs: list[Run] = []
    for offset, length in memory["parts"]:
        inside = offset - ref["offset"]
        first = max(inside // size, 0)
        stop = min(max(-(-(inside + length) // size), first + 1), count)
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        elif first < stop:
            runs.append((first, stop))
    return Elements(
        name=ref["name"],
        shape=tuple(ref["shape"]),
        dtype=ref["dtype"],
        runs=tuple(runs),
        is_complete=not memory.get("is_cut_off", False),
    )


def joined_elements(some: Sequence[Elements]) -> Elements:
    """All elements of one Ref that are in any of several."""
    is_complete = all(elements.is_complete for elements in some)
    runs = _united(run for elements in some for run in elements.runs)
    return dataclasses.replace(some[0], runs=runs, is_complete=is_complete)


def within_slot(elements: Elements, slots: int) -> Elements:
    """The elements of a Ref that holds blocks one behind the other as elements of a block: of any
    of them. `slots` says how many there are.
    """
    shape = elements.shape[1:] or (elements.shape[0] // slots,)
    size = max(math.prod(shape), 1)
    pieces = [
        (max(first - low, 0), min(stop - low, size))
        for first, stop in elements.runs
        for low in range(first // size * size, stop, size)
    ]
    runs = _united(pieces)
    return dataclasses.replace(elements, shape=shape, runs=runs)


def _united(pieces: Iterable[Run]) -> tuple[Run, ...]:
    """The same elements as runs of neighbours in ascending order."""
    runs: list[Run] = []
    for first, stop in sorted(pieces):
        if runs and first <= runs[-1][1]:
            runs[-1] = (runs[-1][0], max(stop, runs[-1][1]))
        else:
            runs.append((first, stop))
    return tuple(runs)


def boxes_of(run: Run, shape: Sequence[int]) -> Iterator[Box]:
    """Yields the boxes of a row-major array that together hold exactly the elements of a run."""
    first, stop = run
    if first >= stop:
        return
    if not shape:
        yield ()
        return
    rest = math.prod(shape[1:])
    low, high = first // rest, (stop - 1) // rest
    if low == high:
        inner = (first - low * rest, stop - low * rest)
        yield from (((low, low + 1), *box) for box in boxes_of(inner, shape[1:]))
        return
    # The end of the first row, whole rows, and the begin of the last one.
    whole_low, whole_high = -(-first // rest), stop // rest
    yield from boxes_of((first, whole_low * rest), shape)
    if whole_low < whole_high:
        yield ((whole_low, whole_high), *((0, extent) for extent in shape[1:]))
    yield from boxes_of((whole_high * rest, stop), shape)


def joined(boxes: Iterable[Box]) -> list[Box]:
    """The same elements in fewer boxes: those that lie side by side become one."""
    known = list(boxes)
    for axis in reversed(range(len(known[0]) if known else 0)):
        rows: dict[Box, list[Run]] = {}
        for box in known:
            sides = rows.setdefault((*box[:axis], *box[axis + 1 :]), [])
            if sides and sides[-1][1] == box[axis][0]:
                sides[-1] = (sides[-1][0], box[axis][1])
            else:
                sides.append(box[axis])
        known = [
            (*rest[:axis], side, *rest[axis:]) for rest, sides in rows.items() for side in sides
        ]
    return sorted(known)


def padding_of(window: Sequence[tuple[int, int, int]]) -> list[Box]:
    """The boxes of a window that lie in the padding of a Ref, and do not overlap.

    Args:
      window: of each dimension the first index, the one behind the last, and the Ref's extent.
    """
    boxes: list[Box] = []
    inside: list[Run] = []
    for axis, (start, stop, extent) in enumerate(window):
        if stop > extent:
            behind = [(first, last) for first, last, _ in window[axis + 1 :]]
            boxes.append((*inside, (max(start, extent), stop), *behind))
        inside.append((start, min(stop, extent)))
        if start >= extent:
            break
    return boxes


def padding_text(name: str, raw: Mapping[str, Any]) -> str:
    """What lies in the padding of a Ref of that which a finding is about, as in "[100:104]"."""
    window = " and ".join(map(written, padding_of(raw.get("window", ()))))
    picked = raw.get("padding")
    if picked is None:
        return window
    runs = tuple((first, stop) for first, stop in picked["runs"])
    shape, is_complete = tuple(picked["shape"]), not picked["is_cut_off"]
    return " and ".join(filter(None, (window, Elements(name, shape, "", runs, is_complete).text)))


def written(box: Box) -> str:
    """A box as an index, as in "[2, 0:16]"."""
    sides = (str(low) if high == low + 1 else f"{low}:{high}" for low, high in box)
    return f"[{', '.join(sides)}]"
