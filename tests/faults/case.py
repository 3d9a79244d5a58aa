"""A corpus of small kernels, each with one planted fault, beside its repaired twin.

A case is a function that builds the kernel: `build(True)` has the fault, `build(False)` has not.
The lines that a finding must name are marked in the source with a comment, `# fault`.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import cokernel

MARK = "# fault"

# Every case of the corpus, by name, in the order of the files.
CASES: dict[str, "Case"] = {}


@dataclasses.dataclass(frozen=True)
class Case:
    """One planted fault.

    Attributes:
      kind: the kind of the finding it must lead to.
      build: takes whether the fault is in and returns a function without parameters that runs the
        kernel.
      name: a word that the finding must contain: the Ref or semaphore, as the kernel names it.
      chip: the chip that its meshes are of, None for plain cores.
      options: what checked mode is asked for besides the defaults.
      always: whether every schedule shows it, rather than some.
      source: the function whose lines are marked, if `build` only calls it.
    """

    kind: str
    build: Callable[[bool], Callable[[], Any]]
    name: str
    chip: str | None
    options: dict[str, Any]
    always: bool
    source: Callable[..., Any]

    @property
    def lines(self) -> set[int]:
        """The marked lines of its source."""
        source, first = inspect.getsourcelines(self.source)
        return {first + number for number, line in enumerate(source) if MARK in line}

    @property
    def file(self) -> str:
        """The file it is written in."""
        return inspect.getsourcefile(self.build) or ""

    def run(self, broken: bool, schedules: int, seed: int = 0) -> cokernel.Report:
        """Explores the kernel under many schedules."""
        with contextlib.ExitStack() as stack:
            if self.chip is not None:
                stack.enter_context(cokernel.target(self.chip))
            options = cokernel.Checked(seed=seed, **{"chip_limits": "off", **self.options})
            return cokernel.explore(self.build(broken), schedules=schedules, options=options)


def case(
    kind: str,
    name: str,
    *,
    chip: str | None = None,
    always: bool = False,
    lines: Callable[..., Any] | None = None,
    **options: Any,
) -> Callable[[Callable[[bool], Callable[[], Any]]], Case]:
    """Adds the decorated builder to the corpus. See `Case` for the arguments."""

    def add(build: Callable[[bool], Callable[[], Any]]) -> Case:
        made = Case(kind, build, name, chip, options, always, lines or build)
        assert build.__name__ not in CASES, f"two cases are called {build.__name__}"
        CASES[build.__name__] = made
        return made

    return add


def lines_of(findings: Sequence[cokernel.Finding], file: str) -> set[int]:
    """All lines of a file that findings name, those from which helpers were called too."""
    places = [
        place
        for finding in findings
        for party in finding.parties
        for place in ((party.file, party.line), *((c["file"], c["line"]) for c in party.callers))
    ]
    return {line for where, line in places if where == file and line is not None}
