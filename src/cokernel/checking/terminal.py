"""Reports in colour, for terminals."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cokernel.checking.places import told_calls

if TYPE_CHECKING:
    from cokernel.checking.findings import Finding, Party
    from cokernel.checking.report import Report


def render(report: "Report") -> Iterator[Any]:
    """Yields what rich prints for a report: a panel for each finding, then what was not seen."""
    from rich.text import Text

    yield Text(report.headline(), "bold green" if report.is_clean else "bold")
    for finding in report.findings:
        yield _panel(finding)
    if report.dropped:
        yield Text(f"... and {report.dropped} more")
    for title, items in (("Not checked", report.not_checked), ("Notes", report.notes)):
        for item in items:
            yield Text.assemble((f"{title}: ", "yellow"), item)
    if report.schedules > 1:
        yield Text(report.behaviours_seen(), "dim")
    yield Text(report.looked_at(), "dim")


def _panel(finding: "Finding") -> Any:
    from rich.console import Group
    from rich.panel import Panel
    from rich.text import Text

    parts: list[Any] = [Text(finding.sentence)]
    for party in finding.told_parties:
        parts += _party(party)
    parts += [Text(line, "dim") for line in finding.told_details]
    parts += [Text.assemble(("-> ", "green"), item) for item in finding.advice]
    if finding.replay is not None:
        parts.append(Text(f'replay: cokernel.Checked(replay="{finding.replay}")', "dim"))
    times = f" (met {finding.occurrences} times{finding.others()})"
    times = times if finding.occurrences > 1 else ""
    return Panel(
        Group(*parts),
        title=Text(f"{finding.kind}{times}", "bold red"),
        title_align="left",
        border_style="red",
    )


def _party(party: "Party") -> list[Any]:
    from rich.text import Text

    action = f" {party.action} {party.polled}".rstrip()
    lines: list[Any] = [Text.assemble("\n", (party.who, "bold"), action)]
    if not party.program:
        lines = [Text.assemble("\nallocated by ", (party.who, "bold"))]
    if party.file is not None and party.line is not None:
        lines += _place(party.file, party.line, party.code)
    for words, caller in told_calls(party.ways):
        lines.append(Text(f"  {words}", "dim"))
        if caller is not None:
            lines += _place(caller["file"], caller["line"], caller["code"])
    return lines


def _place(file: str, line: int, code: str | None) -> list[Any]:
    from rich.syntax import Syntax
    from rich.text import Text

    place: list[Any] = [Text(f"  {file}:{line}", "cyan")]
    if code:
        numbered = {"line_numbers": True, "start_line": line, "background_color": "default"}
        place.append(Syntax(code, "python", **numbered))  # type: ignore[arg-type]
    return place
