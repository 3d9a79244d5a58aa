"""Which findings of a launch have one cause: one wait() that is missing has several effects."""

from collections.abc import Mapping, Sequence
from typing import Any

from cokernel.checking.places import Places, where_and_code

Raw = Mapping[str, Any]

# What is wrong with one copy, the one that tells most first.
_OF_A_COPY = ("UnwaitedCopy", "CopyInFlight")
# Those that others may follow from.
WITH_EFFECTS = (*_OF_A_COPY, "Race")


def by_cause(findings: Sequence[Raw], places: Places) -> list[tuple[Raw, list[Raw]]]:
    """The findings that tell of a mistake, each with the others that follow from the same one.

    Of one copy, which is known by where it is started, all that follows from nobody waiting for it
    is one mistake, and so are the races that it alone is in. A copy that is waited for, but too
    late, is in a race that names the lines which a repair must order; and that who reads too early
    reads what nobody has written follows from that race, whoever writes.

    Args:
      findings: as the runtime records them, of one launch.
      places: the names of the kernel's sites, cores and memory.
    """
    leaders: list[Raw] = []
    followers: dict[int, list[Raw]] = {}
    of_copies: dict[tuple[int, int], Raw] = {}
    for finding in sorted(filter(_is_of_a_copy, findings), key=_rank):
        of_copies.setdefault(_copies_of(finding)[0], finding)
    races = [finding for finding in findings if finding["kind"] == "Race"]

    def of_a_copy(finding: Raw) -> Raw | None:
        known = (of_copies.get(copy) for copy in _copies_of(finding))
        return next((leader for leader in known if leader is not None), None)

    for finding in findings:
        leader = None
        if _is_of_a_copy(finding) or (
            finding["kind"] == "Race"
            and (finding.get("is_unwaited") or _is_within_a_line(finding, places))
        ):
            leader = of_a_copy(finding)
            if leader is None and not finding.get("is_unwaited"):
                # Two rounds of copies meet where nobody has waited for who reads in between.
                leader = next((race for race in races if _is_between(race, finding)), None)
        elif finding.get("is_too_early"):
            leader = next((race for race in races if _explains(race, finding)), None)
            # The race may itself follow from a copy that nobody waits for.
            if leader is not None and leader.get("is_unwaited"):
                leader = of_a_copy(leader) or leader
        if leader is None or leader is finding:
            leaders.append(finding)
        else:
            followers.setdefault(id(leader), []).append(finding)
    return [(leader, followers.get(id(leader), [])) for leader in leaders]


def _is_of_a_copy(finding: Raw) -> bool:
    first = finding.get("first")
    return finding["kind"] in _OF_A_COPY and first is not None and first["is_dma"]


def _rank(finding: Raw) -> tuple[int, bool]:
    # Of scopes that end, that of memory says more than that of the semaphore.
    return _OF_A_COPY.index(finding["kind"]), finding.get("memory") is None


def _copies_of(finding: Raw) -> list[tuple[int, int]]:
    """The copies among those that a finding is about, by their programs and where they start."""
    parties = [finding.get("first"), finding.get("second")]
    return [(one["program"], one["dma_site"]) for one in parties if one and one["is_dma"]]


def _is_within_a_line(finding: Raw, places: Places) -> bool:
    """Whether it is a race between two copies that one core has started on one line."""
    one, other = finding.get("first"), finding.get("second")
    return (
        one is not None
        and other is not None
        and all(one[name] == other[name] for name in ("program", "index", "is_dma"))
        and one["is_dma"]
        and other["access"] != "copy writes again"
        and where_and_code(places.site(one["dma_site"]), "")
        == where_and_code(places.site(other["dma_site"]), "")
    )


def _is_between(race: Raw, meeting: Raw) -> bool:
    """Whether a race is of a core with one of two copies from one line that meet in its memory."""
    memory, own = race.get("memory"), meeting.get("memory")
    starts = _copies_of(race)
    return (
        race is not meeting
        and len(starts) == 1
        and starts[0] in _copies_of(meeting)
        and memory is not None
        and own is not None
        and all(memory[name] == own[name] for name in ("owner", "program"))
        and meeting["first"]["index"] != own["index"]
        and own["owner"] == "private"
        and memory["parts"] == own["parts"]
    )


def _explains(race: Raw, read: Raw) -> bool:
    """Whether a race may be that of a read with the write that it came before: what one core has
    read, others may have too."""
    parties = [race["first"], race["second"], *(one for pair in race["also"] for one in pair)]
    memory, own = race.get("memory"), read.get("memory")
    return (
        any(_is_same_place(party, read["first"]) for party in parties)
        and memory is not None
        and own is not None
        and memory["owner"] == own["owner"]
        and memory["program"] == own["program"]
        # Cores, and groups of them, have the same Refs each for itself.
        and (memory["index"] == own["index"] or own["owner"] in ("private", "shared"))
    )


def _is_same_place(one: Raw, other: Raw) -> bool:
    # What a DMA does is known by where it was started.
    site = "dma_site" if one["is_dma"] else "site"
    return all(one[name] == other[name] for name in ("program", "access", "is_dma", site))
