"""`cokernel check script.py`: runs a script with every kernel in checked mode."""

import argparse
import json
import pathlib
import runpy
import sys
import traceback
from collections.abc import Sequence

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
    parser.add_argument("--json", metavar="FILE", help="write the reports there too; - prints them")
    parser.add_argument("script", help="the Python script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script is given")
    asked = parser.parse_args(arguments)
    script = pathlib.Path(asked.script)
    if not script.is_file():
        parser.error(f"there is no file {asked.script!r}")

    from cokernel.checking import options, report

    try:
        wanted = options.from_text(asked.options)
        for name in ("schedules", "seed", "replay"):
            if getattr(asked, name) is not None:
                wanted = wanted.replace(**{name: getattr(asked, name)})
    except (TypeError, ValueError) as error:
        parser.error(str(error))

    with report.collected_reports() as heard:
        ended_well = _run(script, asked.arguments, wanted.replace(on_finding="warn"), asked.target)
    reports = [made for made, _ in heard]
    if asked.json == "-":
        print(json.dumps([made.to_dict() for made in reports], indent=2))
    else:
        _print(reports)
        if asked.json:
            text = json.dumps([made.to_dict() for made in reports], indent=2)
            pathlib.Path(asked.json).write_text(text + "\n")
    return CLEAN if ended_well and not any(made.findings for made in reports) else FOUND


def _run(script: pathlib.Path, arguments: Sequence[str], options: object, target: str) -> bool:
    """Runs the script as the main program; whether it ended well."""
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
        return True
    except SystemExit as exit_:
        return exit_.code in (None, 0)
    except Exception as error:
        # What stopped a kernel is told by its report; its traceback would say the same again.
        if not str(error).removeprefix("INTERNAL: ").startswith("Checked:"):
            traceback.print_exc()
        return False
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
