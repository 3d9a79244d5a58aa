"""`cokernel aot`: compiles a function for chips that are not there, and prints the reports."""

import argparse
import contextlib
import functools
import importlib
import inspect
import json
import pathlib
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from cokernel import meshes
from cokernel.aot import compiling, places, report
from cokernel.aot.process import CompilerMissing
from cokernel.aot.targets import TARGETS

_TYPE = re.compile(r"(?P<dtype>\w+)\[ *(?P<shape>(?:\d+ *(?:, *\d+ *)*,? *)?)\]")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
      0 if every chip accepts the function, 1 if one refuses it, 2 if it could not be asked.
    """
    parser = argparse.ArgumentParser(prog="cokernel aot", description=__doc__)
    parser.add_argument(
        "function",
        help="module:function, or file.py:function; it may be a kernel; a name with dots reaches "
        "into an object",
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
        "--time-limit",
        type=_seconds,
        default=300.0,
        metavar="S",
        help="seconds for one compilation, 300 if not given",
    )
    options = parser.parse_args(arguments)
    try:
        args = [_parsed_type(text) for text in options.types]
        # What the user's module prints must not end up in the JSON.
        with contextlib.redirect_stdout(sys.stderr), _importable(options.function):
            reports = [
                _compiled(options.function, args, name, options.time_limit)
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


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text}")
    return seconds


def _print(reports: Sequence[report.Report]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    for found in reports:
        report.render(found, console)


def _parsed_type(text: str) -> jax.ShapeDtypeStruct:
    found = _TYPE.fullmatch(text.strip())
    if found is None:
        raise _UsageError(f"a type is written like 'float32[256,128]', got {text!r}")
    shape = tuple(map(int, re.findall(r"\d+", found["shape"])))
    try:
        dtype = jnp.dtype(found["dtype"])
        with warnings.catch_warnings(action="ignore"):
            usable = jax.eval_shape(lambda: jnp.zeros((), dtype)).dtype
    except TypeError as error:
        raise _UsageError(f"there is no type of elements {found['dtype']!r} in JAX") from error
    if usable != dtype:
        raise _UsageError(f"JAX makes {usable} of {dtype}: set JAX_ENABLE_X64=1 to have {dtype}")
    return jax.ShapeDtypeStruct(shape, dtype)


def _compiled(name: str, args: Sequence[Any], target: str, time_limit_s: float) -> report.Report:
    # Meshes that the module makes without saying for which chip are for this one.
    pretended = TARGETS[target].platform == "tpu"
    with meshes.target_or_nothing(target if pretended else None):
        function = _loaded(name)
    _check_arguments(name, function, args)
    return compiling.compile(function, *args, target=target, time_limit_s=time_limit_s)


def _split(name: str) -> tuple[str, str]:
    """Returns the module's name and the function's of "module:function"."""
    module_name, colon, function_name = name.rpartition(":")
    if not colon or not module_name or not function_name:
        raise _UsageError(f"name a function as module:function, got {name!r}")
    return module_name, function_name


@contextlib.contextmanager
def _importable(name: str) -> Iterator[None]:
    """Lets the module import what it could if Python ran it: its neighbours."""
    module_name, _ = _split(name)
    is_file = module_name.endswith(".py")
    folder = pathlib.Path(module_name).parent if is_file else pathlib.Path.cwd()
    before = sys.path[:]
    sys.path.insert(0, str(folder.resolve()))
    try:
        yield
    finally:
        sys.path[:] = before


def _loaded(name: str) -> Callable[..., Any]:
    """Returns the function called "module:function", from a module that is imported anew: for
    another chip it may make other meshes."""
    module_name, function_name = _split(name)
    first, *rest = function_name.split(".")
    known = set(sys.modules)
    try:
        if module_name.endswith(".py"):
            found = runpy.run_path(module_name)[first]
        else:
            found = getattr(importlib.import_module(module_name), first)
        function = functools.reduce(getattr, rest, found)
    except (Exception, SystemExit) as error:
        # Whatever the user's module does when it is imported, and exiting is one such thing.
        line = places.line_of_error(error)
        at = f" at {line}" if line else ""
        raise _UsageError(f"cannot load {name!r}{at}: {type(error).__name__}: {error}") from error
    finally:
        _forget_neighbours(set(sys.modules) - known)
    if not callable(function):
        raise _UsageError(f"{name!r} is {function!r}: name a function of arrays")
    return function


def _forget_neighbours(names: set[str]) -> None:
    """Lets the modules that lie where the user's lies be imported anew next time."""
    folder = pathlib.Path(sys.path[0])
    for name in names:
        file = getattr(sys.modules[name], "__file__", None)
        if file is None or "site-packages" in file:
            continue
        if pathlib.Path(file).resolve().is_relative_to(folder) and places.is_users(file):
            del sys.modules[name]


def _check_arguments(name: str, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Checks that a function takes as many arguments as there are types on the command line."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        # A function without a signature is asked by calling it.
        return
    try:
        signature.bind(*args)
    except TypeError as error:
        line = places.line_of_definition(function)
        at = f" at {line}" if line else ""
        raise _UsageError(
            f"{name!r}{at} takes {signature}, but the command line has {len(args)} types "
            f"({error}): give one for each argument, as in 'float32[256,128]'"
        ) from error
