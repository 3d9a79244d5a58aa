"""The text that explains a deadlock: who waits for what, and where those are who could end it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cokernel.checking.copies_seen import describe_copies, describe_untaken, missing_copy
from cokernel.checking.places import (
    Places,
    SemaphorePlace,
    called_at,
    code,
    where,
    where_and_code,
)
from cokernel.compiler.window_names import name_is_words, semaphore_in_words

# A report lists at most so many groups of cores, and so many lines within one.
GROUPS = 16
LINES = 6
# Advice looks at no more groups than these: a program that needs more has them all alike.
GROUPS_ADVISED = 64

Core = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Untaken:
    """A semaphore that counts what nobody has taken."""

    name: str
    # The core that it is of, if that is not the one that waits; "" otherwise.
    core: str
    count: int
    signals: Sequence[Mapping[str, Any]]

    @property
    def in_words(self) -> str:
        """As in "'s[1]'", or "'s' of core=1"."""
        return f"{self.name!r}" + f" of {self.core}" * bool(self.core)


@dataclasses.dataclass
class Group:
    """Cores of one program that wait for the same thing at the same place."""

    program: int
    name: str
    site: Mapping[str, Any] | None
    # What is waited for: a semaphore as the program names it, or a barrier.
    target: str
    cores: list[Core]
    places: list[SemaphorePlace | None]
    # The places of the program where it could be signalled, and those that signal something close:
    # another element, by its name, or, without one, this one of another core.
    signals: list[Mapping[str, Any]] = dataclasses.field(default_factory=list)
    near_misses: list[tuple[Mapping[str, Any], str]] = dataclasses.field(default_factory=list)
    # What was signalled instead, and nobody has taken it.
    untaken: list[Untaken] = dataclasses.field(default_factory=list)
    has_other_cores: bool = True
    # Who comes to the former: for each program the row-major numbers of its cores, or None for all.
    helpers: dict[int, set[int] | None] = dataclasses.field(default_factory=dict)
    # The kind of another finding that says what this wait lacks; "" if there is none.
    explained_by: str = ""

    @property
    def is_barrier(self) -> bool:
        return self.cores[0]["state"] == "barrier"

    @property
    def is_for_copies(self) -> bool:
        return self.site is not None and self.site["operation"] == "dma_wait"

    @property
    def is_for_copies_alone(self) -> bool:
        """Whether only copies could end the wait, so far as is known."""
        return self.is_for_copies and all(
            site["operation"] != "semaphore_signal" for site in self.signals
        )

    @property
    def copies(self) -> list[Mapping[str, Any]] | None:
        """The copies that have signalled what these cores wait for; None if nobody has noted them,
        as in a launch that is not checked."""
        known = [core["copies"] for core in self.cores if "copies" in core]
        return [copy for copies in known for copy in copies] if known else None

    @property
    def short(self) -> str:
        """The name alone of what is waited for."""
        return self.target.removeprefix("semaphore ")

    def helping(self, cores: Iterable[Core]) -> list[Core]:
        """Those of the cores that could end the wait."""
        found = []
        for core in cores:
            numbers = self.helpers.get(core["program"], set())
            if numbers is None or core["index"] in numbers:
                found.append(core)
        return found

    def find_helpers(self, cores: Sequence[Core], places: Places) -> None:
        """Finds out who could end the wait: by a signal, or by coming to the barrier."""
        if self.is_barrier:
            waited = {core["barrier"]["group"] for core in self.cores}
            self.helpers[self.program] = {
                core["index"]
                for core in cores
                if core["program"] == self.program
                and core["group"] in waited
                and core["state"] != "barrier"
            }
            return
        known = [place for place in self.places if place is not None]
        for site in places.signalling_sites:
            reaching = [who for key in site["signals"] if (who := reached_by(key, known)) != set()]
            if reaching:
                self.signals.append(site)
                for who in reaching:
                    self._add_helpers(site["program_number"], who)
                continue
            for key in site["signals"]:
                if not any(place.is_of_same_array(key) for place in known[:1]):
                    continue
                is_same = any(place.is_covered_by(key) for place in known)
                near = "" if is_same else places.signalled(key) or site["name"]
                self.near_misses.append((site, near))

    def find_untaken(self, cores: Sequence[Core], places: Places) -> None:
        """Finds out what was signalled instead: another semaphore of a core that waits, or the same
        one of a core that has finished, so that it will not be taken.
        """
        self.has_other_cores = len(cores) > 1
        finished = {
            (core["program"], core["index"]): core for core in cores if core["state"] == "finished"
        }
        for core, own in zip(self.cores, self.places, strict=True):
            for raw in core.get("untaken", ()):
                other = places.semaphore(raw)
                if own is None or other is None:
                    continue
                label = ""
                if other.core != own.core:
                    owner = finished.get((own.key[1], other.core))
                    if owner is None or own.key != other.key:
                        continue
                    label = places.core(owner["program"], owner["coordinates"])
                new = Untaken(other.element, label, raw["count"], raw["from"])
                if all((old.name, old.core) != (new.name, new.core) for old in self.untaken):
                    self.untaken.append(new)

    def _add_helpers(self, program: int, numbers: set[int] | None) -> None:
        before = self.helpers.get(program, set())
        everyone = before is None or numbers is None
        self.helpers[program] = None if everyone else {*(before or ()), *(numbers or ())}


def reached_by(key: Sequence[Any], places: Sequence[SemaphorePlace]) -> set[int] | None:
    """Which cores of the program that has a site with this key could signal one of the semaphores:
    their row-major numbers, or None for all."""
    target = key[4]
    covered = [place for place in places if place.is_covered_by(key)]
    if target == "own":
        return {place.core for place in covered}
    reached = [place for place in covered if target is None or target == place.core]
    return None if reached else set()


def describe_deadlock(failure: Mapping[str, Any], places: Places) -> str:
    """The report of a launch all of whose unfinished cores wait for each other, or for nobody."""
    cores = failure["cores"]
    blocked = [core for core in cores if core["state"] in ("semaphore", "barrier")]
    groups = group_blocked(blocked, places)
    for group in groups:
        group.find_helpers(cores, places)
        group.find_untaken(cores, places)
        for semaphore, kind in failure.get("explained", ()):
            if any(_is_same(semaphore, core.get("semaphore")) for core in group.cores):
                group.explained_by = kind
    lines = [_headline(failure, cores, blocked), ""]
    for group in groups[:GROUPS]:
        lines += _describe_group(group, cores, places)
    if len(groups) > GROUPS:
        lines.append(f"... and {len(groups) - GROUPS} more groups of blocked cores.")
    finished = [core for core in cores if core["state"] == "finished"]
    if finished:
        lines.append(f"Finished: {_by_program(finished, places)}.")
    advice = dict.fromkeys(_shortened(give_advice(groups)))
    return "\n".join([*lines, "", "What to do:", *(f"  - {line}" for line in advice)])


def _is_same(one: Mapping[str, Any], other: Mapping[str, Any] | None) -> bool:
    names = ("owner", "program", "index", "offset")
    return other is not None and all(one[name] == other[name] for name in names)


def _headline(failure: Mapping[str, Any], cores: Sequence[Core], blocked: Sequence[Core]) -> str:
    who = "its only core is" if len(cores) == 1 else f"{len(blocked)} of its {len(cores)} cores are"
    return (
        f"Deadlock: kernel {failure['executable']!r} cannot go on, because {who} blocked and no "
        "core is left that could wake them."
        if len(cores) > 1
        else f"Deadlock: kernel {failure['executable']!r} cannot go on, because {who} blocked."
    )


def group_blocked(blocked: Iterable[Core], places: Places) -> list[Group]:
    """Puts blocked cores together that wait at the same place for the same kind of thing."""
    groups: dict[Any, Group] = {}
    for core in blocked:
        site = places.site(core["site"])
        place = places.semaphore(core["semaphore"]) if core["state"] == "semaphore" else None
        target = _target_name(core, site, place)
        key = (core["program"], core["site"], core["state"], target)
        if key not in groups:
            groups[key] = Group(core["program"], core["program_name"], site, target, [], [])
        groups[key].cores.append(core)
        groups[key].places.append(place)
    return list(groups.values())


def _target_name(core: Core, site: Mapping[str, Any] | None, place: SemaphorePlace | None) -> str:
    if core["state"] == "barrier":
        return "the barrier"
    name = site["name"] if site is not None else None
    if place is None:
        return semaphore_in_words(name) if name else "a semaphore"
    if not name or name_is_words(place.name):
        return semaphore_in_words(place.element)
    if name.endswith("[...]"):
        # The program chose the element at run time; which one it was can be told from its place.
        return f"semaphore {name[: -len('[...]')] + place.element[len(place.name) :]!r}"
    return semaphore_in_words(name)


def _describe_group(group: Group, cores: Sequence[Core], places: Places) -> list[str]:
    label = places.cores(group.program, [core["coordinates"] for core in group.cores])
    operation = group.site["operation"] if group.site is not None else "a wait"
    verb = "wait" if len(group.cores) > 1 else "waits"
    lines = [f"{group.name} {label} {verb} in {operation} for {group.target}:"]
    lines += where_and_code(group.site, "  ")
    if group.is_barrier:
        return [*lines, *_describe_barrier(group, cores, places)]
    lines += _describe_counts(group, places)
    if group.copies is not None:
        lines += describe_copies(group.copies, places)
    for untaken in group.untaken[:LINES]:
        lines += describe_untaken(untaken.in_words, untaken.count, untaken.signals, places)
    lines += _describe_signallers(group, cores, places)
    return lines


def _describe_counts(group: Group, places: Places) -> list[str]:
    by_numbers: dict[Any, list[Core]] = {}
    for core in group.cores:
        numbers = core["semaphore"]["count"], core["value"]
        by_numbers.setdefault(numbers, []).append(core)
    unit = " (bytes)" if group.is_for_copies else ""
    if len(by_numbers) == 1:
        [(count, value)] = by_numbers
        return [f"  it counts {count}, and {value} is needed{unit}"]
    lines = [
        f"  {places.cores(group.program, [core['coordinates'] for core in some])}: it counts "
        f"{count}, and {value} is needed{unit}"
        for (count, value), some in by_numbers.items()
    ]
    return _shortened(lines)


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= LINES:
        return lines
    return [*lines[:LINES], f"  ... and {len(lines) - LINES} more"]


def _describe_barrier(group: Group, cores: Sequence[Core], places: Places) -> list[str]:
    barriers = {core["barrier"]["group"]: core["barrier"] for core in group.cores}
    lines = []
    for number, barrier in barriers.items():
        missing = [core for core in group.helping(cores) if core["group"] == number]
        lines.append(
            f"  {barrier['arrived']} of {barrier['expected']} cores have arrived; missing: "
            f"{_whereabouts(missing, places)}"
        )
    return _shortened(lines)


def _describe_signallers(group: Group, cores: Sequence[Core], places: Places) -> list[str]:
    if not group.signals:
        # Natively a copy that its own core waits for at once needs no semaphore, so it has no site.
        none = "no copy that signals it is left to be started"
        lines = [f"  {none if group.is_for_copies else 'nothing in this kernel ever signals it'}"]
        near = _by_line(
            (
                f"    ({site['program']} signals "
                + (f"{name!r}" if name else f"{group.short} of another core")
                + f" by {site['operation']} at {where(site)})",
                site,
            )
            for site, name in group.near_misses
        )
        for line, sites in list(near.items())[:LINES]:
            lines += [line, *called_at(sites, "      ")]
        if len(near) > LINES:
            lines.append(f"    ... and {len(near) - LINES} more")
        return lines
    lines = ["  it could be signalled"]
    told = _by_line(
        (f"    by {site['program']}, {site['operation']} at {where(site)}", site)
        for site in group.signals
    )
    for line, sites in list(told.items())[:LINES]:
        lines.append(line)
        quoted = code(sites[0])
        if quoted is not None:
            lines.append(f"        {quoted}")
        lines += called_at(sites, "      ")
    if len(told) > LINES:
        lines.append(f"    ... and at {len(told) - LINES} more places")
    lines.append(f"  of those, now: {_whereabouts(group.helping(cores), places)}")
    return lines


def _by_line(
    told: Iterable[tuple[str, Mapping[str, Any]]],
) -> dict[str, list[Mapping[str, Any]]]:
    """The sites of which a text says the same: each round of a loop that is written out, and each
    call of a function, has a site of its own.
    """
    sites: dict[str, list[Mapping[str, Any]]] = {}
    for line, site in told:
        sites.setdefault(line, []).append(site)
    return sites


def give_advice(groups: Sequence[Group]) -> list[str]:
    """What to look at: first the waits that cause the deadlock, then those that only follow."""
    groups = groups[:GROUPS_ADVISED]
    in_program: dict[int, list[tuple[int, set[int]]]] = {}
    for number, group in enumerate(groups):
        cores = {core["index"] for core in group.cores}
        in_program.setdefault(group.program, []).append((number, cores))
    # Whose waits would have to end first, for each group.
    needs = [
        {
            number
            for program, helpers in group.helpers.items()
            for number, cores in in_program.get(program, ())
            if helpers is None or helpers & cores
        }
        for group in groups
    ]
    reached = [_reachable(number, needs) for number in range(len(groups))]
    causes: list[str] = []
    followers: list[str] = []
    told: set[int] = set()
    for number, group in enumerate(groups):
        if number in told:
            continue
        circle = [n for n in sorted(reached[number]) if number in reached[n]]
        if group.explained_by:
            causes.append(
                f"The wait for {group.short} takes what is not there: see the "
                f"{group.explained_by} that is told of it."
            )
        elif len(circle) > 1:
            told.update(circle)
            names = " and ".join(dict.fromkeys(groups[n].short for n in circle))
            starts = any(groups[n].is_for_copies for n in circle)
            step = "signal, or start its copy," if starts else "signal"
            causes.append(
                f"The waits for {names} wait for each other: let one side {step} before it waits, "
                "or signal more often where it has already."
            )
        elif not needs[number]:
            causes.append(_cause(group))
        elif needs[number] == {number} and group.is_for_copies_alone:
            causes.append(_missing_copy_of(group))
        elif needs[number] == {number}:
            causes.append(
                f"Only the cores that wait for {group.short} could still signal it: let one of "
                "them signal before it waits, often enough, and the right core (device_id)."
            )
        else:
            followers.append(
                f"The wait for {group.short} follows from others and may need no change."
            )
    return [*causes, *followers]


def _reachable(start: int, edges: Sequence[set[int]]) -> set[int]:
    found: set[int] = set()
    ahead = [start]
    while ahead:
        for following in edges[ahead.pop()] - found:
            found.add(following)
            ahead.append(following)
    return found


def _cause(group: Group) -> str:
    """Advice for a wait that no unfinished core could end."""
    short = group.short
    if group.is_barrier:
        return (
            f"Every core of program {group.name!r} that shares a barrier must come to it equally "
            "often: look for a barrier under a condition, or in a loop whose length differs."
        )
    if group.signals and group.is_for_copies_alone:
        return _missing_copy_of(group)
    if group.signals and group.untaken:
        return (
            f"Every core that could signal {short} has finished, and "
            f"{' and '.join(untaken.in_words for untaken in group.untaken)} was signalled instead: "
            "compare the index and the device_id of signal and wait."
        )
    if group.signals:
        return (
            f"Every core that could signal {short} has finished: it was signalled too little, or "
            "on another core. Compare how often, with what amount and with which device_id it is "
            "signalled and waited for."
        )
    if group.near_misses:
        return _aimed_elsewhere(group)
    if group.copies:
        return _missing_copy_of(group)
    if group.is_for_copies:
        return (
            f"No copy is in flight that signals {short}: start one before each wait for it, and "
            "give both the same semaphore."
        )
    return f"Add a signal of {short}, or remove the wait for it."


def _missing_copy_of(group: Group) -> str:
    counts = any(core["semaphore"]["count"] > 0 for core in group.cores)
    others = [
        untaken.in_words
        for untaken in group.untaken
        if any(signal["is_dma"] for signal in untaken.signals)
    ]
    return missing_copy(group.short, group.copies, counts, others, group.has_other_cores)


def _aimed_elsewhere(group: Group) -> str:
    """Advice for a wait of which only the semaphore's neighbours are signalled, or only other
    cores' own."""
    short = group.short
    others = dict.fromkeys(name for _, name in group.near_misses if name)
    if others:
        named = " and ".join(map(repr, others))
        step = "start() and wait()" if group.is_for_copies else "signal and wait"
        return (
            f"Nothing signals {short}, but something signals {named}: let {step} name the same "
            "element."
        )
    if group.is_for_copies:
        return (
            f"Copies signal {short} of other cores only: a copy signals the core that starts it, "
            "and one with a device_id the core of that id when it arrives. Compare the device_id "
            "with the core that waits."
        )
    return (
        f"Signals of {short} go to other cores: compare the device_id of the signal with the core "
        "that waits. Without a device_id a signal goes to the signalling core itself."
    )


