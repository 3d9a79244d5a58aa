"""A pytest plugin: `pytest --cokernel-check` runs every kernel of the tests in checked mode."""

import argparse
import contextlib
from typing import Any

# JAX is imported when the option is given, and not whenever pytest starts.


def pytest_addoption(parser: Any) -> None:
    """Adds the options to pytest's own."""
    group = parser.getgroup("cokernel", "Cokernel's checked mode")
    group.addoption(
        "--cokernel-check",
        metavar="N",
        nargs="?",
        type=_number,
        const=1,
        default=0,
        help="run every kernel, of Cokernel or stock Pallas, in checked mode under N schedules (1)",
    )
    group.addoption(
        "--cokernel-check-options",
        metavar="OPTIONS",
        default="",
        help="what is looked for, as fields of cokernel.Checked: 'seed=3,races=off'",
    )


def _number(text: str) -> int:
    """How many schedules; where a path follows the option, the parser takes the path for it."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"takes a number of schedules, got {text!r}; write --cokernel-check=1 before a path"
        ) from None


def pytest_configure(config: Any) -> None:
    """Turns checked mode on for the whole run, if it is asked for."""
    schedules = config.getoption("cokernel_check")
    written = config.getoption("cokernel_check_options")
    if not schedules and not written:
        return
    if schedules is not None and schedules < 0:
        import pytest

        raise pytest.UsageError(f"--cokernel-check takes a number of schedules, got {schedules}")
    config.pluginmanager.register(_CheckedRun(max(schedules, 1), written), "cokernel-checked-run")


class _CheckedRun:
    """Checked mode during one run of pytest, and its summary."""

    def __init__(self, schedules: int, written: str):
        import pytest

        from cokernel.checking import options, report

        try:
            asked = options.from_text(written)
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(f"--cokernel-check-options: {error}") from None
        self.options = asked.replace(schedules=max(schedules, asked.schedules))
        self._stack = contextlib.ExitStack()
        self._reports = report

    def pytest_sessionstart(self) -> None:
        from cokernel import pallas
        from cokernel.checking import state

        before = state.current()
        state.set_checked(self.options)
        self._stack.callback(state.set_checked, before)
        pallas.enable()
        self._stack.callback(pallas.disable)
        self._heard = self._stack.enter_context(self._reports.collected_reports())

    def pytest_sessionfinish(self) -> None:
        self._stack.close()

    def pytest_report_header(self) -> str:
        return (
            f"cokernel: kernels run in checked mode, {self.options.schedules} schedule(s) a launch"
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        made = [report for report, _ in self._heard]
        findings = self._reports.merged([f for report in made for f in report.findings])
        unseen = dict.fromkeys(item for report in made for item in report.not_checked)
        terminalreporter.section("cokernel: checked mode")
        kernels = len({report.kernel for report in made})
        terminalreporter.line(
            f"{len(made)} launches of {kernels} kernels, {len(findings)} different findings"
        )
        for finding in findings:
            terminalreporter.line(f"  {finding.kind}: {finding.sentence}", red=True)
        for item in unseen:
            terminalreporter.line(f"  not checked: {item}", yellow=True)
