"""Measures what checked mode costs, with all checks on.

    python benchmarks/checked.py [--rounds N] [--no-interpret] [--json FILE]

Shows checked mode beside the same kernels run natively, the time of an access as a launch has more
of them, and JAX's interpreter with its search for races beside both. Times are medians over rounds
in which the contenders take turns. Run it on a machine that does nothing else.
"""

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernels import CHIP, LANES, SUBCORES, arithmetic, movement
from kernels.checked import WINDOW, sweep, tiles
from measure import Case, Goal, jitted, run
from rich.console import Console
from rich.table import Table
from run import case_table, duration, goal_lines

import cokernel

CHECKED, NATIVE = "checked", "native"
# Checked mode without some of its checks, to tell what each of them costs.
OFF = dict.fromkeys(("races", "uninitialised", "bounds", "leftovers", "unwaited_copies"), False)
PARTS = {
    "schedules only": OFF,
    "races only": {**OFF, "races": True},
    "uninitialised only": {**OFF, "uninitialised": True},
    "bounds only": {**OFF, "bounds": True},
    "leftovers only": {**OFF, "leftovers": True, "unwaited_copies": True},
}
# From 10^4 to 10^7 loads and stores of registers in one launch, as the windows of each subcore; and
# how much longer than at the cheapest size an access may take at any other.
WINDOWS = (1, 10, 100, 1000)
ACCESSES_OF_A_WINDOW = SUBCORES * 2 * WINDOW // LANES
LINEAR_WITHIN = 2
# The same for JAX's interpreter, whose time grows with the square, and its limit for each size.
INTERPRETED_ACCESSES = (64, 256, 1024, 4096)
INTERPRETER = "JAX's interpreter, races on"
INTERPRETER_LIMIT_S = 20


def cases() -> list[Case]:
    """Returns a case for each kind of kernel: checked mode beside native."""
    table = [
        ("tile", "softmax of float32[1024, 1024], 64 rows at a time", 10,
         lambda **options: arithmetic.softmax(cokernel.kernel, (1024, 1024), 64, **options),
         (1024, 1024)),
        ("dma", "copy of float32[8192, 256], 64 rows at a time", 10,
         lambda **options: movement.copy(cokernel.kernel, 8192, 256, 64, **options),
         (8192, 256)),
        ("lanes", "x * 2 + 1 of float32[1048576], 16 lanes at a time", 30,
         lambda **options: movement.affine(cokernel.kernel, 2**20, 4096, **options),
         (2**20,)),
    ]  # fmt: skip
    built = []
    for key, title, bound, make, shape in table:
        argument = jnp.asarray(np.random.default_rng(0).random(shape, np.float32))
        contenders = [
            jitted(NATIVE, make(), argument),
            jitted(CHECKED, make(interpret=cokernel.Checked()), argument),
            *(
                jitted(name, make(interpret=cokernel.Checked(**checks)), argument)
                for name, checks in PARTS.items()
            ),
        ]
        built.append(Case(key, title, contenders, [Goal(CHECKED, bound, NATIVE)]))
    return built


def access_times(rounds: int) -> dict[int, float]:
    """Returns the median time of a checked launch, in seconds, by the number of its accesses."""
    contenders = {}
    for windows in WINDOWS:
        kernel = sweep(cokernel.kernel, windows, interpret=cokernel.Checked())
        argument = jnp.ones((windows * SUBCORES * WINDOW,), jnp.float32)
        accesses = windows * ACCESSES_OF_A_WINDOW
        contenders[accesses] = jitted(str(accesses), kernel, argument)
    run(list(contenders.values()), rounds)
    return {accesses: contender.median_s for accesses, contender in contenders.items()}


def access_table(times: dict[int, float]) -> tuple[Table, list[dict]]:
    """Returns the table of the times of an access, and the goal that they are alike."""
    table = Table(
        title="One access of checked mode, in a 16-lane loop by 32 subcores", title_justify="left"
    )
    for heading in ("accesses of a launch", "launch", "one access"):
        table.add_column(heading, justify="right")
    for accesses, seconds in times.items():
        table.add_row(f"{accesses:,}", duration(seconds), duration(seconds / accesses))
    each = [seconds / accesses for accesses, seconds in times.items()]
    value = max(each) / min(each)
    text = (
        f"linear: an access takes at most {value:.2f} x as long at one size as at another,"
        f" expected at most {LINEAR_WITHIN:.2f}"
    )
    return table, [
        {"text": text, "value": value, "bound": LINEAR_WITHIN, "met": value <= LINEAR_WITHIN}
    ]