def _by_program(cores: Sequence[Core], places: Places) -> str:
    by_program: dict[int, list[Core]] = {}
    for core in cores:
        by_program.setdefault(core["program"], []).append(core)
    return "; ".join(
        f"{some[0]['program_name']} "
        + places.cores(program, [core["coordinates"] for core in some])
        for program, some in by_program.items()
    )


def _whereabouts(cores: Sequence[Core], places: Places) -> str:
    """Where cores are: finished, or blocked on what."""
    by_state: dict[Any, list[Core]] = {}
    for core in cores:
        by_state.setdefault((core["program"], state_of(core, places)), []).append(core)
    parts = [
        f"{some[0]['program_name']} "
        f"{places.cores(program, [core['coordinates'] for core in some])} "
        + ("has " if len(some) == 1 else "have ") * (state == "finished")
        + state
        for (program, state), some in by_state.items()
    ]
    if len(parts) > LINES:
        parts = [*parts[:LINES], f"and {len(parts) - LINES} more groups of cores"]
    return "; ".join(parts) or "nobody"


def state_of(core: Core, places: Places) -> str:
    """What a core does, in a few words."""
    site = places.site(core["site"])
    line = f" at line {site['line']}" if site is not None and site.get("line") else ""
    match core["state"]:
        case "semaphore":
            place = places.semaphore(core["semaphore"])
            return f"blocked on {_target_name(core, site, place)}{line}"
        case "barrier":
            return f"blocked in the barrier{line}"
        case "finished":
            return "finished"
        case "unstarted":
            return "not started yet"
        case state:
            return f"{state}{', last seen' + line if line else ''}"
