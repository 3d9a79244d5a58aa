"""Measures how long a kernel takes from its first call to its result, and where the time goes.

    python benchmarks/compile_time.py [--rounds N] [--only KERNEL ...] [--json FILE]

Every measurement is a process of its own, in which JAX has started but nothing been traced: without
the cache of objects, and again when another process has filled it. Beside it stand the same
computation in plain JAX under `jax.jit`, and the kernel under JAX's interpreter. Times are medians
over the rounds. Run it on a machine that does nothing else.

Where the cache has the code, JAX's tracing is most of what is left, and it takes a time that no
cache of ours saves; so it is given beside the total.
"""

import argparse
import contextlib
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

PHASES = ("trace", "lower", "emit", "parse", "optimise", "machine code", "load", "XLA", "run")
# Seconds from the call to the result, without the cache and with it. `rows` has as many equations
# as the median of the kernels that people write, `merge` as many as the largest.
GOALS_S = {"rows": 0.150, "merge": 1.5}
CACHED_GOALS_S = {"rows": 0.050}
INTERPRETER_LIMIT_S = 120


# One measurement, in a process of its own.


@contextlib.contextmanager
def _timed(times: dict[str, float], phase: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
        yield
    finally:
        times[phase] = times.get(phase, 0.0) + time.perf_counter() - start


def _time_calls(times: dict[str, float], owner: Any, name: str, phase: str) -> None:
    """Has all calls of a function of the compiler counted as a phase."""
    function = getattr(owner, name)

    def timed(*args: Any, **kwargs: Any) -> Any:
        with _timed(times, phase):
            return function(*args, **kwargs)

    setattr(owner, name, timed)


def measure(name: str, what: str) -> dict[str, float]:
    """The seconds of each phase, their "total", and the number of "equations"."""
    import compile_kernels
    import jax

    import cokernel

    _check_bytecode_is_kept(jax, cokernel)
    # The start of JAX's own machinery belongs to nobody's first call.
    jax.block_until_ready(jax.jit(lambda x: x - 1)(1.0))
    kernel = compile_kernels.KERNELS[name]
    times: dict[str, float] = {}
    with cokernel.target("7x"):
        if what == "phases":
            _count_phases(times)
        functions: dict[str, Callable[[], Callable]] = {
            "plain JAX": lambda: kernel.plain,
            "interpreter": lambda: kernel.make(_interpreted),
        }
        function = functions.get(what, lambda: kernel.make(cokernel.mpmd_map))()
        start = time.perf_counter()
        with _timed(times, "trace"):
            traced = jax.jit(function).trace(*kernel.arguments)
        with _timed(times, "lower"):
            lowered = traced.lower()
        with _timed(times, "XLA"):
            compiled = lowered.compile()
        with _timed(times, "run"):
            jax.block_until_ready(compiled(*kernel.arguments))
        times["total"] = time.perf_counter() - start
    inside = ("emit", "optimise", "machine code", "load")
    times["lower"] -= sum(times.get(phase, 0.0) for phase in inside)
    if "parse" in times:
        times["optimise"] -= times["parse"]
    times["equations"] = _equations(traced.jaxpr.jaxpr)
    return times


def _check_bytecode_is_kept(*packages: Any) -> None:
    """Raises RuntimeError where Python compiles its modules again in every process."""
    for package in packages:
        cached = package.__spec__.cached
        if cached is None or not os.path.exists(cached):
            raise RuntimeError(
                f"Python keeps no bytecode of {package.__name__}, so what is measured would be its "
                "own compiler: set PYTHONPYCACHEPREFIX to a folder that can be written"
            )


def _count_phases(times: dict[str, float]) -> None:
    import llvmlite.binding as llvm

    from cokernel.compiler import codegen, kernel

    _time_calls(times, kernel.Kernel, "compile", "emit")
    _time_calls(times, codegen, "_optimised", "optimise")
    _time_calls(times, llvm, "parse_assembly", "parse")
    _time_calls(times, llvm.TargetMachine, "emit_object", "machine code")
    _time_calls(times, codegen.LoadedCode, "__init__", "load")


def _interpreted(programs: Any, out_type: Any, **options: Any) -> Callable:
    """`cokernel.mpmd_map` for JAX's own interpreter, which takes kernels of one program."""
    from jax.experimental import pallas as pl

    [(mesh, body)] = programs
    return pl.kernel(body, out_type=out_type, mesh=mesh, interpret=True, **options)


def _equations(jaxpr: Any) -> int:
    from cokernel import primitive

    kernels = [
        eqn for eqn in primitive.all_equations(jaxpr) if eqn.primitive is primitive.mpmd_map_p
    ]
    return sum(
        1
        for eqn in kernels
        for program in eqn.params["jaxprs"]
        for _ in primitive.all_equations(program)
    )


# All measurements.


def in_process(name: str, what: str, cache: str) -> dict[str, float] | str:
    """What `measure` returns in a new process, or why it did not."""
    environment = {**os.environ, "COKERNEL_CACHE": cache}
    # As after an ordinary start: Python's own cache of bytecode is not what is measured here.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    command = [sys.executable, __file__, "--measure", name, what]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=INTERPRETER_LIMIT_S
        )
    except subprocess.TimeoutExpired:
        return f"longer than {INTERPRETER_LIMIT_S} s"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["?"]
        errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
        return "refused: " + (errors or lines)[-1]
    return json.loads(done.stdout.splitlines()[-1])


