"""Which findings of a launch have one cause: one wait() that is missing has several effects."""

from collections.abc import Mapping, Sequence
from typing import Any

Raw = Mapping[str, Any]

# What is wrong with one copy, the one that tells most first.
_OF_A_COPY = ("UnwaitedCopy", "CopyInFlight")
# Those that others may follow from.
WITH_EFFECTS = (*_OF_A_COPY, "Race")


def by_cause(findings: Sequence[Raw]) -> list[tuple[Raw, list[Raw]]]:
    """The findings that tell of a mistake, each with the others that follow from the same one.

    Of one copy, which is known by where it is started, all that follows from nobody waiting for it
    is one mistake. A race with it is another effect, which names the lines that a repair must
    order, unless it is with a copy from the same line; and that who reads too early reads what
    nobody has written follows from that race.

    Args:
      findings: as the runtime records them, of one launch.
    """
    leaders: list[Raw] = []
    followers: dict[int, list[Raw]] = {}
    of_copies: dict[tuple[int, int], Raw] = {}
    for finding in sorted(filter(_is_of_a_copy, findings), key=_rank):
        of_copies.setdefault(_copy_of(finding), finding)
    races = [finding for finding in findings if finding["kind"] == "Race"]
    for finding in findings:
        leader = None
        if _is_of_a_copy(finding):
            leader = of_copies[_copy_of(finding)]
        elif _is_within_a_line(finding):
            leader = of_copies.get(_copy_of(finding))
        elif finding["kind"] == "UninitialisedRead":
            leader = next((race for race in races if _explains(race, finding)), None)
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


def _copy_of(finding: Raw) -> tuple[int, int]:
    return finding["first"]["program"], finding["first"]["dma_site"]


def _is_within_a_line(finding: Raw) -> bool:
    """Whether it is a race between two copies that one core has started on one line."""
    one, other = finding.get("first"), finding.get("second")
    return (
        finding["kind"] == "Race"
        and one is not None
        and other is not None
        and all(one[name] == other[name] for name in ("program", "index", "dma_site", "is_dma"))
        and one["is_dma"]
        and other["access"] != "copy writes again"
    )


def _explains(race: Raw, read: Raw) -> bool:
    """Whether a core reads what a copy still has to write, and nothing else that is undefined."""
    parties = (race["first"], race["second"])
    memory, own = race.get("memory"), read.get("memory")
    return (
        any(party["is_dma"] and party["access"] == "copy writes" for party in parties)
        and any(_is_same_place(party, read["first"]) for party in parties)
        and memory is not None
        and own is not None
        and all(memory[name] == own[name] for name in ("owner", "program", "index"))
        and all(any(_holds(whole, part) for whole in memory["parts"]) for part in own["parts"])
    )


def _is_same_place(one: Raw, other: Raw) -> bool:
    return all(one[name] == other[name] for name in ("program", "index", "site", "access"))


def _holds(whole: Sequence[int], part: Sequence[int]) -> bool:
    return whole[0] <= part[0] and part[0] + part[1] <= whole[0] + whole[1]
