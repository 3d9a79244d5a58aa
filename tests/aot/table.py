"""The tables in docs/platforms.md: which kernels each chip's compiler accepts, and why not."""

import collections
import pathlib
import re
from collections.abc import Callable, Sequence

from cokernel import aot
from tests.aot import corpus
from tests.aot.corpus import Case

TPUS = corpus.TPUS
GPUS = ("h100", "b200")
PAGE = corpus.ROOT / "docs" / "platforms.md"
BEGIN = "<!-- Written by scripts/platforms.py for {} -->\n"
END = "<!-- End of what scripts/platforms.py writes for {} -->\n"


def reports(
    cases: Sequence[Case], compiler_for: Callable[[str], aot.Compiler]
) -> dict[Case, dict[str, aot.Report]]:
    """Compiles every kernel that names only TPU features for every TPU."""
    return _reports([case for case in cases if case.names_only_tpu_features], TPUS, compiler_for)


def gpu_reports(
    cases: Sequence[Case], compiler_for: Callable[[str], aot.Compiler]
) -> dict[Case, dict[str, aot.Report]]:
    """Compiles every kernel for every GPU."""
    return _reports(cases, GPUS, compiler_for)


def _reports(
    cases: Sequence[Case], chips: Sequence[str], compiler_for: Callable[[str], aot.Compiler]
) -> dict[Case, dict[str, aot.Report]]:
    return {
        case: {
            chip: aot.compile_with(compiler_for(chip), case.function, *case.args)
            for chip in chips
            if case.chip in (None, chip)
        }
        for case in cases
    }


def text(found: dict[Case, dict[str, aot.Report]]) -> str:
    """Returns the table, and below it the reasons."""
    chips = list(dict.fromkeys(chip for by_chip in found.values() for chip in by_chip))
    groups: dict[tuple[str, str], list[dict[str, aot.Report]]] = collections.defaultdict(list)
    for case, by_chip in found.items():
        groups[case.source, case.name].append(by_chip)
    reasons: dict[str, int] = {}

    def cell(variants: Sequence[dict[str, aot.Report]], chip: str) -> str:
        variants = [by_chip for by_chip in variants if chip in by_chip]
        refused = [by_chip[chip] for by_chip in variants if not by_chip[chip].accepted]
        if not refused:
            return "compiles"
        numbers = {reasons.setdefault(_reason(report), len(reasons) + 1) for report in refused}
        listed = ", ".join(map(str, sorted(numbers)))
        some = f"{len(refused)} of {len(variants)} " if len(refused) < len(variants) else ""
        return f"{some}refused ({listed})"

    rows = [
        f"| {_link(source)} | `{name}` | {' | '.join(cell(variants, chip) for chip in chips)} |"
        for (source, name), variants in sorted(groups.items())
    ]
    lines = [
        f"| from | kernel | {' | '.join(chips)} |",
        f"| --- | --- {'| --- ' * len(chips)}|",
        *rows,
        "",
        *[f"{number}. {reason}" for reason, number in reasons.items()],
    ]
    return "\n".join(lines) + "\n"


def _link(source: str) -> str:
    file, _, test = source.partition("::")
    return f"[{pathlib.Path(file).stem}](../{file})" + (f" {_words(test)}" if test else "")


def _words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def _reason(report: aot.Report) -> str:
    """Returns why a kernel is refused, without what changes when a line is added somewhere."""
    message = report.message
    if message.startswith("ptxas"):
        message = message.partition(";")[0]
    for end in ("at location", "See https", "note: see current operation", "\n\n"):
        message = message.partition(end)[0]
    message = " ".join(message.split())
    message = re.sub(r"[\w.<>-]+:\d+:\d+:( error:| note:)? ?", "", message)
    message = re.sub(r"^(INTERNAL|INVALID_ARGUMENT|RESOURCE_EXHAUSTED|\w*Error): ", "", message)
    # Which program uses what, and where, is in the report.
    message = re.sub(r"^kernel .* uses '\w+' at .*?\), ", "a TensorCore's program uses ", message)
    message = re.sub(r" \S*\.py:\d+(:\d+)?", "", message)
    return _where(report) + message.strip()


def _where(report: aot.Report) -> str:
    """Returns the program and the operation, where the compiler's message is about one."""
    place = report.place
    if place is None or report.stage != "compile":
        return ""
    return f"`{place.program}`, {place.what}: "


def page_with(kind: str, table: str, page: str) -> str:
    """Returns the page with the table of "TPUs" or "GPUs" in its place."""
    begin, end = BEGIN.format(kind), END.format(kind)
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{table}\n{end}{after}"
