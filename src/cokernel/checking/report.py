"""The report of a checked launch, or of several: its findings, and what could not be checked."""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cokernel.checking.advice import advise_failure
from cokernel.checking.causes import WITH_EFFECTS, by_cause
from cokernel.checking.failures import describe, failed_indices, failed_parties
from cokernel.checking.findings import (
    EXPLAIN_DEADLOCKS,
    KINDS,
    TOLD_IN_DETAILS,
    Finding,
    effect,
    element_of_batch,
    finding_of,
    replay_text,
)
from cokernel.checking.places import Places, where_and_code
from cokernel.checking.undefined_uses import with_consequences
from cokernel.checking.united import united

# What stands above the advice in the text of a deadlock.
ADVICE = "What to do:"
# Failures in whose texts the indentation says something.
AS_TOLD = ("Deadlock", "Callback")


# What `coverage` tells of what was counted.
_COUNTED = {
    "cores": ("core", "cores"),
    "accesses": ("access to memory", "accesses to memory"),
    "signals": ("signal", "signals"),
    "waits": ("wait", "waits"),
    "barriers": ("arrival at a barrier", "arrivals at barriers"),
    "dmas": ("copy", "copies"),
}


class CheckWarning(UserWarning):
    """A finding of checked mode where options say that findings only warn."""


