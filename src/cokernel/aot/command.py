"""`cokernel aot`: compiles a function for chips that are not there, and prints the reports."""

import argparse
import functools
import importlib
import json
import pathlib
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cokernel import meshes
from cokernel.aot import compiling, report
from cokernel.aot.process import CompilerMissing
from cokernel.aot.targets import TARGETS

_TYPE = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      0 if every chip accepts the function, 1 if one refuses it, 2 if it could not be asked.
    """
    parser = argparse.ArgumentParser(prog="cokernel aot", description=__doc__)
    parser.add_argument(
        "function",
        help="module:function, or file.py:function; a name with dots reaches into an object",
    )
    parser.add_argument(
        "types",
        nargs="*",
        metavar="TYPE",
        help="the types of its arguments, as in 'float32[256,128]' or 'int32[]'",
    )
    parser.add_argument(
        "--target",
        action="append",
        required=True,
        choices=list(TARGETS),
        help="the chip; may be given several times",
    )
    parser.add_argument("--json", action="store_true", help="print a list of reports as JSON")
    parser.add_argument(
        "--time-limit", type=float, default=300.0, metavar="S", help="seconds for one compilation"
    )
    options = parser.parse_args(arguments)
    try:
        args = [_parsed_type(text) for text in options.types]
        reports = [
            compiling.compile(
                _loaded(options.function, name), *args, target=name, time_limit_s=options.time_limit
            )
            for name in dict.fromkeys(options.target)
        ]
    except (CompilerMissing, _UsageError) as error:
        print(f"cokernel aot: {error}", file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps([found.to_dict() for found in reports], indent=2))
    else:
        _print(reports)
    return 0 if all(found.accepted for found in reports) else 1


class _UsageError(ValueError):
    """The command line does not name a function or a type."""


def _print(reports: Sequence[report.Report]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for found in reports:
        report.render(found, console)


def _parsed_type(text: str) -> jax.ShapeDtypeStruct:
    found = _TYPE.fullmatch(text.strip())
    if found is None:
        raise _UsageError(f"a type is written like 'float32[256,128]', got {text!r}")
    try:
        dtype = jnp.dtype(found["dtype"])
    except TypeError as error:
        raise _UsageError(f"there is no type of elements {found['dtype']!r}") from error
    sizes = [size.strip() for size in found["shape"].split(",")]
    return jax.ShapeDtypeStruct(tuple(int(size) for size in sizes if size), dtype)


def _loaded(name: str, target: str) -> Callable[..., Any]:
    """Returns the function called "module:function"; the module is imported for the chip."""
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise _UsageError(f"name a function as module:function, got {name!r}")
    # Meshes that the module makes without saying for which chip are for this one.
    pretended = TARGETS[target].platform == "tpu"
    with meshes.target_or_nothing(target if pretended else None):
        try:
            if module_name.endswith(".py"):
                contents = runpy.run_path(module_name)
                first, *rest = function_name.split(".")
                found = contents[first]
            else:
                sys.path.insert(0, str(pathlib.Path.cwd()))
                try:
                    found, rest = importlib.import_module(module_name), function_name.split(".")
                finally:
                    sys.path.pop(0)
            return functools.reduce(getattr, rest, found)
        except (ImportError, AttributeError, KeyError, FileNotFoundError) as error:
            raise _UsageError(f"cannot load {name!r}: {type(error).__name__}: {error}") from error
