"""Runs a function under many schedules, or under all there are, and puts the findings together."""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from cokernel import _runtime
from cokernel.checking.absent import no_launch
from cokernel.checking.launches import Heard, collected_reports, is_explained, misfit
from cokernel.checking.options import Checked, as_int
from cokernel.checking.report import Report, combined
from cokernel.checking.schedules import Schedule
from cokernel.checking.state import checked
from cokernel.checking.tree import ChoiceTree

# The runtime has one schedule for all launches of the process, so one exploration runs at a time.
_exploring = threading.Lock()

# Under so many schedules a function runs if nobody says under how many.
SCHEDULES = 100


@contextlib.contextmanager
def scheduled(schedule: Schedule | None, *, record: bool = False) -> Iterator[None]:
    """Runs the checked launches in a `with` block, of all threads, under one schedule.

    Args:
      schedule: what overrides the kernels' own options; None leaves those.
      record: whether the decisions are kept in the launches' records.
    """
    wanted = None if schedule is None else schedule.for_runtime(record=record)
    previous = _runtime.set_schedule(wanted)
    try:
        yield
    finally:
        _runtime.set_schedule(previous)


def explore(
    function: Callable[..., Any],
    *args: Any,
    schedules: int | None = None,
    options: Checked | None = None,
    exhaustive: bool = False,
    preemptions: int | None = 2,
    **kwargs: Any,
) -> Report:
    """Runs a function in checked mode under many schedules.

    Each run calls `function(*args, **kwargs)` anew, with the kernels in it compiled once. Findings
    do not raise here: they are in the report, equal ones merged.

    Args:
      function: calls one or more kernels. It must not keep state between calls, and is best
        without donated arguments.
      schedules: how many runs there are at most: 100, unless `options` say how many.
      options: what is looked for, and with which strategy and first seed. A `replay` in it makes
        this one run of that schedule.
      exhaustive: whether, instead of drawing schedules, all are visited that interrupt a core at
        most `preemptions` times while it could go on. Only for small kernels, and for functions
        that launch one kernel; the report says whether `schedules` were enough.
      preemptions: see `exhaustive`. None means any number: every behaviour is visited, and those
        that differ only in the order of independent steps only once.

    Returns:
      The report of all runs together. Its `behaviours` counts the runs that synchronised in
      different orders.

    Raises:
      TypeError: if `function` cannot be called, or an argument is of a wrong type.
      ValueError: if a number is too small, if an exhaustive exploration meets a function that
        launches more than one kernel, or none, or if a `replay` belongs to another kernel.
      Exception: what the function raises, unless it is the error of a launch that the report
        explains.
    """
    _check_arguments(function, options, exhaustive)
    asked = Checked() if options is None else options
    most = _schedules(schedules, asked)
    bound = None if preemptions is None else _at_least("preemptions", preemptions, 0)
    # One launch, one schedule: repeating is done here.
    quiet = asked.replace(schedules=1, on_finding="warn", replay=None)

    def run(schedule: Schedule, record: bool = False) -> list[Heard]:
        with scheduled(schedule, record=record), collected_reports() as heard:
            try:
                jax.block_until_ready(function(*args, **kwargs))
            except Exception as error:
                # What ended a launch is in its report; any other error is the caller's.
                if not any(is_explained(error, report) for report, _ in heard):
                    raise
            return list(heard)

    def told(runs: Sequence[Sequence[Heard]]) -> Report:
        if not any(runs):
            raise ValueError(no_launch(lambda: function(*args, **kwargs)))
        return together(runs)

    with _exploring, checked(quiet):
        if asked.replay is not None:
            heard = run(asked.schedule())
            for _, made in heard:
                if not made["schedule"].get("fits", True):
                    raise ValueError(misfit(made["executable"]))
            return told([heard])
        if exhaustive:
            return _all_schedules(run, most, bound, told)
        # Launches are counted within each run.
        first = dataclasses.replace(asked.schedule(), launch=None)
        return told(
            [
                run(dataclasses.replace(first, seed=(first.seed + number) % 2**64))
                for number in range(most)
            ]
        )


def _schedules(schedules: Any, options: Checked) -> int:
    """How many runs are asked for by the argument, or else by the options."""
    if schedules is None:
        return options.schedules if options.schedules != 1 else SCHEDULES
    wanted = _at_least("schedules", schedules, 1)
    if options.schedules not in (1, wanted):
        raise ValueError(
            f"explore(schedules={wanted}) and Checked(schedules={options.schedules}) contradict "
            "each other: give one of them"
        )
    return wanted


def _at_least(name: str, number: Any, least: int) -> int:
    value = as_int(f"explore({name}=...)", number)
    if value < least:
        raise ValueError(f"explore({name}=...) must be at least {least}, got {value}")
    return value


def _check_arguments(function: Any, options: Any, exhaustive: Any) -> None:
    if not callable(function):
        raise TypeError(
            "explore(function, *args) calls a function that launches kernels, under many "
            f"schedules; got {type(function).__name__}. Write explore(f, x), not explore(f(x))"
        )
    if options is not None and not isinstance(options, Checked):
        raise TypeError(f"explore(options=...) must be a cokernel.Checked, got {options!r}")
    if not isinstance(exhaustive, bool):
        raise TypeError(f"explore(exhaustive=...) must be a bool, got {exhaustive!r}")


def _all_schedules(
    run: Callable[[Schedule, bool], list[Heard]],
    schedules: int,
    preemptions: int | None,
    told: Callable[[Sequence[Sequence[Heard]]], Report],
) -> Report:
    tree = ChoiceTree(preemptions)
    runs: list[list[Heard]] = []
    while (choices := tree.next()) is not None and len(runs) < schedules:
        heard = run(Schedule(strategy="choices", choices=choices), True)
        if len(heard) > 1:
            raise ValueError(
                "an exhaustive exploration needs a function that launches one kernel, and this one "
                f"launched {len(heard)}"
            )
        runs.append(heard)
        if not heard:
            break
        tree.add(heard[0][1]["schedule"])
    return dataclasses.replace(told(runs), exhaustive=tree.is_done, preemptions=preemptions)


def together(runs: Sequence[Sequence[Heard]]) -> Report:
    """One report of several runs, each of which may have launched several kernels."""
    reports = [report for run in runs for report, _ in run]
    behaviours = {tuple(record["behaviour"] for _, record in run) for run in runs}
    return dataclasses.replace(combined(reports), schedules=len(runs), behaviours=len(behaviours))
