"""The end of a checked launch: its report is made, kept and told."""

import collections
import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cokernel.checking.findings import Finding
from cokernel.checking.options import Checked
from cokernel.checking.places import Places
from cokernel.checking.report import CheckWarning, Report, report_of_record

# `reports` goes back so many launches.
REPORTS_KEPT = 1000

# What ends the text of an error that was to be a warning.
AS_ERROR = (
    "This is a CheckWarning, which the warning filters of Python make an error "
    '(as "python -W error" does): warnings.filterwarnings("default", '
    "category=cokernel.CheckWarning) lets it be a warning."
)

# The report of a launch, and the record it was made from, with its "options".
Heard = tuple[Report, Mapping[str, Any]]


class _Reports:
    """The latest reports of the process, and those who listen for reports."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._latest: collections.deque[Report] = collections.deque(maxlen=REPORTS_KEPT)
        # Each with whether it speaks for those that it hears, so that nobody need be warned.
        self._listeners: list[tuple[list[Heard], bool]] = []

    def add(self, report: Report, record: Mapping[str, Any]) -> bool:
        """Keeps a report; whether somebody listens who speaks for it."""
        with self._lock:
            self._latest.append(report)
            for heard, _ in self._listeners:
                heard.append((report, record))
            return any(speaks for _, speaks in self._listeners)

    def latest(self) -> tuple[Report, ...]:
        """The reports that are kept, oldest first."""
        with self._lock:
            return tuple(self._latest)

    @contextlib.contextmanager
    def listening(self, speaks: bool) -> Iterator[list[Heard]]:
        """Collects what is added."""
        heard: list[Heard] = []
        with self._lock:
            self._listeners.append((heard, speaks))
        try:
            yield heard
        finally:
            with self._lock:
                # By identity: two listeners that have heard the same are equal lists.
                self._listeners = [other for other in self._listeners if other[0] is not heard]


_reports = _Reports()
# Python's own note of the warnings that were shown already.
_warned: dict[Any, Any] = {}


def last_report() -> Report | None:
    """Returns the report of the checked launch that ended last, None if there was none yet.

    A launch runs asynchronously: wait for its results (`jax.block_until_ready`) before you ask.
    """
    latest = _reports.latest()
    return latest[-1] if latest else None


def reports() -> tuple[Report, ...]:
    """Returns the reports of the checked launches that have ended, oldest first: one for each
    launch, thus several for a program of several kernels. The last thousand are kept.

    A launch runs asynchronously: wait for its results (`jax.block_until_ready`) before you ask.
    """
    return _reports.latest()


def report_of(error: BaseException) -> Report | None:
    """Returns the report that an exception brings the text of.

      try:
          jax.block_until_ready(f(x))
      except jax.errors.JaxRuntimeError as error:
          report = cokernel.report_of(error)

    XLA makes the exception of a launch, out of a text, so that no object can travel with it: this
    finds the report of that text among those of `reports()`. Exceptions that others were raised
    from, or while they were handled, are looked at as well.

    Args:
      error: any exception.

    Returns:
      The report; None if the exception comes from no checked launch, or from one that ended more
      than a thousand launches ago.

    Raises:
      TypeError: if it is no exception.
    """
    if not isinstance(error, BaseException):
        raise TypeError(f"report_of(error) takes an exception, got {error!r}")
    latest = _reports.latest()
    for one in _with_causes(error):
        text = str(one)
        for report in reversed(latest):
            # The headlines first: most reports differ in them, and all of them are short.
            if report.headline() in text and str(report) in text:
                return report
            if misfit(report.kernel) in text:
                return report
    return None


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what it comes from, each once, nearest first."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop(0)
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
        waiting += [one.__cause__, one.__context__]


def collected_reports(*, speaks: bool = True) -> contextlib.AbstractContextManager[list[Heard]]:
    """Collects, within a `with` block, the reports of all launches that end, with their records.

    Args:
      speaks: whether the caller goes on to tell what is in them, so that nobody need be warned.
    """
    return _reports.listening(speaks)


def finish_launch(
    record: Mapping[str, Any],
    *,
    options: Checked,
    sites: Sequence[Mapping[str, Any]],
    memory: Mapping[str, Any],
    not_checked: Sequence[str] = (),
    chip: Sequence[Finding] = (),
    notes: Sequence[str] = (),
) -> str:
    """Makes and keeps the report of a launch; the runtime calls this at its end.

    Returns:
      The text of the error that the launch raises, "" if it raises none. A launch that did not
      come to its end has no results, so it raises whatever the options say.
    """
    places = Places(sites, memory)
    if options.chip_limits == "warn":
        notes, chip = [*notes, *map(_as_note, chip)], ()
    report = report_of_record(
        record, places, not_checked=not_checked, chip=chip, notes=notes, off=options.switched_off
    )
    if record.get("batch"):
        report = _of_element(report, tuple(record["batch"]))
    is_heard = _reports.add(report, {**record, "options": options})
    if not record["schedule"].get("fits", True):
        return misfit(report.kernel)
    has_ended = record.get("failure") is not None or not record.get("is_complete", True)
    if not has_ended and (options.on_finding == "warn" or not (report.findings or report.dropped)):
        if not is_heard and (report.findings or report.not_checked or report.notes):
            return _warn(report, places)
        return ""
    return str(report)


def _of_element(report: Report, element: tuple[int, ...]) -> Report:
    """The report of a launch that was made for one element of a batch."""
    findings = tuple(dataclasses.replace(one, batch=element) for one in report.findings)
    return dataclasses.replace(report, findings=findings, batch=(element,))


# Of each kernel under vmap the last warning, without its element, and the element.
_told_of_batches: dict[str, tuple[Report, tuple[int, ...]]] = {}


def _told_already(report: Report) -> bool:
    """Whether an earlier element of the batch has given the same warning."""
    [element] = report.batch
    plain = _of_element(report, ())
    known, before = _told_of_batches.get(report.kernel, (None, ()))
    _told_of_batches[report.kernel] = plain, element
    return known == plain and before < element


def _warn(report: Report, places: Places) -> str:
    """Warns at the line of the first finding, or else at the one that made the kernel.

    Returns:
      The text of the error that the launch raises where the warning ends in an exception: no
      exception can go from here through XLA to the user. "" otherwise.
    """
    parties = [party for finding in report.findings for party in finding.parties]
    lines = [(party.file, party.line) for party in parties if party.file and party.line]
    if places.made_at is not None:
        lines.append((places.made_at["file"], places.made_at["line"]))
    file, line = lines[0] if lines else (f"<kernel {report.kernel}>", 1)
    if report.batch and _told_already(report):
        return ""
    try:
        # The runtime calls this, so that no frame of the user is on the stack.
        warnings.warn_explicit(str(report), CheckWarning, file, line, registry=_warned)
    except CheckWarning:
        return f"{report}\n\n{AS_ERROR}"
    except Exception as error:
        # What shows warnings can be replaced (`warnings.showwarning`), and may raise anything.
        problem = f"{type(error).__name__}: {error}"
        return f"{report}\n\nThis was to be a CheckWarning, and showing it raised {problem}"
    return ""


def misfit(kernel: str) -> str:
    """What is said where the choices of a schedule cannot be taken."""
    return (
        f"kernel {kernel!r} cannot follow the schedule that it shall replay: the schedule belongs "
        "to another kernel, to other arguments, or to the kernel as it was before it was changed. "
        "Explore the kernel again"
    )


def is_explained(error: Exception, report: Report) -> bool:
    """Whether an error is the one that a launch raised because of what its report says."""
    texts = [misfit(report.kernel)]
    if report.findings or report.dropped:
        texts.append(report.headline())
    return any(text in str(error) for text in texts)


def _as_note(finding: Finding) -> str:
    place = next((f" ({p.file}:{p.line})" for p in finding.parties if p.file), "")
    times = f", met {finding.occurrences} times" if finding.occurrences > 1 else ""
    return f"{finding.kind}: {finding.sentence}{place}{times}"
