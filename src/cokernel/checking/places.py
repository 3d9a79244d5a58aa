"""How reports name what a launch consists of: cores, semaphores, lines of the user's program."""

import linecache
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cokernel.compiler.window_names import element_name

Coordinates = tuple[int, ...]

SEMAPHORE_BYTES = 16

# Lists of cores are cut off after so many parts.
LONGEST_LIST = 10
# Of the calls of one function so many are told.
CALLS_TOLD = 4

# Where a function was called from, and where that one was, and so on.
Calls = Sequence[Mapping[str, Any]]


class Places:
    """The names of a kernel's cores, sites and semaphores.

    `sites` and `memory` are what the compiler hands over: `SiteTable.to_list` and
    `Kernel.describe_memory`.
    """

    def __init__(self, sites: Sequence[Mapping[str, Any]], memory: Mapping[str, Any]):
        self.sites = sites
        self.memory = memory
        # The user's line that made the kernel, as a site; None if it is not known.
        self.made_at: Mapping[str, Any] | None = memory.get("made_at")
        self.signalling_sites = [site for site in sites if site.get("signals")]

    def site(self, number: int | None) -> Mapping[str, Any] | None:
        """A site by its number; None if the core has not come to one yet."""
        if number is None or not 0 <= number < len(self.sites):
            return None
        return self.sites[number]

    def axes(self, program: int, count: int) -> list[str]:
        """The names of the axes of a program's mesh."""
        known = list(self.memory.get("axes", ()))
        if program < len(known) and len(known[program]) == count:
            return list(known[program])
        return [f"axis{number}" for number in range(count)]

    def core(self, program: int, coordinates: Sequence[int]) -> str:
        """One core, as in "core=1 subcore=3"."""
        return self.cores(program, [tuple(coordinates)])

    def cores(self, program: int, coordinates: Iterable[Sequence[int]]) -> str:
        """Several cores of one program, as in "core=0-1 subcore=0-15"."""
        points = sorted({tuple(point) for point in coordinates})
        axes = self.axes(program, len(points[0]) if points else 0)
        labels = [
            " ".join(f"{axis}={_spans(values)}" for axis, values in zip(axes, box, strict=True))
            for box in boxes(points)
        ]
        if len(labels) > LONGEST_LIST:
            labels = [*labels[:LONGEST_LIST], f"... ({len(points)} cores in all)"]
        return ", ".join(labels)

    def semaphore(self, info: Mapping[str, Any]) -> "SemaphorePlace | None":
        """What a failure's description of a semaphore means; None for one nobody knows."""
        offset = info["offset"]
        if info["owner"] == "private":
            program = info["program"]
            for start, size, name, shape in self.memory.get("semaphores", {}).get(str(program), ()):
                if start <= offset < start + size:
                    element = _element(name, shape, (offset - start) // SEMAPHORE_BYTES)
                    key = ("private", program, offset)
                    return SemaphorePlace(element, name, key, info["index"], (start, start + size))
        if info["owner"] == "buffer":
            known = self.memory.get("instances", {}).get(str(info["index"]))
            if known is not None and known["bytes"]:
                core, inside = divmod(offset, known["bytes"])
                element = _element(known["name"], known["shape"], inside // SEMAPHORE_BYTES)
                key = ("instances", info["index"], inside)
                return SemaphorePlace(element, known["name"], key, core, (0, known["bytes"]))
        return None

    def is_copied_to(self, name: str) -> bool:
        """Whether some program starts copies into a Ref, or a part of it, that it calls so."""
        return any(
            site["operation"].startswith("dma") and site["name"].partition("[")[0] == name
            for site in self.sites
            if site.get("name")
        )

    def signalled(self, key: Sequence[Any]) -> "str | None":
        """The semaphore that a site signals, as the program names it: one, or all of an array if
        it may be any; None for one nobody knows.
        """
        place, owner, first, end, _ = key
        known: dict[str, Any] = {"offset": first, "index": 0}
        if place == "private":
            known |= {"owner": "private", "program": owner}
        else:
            known |= {"owner": "buffer", "index": owner}
        found = self.semaphore(known)
        if found is None:
            return None
        return found.element if end - first == SEMAPHORE_BYTES else found.name

    def ref(self, memory: Mapping[str, Any], names: Sequence[str] = ()) -> Mapping[str, Any] | None:
        """The Ref that some bytes of a launch's memory belong to; None if there is none.

        Scopes that follow each other use the same bytes, so of several Refs the one goes first that
        the program calls by one of `names`.

        Args:
          memory: "owner", "program", "index" and "offset", as in a finding of the runtime.
          names: what those who touched the bytes call them.
        """
        found = [
            ref
            for ref in self.memory.get("refs", ())
            if ref["owner"] == memory["owner"]
            and (memory["owner"] != "private" or ref["program"] == memory["program"])
            and (memory["owner"] != "buffer" or ref["buffer"] == memory["index"])
            and ref["offset"] <= memory["offset"] < ref["offset"] + max(ref["bytes"], 1)
        ]
        # "x[0:4]" is a part of "x".
        plain = {*names, *(name.partition("[")[0] for name in names)}
        named = [ref for ref in found if ref["name"] in plain]
        return (named or found or [None])[0]


class SemaphorePlace:
    """One semaphore of one core."""

    def __init__(
        self,
        element: str,
        name: str,
        key: tuple[str, int, int],
        core: int,
        whole: tuple[int, int],
    ):
        # The element and the whole array as the owner's program names them: "sems[2]", "sems".
        self.element = element
        self.name = name
        # Its kind of place, the program or the buffer, and the first byte there.
        self.key = key
        # The row-major number of the core that owns it, and the bytes of the array it belongs to.
        self.core = core
        self.whole = whole

    def is_covered_by(self, key: Sequence[Any]) -> bool:
        """Whether a site's key covers this semaphore, whichever core it is of."""
        place, owner, first, end, _ = key
        return (place, owner) == self.key[:2] and first <= self.key[2] < end

    def is_of_same_array(self, key: Sequence[Any]) -> bool:
        """Whether a site's key covers any part of the array that this semaphore belongs to."""
        place, owner, first, end, _ = key
        return (place, owner) == self.key[:2] and first < self.whole[1] and end > self.whole[0]


def _element(name: str, shape: Sequence[int], flat: int) -> str:
    if math.prod(shape) == 1 and len(shape) <= 1:
        return name
    index = []
    for extent in reversed(shape):
        index.append(flat % extent)
        flat //= extent
    return element_name(name, f"[{', '.join(map(str, reversed(index)))}]")


def boxes(points: Iterable[Coordinates]) -> list[list[list[int]]]:
    """Divides points into boxes, each the values on every axis whose combinations are points."""
    points = list(points)
    if not points:
        return []
    axes = [sorted(set(values)) for values in zip(*points, strict=True)]
    if math.prod(len(values) for values in axes) == len(points):
        return [axes]
    # Slices along the first axis that look the same are told together.
    alike: dict[tuple[Coordinates, ...], list[int]] = {}
    for value in axes[0]:
        rest = tuple(sorted(point[1:] for point in points if point[0] == value))
        alike.setdefault(rest, []).append(value)
    return [[values, *box] for rest, values in alike.items() for box in boxes(rest)]


def _spans(values: Sequence[int]) -> str:
    """Sorted numbers with runs drawn together: "0-3,7"."""
    spans: list[list[int]] = []
    for value in values:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    texts = [f"{a}" if a == b else f"{a}-{b}" for a, b in spans]
    if len(texts) > LONGEST_LIST:
        texts = [*texts[:LONGEST_LIST], f"... ({len(values)} in all)"]
    return ",".join(texts)


def where(site: Mapping[str, Any] | None) -> str:
    """File, line and function of a site."""
    if site is None or site.get("file") is None:
        return "a line that is not known"
    # Programs are often nested functions, and "<locals>" between all of them only hides the names.
    function = site["function"].replace(".<locals>", "")
    return f"{site['file']}:{site['line']} in {function}"


def code(site: Mapping[str, Any] | None) -> str | None:
    """The text of a site's line, None if the file cannot be read."""
    if site is None or site.get("file") is None:
        return None
    return linecache.getline(site["file"], site["line"]).strip() or None


def where_and_code(site: Mapping[str, Any] | None, indent: str) -> list[str]:
    """Lines that name a place in the user's program, and from where it was called, and quote it."""
    return [f"{indent}at {where(site)}", *_quoted(site, indent), *called_at([site], indent)]


def called_at(sites: Sequence[Mapping[str, Any] | None], indent: str) -> list[str]:
    """Lines that say from where the function of some sites, all on one line, was called."""
    ways = ways_to([(site or {}).get("callers", ()) for site in sites])
    lines: list[str] = []
    for start, caller in told_calls(ways):
        if caller is None:
            lines.append(f"{indent}{start}")
        else:
            lines += [f"{indent}{start} {where(caller)}", *_quoted(caller, indent)]
    return lines


def ways_to(calls: Iterable[Calls]) -> list[Calls]:
    """Each of several ways to a line once, in the order in which they stand in the program."""
    known = {tuple(where(caller) for caller in way): way for way in calls if way}
    return sorted(known.values(), key=_place_of_calls)


def _place_of_calls(way: Calls) -> list[tuple[str, int, str]]:
    return [
        (caller.get("file") or "", caller.get("line") or 0, caller.get("function") or "")
        for caller in way
    ]


def told_calls(ways: Sequence[Calls]) -> Iterator[tuple[str, Mapping[str, Any] | None]]:
    """What a text says of the ways to a line: words, and the caller that they are of; None where
    the words are all there is.
    """
    for number, way in enumerate(ways[:CALLS_TOLD]):
        for depth, caller in enumerate(way):
            deeper = "  " * (depth if len(ways) > 1 else 0)
            yield f"{deeper}{'and at' if number and not depth else 'called at'}", caller
    if len(ways) > CALLS_TOLD:
        left_out = len(ways) - CALLS_TOLD
        yield f"and at {left_out} more {'place' if left_out == 1 else 'places'}", None


def _quoted(site: Mapping[str, Any] | None, indent: str) -> list[str]:
    quoted = code(site)
    return [] if quoted is None else [f"{indent}    {quoted}"]