def outcome_of_tiles(mode: str, accesses: int) -> dict:
    """Runs the kernel `tiles` and returns {"seconds": time of the second call}, or why not."""
    make, interpret = {
        INTERPRETER: (pl.kernel, pltpu.InterpretParams(detect_races=True)),
        NATIVE: (cokernel.kernel, None),
        CHECKED: (cokernel.kernel, cokernel.Checked()),
    }[mode]
    try:
        with cokernel.target(CHIP):
            options = {} if interpret is None else {"interpret": interpret}
            call = jax.jit(tiles(make, accesses, **options))
            argument = jnp.ones((64, 128), jnp.float32)
            jax.block_until_ready(call(argument))
            times = []
            for _ in range(1 if mode == INTERPRETER else 5):
                start = time.perf_counter()
                jax.block_until_ready(call(argument))
                times.append(time.perf_counter() - start)
    except Exception as error:
        # Whatever the interpreter raises is what the benchmark has to report.
        return {"refused": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}
    return {"seconds": statistics.median(times)}


def interpreted(accesses: int) -> dict:
    """Runs JAX's interpreter in a process of its own, which may hang or die."""
    command = [sys.executable, __file__, "--interpret-one", str(accesses)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INTERPRETER_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"refused": f"no result of two calls within {INTERPRETER_LIMIT_S} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"refused": f"exit status {done.returncode}: {last}"}
    return json.loads(done.stdout)


def interpreter_table() -> tuple[Table, list[dict]]:
    """Returns the table of one kernel natively, checked, and interpreted, and the same as data."""
    table = Table(
        title="Loads and stores of tiles of 8 x 128 by one TensorCore", title_justify="left"
    )
    for heading in ("accesses", NATIVE, CHECKED, INTERPRETER):
        table.add_column(heading, justify="right", overflow="fold")
    rows: list[dict] = []
    for accesses in INTERPRETED_ACCESSES:
        row = {mode: outcome_of_tiles(mode, accesses) for mode in (NATIVE, CHECKED)}
        # What was too slow at one size is not asked for a larger one.
        slow = bool(rows) and "refused" in rows[-1][INTERPRETER]
        row[INTERPRETER] = {"refused": "not tried"} if slow else interpreted(accesses)
        shown = [
            f"refused: {found['refused']}" if "refused" in found else duration(found["seconds"])
            for found in row.values()
        ]
        table.add_row(f"{accesses:,}", *shown)
        rows.append({"accesses": accesses, **row})
    return table, rows


def main() -> int:
    """Runs what the command line asks for; returns 1 when a goal was missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-interpret", action="store_true")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    parser.add_argument("--interpret-one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.interpret_one is not None:
        print(json.dumps(outcome_of_tiles(INTERPRETER, options.interpret_one)))
        return 0

    console = Console(highlight=False)
    console.width = max(console.width, 110)
    load = os.getloadavg()[0]
    console.print(
        f"{platform.system()} on {platform.machine()}, {os.cpu_count()} processors,"
        f" load {load:.1f}, Python {platform.python_version()}, JAX {jax.__version__},"
        f" {options.rounds} rounds"
    )
    results: dict = {"load": load, "rounds": options.rounds, "cases": {}}
    goals = []
    with cokernel.target(CHIP):
        for case in cases():
            run(case.contenders, options.rounds)
            console.print(case_table(case))
            results["cases"][case.key] = {c.name: c.times_s for c in case.contenders}
            goals += goal_lines(case)
        times = access_times(options.rounds)
    table, linear = access_table(times)
    goals += linear
    results["accesses"] = {str(accesses): seconds for accesses, seconds in times.items()}
    console.print(table)
    if not options.no_interpret:
        table, results["interpreter"] = interpreter_table()
        console.print(table)
    for goal in goals:
        verdict = "[green]met[/]     " if goal["met"] else "[red]missed[/]  "
        console.print(verdict + goal["text"])
    results["goals"] = goals
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(goal["met"] for goal in goals) else 1


if __name__ == "__main__":
    sys.exit(main())
