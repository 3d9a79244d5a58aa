"""Writes the table of transformations in docs/transformations.md, from cases that it runs.

Each case of tests/rules/transformation_cases.py runs with Cokernel and, beside it, with JAX's own
`pl.kernel` in JAX's two interpreters; the better of the two counts. Each runs in a process of its
own that is ended if a case does not come back.

  python scripts/transformations.py            writes the table
  python scripts/transformations.py --check    only says whether every case is right with Cokernel
"""

import argparse
import json
import pathlib
import re
import select
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

ROOT = pathlib.Path(__file__).parents[1]
TABLE = ROOT / "docs" / "transformations.md"
TIME_LIMIT_S = 60
WORKS = "**works**"
IMPLEMENTATIONS = {
    "cokernel": "Cokernel",
    "interpret": "JAX, `interpret=True`",
    "interpret-tpu": "JAX, `interpret=pltpu.InterpretParams()`",
}

HEADER = """# Transformations

`cokernel.mpmd_map` and `cokernel.kernel` are JAX primitives like any other: what is composed around
them works, or says in one sentence why it can't.

- **vmap** launches the kernel once for each element of the batch, one after the other, on the
  same worker pool. Only arguments and Refs that are batched are cut up. A Ref that is common to the
  batch may be read, not written.
- **Forward mode** runs one kernel that computes values and tangents: each float Ref has a Ref of
  tangents beside it, each copy of floats is two copies over the same semaphore. `jax.linearize`
  runs the kernel at once, and its derivative when tangents are there. A prefix maximum has the
  tangent of the element it is, a sort moves tangents with their values; what takes the bits of a
  float for an integer, or calls Python, is refused with its line.
- **Reverse mode** needs a backward kernel, which `jax.custom_vjp` joins to the forward one.
- **remat** saves the outputs or runs the kernel again, as the policy says; with Ref arguments it
  runs in both passes.
- **DCE** drops a kernel whose outputs are unused, unless it writes to a Ref, prints, or has
  `CompilerParams(has_side_effects=True)`.
- **discharge** makes outputs of the Refs that are written, and of no others.
- **export** needs the option
  `disabled_checks=[jax.export.DisabledSafetyCheck.custom_call("cokernel_launch")]`, because JAX
  vouches only for calls of its own. Who loads the file imports `cokernel` first. A kernel is
  compiled for the shapes it is given, so symbolic shapes are refused, and so are kernels that print
  or call back, which need the Python of their process.
- **cost_estimate** is attached to the call in the lowered and in the compiled module, where tools
  find it (`compiled.as_text()`). `compiled.cost_analysis()` does not count it: on a CPU, XLA's
  analysis marks every custom call as unknown (`flops: -1`) and asks nobody for its cost.
- **Closed-over values** are those of the first call with the same argument types, as under
  `jax.jit`. Who rebinds a variable to another Ref or scalar passes it as an argument.

"Works" in the row of an error means that the error comes and says what the row asks for; "refuses
vaguely", that it comes and does not say it.

The table shows what happens to the same kernel with Cokernel and with JAX's own `pl.kernel` on a
CPU, where JAX only interprets: each case ran in both of its interpreters (`interpret=True` and
`pltpu.InterpretParams()`), and the answers of both are shown where neither does it.
`python scripts/transformations.py` ran the cases and wrote this file, with jax {version}.

| part | what was tried | Cokernel | JAX |
| --- | --- | --- | --- |
"""


def run_cases(name: str, start: int) -> None:
    """Runs the cases from `start` on with one implementation, and prints a line for each."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    sys.path.insert(0, str(ROOT / "tests" / "rules"))
    import functools

    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu
    from transformation_cases import CASES, Api, VagueError

    import cokernel

    apis = {
        "cokernel": Api(cokernel.kernel, False),
        "interpret": Api(functools.partial(pl.kernel, interpret=True), False),
        "interpret-tpu": Api(functools.partial(pl.kernel, interpret=pltpu.InterpretParams()), True),
    }
    for index, case in enumerate(CASES[start:], start):
        try:
            case.run(apis[name])
            outcome, message = "works", ""
        except VagueError as error:
            outcome, message = "refuses vaguely", str(error)
        except AssertionError as error:
            outcome, message = "wrong", str(error)
        except Exception as error:
            outcome, message = "refuses", f"{type(error).__name__}: {error}"
        line = {
            "index": index,
            "part": case.part,
            "title": case.title,
            "outcome": outcome,
            "message": message,
            "version": jax.__version__,
        }
        print("CASE " + json.dumps(line), flush=True)
    print("END", flush=True)


def results_of(name: str) -> Iterator[dict[str, Any]]:
    """Yields the result of each case, starting a new process after one that hangs or dies."""
    start = 0
    while True:
        command = [sys.executable, __file__, "--run", name, "--start", str(start)]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        assert process.stdout is not None
        while True:
            ready, _, _ = select.select([process.stdout], [], [], TIME_LIMIT_S)
            line = process.stdout.readline() if ready else None
            if line is None or not line or line.startswith("END"):
                break
            if line.startswith("CASE "):
                result = json.loads(line.removeprefix("CASE "))
                start = result["index"] + 1
                yield result
        process.kill()
        process.wait()
        if line is not None and line.startswith("END"):
            return
        outcome = "hangs" if line is None else "ends the process"
        yield {"index": start, "outcome": outcome, "message": ""}
        start += 1


def cell(result: dict[str, Any]) -> str:
    """Returns the text of one cell of the table."""
    message = " ".join(result["message"].replace(f"{ROOT}/", "").split())
    # Addresses differ from run to run.
    message = re.sub(r" object at 0x[0-9a-f]+", "", message)
    message = message.partition(" --------------------")[0]
    if len(message) > 160:
        message = message[:157] + "..."
    message = message.replace("|", "\\|").replace("`", "'")
    return f"{result['outcome']}: `{message}`" if message else f"**{result['outcome']}**"


def main() -> int:
    """Runs all cases and writes the table; returns 1 if one is not right with Cokernel."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--run", choices=IMPLEMENTATIONS)
    parser.add_argument("--start", type=int, default=0)
    options = parser.parse_args()
    if options.run:
        run_cases(options.run, options.start)
        return 0

    ours = list(results_of("cokernel"))
    failures = [result for result in ours if result["outcome"] != "works"]
    for result in failures:
        print(f"{result.get('title', result['index'])}: {cell(result)}", file=sys.stderr)
    if options.check:
        return 1 if failures else 0

    first, second = (list(results_of(name)) for name in ("interpret", "interpret-tpu"))
    rows = []
    works = 0
    for mine, *theirs in zip(ours, first, second, strict=True):
        cells = {cell(result) for result in theirs}
        if any(result["outcome"] == "works" for result in theirs):
            works += 1
            cells = {WORKS}
        # Both answers, where neither interpreter does it.
        peer = "; ".join(sorted(cells))
        rows.append(f"| {mine['part']} | {mine['title']} | {cell(mine)} | {peer} |\n")
    summary = (
        f"\nOf {len(ours)} cases, {len(ours) - len(failures)} are right with Cokernel and {works} "
        "with JAX.\n"
    )
    TABLE.write_text(HEADER.format(version=ours[0]["version"]) + "".join(rows) + summary)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
