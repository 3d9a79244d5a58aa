"""Measures Cokernel beside its peers and prints what came out.

    python benchmarks/run.py [--rounds N] [--only CASE ...] [--no-interpret] [--json FILE]

Times are medians over rounds in which all contenders of a case take turns; ratios are medians of
the ratios within each round. Run it on a machine that does nothing else.
"""

import argparse
import ctypes
import json
import os
import pathlib
import platform
import subprocess
import sys
import tempfile

import cases
import interpret
import jax
import measure
import native
from kernels import CHIP
from measure import Case
from rich.console import Console
from rich.table import Table

import cokernel
from cokernel import _runtime

INTERPRET_LIMIT_S = 60


def duration(seconds: float) -> str:
    """Returns the time in the unit that suits it, with three digits."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def case_table(case: Case) -> Table:
    """Returns the table of one case: each contender's time, beside the first one's."""
    table = Table(title=f"({case.key}) {case.title}", title_justify="left")
    table.add_column("contender")
    headings = ["median", "fastest", f"{case.contenders[0].name} / this", "first call"]
    if case.limit is not None:
        headings.append("share of limit")
    for heading in headings:
        table.add_column(heading, justify="right")
    for contender in case.contenders:
        first_call = contender.first_call_s
        share = shares(case).get(contender.name)
        table.add_row(
            contender.name,
            duration(contender.median_s),
            duration(min(contender.times_s)),
            f"{measure.ratio(case.contenders[0], contender):.2f}",
            "" if first_call is None else duration(first_call),
            *([] if share is None else [f"{share:.0%}"]),
        )
    return table


def shares(case: Case) -> dict[str, float]:
    """Returns how much of what the machine can do each contender reaches, if that is known."""
    if case.limit is None:
        return {}
    # Its fastest time: what disturbs a measurement only ever makes the machine look slower.
    limit = min(case.by_name()[case.limit].times_s)
    return {c.name: limit / c.median_s for c in case.contenders}


def goal_lines(case: Case) -> list[dict]:
    """Returns, for each goal of the case, what was expected and what was measured."""
    lines = []
    for goal in case.goals:
        value = goal.measured(case.by_name())
        subject = f"{case.key}: {goal.subject}"
        if goal.peer is None:
            text = f"{subject} {duration(value)}, expected at most {duration(goal.bound)}"
        else:
            text = f"{subject} takes {value:.2f} x {goal.peer}, expected at most {goal.bound:.2f}"
        lines.append(
            {"text": text, "value": value, "bound": goal.bound, "met": value <= goal.bound}
        )
    return lines


def interpreted(mode: str, names: list[str]) -> list[dict]:
    """Runs kernels under one interpret mode, in a process that may hang or die: then the kernels
    that it has not come to are run in another one.
    """
    program = pathlib.Path(__file__).with_name("interpret.py")
    outcomes: list[dict] = []
    while len(outcomes) < len(names):
        command = [sys.executable, str(program), mode, *names[len(outcomes) :]]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=INTERPRET_LIMIT_S
            )
            output, ended = (
                done.stdout,
                f"exit status {done.returncode}: "
                + (done.stderr.strip().splitlines() or ["no message"])[-1],
            )
        except subprocess.TimeoutExpired as error:
            output = (error.stdout or b"").decode()
            ended = f"no result within {INTERPRET_LIMIT_S} s"
        outcomes += map(json.loads, output.splitlines())
        if len(outcomes) < len(names):
            outcomes.append({"refused": ended})
    return outcomes


def shown(outcome: dict) -> str:
    """Returns the outcome of an interpreted run in words."""
    if "refused" in outcome:
        return f"refused: {outcome['refused']}"
    return duration(outcome["seconds"]) + ("" if outcome["right"] else ", and a wrong result")


def interpret_table(names: list[str]) -> tuple[Table, dict]:
    """Returns the table of the interpret modes, and the same as data."""
    table = Table(title="Under JAX's interpret modes, at small sizes", title_justify="left")
    for heading in ("kernel", "size", "mode", "one call"):
        table.add_column(heading, overflow="fold")
    by_mode = {mode: interpreted(mode, names) for mode in interpret.MODES}
    data: dict = {}
    for number, name in enumerate(names):
        for mode, outcomes in by_mode.items():
            outcome = data.setdefault(name, {})[mode] = outcomes[number]
            table.add_row(name, cases.SAMPLES[name].size, mode, shown(outcome))
    return table, data


def measure_case(name: str, limits: ctypes.CDLL, rounds: int) -> tuple[Case, list[str]]:
    """Builds the case called `name` and measures it.

    Returns it with one line for each executable of Cokernel: how many of its launches had the
    help of a second worker. The runtime asks for help only where it expects to gain by it.
    """
    with cokernel.target(CHIP):
        case = cases.CASES[name](limits)
        _runtime.reset_statistics()
        measure.run(case.contenders, rounds)
    helped = [
        f"{s['name']}: {s['helped_launches']} of {s['launches']} launches had helpers"
        for s in _runtime.statistics()
        if s["launches"]
    ]
    return case, helped


def main() -> int:
    """Runs what the command line asks for; returns 1 when a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", metavar="CASE")
    parser.add_argument("--no-interpret", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    unknown = set(options.only or ()) - set(cases.CASES)
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(cases.CASES)}")
    names = options.only or list(cases.CASES)

    # A first call compiles; an object from an earlier run would hide what that costs.
    cache = tempfile.TemporaryDirectory()
    os.environ["COKERNEL_CACHE"] = cache.name
    console = Console(highlight=False)
    console.width = max(console.width, 110)
    limits = native.build(cases.SIGNATURES)
    # The start of JAX's own machinery belongs to nobody's first call.
    jax.block_until_ready(jax.jit(lambda x: x - 1)(1.0))
    load = os.getloadavg()[0]
    console.print(
        f"{platform.system()} on {platform.machine()}, {os.cpu_count()} processors,"
        f" load {load:.1f}, Python {platform.python_version()}, JAX {jax.__version__},"
        f" {options.rounds} rounds"
    )
    if load > 0.5:
        console.print("The machine is busy with something else; times of two threads mean little.")
    results: dict = {"load": load, "rounds": options.rounds, "cases": {}}
    goals = []
    for name in names:
        case, helped = measure_case(name, limits, options.rounds)
        console.print(case_table(case), *helped, sep="\n")
        results["cases"][name] = {
            "contenders": {
                c.name: {"times_s": c.times_s, "first_call_s": c.first_call_s}
                for c in case.contenders
            },
            "title": case.title,
            "limit": case.limit,
            "shares": shares(case),
            "goals": goal_lines(case),
            "helped": helped,
        }
        goals += results["cases"][name]["goals"]
    if not options.no_interpret:
        table, results["interpret"] = interpret_table(names)
        console.print(table)
    for goal in goals:
        console.print(
            f"[green]met[/]     {goal['text']}"
            if goal["met"]
            else f"[red]missed[/]  {goal['text']}"
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(goal["met"] for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
