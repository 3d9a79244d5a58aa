"""A pytest plugin: `pytest --cokernel-check` runs every kernel of the tests in checked mode."""

import argparse
import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

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
        raise pytest.UsageError(f"--cokernel-check takes a number of schedules, got {schedules}")
    config.pluginmanager.register(_CheckedRun(max(schedules, 1), written), "cokernel-checked-run")


class _CheckedRun:
    """Checked mode during one run of pytest, and its summary."""

    def __init__(self, schedules: int, written: str):
        from cokernel.checking import options

        try:
            asked = options.from_text(written)
        except (TypeError, ValueError) as error:
            raise pytest.UsageError(f"--cokernel-check-options: {error}") from None
        if schedules > 1 and asked.schedules not in (1, schedules):
            raise pytest.UsageError(
                f"--cokernel-check={schedules} and schedules={asked.schedules} of "
                "--cokernel-check-options contradict each other: give one of them"
            )
        self.options = asked.replace(schedules=max(schedules, asked.schedules))
        self._stack = contextlib.ExitStack()
        # The reports of all launches so far with their records, and how many are dealt with.
        self._heard: list[tuple[Any, Mapping[str, Any]]] = []
        self._seen = 0
        self._executions: Any = None

    def pytest_sessionstart(self) -> None:
        from cokernel import pallas
        from cokernel.checking import executions, launches, state

        before = state.current()
        state.set_checked(self.options)
        self._stack.callback(state.set_checked, before)
        pallas.enable()
        self._stack.callback(pallas.disable)
        self._heard = self._stack.enter_context(launches.collected_reports(speaks=False))
        self._stack.enter_context(_expectations(self._expect))
        self._executions = self._stack.enter_context(executions.noted_executions())

    def pytest_sessionfinish(self, session: Any, exitstatus: int) -> None:
        self._wait_for_launches()
        if self._swallowed() and not exitstatus:
            # A launch that nobody has waited for has ended after the last test.
            session.exitstatus = 1
        self._stack.close()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self) -> Iterator[None]:
        yield from self._phase()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        yield from self._phase()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self) -> Iterator[None]:
        yield from self._phase()

    def _phase(self) -> Iterator[None]:
        """Fails a part of a test that passes although its kernels have findings."""
        try:
            result = yield
        except KeyboardInterrupt:
            raise
        except BaseException:
            # It has failed, or was skipped, and pytest says why.
            self._wait_for_launches()
            self._seen = len(self._heard)
            raise
        self._wait_for_launches()
        swallowed = self._swallowed()
        self._seen = len(self._heard)
        if swallowed:
            pytest.fail(_SWALLOWED + "\n\n".join(map(str, swallowed)), pytrace=False)
        return result

    def _wait_for_launches(self) -> None:
        """Waits until what was launched so far has ended, also what nobody holds a result of any
        more, so that its findings are told of the test that has launched it.
        """
        if self._executions is not None:
            self._executions.wait()

    def _swallowed(self) -> list[Any]:
        """The reports with findings that nobody has dealt with."""
        new = self._heard[self._seen :]
        if not new:
            return []
        if self.options.on_finding == "warn":
            return []
        # Where a test has chosen other options, or explores, the findings are its own business.
        return [
            report
            for report, record in new
            if record["options"] == self.options and (report.findings or report.dropped)
        ]

    def _expect(self, error: BaseException) -> None:
        """Notes an exception that has come to `pytest.raises`."""
        from cokernel.checking.launches import is_explained

        new = self._heard[self._seen :]
        if isinstance(error, Exception) and any(is_explained(error, report) for report, _ in new):
            self._seen = len(self._heard)

    def pytest_report_header(self) -> str:
        return (
            f"cokernel: kernels run in checked mode, {self.options.schedules} schedule(s) a launch"
        )

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        from cokernel.checking.report import merged

        made = [report for report, _ in self._heard]
        findings = merged([f for report in made for f in report.findings])
        unseen = dict.fromkeys(item for report in made for item in report.not_checked)
        terminalreporter.section("cokernel: checked mode")
        kernels = len({report.kernel for report in made})
        terminalreporter.line(
            f"{_counted(len(made), 'launch', 'launches')} of "
            f"{_counted(kernels, 'kernel', 'kernels')}, "
            f"{_counted(len(findings), 'finding', 'different findings')}"
        )
        for finding in findings:
            terminalreporter.line(f"  {finding.kind}: {finding.sentence}", red=True)
        for item in unseen:
            terminalreporter.line(f"  not checked: {item}", yellow=True)


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


_SWALLOWED = (
    "this passes, but its kernels have findings in checked mode that did not reach pytest: their "
    "exceptions were caught, or nobody waited for the results. Where they are expected write "
    "pytest.raises around the launch, or ask for checked mode there; "
    "--cokernel-check-options=on_finding=warn fails no test.\n\n"
)


@contextlib.contextmanager
def _expectations(note: Callable[[BaseException], None]) -> Iterator[None]:
    """Tells `note` of every exception that `pytest.raises` is content with."""
    kind: Any = type(pytest.raises(Exception))
    leave = kind.__exit__

    def noting(self: Any, exc_type: Any, error: Any, traceback: Any) -> Any:
        is_content = leave(self, exc_type, error, traceback)
        if is_content and error is not None:
            note(error)
        return is_content

    kind.__exit__ = noting
    try:
        yield
    finally:
        kind.__exit__ = leave
