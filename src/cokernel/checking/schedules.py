"""Schedules: in which order a checked launch takes its steps, and how to write that down."""

import base64
import dataclasses
import zlib
from typing import Any

STRATEGIES = ("random", "pct", "delay_dma", "round_robin", "run_to_block")

# The first word of a written schedule, with the version of what follows.
PREFIX = "ck1"
EXAMPLE = f"{PREFIX}:random:0:17"
FORM = f"{PREFIX}:strategy:launch:seed"

# The largest depth of "pct": faults that need more changes of priority are not found by drawing.
DEEPEST = 10_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How the launches of a process take their steps.

    Attributes:
      strategy: one of `STRATEGIES`, or "choices".
      seed: what random choices start from.
      depth: for "pct", one more than the changes of priority.
      launch: the number of the launch, from 0, whose part of the schedule is meant; None means
        that launches are counted from 0 on.
      choices: for "choices", the number of the candidate taken at each decision; when they are
        used up, each core runs until it blocks.
    """

    strategy: str = "random"
    seed: int = 0
    depth: int = 3
    launch: int | None = None
    choices: tuple[int, ...] = ()

    def for_runtime(self, *, record: bool = False) -> dict[str, Any]:
        """The schedule as the runtime takes it. `record`: whether decisions are reported back."""
        return {
            "strategy": self.strategy,
            "seed": self.seed,
            "depth": self.depth,
            "launch": -1 if self.launch is None else self.launch,
            "choices": list(self.choices),
            "record": record,
        }

    def to_text(self) -> str:
        """A short string from which `from_text` makes the same schedule in any process."""
        launch = 0 if self.launch is None else self.launch
        if self.strategy == "choices":
            packed = zlib.compress(_varints(self.choices), 9)
            return f"{PREFIX}:choices:{launch}:{base64.urlsafe_b64encode(packed).decode()}"
        depth = f":{self.depth}" if self.strategy == "pct" else ""
        return f"{PREFIX}:{self.strategy}:{launch}:{self.seed}{depth}"

    @classmethod
    def from_text(cls, text: str) -> "Schedule":
        """The schedule that `to_text` wrote.

        Raises:
          TypeError: if it is no string.
          ValueError: if `text` is not such a string.
        """
        if not isinstance(text, str):
            raise TypeError(f"a schedule is a string, as in {EXAMPLE!r}, not {text!r}")
        try:
            parts = text.strip().split(":", 3)
            if len(parts) < 4:
                raise ValueError(f"it has {len(parts)} of the four parts between colons")
            prefix, strategy, launch, rest = parts
            if prefix != PREFIX:
                raise ValueError(f"it begins with {prefix!r}")
            if strategy == "choices":
                number = _number("launch", launch)
                return cls(strategy=strategy, launch=number, choices=_unpacked(rest))._checked()
            if strategy not in STRATEGIES:
                raise ValueError(f"there is no strategy {strategy!r}")
            seed, _, depth = rest.partition(":")
            if depth and strategy != "pct":
                raise ValueError(f"nothing may follow the seed of strategy {strategy!r}")
            return cls(
                strategy=strategy,
                launch=_number("launch", launch),
                seed=_number("seed", seed),
                depth=_number("depth", depth or "3"),
            )._checked()
        except ValueError as error:
            raise ValueError(
                f"{text!r} is no schedule, which is written {FORM}, as in {EXAMPLE!r}: {error}"
            ) from None

    def _checked(self) -> "Schedule":
        """The schedule itself, once its numbers are known to be such as the runtime takes."""
        for name, number, most in (
            ("launch", self.launch or 0, 2**63 - 1),
            ("seed", self.seed, 2**64 - 1),
            ("depth", self.depth - 1, DEEPEST - 1),
            ("choice", max(self.choices, default=0), 2**31 - 1),
        ):
            if not 0 <= number <= most:
                raise ValueError(f"its {name} is out of range")
        return self


def _number(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"its {name} is {text!r}, and not a whole number") from None


def _unpacked(text: str) -> tuple[int, ...]:
    try:
        return _from_varints(zlib.decompress(base64.b64decode(text, b"-_", validate=True)))
    except (ValueError, zlib.error):
        raise ValueError("its choices are cut off or changed; copy the whole string") from None


def _varints(numbers: tuple[int, ...]) -> bytes:
    """Seven bits to a byte, the lowest first; the highest bit says that more follow."""
    result = bytearray()
    for number in numbers:
        while number >= 128:
            result.append(number & 127 | 128)
            number >>= 7
        result.append(number)
    return bytes(result)


def _from_varints(data: bytes) -> tuple[int, ...]:
    numbers = []
    number = shift = 0
    for byte in data:
        number |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            numbers.append(number)
            number = shift = 0
    return tuple(numbers)
