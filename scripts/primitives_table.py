"""Writes docs/primitives.md: every primitive a kernel may use, how it runs on the CPU, and the
tests that run it.

    primitives_table.py                     writes the table from what is recorded
    primitives_table.py --record            runs the compiler's tests first, and records which
                                            primitives each of them compiles
    primitives_table.py --record PATH ...   runs some tests, and adds to what is recorded

What is recorded is in tests/compiler/primitives.json: which tests compile a primitive, of which
dtypes, and how far from the right results the tests let it be for each.
"""

import collections
import json
import os
import pathlib
import sys
from collections.abc import Collection
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax

from cokernel import _jax
from cokernel.compiler import cache, calls, keys, pipelines, program
from cokernel.compiler.ops import load_rules
from cokernel.compiler.ops.registry import RULES

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.compiler import tolerance  # noqa: E402
from tests.compiler.ops.every_dtype import ANY, FLOAT8, FLOATING, INTS, NARROW_FLOATS  # noqa: E402
from tests.compiler.ops.forms import name_of  # noqa: E402

RECORD = ROOT / "tests" / "compiler" / "primitives.json"
TABLE = ROOT / "docs" / "primitives.md"
TESTS = ["tests/compiler", "tests/kernels"]

# Where primitives are defined, by the name people know the module by.
MODULES = {
    "lax": lax,
    "pl": _jax.pallas_primitives,
    "pltpu": _jax.tpu_primitives,
    "plsc": _jax.sc_primitives,
    "jax": _jax,
    "jax.random": _jax.prng,
}
# The functions that see every equation which is compiled: where each is, its name, and which of its
# arguments is the equation.
LISTENED: list[tuple[Any, str, int]] = [
    (program, "apply_rule", 1),
    (keys.Rewriter, "equation", 1),
    (pipelines, "written_out", 0),
    (calls, "stand_in", 0),
]
# Rules that no kernel of the tests can be made to contain, and why.
SELDOM_TRACED = {
    "jax.pvary": "only inside shard_map with typed axes",
    "jax.reduced_vary_cast": "only inside shard_map with typed axes",
    "jax.reshard": "only under meshes with explicit axes",
    "lax.stage": "JAX leaves it out of what it traces",
    "pl.num_programs": "only for a dynamic grid",
}
# Rules that compute nothing of their own: the order of things, positions, marks and calls, or
# numbers that no other machine draws.
WITHOUT_TOLERANCE = {
    "jax.broadcast_to", "jax.check", "jax.closed_call", "jax.dce_sink", "jax.debug_callback",
    "jax.debug_print", "jax.empty", "jax.empty_ref", "jax.io_callback", "jax.pipeline_body",
    "jax.platform_index", "jax.pure_callback", "jax.pvary", "jax.reduced_vary_cast",
    "lax.axis_index", "lax.stage", "pl.delay", "pl.multiple_of", "pl.num_programs",
    "pl.program_id", "pl.semaphore_read", "pl.semaphore_signal", "pl.semaphore_wait",
    "plsc.barrier", "plsc.parallel_loop", "pltpu.get_barrier_semaphore",
    "pltpu.has_memory_space", "pltpu.prng_random_bits", "pltpu.prng_seed", "pltpu.touch",
    "pltpu.trace_value", "jax.random.iota_2x32_shape", "jax.name", "jax.reshard",
    "jax.xla_metadata_value", "lax.device_put", "lax.sharding_constraint",
}  # fmt: skip
UNSUPPORTED = {"pl.get_global": "reads GPU tables"}

INTRODUCTION = """\
# Primitives

Every primitive that a kernel body may contain on the CPU, and how it runs.
`scripts/primitives_table.py` writes this page from the compiler's table of rules and from a record
of what its tests compile; a test fails when the page is out of date, or a rule has no test.

The column of dtypes lists what the tests give a primitive or get from it. The column of tolerances
says how far the tests let its results be from XLA's on the same inputs, special values among them,
for each dtype of its operands. It is written down by the tests' own assertions, and not by hand:

- *exact*: the same bits (and NaN for NaN). Sums and products of floats are compared where every
  order of them gives the same; otherwise they may be added in another order than XLA does.
- *N ulp*: that many units in the last place, for functions of floats. Those of `ops/math.py` are
  compared with the exact value, to which they are nearer than XLA is, all others with XLA's.
- *rounded*: the bits of the float32 result, rounded once to the narrower dtype. XLA rounds every
  step to it.
- *refused*: `NotImplementedError` names the primitive.

Where XLA errs for a narrow dtype, it computes the same in a wider one: see
`tests/compiler/ops/every_dtype.py`.
A primitive that is not listed is compiled by XLA and called through Python, with one warning that
names it.

| primitive | how it runs | dtypes in tests | tolerance | tested in |
| --- | --- | --- | --- | --- |
"""


