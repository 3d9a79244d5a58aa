"""The tree of all schedules of a small kernel, visited depth first.

Every decision of a run is a node: which of several agents takes the next step. Runs that differ
only in the order of steps on different objects behave alike; sleep sets (P. Godefroid,
"Partial-Order Methods for the Verification of Concurrent Systems", 1996) leave out the repetitions.
What a step synchronises by is known before it is taken. What memory it polls and writes is known
only afterwards, but all that sleeps has been taken before. The runtime offers no poll that would
find all as it was, since that leads back to where it is. Under a bound on preemptions sleep sets
could leave out a behaviour whose other order exceeds the bound, so they are used only without one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

# What an agent does next: its number, the operation, the objects that it touches (none: they are
# not known), and the core that it is, or that has started it.
Step = tuple[int, str, tuple[int, ...], int]
# Memory: who owns it, the program and the number of the block, and the first byte and the end.
Range = tuple[str, int, int, int, int]
# What a step has done that was taken: the memory that it has polled, what of it others see that it
# has written, and whether there was more of either. It is known only once the step was taken.
Effects = tuple[Sequence[Range], Sequence[Range], bool]


@dataclasses.dataclass
class _Node:
    """One decision of the run that was taken last."""

    steps: list[Step]
    # Whether the first step goes on with the agent that took the one before.
    continues: bool
    chosen: int
    # Interruptions of an agent that could go on, up to this decision.
    preemptions: int
    tried: set[int]
    # Steps that need not be tried here: some earlier branch has had them, with these effects.
    asleep: Mapping[Step, Effects]
    # Those of the choices that were tried.
    effects: dict[int, Effects] = dataclasses.field(default_factory=dict)

    def costs(self, choice: int) -> int:
        """The interruptions up to the next decision, under some choice at this one."""
        return self.preemptions + (self.continues and choice != 0)


class ChoiceTree:
    """Says which choices to take in the next run, given what the earlier ones met.

    Args:
      preemptions: how many times an agent may be interrupted although it could go on, None for any
        number.
    """

    def __init__(self, preemptions: int | None):
        self._bound = preemptions
        self._path: list[_Node] = []
        self._has_begun = False
        self.is_done = False

    def next(self) -> tuple[int, ...] | None:
        """The choices with which the next run begins; None when there is none left."""
        if not self._has_begun:
            self._has_begun = True
            return ()
        while self._path:
            node = self._path[-1]
            choice = self._untried(node)
            if choice is not None:
                node.chosen = choice
                node.tried.add(choice)
                return tuple(other.chosen for other in self._path)
            self._path.pop()
        self.is_done = True
        return None

    def add(self, schedule: Mapping[str, Any]) -> None:
        """Takes in what a run met: its "choices", "candidates", "continuing" and "effects", per
        decision.

        Raises:
          RuntimeError: if the run did not follow the choices it was given, that is, if the kernel
            depends on something else than its schedule.
        """
        met = zip(schedule["choices"], schedule["candidates"], schedule["continuing"], strict=True)
        for depth, (choice, candidates, continues) in enumerate(met):
            steps = list(candidates)
            if depth < len(self._path):
                self._check_repeats(depth, choice, steps)
                self._path[depth].effects[choice] = schedule["effects"][depth]
                continue
            asleep = self._asleep_below()
            preemptions = self._path[-1].costs(self._path[-1].chosen) if self._path else 0
            self._path.append(_Node(steps, continues, choice, preemptions, {choice}, asleep))
            self._path[-1].effects[choice] = schedule["effects"][depth]
            if steps[choice] in asleep:
                # From here on the run repeats an earlier one; another choice here may not.
                return

    def _check_repeats(self, depth: int, choice: int, steps: Sequence[Step]) -> None:
        node = self._path[depth]
        if choice != node.chosen or steps != node.steps:
            raise RuntimeError(
                f"decision {depth} of the kernel was another one than in the run before, although "
                "all decisions before it were the same: its programs depend on something that the "
                "schedule does not fix, such as a callback or the values of its arguments"
            )

    def _untried(self, node: _Node) -> int | None:
        for choice, step in enumerate(node.steps):
            if choice in node.tried:
                continue
            if self._bound is not None:
                if node.costs(choice) <= self._bound:
                    return choice
            elif step not in node.asleep:
                return choice
        return None

    def _asleep_below(self) -> Mapping[Step, Effects]:
        """What sleeps at the decision that follows the path."""
        if not self._path or self._bound is not None:
            return {}
        node = self._path[-1]
        taken, done = node.steps[node.chosen], node.effects[node.chosen]
        earlier = {
            node.steps[choice]: node.effects[choice]
            for choice in node.tried
            if choice != node.chosen
        }
        return {
            step: effects
            for step, effects in {**node.asleep, **earlier}.items()
            if _are_independent(step, taken) and _touch_others(effects, done)
        }


def _are_independent(one: Step, other: Step) -> bool:
    """Whether two steps synchronise by different objects."""
    _, _, objects, core = one
    _, _, others, other_core = other
    are_known = bool(objects and others)
    return core != other_core and are_known and not set(objects) & set(others)


def _touch_others(one: Effects, other: Effects) -> bool:
    """Whether neither of two steps polls what the other writes: polling orders them."""
    if one[2] or other[2]:
        return False
    return not (_meet(one[0], other[1]) or _meet(other[0], one[1]))


def _meet(some: Sequence[Range], others: Sequence[Range]) -> bool:
    return any(
        tuple(one[:3]) == tuple(other[:3]) and one[3] < other[4] and other[3] < one[4]
        for one in some
        for other in others
    )
