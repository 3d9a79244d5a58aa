"""What checked mode is asked to look for, and under which schedules."""

import dataclasses
import operator
import os
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from cokernel import _jax
from cokernel.checking.schedules import DEEPEST, STRATEGIES, Schedule

# Turns checked mode on for a whole process: "1", or options as in "seed=3,schedules=20".
VARIABLE = "COKERNEL_CHECK"

Fill = Literal["nan", "zeros", "random"] | int
ChipLimits = Literal["off", "warn", "error"]
OnFinding = Literal["raise", "warn"]

# The fields that switch a check on or off.
CHECKS = ("races", "uninitialised", "bounds", "leftovers", "unwaited_copies")

FILLS = ("nan", "zeros", "random")
CHIP_LIMITS = ("off", "warn", "error")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checked:
    """Asks for checked mode: the same compiled kernel with probes, run by one worker.

    Pass it as `interpret=` to a kernel, to `with cokernel.checked(...)`, or to
    `cokernel.explore`.

    Attributes:
      races: whether unordered accesses to the same elements, one of them a write, are found.
      uninitialised: whether values nobody wrote are followed until they matter, and outputs are
        examined for elements that were never written.
      bounds: whether dynamic indices are checked. They are in native mode too.
      leftovers: whether semaphores must count zero at the end of their scope.
      unwaited_copies: whether each DMA must have been waited for at the end of its semaphore.
      padded_tiles: whether an index beyond a Ref's shape is allowed while it stays within the
        tiles that hold the Ref on the chip of `cokernel.target`. What is read there is undefined
        and holds `fill`, what is written there is lost.
      chip_limits: whether the kernel is measured against the memories of the target chip: "off",
        "warn" (a note in the report) or "error".
      strategy: how the next step is chosen: "random", "pct" (few changes of priority), "delay_dma"
        (copies take effect as late as possible), "round_robin" or "run_to_block".
      seed: what random choices start from; the same seed gives the same schedule, results and
        findings.
      schedules: under how many schedules each launch runs, with seeds from `seed` on. What it
        returns comes from the last one.
      depth: with "pct", how many changes of priority a schedule has at most, plus one.
      fill: what memory that starts uninitialised holds: "nan" (all bits set), "zeros", "random",
        or the value of each byte.
      stop_at_first: whether the launch ends at the first finding, instead of collecting all.
      max_findings: how many different findings a report holds; the others are counted.
      on_finding: whether a finding fails the launch ("raise") or becomes a Python warning ("warn");
        `cokernel.last_report()` has it either way. What ends a launch (a deadlock, a bad index)
        always raises.
      replay: the string a finding printed, whose schedule is taken again, once. It takes the place
        of `schedules`, `strategy`, `seed` and `depth`.

    Raises:
      TypeError, ValueError: for a value that means nothing; the message names the field.
    """

    races: bool = True
    uninitialised: bool = True
    bounds: bool = True
    leftovers: bool = True
    unwaited_copies: bool = True
    padded_tiles: bool = False
    chip_limits: ChipLimits = "warn"
    strategy: str = "random"
    seed: int = 0
    schedules: int = 1
    depth: int = 3
    fill: Fill = "nan"
    stop_at_first: bool = False
    max_findings: int = 100
    on_finding: OnFinding = "raise"
    replay: str | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool and not isinstance(value, bool):
                raise TypeError(f"Checked({field.name}=...) must be a bool, got {value!r}")
            if field.type is int:
                # Also NumPy's integers, and scalar arrays of them.
                number = as_int(f"Checked({field.name}=...)", value)
                object.__setattr__(self, field.name, number)
        if not isinstance(self.fill, str | bool) and hasattr(self.fill, "__index__"):
            object.__setattr__(self, "fill", as_int("Checked(fill=...)", self.fill))
        for name, (least, most) in _RANGES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(
                    f"Checked({name}=...) must be from {least} to {most}, got {getattr(self, name)}"
                )
        _check_choice("strategy", self.strategy, STRATEGIES)
        _check_choice("chip_limits", self.chip_limits, CHIP_LIMITS)
        _check_choice("on_finding", self.on_finding, ("raise", "warn"))
        is_byte = isinstance(self.fill, int) and not isinstance(self.fill, bool)
        if not is_byte:
            _check_choice("fill", self.fill, FILLS, or_else=" or a byte from 0 to 255")
        elif not 0 <= self.fill <= 255:  # type: ignore[operator]
            raise ValueError(f"Checked(fill=...) as a byte must be 0 to 255, got {self.fill}")
        if self.replay is not None:
            # A string that cannot be read is better refused here than when the kernel runs.
            try:
                Schedule.from_text(self.replay)
            except (TypeError, ValueError) as error:
                raise type(error)(
                    f"Checked(replay=...): {error}. A finding prints the string, behind 'Replay:'"
                ) from None

    def schedule(self) -> Schedule:
        """The schedule that these options name."""
        if self.replay is not None:
            return Schedule.from_text(self.replay)
        # Every launch takes the same part, so that what it does depends on nothing before it.
        return Schedule(strategy=self.strategy, seed=self.seed, depth=self.depth, launch=0)

    @property
    def switched_off(self) -> tuple[str, ...]:
        """The checks that are not made, by the names of their fields."""
        return tuple(name for name in CHECKS if not getattr(self, name))

    def for_runtime(self) -> dict[str, Any]:
        """The options as the runtime takes them: `spec["checked"]`."""
        return {
            "races": self.races,
            "uninitialised": self.uninitialised,
            "leftovers": self.leftovers,
            "unwaited_copies": self.unwaited_copies,
            "stop_at_first": self.stop_at_first,
            "max_findings": self.max_findings,
            "fill": self.fill,
            "schedules": self.schedules if self.replay is None else 1,
            "schedule": self.schedule().for_runtime(),
        }

    replace = dataclasses.replace


