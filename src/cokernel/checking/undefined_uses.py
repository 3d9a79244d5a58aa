"""What comes of an undefined value that a program puts to use: a bad index, a wait that never ends.

Where a value that nobody wrote decides something, that is the mistake, and what it leads to is told
below it. Which findings those are is worked out from where the value is used: on the line that
fails, or by a branch or loop that the line is in.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from cokernel.checking.deadlock import group_blocked
from cokernel.checking.places import Places

Raw = Mapping[str, Any]
Site = Mapping[str, Any]

# The uses by which a value decides what a program does, on one line, or within one construct.
_OF_A_LINE = ("index", "amount")
_OF_WHAT_IS_INSIDE = ("branch", "loop")
DECIDING = (*_OF_A_LINE, *_OF_WHAT_IS_INSIDE, "callback")

# What a core does to an element at a bad index, or to a semaphore by a bad amount.
_OF_ITS_PARTIES = (
    "Race",
    "LeftoverSemaphore",
    "UnwaitedCopy",
    "CopyInFlight",
    "WaitTooLarge",
    "SemaphoreUnderflow",
    "SemaphoreOverflow",
)
# What is left of a semaphore may also come from a wait that was passed over.
_OF_ITS_SEMAPHORE = ("LeftoverSemaphore", "UnwaitedCopy")
# These end a launch on the line of one core.
_OF_ONE_CORE = ("OutOfBounds", "Check", "Callback")


def with_consequences(
    findings: Sequence[Raw], failure: Raw | None, places: Places
) -> list[tuple[Raw, Raw]]:
    """What follows from the use of an undefined value: pairs of the UninitialisedRead and of a
    finding, or the failure of the launch, that it explains.

    Args:
      findings: as the runtime records them, of one launch.
      failure: what has ended it, None if it came to its end.
      places: the names of the kernel's sites, cores and memory.
    """
    uses = [_Use(raw, places) for raw in findings if _decides(raw)]
    if not uses:
        return []
    pairs: list[tuple[Raw, Raw]] = []
    for raw in findings:
        use = next((use for use in uses if _explains(use, raw, places)), None)
        if use is not None:
            pairs.append((use.raw, raw))
    if failure is not None:
        use = next((use for use in uses if use.has_failed(failure)), None)
        use = use or next((use for use in uses if _explains_failure(use, failure, places)), None)
        if use is not None:
            pairs.append((use.raw, failure))
    return pairs


def _decides(raw: Raw) -> bool:
    return raw["kind"] == "UninitialisedRead" and raw.get("use") in DECIDING


class _Use:
    """The use of an undefined value, by one core or by several that did the same."""

    def __init__(self, raw: Raw, places: Places):
        self.raw = raw
        user = raw["second"]
        self._places = places
        self.site = user["site"]
        self.program = user["program"]
        # The other cores come as pairs of who has read and who has used it.
        others = [parties[-1] for parties in raw.get("also", ())]
        self.cores = {(one["program"], one["index"]) for one in (user, *others)}
        self._place = _place(places.site(self.site))
        self._is_of_a_line = raw["use"] not in _OF_WHAT_IS_INSIDE

    def is_by(self, party: Raw) -> bool:
        """Whether one of its cores is meant."""
        return (party["program"], party["index"]) in self.cores

    def has_failed(self, failure: Raw) -> bool:
        """Whether the launch ended at once where the value was used."""
        return failure.get("use_site", -1) == self.site and self.is_by(failure)

    def decides_at(self, site: Site | None) -> bool:
        """Whether the value decides what is done at a site."""
        if self._place is None or site is None or site["program_number"] != self.program:
            return False
        return (self._is_of_a_line and _place(site) == self._place) or self.is_around(site)

    def is_around(self, site: Site | None) -> bool:
        """Whether the value decides if, or how often, a core comes to a site."""
        if self._is_of_a_line or self._place is None or site is None:
            return False
        around = map(self._places.site, site.get("around", ()))
        return site["program_number"] == self.program and any(
            _place(one) == self._place for one in around
        )


def _place(site: Site | None) -> tuple[Any, ...] | None:
    """The line of a site, and where its function was called from; None if it is not known."""
    if site is None or site.get("file") is None:
        return None
    callers = tuple((caller["file"], caller["line"]) for caller in site.get("callers", ()))
    return (site["program_number"], site["file"], site["line"], callers)


def _explains(use: _Use, raw: Raw, places: Places) -> bool:
    if raw["kind"] == "Livelock":
        return _explains_polling(use, raw, places)
    if raw["kind"] == "NeverWritten":
        return any(map(use.decides_at, _writing_sites(raw, places)))
    if raw["kind"] not in _OF_ITS_PARTIES:
        return False
    parties = [party for party in (raw.get("first"), raw.get("second")) if party is not None]
    first = use.raw["first"]
    for party in parties:
        site = party["dma_site"] if party["is_dma"] else party["site"]
        if not use.is_by(party) or use.raw["use"] not in _OF_A_LINE:
            continue
        # An access may be on the line that uses what it reads.
        is_the_read = party["site"] == first["site"] and party["access"] == first["access"]
        if use.decides_at(places.site(site)) and not is_the_read:
            return True
    if raw["kind"] not in _OF_ITS_SEMAPHORE or raw.get("semaphore") is None:
        return False
    signalling = places.site(parties[0]["dma_site" if parties[0]["is_dma"] else "site"])
    place = places.semaphore(raw["semaphore"])
    waiting = [] if place is None else _sites_of(place.name, places)
    return any(use.is_around(site) for site in (signalling, *waiting))


def _sites_of(name: str, places: Places) -> Iterator[Site]:
    """What programs do with a Ref or semaphore that they call by a name, or with a part of it."""
    for site in places.sites:
        if site["name"] == name or site["name"].startswith(f"{name}["):
            yield site


def _writing_sites(raw: Raw, places: Places) -> Iterator[Site]:
    """Where a program would write to an output."""
    ref = places.ref(raw["memory"]) if raw.get("memory") else None
    for site in _sites_of(ref["name"], places) if ref else ():
        if site["operation"] != "read":
            yield site


def _explains_polling(use: _Use, raw: Raw, places: Places) -> bool:
    """Whether cores poll for ever because of a value: it is what they poll, or it has decided
    whether what they poll is written or signalled."""
    for look in raw.get("polled", ()):
        site = places.site(look["party"]["site"])
        if use.is_by(look["party"]) and use.decides_at(site):
            return True
        name = (site or {}).get("name")
        if name and any(use.decides_at(other) for other in _sites_of(name, places)):
            return True
    return False


def _explains_failure(use: _Use, failure: Raw, places: Places) -> bool:
    if failure["kind"] in _OF_ONE_CORE:
        return use.is_by(failure) and use.is_around(places.site(failure.get("site")))
    if failure["kind"] == "Deadlock":
        return any(map(use.decides_at, _sites_of_deadlock(use, failure, places)))
    if failure["kind"] in ("TimeLimit", "Interrupted"):
        return any(
            use.is_by(core) and use.is_around(places.site(core["site"]))
            for core in failure.get("cores", ())
            if core["state"] not in ("finished", "unstarted")
        )
    return False


def _sites_of_deadlock(use: _Use, failure: Raw, places: Places) -> Iterable[Site | None]:
    """Where cores are blocked, and where those are, or would have been, who could have ended it."""
    blocked = [core for core in failure["cores"] if core["state"] in ("semaphore", "barrier")]
    for group in group_blocked(blocked, places):
        if any(map(use.is_by, group.cores)):
            yield group.site
        group.find_helpers(failure["cores"], places)
        yield from group.signals
        yield from (site for site, _ in group.near_misses)
        if group.is_barrier and group.site is not None:
            yield from (
                site for site in places.sites if site["operation"] == group.site["operation"]
            )
