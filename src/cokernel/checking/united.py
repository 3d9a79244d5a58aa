"""Findings on one line that are told as one: with what each has touched, and who called each."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

from cokernel.checking.elements import Elements, joined_elements
from cokernel.checking.findings import TOLD_IN_DETAILS, Finding, Party
from cokernel.checking.places import ways_to
from cokernel.compiler.window_names import element_name

# These are about elements that somebody has touched.
_OF_TOUCHED = ("Race", "UninitialisedRead", "CopyInFlight")


def united(known: Finding, finding: Finding, is_one_launch: bool) -> Finding:
    """A finding, with what an equal one says of the elements and of the callers.

    The elements are those of the cores that the finding names. What others have touched is left
    out, unless by another call of a function, which is nowhere else to be read.

    Args:
      known: the one that is told.
      finding: one with the same identity.
      is_one_launch: whether both are of one launch, so that they tell of different operations.
    """
    if known.kind in TOLD_IN_DETAILS:
        # They tell of one moment.
        return known
    parties = tuple(_with_callers(party, finding.parties) for party in known.parties)
    is_called_elsewhere = parties != known.parties
    known = dataclasses.replace(known, parties=parties)
    if _cores(known) == _cores(finding):
        if is_called_elsewhere or is_one_launch:
            known = _with_elements(known, finding.memory, finding.is_exact)
        others = finding.other_calls
    else:
        others = (*_in_words(finding), *finding.other_calls)
    if not is_called_elsewhere:
        return known
    return dataclasses.replace(
        known, other_calls=tuple(dict.fromkeys([*known.other_calls, *others]))
    )


def _cores(finding: Finding) -> tuple[Any, ...]:
    """Who has touched the elements, and whose they are; of two, who came first is up to the
    schedule."""
    return (sorted(finding.acting_cores), finding.owner)


def _in_words(finding: Finding) -> Iterator[str]:
    """What the cores of a finding have touched, as in "core=2 and core=3: board[0:16]"."""
    if finding.kind in _OF_TOUCHED and finding.memory is not None:
        what = element_name(finding.name, finding.memory.text)
        what += f" of {finding.owner}" * bool(finding.owner)
        yield f"{' and '.join(dict.fromkeys(finding.acting_cores))}: {what}"


def _with_callers(party: Party, others: Iterable[Party]) -> Party:
    """A party with all ways that led others to the same line, where they did the same."""
    same = [other for other in others if other.is_at == party.is_at]
    ways = ways_to([*party.ways, *(way for other in same for way in other.ways)])
    own = [_lines(party.callers)]
    new = tuple(tuple(way) for way in ways if _lines(way) not in own)
    return dataclasses.replace(party, other_callers=new)


def _lines(way: Iterable[Any]) -> tuple[Any, ...]:
    return tuple((caller["file"], caller["line"], caller["function"]) for caller in way)


def _with_elements(finding: Finding, more: Elements | None, is_exact: bool) -> Finding:
    """A finding that is about more elements of its Ref as well, or some of them, also in its
    words.
    """
    own = finding.memory
    if finding.kind not in _OF_TOUCHED or own is None or more is None:
        return finding
    if (own.name, own.shape, own.dtype) != (more.name, more.shape, more.dtype):
        return finding
    memory = joined_elements([own, more])
    before, after = (element_name(own.name, some.text) for some in (own, memory))
    if finding.is_exact and not is_exact:
        after = f"some of {after}"
    return dataclasses.replace(
        finding,
        memory=memory,
        is_exact=finding.is_exact and is_exact,
        indices=finding.indices.replace(own.text, memory.text, 1),
        sentence=finding.sentence.replace(before, after, 1),
    )