@dataclasses.dataclass(frozen=True)
class Report:
    """What checked mode has to say.

    Attributes:
      kernel: the name of the kernel.
      findings: what is wrong, what stopped a launch first.
      dropped: how many different findings there was no room for.
      not_checked: what checked mode could not see, such as a primitive that went through XLA, as
        sentences. What is listed here is neither right nor wrong.
      notes: what is worth knowing though nothing is wrong with the run.
      schedules: under how many schedules the kernel ran.
      behaviours: how many of them ordered the synchronisation differently.
      exhaustive: whether those were all there are with so many `preemptions`.
      preemptions: how many interruptions of a core that could go on an exhaustive exploration was
        asked to visit; None where any number was, or where schedules were drawn.
      counts: how many "accesses", "signals", "waits", arrivals at "barriers" and "dmas" were looked
        at, by how many "cores".
      batch: under `jax.vmap`, the elements of the batch that were looked at; of vmaps within others
        one number each, the outermost first.
      off: the checks that the options have switched off, by the names of their fields.
    """

    kernel: str
    findings: tuple[Finding, ...] = ()
    dropped: int = 0
    not_checked: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    schedules: int = 1
    behaviours: int = 1
    exhaustive: bool = False
    preemptions: int | None = None
    counts: Mapping[str, int] = dataclasses.field(default_factory=dict)
    off: tuple[str, ...] = ()
    batch: tuple[tuple[int, ...], ...] = ()

    @property
    def is_clean(self) -> bool:
        """Whether nothing was found and everything was looked at, with all checks on."""
        return not (self.findings or self.dropped or self.not_checked or self.off)

    def coverage(self) -> str:
        """What was looked at, and what was not, in some sentences."""
        sentences = [self.looked_at()]
        if self.not_checked:
            sentences.append(f"Not checked: {'; '.join(self.not_checked)}.")
        if self.dropped:
            sentences.append(f"{self.dropped} findings more than max_findings were not kept.")
        return " ".join(sentences)

    def looked_at(self) -> str:
        """What was looked at, and which checks were off, in some sentences."""
        counted = [
            f"{count:,} {one if count == 1 else many}"
            for name, (one, many) in _COUNTED.items()
            for count in [self.counts.get(name, 0)]
        ]
        runs = f"{self.schedules} schedule" + ("s" if self.schedules > 1 else "")
        extent = self._all if self.exhaustive else "out of more there may be"
        where = ""
        if len(self.batch) == 1:
            where = f", in batch element {element_of_batch(self.batch[0])}"
        elif self.batch:
            where = f", in {len(self.batch)} batch elements"
        sentences = [
            f"Looked at {', '.join(counted[:-1])} and {counted[-1]}{where}, under {runs}, {extent}."
        ]
        if self.off:
            sentences.append(f"Switched off by the options: {', '.join(self.off)}.")
        return " ".join(sentences)

    @property
    def _all(self) -> str:
        """What an exhaustive exploration has seen all of."""
        if self.preemptions is None:
            return "all there are"
        times = "interruption" if self.preemptions == 1 else "interruptions"
        return f"all there are with at most {self.preemptions} {times} of a core"

    def behaviours_seen(self) -> str:
        """How many different behaviours the schedules have shown, as a sentence."""
        seen = "behaviour was" if self.behaviours == 1 else "different behaviours were"
        extent = self._all if self.exhaustive else "not all there may be"
        return f"{self.behaviours} {seen} seen, {extent}."

    def of_kind(self, kind: str) -> list[Finding]:
        """The findings of one kind.

        Raises:
          ValueError: if there is no such kind.
        """
        if kind not in KINDS:
            raise ValueError(f"there is no kind {kind!r}; there are {', '.join(KINDS)}")
        return [finding for finding in self.findings if finding.kind == kind]

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, for JSON."""
        return {
            "headline": self.headline(),
            "is_clean": self.is_clean,
            **{field.name: getattr(self, field.name) for field in dataclasses.fields(self)},
            "findings": [finding.to_dict() for finding in self.findings],
            "counts": dict(self.counts),
            "coverage": self.coverage(),
        }

    def headline(self) -> str:
        """One line that says how it stands."""
        runs = "" if self.schedules == 1 else f" under {self.schedules} schedules"
        if not self.findings:
            verdict = "nothing found" if not self.not_checked else "nothing found in what was seen"
            if self.off:
                verdict += f"; not looked for: {', '.join(self.off)}"
            return f"Checked: kernel {self.kernel!r}{runs}: {verdict}."
        kinds: dict[str, int] = {}
        for finding in self.findings:
            kinds[finding.kind] = kinds.get(finding.kind, 0) + 1
        counted = ", ".join(
            kind if count == 1 else f"{count} x {kind}" for kind, count in kinds.items()
        )
        return f"Checked: kernel {self.kernel!r}{runs}: {counted}."

    def __str__(self) -> str:
        lines = [self.headline()]
        for finding in self.findings:
            lines += ["", finding.text()]
        if self.dropped:
            lines += ["", f"... and {self.dropped} more; max_findings says how many are kept."]
        for title, items in (("Not checked:", self.not_checked), ("Notes:", self.notes)):
            if items:
                lines += ["", title, *(f"  - {item}" for item in items)]
        if self.schedules > 1:
            lines += ["", self.behaviours_seen()]
        lines += ["", self.looked_at()]
        return "\n".join(lines)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from cokernel.checking.terminal import render

        yield from render(self)


def report_of_record(
    record: Mapping[str, Any],
    places: Places,
    *,
    not_checked: Sequence[str] = (),
    chip: Sequence[Finding] = (),
    notes: Sequence[str] = (),
    off: Sequence[str] = (),
) -> Report:
    """Puts what the runtime recorded of a launch into words.

    Args:
      record: what the runtime hands over at the end of a checked launch.
      places: the names of the kernel's sites, cores and memory.
      not_checked, notes: what the compiler knows that the runtime does not.
      off: the checks that are switched off.
      chip: where the kernel asks for more than the target chip has, as far as that counts as wrong.
    """
    raw, failure = record["findings"], record.get("failure")
    pairs = with_consequences(raw, failure, places)
    following = [id(one) for _, one in pairs]
    if failure is not None and failure["kind"] == "Deadlock":
        told = {**failure, "explained": _explained(raw)}
        pairs = [(use, told if one is failure else one) for use, one in pairs]
        failure = told if id(failure) not in following else None
    elif id(failure) in following:
        failure = None
    found = [
        _with_effects(one, others, pairs, record, places)
        for one, others in by_cause([one for one in raw if id(one) not in following], places)
    ]
    if failure is not None:
        found.append(_failure_finding(failure, record, places))
    findings = merged([*found, *chip], is_one_launch=True)
    return Report(
        kernel=record["executable"],
        findings=findings,
        dropped=record.get("dropped", 0),
        not_checked=tuple(not_checked),
        notes=tuple(notes),
        schedules=record.get("schedules", 1),
        behaviours=record.get("behaviours", 1),
        counts=record.get("counts", {}),
        off=tuple(off),
    )


def _with_effects(
    raw: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]],
    record: Mapping[str, Any],
    places: Places,
) -> Finding:
    """A finding that tells of what follows from the same mistake as well; `pairs` are undefined
    values and what has come of them.
    """
    finding = finding_of(raw, places)
    effects = _each_once([effect(finding_of(other, places), other) for other in others])
    following = [one for use, one in pairs if any(use is own for own in (raw, *others))]
    consequences = [
        _failure_finding(one, record, places) if "executable" in one else finding_of(one, places)
        for one in following
    ]
    return dataclasses.replace(
        finding,
        details=(*finding.details, *effects),
        consequences=merged(consequences, is_one_launch=True),
    )


def _explained(raw: Sequence[Mapping[str, Any]]) -> list[tuple[Mapping[str, Any], str]]:
    """The semaphores of which a finding says what those lack that wait for them, with its kind."""
    return [
        (finding["semaphore"], finding["kind"])
        for finding in raw
        if finding["kind"] in EXPLAIN_DEADLOCKS and finding["semaphore"] is not None
    ]


def _failure_finding(
    failure: Mapping[str, Any], record: Mapping[str, Any], places: Places
) -> Finding:
    """The finding that a failure is which ended the launch."""
    headline, *rest = describe(failure, places.sites, places.memory).splitlines()
    kind, _, sentence = headline.partition(": ")
    parties = failed_parties(failure, places)
    site = places.site(failure.get("site"))
    advice = list(
        advise_failure(kind, (site or {}).get("name") or "the Ref", site, "position" in failure)
    )
    if ADVICE in rest:
        # A deadlock's text ends with its own.
        at = rest.index(ADVICE)
        rest, advice = rest[:at], [line.strip().removeprefix("- ") for line in rest[at + 1 :]]
    if kind not in TOLD_IN_DETAILS:
        told = where_and_code(site, "  ")
        rest = [line for line in rest if line not in told]
    while rest and not rest[-1]:
        rest.pop()
    schedule = failure.get("schedule") or record.get("schedule")
    return Finding(
        kind=kind,
        sentence=sentence,
        parties=parties,
        name=next((party.name for party in parties if party.name), ""),
        indices=failed_indices(failure, site),
        advice=tuple(advice),
        replay=replay_text(schedule) if schedule else None,
        details=tuple(line if kind in AS_TOLD else line.removeprefix("  ") for line in rest),
    )


def merged(findings: Sequence[Finding], *, is_one_launch: bool = False) -> tuple[Finding, ...]:
    """The findings in the order of `KINDS`, equal ones counted instead of repeated.

    Args:
      findings: some may be equal; see `Finding.identity`.
      is_one_launch: whether no two of them tell of the same operation, which a launch and another,
        or one under another schedule, may have met with other elements.
    """
    by_identity: dict[Any, Finding] = {}
    for finding in findings:
        # Of some, only the sentence says what it is about.
        is_told_apart = not finding.parties or finding.kind == "ChipLimit"
        key = (*finding.identity, finding.sentence if is_told_apart else "")
        known = by_identity.get(key)
        by_identity[key] = (
            finding
            if known is None
            else dataclasses.replace(
                united(known, finding, is_one_launch),
                occurrences=known.occurrences + finding.occurrences,
                details=_details(known, finding),
                consequences=merged([*known.consequences, *finding.consequences]),
                also=_others(known, finding),
            )
        )
    order = {kind: number for number, kind in enumerate(KINDS)}
    found = by_identity.values()
    blocked = {
        party.name for finding in found if finding.kind == "Deadlock" for party in finding.parties
    }

    def rank(finding: Finding) -> int:
        # What a deadlock follows from is told first.
        explains = finding.kind in EXPLAIN_DEADLOCKS and finding.name in blocked
        kinds = [finding.kind, *(one.kind for one in finding.consequences)]
        return -1 if explains else min(order.get(kind, len(KINDS)) for kind in kinds)

    return tuple(sorted(found, key=rank))


def _details(known: Finding, finding: Finding) -> tuple[str, ...]:
    if known.kind not in WITH_EFFECTS:
        # They tell of one moment.
        return known.details
    return _each_once([*known.details, *finding.details])


def _each_once(effects: Sequence[str]) -> tuple[str, ...]:
    """Effects that differ only in cores and elements are told once."""
    told: dict[str, str] = {}
    for text in effects:
        told.setdefault(re.sub(r"\w+=\S+|\[[^\]]*\]", "", text), text)
    return tuple(told.values())


def _others(known: Finding, finding: Finding) -> tuple[tuple[str, ...], ...]:
    """The cores beside those of a known finding that an equal one was met with as well."""
    own, new = known.acting_cores, finding.acting_cores
    met = dict.fromkeys([*known.also, new, *finding.also])
    return tuple(cores for cores in met if cores and sorted(cores) != sorted(own))


def combined(reports: Sequence[Report]) -> Report:
    """One report of several launches, of one kernel or of more, with equal findings merged.

    Raises:
      ValueError: if there is no report.
    """
    if not reports:
        raise ValueError("there is no report to combine")
    counts: dict[str, int] = {}
    cores: dict[str, int] = {}
    for report in reports:
        for name, count in report.counts.items():
            counts[name] = counts.get(name, 0) + count
        # The cores of a kernel are the same in all its launches.
        cores[report.kernel] = max(cores.get(report.kernel, 0), report.counts.get("cores", 0))
    if "cores" in counts:
        counts["cores"] = sum(cores.values())
    return Report(
        kernel=", ".join(dict.fromkeys(report.kernel for report in reports)),
        findings=merged([finding for report in reports for finding in report.findings]),
        dropped=max(report.dropped for report in reports),
        not_checked=tuple(dict.fromkeys(item for report in reports for item in report.not_checked)),
        notes=tuple(dict.fromkeys(item for report in reports for item in report.notes)),
        schedules=max(report.schedules for report in reports),
        behaviours=max(report.behaviours for report in reports),
        counts=counts,
        off=tuple(dict.fromkeys(name for report in reports for name in report.off)),
        batch=tuple(dict.fromkeys(element for report in reports for element in report.batch)),
    )