def medians(results: list[dict[str, float]]) -> dict[str, float]:
    """The median of each entry."""
    return {key: statistics.median(result[key] for result in results) for key in results[0]}


def measure_kernel(name: str, rounds: int) -> dict[str, Any]:
    """The medians of all that is measured of one kernel, by what it is."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as cache:
        in_process(name, "kernel", cache)  # Fills the cache.
        for what, folder in (
            ("kernel", ""), ("cached kernel", cache), ("phases", ""), ("plain JAX", ""),
        ):  # fmt: skip
            results = [in_process(name, what, folder) for _ in range(rounds)]
            failures = [result for result in results if isinstance(result, str)]
            found[what] = failures[0] if failures else medians(results)  # type: ignore[arg-type]
    found["interpreter"] = in_process(name, "interpreter", "")
    return found


def in_milliseconds(result: Any, key: str = "total") -> str:
    """An entry of a result in words."""
    return result if isinstance(result, str) else f"{1e3 * result.get(key, 0.0):.1f}"


def main() -> int:
    """Runs what the command line asks for; returns 1 when a goal was missed."""
    import compile_kernels
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    names = list(compile_kernels.KERNELS)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="KERNEL")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE")
    options = parser.parse_args()
    results = {name: measure_kernel(name, options.rounds) for name in options.only}

    console = Console(highlight=False)
    console.width = max(console.width, 110)
    totals = Table(title="From the first call to the result, in ms", title_justify="left")
    for heading in (
        "kernel", "equations", "Cokernel", "cached", "tracing", "jit of plain JAX", "interpreter",
    ):  # fmt: skip
        totals.add_column(heading, justify="left" if heading == "kernel" else "right")
    phases = Table(title="Where the time goes without the cache, in ms", title_justify="left")
    for heading in ("kernel", *PHASES):
        phases.add_column(heading, justify="left" if heading == "kernel" else "right")
    goals = []
    for name, found in results.items():
        kernel, cached = found["kernel"], found["cached kernel"]
        totals.add_row(
            f"{name}: {compile_kernels.KERNELS[name].title}",
            f"{kernel['equations']:.0f}",
            in_milliseconds(kernel),
            in_milliseconds(cached),
            in_milliseconds(cached, "trace"),
            in_milliseconds(found["plain JAX"]),
            in_milliseconds(found["interpreter"])[:40],
        )
        phases.add_row(name, *(in_milliseconds(found["phases"], phase) for phase in PHASES))
        if name in GOALS_S:
            goals.append((f"{name}: first call", kernel["total"], GOALS_S[name]))
        if name in CACHED_GOALS_S:
            text = f"{name}: first call with the cache"
            goals.append((text, cached["total"], CACHED_GOALS_S[name]))
    console.print(totals, phases)
    for text, seconds, bound in goals:
        verdict = "[green]met[/]    " if seconds <= bound else "[red]missed[/] "
        console.print(f"{verdict} {text}: {1e3 * seconds:.1f} ms, goal {1e3 * bound:.0f} ms")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))
    return 0 if all(seconds <= bound for _, seconds, bound in goals) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(*sys.argv[2:])))
    else:
        sys.exit(main())