def names() -> dict[Any, str]:
    """The name of each primitive, such as "lax.add"; names of primitives alone are not unique."""
    found: dict[Any, str] = {}
    for label, module in MODULES.items():
        for attribute in sorted(dir(module)):
            value = getattr(module, attribute)
            if attribute.endswith("_p") and isinstance(value, _jax.Primitive):
                found.setdefault(value, f"{label}.{attribute.removesuffix('_p')}")
    return found


def how_it_runs(primitive: Any) -> str | None:
    """The part of the compiler that deals with a primitive, or None if XLA does."""
    if primitive in keys.MEANING:
        return "rewritten in `keys.py`"
    if primitive in calls.MEANING:
        return "written out in `calls.py`"
    if primitive is _jax.emit_pipeline_p:
        return "written out in `pipelines.py`"
    rule = RULES.get(primitive)
    if rule is None:
        return None
    # A rule that a decorator has made is told by the function inside it.
    if rule.__module__.endswith((".registry", ".traced")):
        inner = [cell.cell_contents for cell in rule.__closure__ or ()]
        rule = next(item for item in inner if hasattr(item, "__module__"))
    return f"rule in `ops/{rule.__module__.rpartition('.')[2]}.py`"


def render(record: dict[str, dict[str, list[str]]]) -> str:
    """The page, from the table of rules and a record of tests."""
    load_rules()
    rows = []
    for primitive, name in names().items():
        how = how_it_runs(primitive)
        seen = record.get(name, {"tests": [], "dtypes": []})
        if how is None and name in UNSUPPORTED:
            how = f"not supported: {UNSUPPORTED[name]}"
        elif how is None:
            if not seen["tests"]:
                continue
            how = "through XLA"
        tests = ", ".join(f"`{test.removeprefix('tests/')}`" for test in shown(seen["tests"], how))
        tests = tests or SELDOM_TRACED.get(name, "")
        tolerances = seen.get("tolerances", {})
        dtypes = [each for each in seen["dtypes"] if tolerances.get(each) != tolerance.REFUSED]
        rows.append((name, how, abbreviated(dtypes), described(tolerances), tests))
    lines = [f"| `{name}` | {' | '.join(cells)} |" for name, *cells in sorted(rows)]
    return INTRODUCTION + "\n".join(lines) + "\n"


# Names for dtypes that usually come together.
GROUPS = {
    "all": frozenset(map(name_of, ANY)),
    "floats": frozenset(map(name_of, FLOATING)),
    "narrow floats": frozenset(map(name_of, NARROW_FLOATS)),
    "integers": frozenset(map(name_of, INTS)),
    "float8": frozenset(map(name_of, FLOAT8)),
}


def abbreviated(dtypes: Collection[str]) -> str:
    """The names of dtypes, with one for each whole group."""
    left, named = set(dtypes), []
    for name, group in GROUPS.items():
        if group <= left:
            named.append(name)
            left -= group
    return ", ".join([*named, *sorted(left)])


def described(tolerances: dict[str, float | str]) -> str:
    """How exact the results of each dtype are, those that are alike together."""
    alike: dict[float | str, set[str]] = collections.defaultdict(set)
    for dtype, value in tolerances.items():
        alike[value].add(dtype)
    parts = []
    for value in sorted(alike, key=str):
        degree = value if isinstance(value, str) else f"{value:g} ulp" if value else "exact"
        is_only = len(alike) == 1 and value == 0
        parts.append(degree if is_only else f"{degree}: {abbreviated(alike[value])}")
    return "; ".join(parts)


def shown(tests: list[str], how: str) -> list[str]:
    """The tests worth naming: the one that mirrors the rule's module, else the first few, and the
    one of every dtype."""
    module = how.rpartition("/")[2].strip("`").removesuffix(".py")
    sweeps = [test for test in tests if pathlib.Path(test).stem.startswith("test_every_dtype")]
    others = [test for test in tests if test not in sweeps]
    own = [test for test in others if pathlib.Path(test).stem == f"test_{module}"]
    return [*(own or others[:3]), *sweeps]


