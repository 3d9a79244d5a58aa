"""Times contenders in turn, so that a busy moment of the machine hits all of them alike."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence

import jax

# One measurement repeats a call until it has taken about this long.
MEASUREMENT_S = 0.01
# How often it is called to know how many calls that are.
TRIAL_CALLS = 8
# A contender is left out of the later rounds when its measurements have taken this long.
BUDGET_S = 1.0
LEAST_ROUNDS = 3
# Before each measurement the machine is left alone for this long. The threads of the contender
# before may still look for work, those of OpenBLAS for 2**26 cycles, and would take processors.
SETTLE_S = 0.04


@dataclasses.dataclass
class Contender:
    """One way to do the job of a case.

    `measure` does it and returns the seconds that one job took. `first_call_s` is the time from
    the first call to its result, where the contender is compiled by then. `times_s` has one time
    for each round that it took part in: the first ones, when it is slow.
    """

    name: str
    measure: Callable[[], float]
    first_call_s: float | None = None
    times_s: list[float] = dataclasses.field(default_factory=list)
    spent_s: float = 0

    @property
    def median_s(self) -> float:
        """The median of the measured times, in seconds."""
        return statistics.median(self.times_s)


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound on the time of `subject`: in seconds, or as a multiple of that of `peer`."""

    subject: str
    bound: float
    peer: str | None = None

    def measured(self, contenders: dict[str, Contender]) -> float:
        """Returns the subject's median time in seconds, or its ratio to the peer's time."""
        subject = contenders[self.subject]
        if self.peer is None:
            return subject.median_s
        return ratio(subject, contenders[self.peer])


@dataclasses.dataclass
class Case:
    """One comparison: a title, what one job is, who does it, and what is expected.

    `limit` names the contender whose time nobody can beat, because the machine's memory or its
    arithmetic units are busy all the time; None where nothing of the kind applies.
    """

    key: str
    title: str
    contenders: list[Contender]
    goals: list[Goal] = dataclasses.field(default_factory=list)
    limit: str | None = None

    def by_name(self) -> dict[str, Contender]:
        """Returns the contenders by their names."""
        return {contender.name: contender for contender in self.contenders}


def ratio(subject: Contender, peer: Contender) -> float:
    """Returns the median, over the rounds of both, of the subject's time over the peer's."""
    pairs = zip(subject.times_s, peer.times_s, strict=False)
    return statistics.median(a / b for a, b in pairs)


def jitted(name: str, function: Callable, *arguments, calls: int = 0, jobs: int = 1) -> Contender:
    """Returns a contender that calls `jax.jit(function)(*arguments)`.

    Its measurement is the median of `calls` calls after one that is not timed, as that of the peers
    in C++ is (0: as many as fill MEASUREMENT_S); each call does `jobs` jobs. The first call of all,
    which traces and compiles, is made and timed here.
    """
    compiled = jax.jit(function)

    def time_call() -> float:
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - start

    first_call_s = time_call()
    if calls == 0:
        # Early calls may be slow: they meet new memory, and Cokernel tries what helpers bring.
        shortest = min(time_call() for _ in range(TRIAL_CALLS))
        calls = max(1, int(MEASUREMENT_S / shortest))

    def measure() -> float:
        time_call()
        return statistics.median(time_call() for _ in range(calls)) / jobs

    return Contender(name, measure, first_call_s)


def run(contenders: Sequence[Contender], rounds: int) -> None:
    """Measures every contender once a round, in alternating order, and keeps the times."""
    for number in range(rounds):
        for contender in contenders if number % 2 == 0 else reversed(contenders):
            if contender.spent_s > BUDGET_S and number >= LEAST_ROUNDS:
                continue
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            contender.times_s.append(contender.measure())
            contender.spent_s += time.perf_counter() - start
