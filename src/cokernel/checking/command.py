"""`cokernel check script.py`: runs a script with every kernel in checked mode."""

import argparse
import contextlib
import json
import os
import pathlib
import runpy
import sys
import traceback
from collections.abc import Iterator, Sequence

# The exit statuses: nothing found; something found, or the script failed.
CLEAN, FOUND = 0, 1


def main(arguments: Sequence[str]) -> int:
    """Runs the script that `arguments` name, and prints what was found in its kernels.

    Returns:
      0 if nothing was found and the script ended well, 1 otherwise.
    """
    parser = argparse.ArgumentParser(
        prog="cokernel check",
        description="Runs a script with every kernel in checked mode, those of Cokernel and those "
        "of stock Pallas, and says what is wrong with them.",
    )
    parser.add_argument("--schedules", type=int, metavar="N", help="run each launch N times")
    parser.add_argument("--seed", type=int, help="what the schedules are drawn from")
    parser.add_argument("--replay", metavar="TEXT", help="take the schedule that a finding printed")
    parser.add_argument(
        "--options",
        default="",
        metavar="OPTIONS",
        help="fields of cokernel.Checked, as in 'races=off,strategy=pct'",
    )
    parser.add_argument("--target", metavar="CHIP", help="pretend to have this chip: v6e, tpu7x")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the reports there too; - prints them, and what the script prints to stderr",
    )
    parser.add_argument("script", help="the Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    asked = parser.parse_args(arguments)
    script = pathlib.Path(asked.script)
    if problem := _unreadable(script):
        parser.error(problem)
    if asked.json not in (None, "-") and not pathlib.Path(asked.json).resolve().parent.is_dir():
        parser.error(f"--json: there is no folder to write {asked.json!r} to")

    if asked.replay is not None and (asked.seed is not None or asked.schedules is not None):
        parser.error("--replay takes one schedule again: leave out --seed and --schedules")

    from cokernel import meshes
    from cokernel.checking import launches, options
    from cokernel.checking.options import Checked

    try:
        wanted = options.from_text(asked.options)
        for name in ("schedules", "seed", "replay"):
            if getattr(asked, name) is not None:
                if getattr(wanted, name) not in (getattr(asked, name), getattr(Checked(), name)):
                    raise ValueError(f"--{name} and {name}= in --options contradict each other")
                wanted = wanted.replace(**{name: getattr(asked, name)})
        with meshes.target_or_nothing(asked.target):
            pass
    except (TypeError, ValueError) as error:
        parser.error(str(error))

    with launches.collected_reports() as heard:
        # Where the reports go to stdout, nothing else may.
        aside = _stdout_on_stderr() if asked.json == "-" else contextlib.nullcontext()
        with aside:
            problem = _run(script, asked.arguments, wanted.replace(on_finding="warn"), asked.target)
    reports = [made for made, _ in heard]
    if asked.json == "-":
        print(json.dumps([made.to_dict() for made in reports], indent=2))
    else:
        _print(reports)
        if asked.json:
            text = json.dumps([made.to_dict() for made in reports], indent=2)
            pathlib.Path(asked.json).write_text(text + "\n")
    if problem:
        print(f"cokernel check: {problem}", file=sys.stderr)
    return CLEAN if not problem and not any(made.findings for made in reports) else FOUND


@contextlib.contextmanager
def _stdout_on_stderr() -> Iterator[None]:
    """Sends what is written to stdout to stderr, also by other programs and by C."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
        os.dup2(kept, 1)
        os.close(kept)


def _unreadable(script: pathlib.Path) -> str:
    """Why a file cannot be run as a script; "" if it can."""
    if script.is_dir():
        return f"{str(script)!r} is a folder; name the Python script in it"
    if not script.is_file():
        return f"there is no file {str(script)!r}; options of cokernel check come before the script"
    try:
        compile(script.read_bytes(), str(script), "exec", dont_inherit=True)
    except OSError as error:
        return f"{str(script)!r} cannot be read: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        place = "" if line is None else f" at line {line}"
        text = getattr(error, "msg", None) or error
        return f"{str(script)!r} is no Python script that can be run: {text}{place}"
    return ""


def _run(script: pathlib.Path, arguments: Sequence[str], options: object, target: str) -> str:
    """Runs the script as the main program; says what is wrong if it did not end well."""
    import jax

    from cokernel import meshes, pallas
    from cokernel.checking import state
    from cokernel.checking.options import Checked

    assert isinstance(options, Checked)
    before = state.current(), sys.argv, sys.path[:]
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent.resolve()))
    state.set_checked(options)
    try:
        with pallas.enabled(), meshes.target_or_nothing(target):
            runpy.run_path(str(script), run_name="__main__")
            jax.effects_barrier()
        return ""
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            return ""
        return (
            f"the script ended itself with {exit_.code!r}, not 0: what was checked are the kernels "
            "that ran until then. Run it without cokernel check to see whether it does so too"
        )
    except Exception as error:
        # What stopped a kernel is told by its report; its traceback would say the same again.
        if str(error).removeprefix("INTERNAL: ").startswith("Checked:"):
            return "the kernel that is reported above has ended the script"
        # The lines of this module and of runpy are nothing to the user.
        own = error.__traceback__
        while own is not None and own.tb_frame.f_code.co_filename != str(script):
            own = own.tb_next
        traceback.print_exception(error.with_traceback(own or error.__traceback__))
        return (
            f"the script raised {type(error).__name__}, as above: what was checked are the kernels "
            "that ran until then"
        )
    finally:
        state.set_checked(before[0])
        sys.argv, sys.path[:] = before[1], before[2]


def _print(reports: Sequence[object]) -> None:
    from rich.console import Console

    from cokernel.checking.report import Report, combined

    console = Console(highlight=False)
    by_kernel: dict[str, list[Report]] = {}
    for made in reports:
        assert isinstance(made, Report)
        by_kernel.setdefault(made.kernel, []).append(made)
    if not by_kernel:
        console.print("The script launched no kernel.")
    for kernel, launches in by_kernel.items():
        times = "" if len(launches) == 1 else f" ({len(launches)} launches)"
        console.rule(f"{kernel}{times}", align="left")
        console.print(combined(launches))