def nearest(tests: set[str]) -> list[str]:
    """The tests of the compiler among some, or a few others if there are none."""
    own = sorted(test for test in tests if test.startswith("tests/compiler/"))
    return own or sorted(tests)[:3]


def untested(record: dict[str, Any]) -> list[str]:
    """The primitives with a rule that no recorded test compiles."""
    load_rules()
    known = names()
    tested = record.keys() | SELDOM_TRACED.keys()
    return sorted(known[rule] for rule in RULES if known[rule] not in tested)


def unstated(record: dict[str, Any]) -> list[str]:
    """The primitives whose rules compute something, but whose results no test compares."""
    load_rules()
    known = names()
    stated = {name for name, entry in record.items() if entry.get("tolerances")}
    return sorted({known[rule] for rule in RULES} - stated - WITHOUT_TOLERANCE)


class Recorder:
    """A pytest plugin that notes which primitives each test module compiles."""

    def __init__(self) -> None:
        self.tests: dict[str, set[str]] = collections.defaultdict(set)
        self.dtypes: dict[str, set[str]] = collections.defaultdict(set)
        self.tolerances: dict[str, dict[str, Any]] = collections.defaultdict(dict)
        self.module = ""
        self.names = names()

    def note(self, eqn: Any) -> None:
        name = self.names.get(eqn.primitive)
        if name is None or not self.module:
            return
        self.tests[name].add(self.module)
        for atom in (*eqn.invars, *eqn.outvars):
            dtype = getattr(atom.aval, "dtype", None)
            if isinstance(dtype, np.dtype):
                self.dtypes[name].add(dtype.name)

    def note_tolerance(self, primitive: Any, dtype: str, value: float | str) -> None:
        """Notes what a test has asserted: of several numbers the greatest."""
        known = self.tolerances[self.names[primitive]]
        earlier = known.get(dtype, value)
        known[dtype] = (
            value if isinstance(earlier, str) or isinstance(value, str) else max(earlier, value)
        )

    def pytest_configure(self, config: pytest.Config) -> None:
        def noting(owner: Any, attribute: str, position: int) -> None:
            original = getattr(owner, attribute)

            def wrapper(*args: Any, **kwargs: Any) -> Any:
                self.note(args[position])
                return original(*args, **kwargs)

            setattr(owner, attribute, wrapper)

        for place in LISTENED:
            noting(*place)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> None:
        self.module = item.location[0]

    def save(self, known: dict[str, Any]) -> None:
        """Writes what was noted, together with what is known already."""
        for name, entry in known.items():
            self.tests[name].update(entry["tests"])
            self.dtypes[name].update(entry["dtypes"])
            self.tolerances[name] = {**entry.get("tolerances", {}), **self.tolerances[name]}
        for name, tolerances in self.tolerances.items():
            taken = {dtype for dtype, value in tolerances.items() if value != tolerance.REFUSED}
            self.dtypes[name].update(taken)
        record = {
            name: {
                "tests": nearest(tests),
                "dtypes": sorted(self.dtypes[name]),
                "tolerances": dict(sorted(self.tolerances[name].items())),
            }
            for name, tests in sorted(self.tests.items())
        }
        RECORD.write_text(json.dumps(record, indent=1) + "\n")


def main(arguments: list[str]) -> int:
    """Writes the table, after running the tests if asked to; returns the exit code."""
    if "--record" in arguments:
        recorder = Recorder()
        paths = [argument for argument in arguments if argument != "--record"]
        chosen = paths or TESTS
        options = ["-q", "-p", "no:cacheprovider"]
        # What the cache has is not compiled, and would not be noted.
        os.environ[cache.CACHE_VARIABLE] = ""
        with tolerance.listening(recorder.note_tolerance):
            outcome = pytest.main([*options, *chosen], plugins=[recorder])
        if outcome != pytest.ExitCode.OK:
            print("the tests must pass before their record is worth anything", file=sys.stderr)
            return 1
        recorder.save(json.loads(RECORD.read_text()) if paths else {})
    jax.config.update("jax_platforms", "cpu")
    record = json.loads(RECORD.read_text())
    TABLE.write_text(render(record))
    missing = untested(record)
    if missing:
        print(f"no test compiles {', '.join(missing)}", file=sys.stderr)
    unknown = unstated(record)
    if unknown:
        print(f"no test states a tolerance of {', '.join(unknown)}", file=sys.stderr)
    return 1 if missing or unknown else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