# The least and the largest value of each number, as the runtime holds them.
_RANGES = {
    "seed": (0, 2**64 - 1),
    "schedules": (1, 2**31 - 1),
    "depth": (1, DEEPEST),
    "max_findings": (1, 2**31 - 1),
}


def as_int(what: str, value: Any) -> int:
    """An integer of any type as an int.

    Raises:
      TypeError: for everything else, and for bools; the message begins with `what`.
    """
    try:
        if isinstance(value, bool | np.bool_):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{what} must be an int, got {value!r}") from None


def _check_choice(name: str, value: Any, choices: tuple[str, ...], or_else: str = "") -> None:
    allowed = f"one of {', '.join(choices)}{or_else}"
    if not isinstance(value, str):
        raise TypeError(
            f"Checked({name}=...) must be {allowed}; got {value!r} of type {type(value).__name__}"
        )
    if value not in choices:
        raise ValueError(f"Checked({name}=...) must be {allowed}; got {value!r}")


def from_interpret_params(params: Any) -> Checked:
    """What JAX's `pltpu.InterpretParams` ask for, in our terms.

    | JAX | here |
    | --- | --- |
    | `detect_races` | `races` |
    | `on_race` | `on_finding` |
    | `uninitialized_memory` | `fill` |
    | `random_seed` | `seed` |
    | `dma_execution_mode` | `strategy`: "delay_dma" for "on_wait", "run_to_block" for "eager" |
    | `buffer_bounds` | `padded_tiles` |

    The other checks are on. The remaining fields describe the interpreter itself (its clocks, its
    log, how many cores it pretends) and have nothing here that they could change.

    Raises:
      ValueError: where they ask for wrong answers: `out_of_bounds_reads="uninitialized"`, under
        which a bad index is no error, and `skip_floating_point_ops=True`.
    """
    if params.out_of_bounds_reads != "raise":
        raise ValueError(
            'out_of_bounds_reads="uninitialized" lets bad indices pass, and checked mode reports '
            'them: leave it at "raise"'
        )
    if params.skip_floating_point_ops:
        raise ValueError(
            "skip_floating_point_ops=True makes every result infinite, and checked mode computes "
            "what a native run computes: leave it at False"
        )
    eager = getattr(params, "dma_execution_mode", "on_wait") == "eager"
    return Checked(
        races=params.detect_races,
        on_finding=params.on_race,
        fill="nan" if params.uninitialized_memory == "nan" else "zeros",
        seed=getattr(params, "random_seed", None) or 0,
        strategy="run_to_block" if eager else "delay_dma",
        padded_tiles=getattr(params, "buffer_bounds", "logical") == "padded",
    )


def from_interpret(interpret: Any) -> Checked | None:
    """What the argument `interpret=` of a kernel asks for; None for a native run.

    True and False both mean native: natively is how a kernel runs on a CPU.

    Raises:
      TypeError: for what neither Cokernel nor JAX understands there.
    """
    match interpret:
        case None | bool():
            return None
        case Checked():
            return interpret
        case _ if isinstance(interpret, _jax.SharedInterpretParams):
            return from_interpret_params(interpret)
        case _ if isinstance(interpret, type) and issubclass(interpret, Checked):
            raise TypeError("interpret=Checked is the class; write interpret=Checked()")
        case _:
            raise TypeError(
                "interpret must be a bool, a cokernel.Checked or a pltpu.InterpretParams, got "
                f"{interpret!r} of type {type(interpret).__name__}"
            )


def from_environment(environment: Mapping[str, str] = os.environ) -> Checked | None:
    """What the variable COKERNEL_CHECK asks for; None if it is unset, empty, "0" or "off".

    Raises:
      ValueError: if it cannot be understood.
    """
    text = environment.get(VARIABLE, "").strip()
    if text == "" or _SWITCH.get(text.lower()) is False:
        return None
    try:
        return from_text(text)
    except (TypeError, ValueError) as error:
        raise type(error)(
            f"the environment variable {VARIABLE} is {text!r}: {error}. Write 1 or 0, or options "
            "as in 'seed=3,schedules=20', or unset it"
        ) from None


def from_text(text: str) -> Checked:
    """Options written as in "seed=3,schedules=20,races=off"; "1", "on" and "" mean the defaults.

    Raises:
      ValueError: naming the part that is not understood.
    """
    if text.strip() == "" or _SWITCH.get(text.strip().lower()):
        return Checked()
    fields = {field.name: field for field in dataclasses.fields(Checked)}
    values: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, written = (piece.strip() for piece in part.partition("="))
        if name not in fields or not equals:
            raise ValueError(
                f"{part.strip()!r} is no option of checked mode; write name=value, separated by "
                f"commas, with a name among {', '.join(fields)}"
            )
        if name in values:
            raise ValueError(f"{name} is given twice, as in {part.strip()!r}; give it once")
        values[name] = _parse(name, fields[name].type, written)
    return Checked(**values)


# Words that switch something on or off, in lower case.
_SWITCH = {
    **dict.fromkeys(("1", "true", "on", "yes"), True),
    **dict.fromkeys(("0", "false", "off", "no"), False),
}


def _parse(name: str, kind: Any, text: str) -> Any:
    if kind is bool:
        if text.lower() not in _SWITCH:
            raise ValueError(f"{name} is either on or off, not {text!r}")
        return _SWITCH[text.lower()]
    if kind is int or (name == "fill" and text.lstrip("-").isdigit()):
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{name} is a whole number, not {text!r}") from None
    return text
