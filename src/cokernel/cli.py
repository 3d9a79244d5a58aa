"""The `cokernel` command: what the machine offers, the first example, checking a script, and
compiling for a chip that is not there."""

import argparse
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass

DEMO_MODULE = "cokernel.demo"
AOT_MODULE = "cokernel.aot.command"


@dataclass(frozen=True)
class Check:
    """One line of the doctor's table: what was asked, and how to find out.

    `find` returns the text to show, or raises an exception whose message says what is missing.
    """

    label: str
    find: Callable[[], str]


@dataclass(frozen=True)
class Finding:
    """What one check found: the text to show, and whether it is as Cokernel needs it."""

    label: str
    text: str
    good: bool


def _python() -> str:
    implementation, version = platform.python_implementation(), platform.python_version()
    return f"{implementation} {version} on {platform.system()} {platform.machine()}"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError as error:
        raise RuntimeError(
            f"{distribution} is not installed; `pip install cokernel` brings it."
        ) from error


def _jax() -> str:
    version = _version("jax")
    if version.split(".")[:2] != ["0", "12"]:
        raise RuntimeError(f"jax {version} is installed; Cokernel is written for 0.12.x.")
    return f"{version} (jaxlib {_version('jaxlib')})"


def _devices() -> str:
    import jax

    devices = jax.devices("cpu")
    return f"{len(devices)} x {devices[0].device_kind}; default backend {jax.default_backend()}"


def _llvm() -> str:
    import llvmlite.binding

    llvm = ".".join(map(str, llvmlite.binding.llvm_version_info))
    return f"llvmlite {_version('llvmlite')} with LLVM {llvm}"


def _processor() -> str:
    from cokernel.compiler import codegen

    _, name, features = codegen.host()
    known = sum(feature.startswith("+") for feature in features.split(","))
    return f"{name}, of which LLVM uses {known} features"


def usable_processors() -> int:
    """Returns the number of processors that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _workers() -> str:
    return f"{usable_processors()} (the processors this process may use)"


def _blas() -> str:
    from scipy.linalg import cython_blas

    missing = {"sgemm", "dgemm"} - set(cython_blas.__pyx_capi__)
    if missing:
        raise RuntimeError(f"SciPy {_version('scipy')} does not export {', '.join(missing)}.")
    return f"from SciPy {_version('scipy')}"


def _runtime() -> str:
    try:
        module = importlib.import_module("cokernel._runtime")
    except ImportError as error:
        raise RuntimeError(
            f"cokernel._runtime does not load ({error}); build it with `make build` in a checkout,"
            " or install Cokernel again."
        ) from error
    return os.path.basename(module.__file__ or "built in")


def _object_cache() -> str:
    cache = importlib.import_module("cokernel.compiler.cache")
    folder = cache.cache_folder()
    if folder is None:
        return f"off ({cache.CACHE_VARIABLE} is set to nothing)"
    nearest = folder.absolute()
    while not nearest.exists():
        nearest = nearest.parent
    if not os.access(nearest, os.W_OK):
        # Kernels run all the same; they are only compiled again in every process.
        return f"{folder}, which cannot be written to: every process compiles again"
    return str(folder)


CHECKS = (
    Check("Cokernel", lambda: _version("cokernel")),
    Check("Python", _python),
    Check("JAX", _jax),
    Check("CPU devices", _devices),
    Check("Compiler", _llvm),
    Check("Processor", _processor),
    Check("Workers", _workers),
    Check("Runtime", _runtime),
    Check("Matrix products", _blas),
    Check("Object cache", _object_cache),
)


def examine(checks: Sequence[Check] = CHECKS) -> list[Finding]:
    """Runs every check, those after a failed one too, and returns what each found."""
    findings = []
    for check in checks:
        try:
            findings.append(Finding(check.label, check.find(), good=True))
        except Exception as error:
            # The doctor exists to report what is broken, in whatever way it is.
            findings.append(Finding(check.label, str(error) or type(error).__name__, good=False))
    return findings


def doctor(checks: Sequence[Check] = CHECKS) -> int:
    """Prints what the machine offers; returns 1, after a sentence, when something is missing."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    findings = examine(checks)
    table = Table(show_header=False, box=None)
    for finding in findings:
        mark = Text("ok", "green") if finding.good else Text("missing", "bold red")
        table.add_row(mark, finding.label, Text(finding.text))
    console = Console(highlight=False)
    console.print(table)
    bad = [finding.label for finding in findings if not finding.good]
    if bad:
        console.print(
            f"Cokernel cannot run kernels here until this is put right: {', '.join(bad)}."
        )
        return 1
    console.print("Cokernel can run kernels on this machine's CPU.")
    return 0


def demo(arguments: Sequence[str]) -> int:
    """Runs the demo with `arguments` and returns its exit status."""
    example = importlib.import_module(DEMO_MODULE)
    return example.main(arguments)


def aot(arguments: Sequence[str]) -> int:
    """Compiles ahead of time as `arguments` say and returns the exit status."""
    command = importlib.import_module(AOT_MODULE)
    return command.main(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command named by `arguments` (`sys.argv` if None); returns the exit status."""
    parser = argparse.ArgumentParser(prog="cokernel", description=__doc__)
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    commands.add_parser("doctor", help="say what this machine offers and what is missing")
    commands.add_parser(
        "demo", help="run one kernel of three programs on real input", add_help=False
    )
    commands.add_parser(
        "check", help="run a script with every kernel in checked mode", add_help=False
    )
    commands.add_parser("aot", help="compile for a chip that is not there", add_help=False)
    options, rest = parser.parse_known_args(arguments)
    if options.version:
        print(f"cokernel {_version('cokernel')}")
        return 0
    if options.command is None:
        parser.error("name a command: doctor, demo, check or aot")
    if options.command == "demo":
        return demo(rest)
    if options.command == "check":
        return importlib.import_module("cokernel.checking.command").main(rest)
    if options.command == "aot":
        return aot(rest)
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return doctor()
