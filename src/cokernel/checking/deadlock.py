"""The text that explains a deadlock: who waits for what, and what became of those who could end it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cokernel.checking.places import Places, SemaphorePlace, code, where, where_and_code

# A report lists at most so many groups of cores, and so many lines within one.
GROUPS = 16
LINES = 6

Core = Mapping[str, Any]


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

    @property
    def is_barrier(self) -> bool:
        return self.cores[0]["state"] == "barrier"


def describe_deadlock(failure: Mapping[str, Any], places: Places) -> str:
    """The report of a launch all of whose unfinished cores wait for each other, or for nobody."""
    cores = failure["cores"]
    blocked = [core for core in cores if core["state"] in ("semaphore", "barrier")]
    groups = group_blocked(blocked, places)
    lines = [_headline(failure, cores, blocked), ""]
    advice: list[str] = []
    for group in groups[:GROUPS]:
        lines += _describe_group(group, cores, places, advice)
    if len(groups) > GROUPS:
        lines.append(f"... and {len(groups) - GROUPS} more groups of blocked cores.")
    finished = [core for core in cores if core["state"] == "finished"]
    if finished:
        lines.append(f"Finished: {_by_program(finished, places)}.")
    lines += ["", "What to do:", *(f"  - {line}" for line in dict.fromkeys(advice))]
    return "\n".join(lines)


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
        return f"semaphore {name!r}" if name else "a semaphore"
    if not name:
        return f"semaphore {place.element!r}"
    if name.endswith("[...]"):
        # The program chose the element at run time; which one it was can be told from its place.
        return f"semaphore {name[: -len('[...]')] + place.element[len(place.name) :]!r}"
    return f"semaphore {name!r}"


def _describe_group(
    group: Group, cores: Sequence[Core], places: Places, advice: list[str]
) -> list[str]:
    label = places.cores(group.program, [core["coordinates"] for core in group.cores])
    operation = group.site["operation"] if group.site is not None else "a wait"
    verb = "wait" if len(group.cores) > 1 else "waits"
    lines = [f"{group.name} {label} {verb} in {operation} for {group.target}:"]
    lines += where_and_code(group.site, "  ")
    if group.is_barrier:
        return [*lines, *_describe_barrier(group, cores, places, advice)]
    lines += _describe_counts(group, places)
    lines += _describe_signallers(group, cores, places, advice)
    return lines


def _describe_counts(group: Group, places: Places) -> list[str]:
    by_numbers: dict[Any, list[Core]] = {}
    for core in group.cores:
        numbers = core["semaphore"]["count"], core["value"]
        by_numbers.setdefault(numbers, []).append(core)
    unit = ""
    if group.site is not None and group.site["operation"] == "dma_wait":
        unit = " (bytes)"
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


def _describe_barrier(
    group: Group, cores: Sequence[Core], places: Places, advice: list[str]
) -> list[str]:
    lines = []
    known: set[int] = set()
    for core in group.cores:
        number = core["barrier"]["group"]
        if number in known:
            continue
        known.add(number)
        barrier = core["barrier"]
        missing = [
            other
            for other in cores
            if other["program"] == group.program
            and other["group"] == number
            and other["state"] != "barrier"
        ]
        lines.append(
            f"  {barrier['arrived']} of {barrier['expected']} cores have arrived; missing: "
            f"{_whereabouts(missing, places)}"
        )
    advice.append(
        f"Every core of program {group.name!r} that shares a barrier must reach it equally often: "
        "look for a barrier under a condition, or in a loop whose length differs between cores."
    )
    return _shortened(lines)


def _describe_signallers(
    group: Group, cores: Sequence[Core], places: Places, advice: list[str]
) -> list[str]:
    sites = [site for site in places.sites if site.get("signals")]
    helpful = [site for site in sites if _may_help(site, group, cores)]
    short = group.target.removeprefix("semaphore ")
    if not helpful:
        return [*_describe_near_misses(sites, group, short, advice)]
    lines = ["  it could be signalled"]
    helpers: list[Core] = []
    for site in helpful[:LINES]:
        quoted = code(site)
        lines.append(f"    by {site['program']}, {site['operation']} at {where(site)}")
        if quoted is not None:
            lines.append(f"        {quoted}")
    if len(helpful) > LINES:
        lines.append(f"    ... and at {len(helpful) - LINES} more places")
    for core in cores:
        mine = [site for site in helpful if site["program_number"] == core["program"]]
        if any(_reaches(site, group, core) for site in mine):
            helpers.append(core)
    lines.append(f"  of those, now: {_whereabouts(helpers, places)}")
    _advise(group, helpers, short, advice)
    return lines


def _may_help(site: Mapping[str, Any], group: Group, cores: Sequence[Core]) -> bool:
    return any(
        core["program"] == site["program_number"] and _reaches(site, group, core) for core in cores
    )


def _reaches(site: Mapping[str, Any], group: Group, core: Core) -> bool:
    """Whether a core could signal what a core of the group waits for, when it runs the site."""
    return any(
        place is not None and place.is_reached_by(key, core["program"], core["index"])
        for key in site["signals"]
        for place in group.places
    )


def _describe_near_misses(
    sites: Sequence[Mapping[str, Any]], group: Group, short: str, advice: list[str]
) -> list[str]:
    near = [
        site
        for site in sites
        if any(
            place is not None and place.is_of_same_array(key)
            for key in site["signals"]
            for place in group.places
        )
    ]
    lines = ["  nothing in this kernel ever signals it"]
    for site in near[:LINES]:
        lines.append(
            f"    ({site['program']} signals {site['name']!r}, of another core or another element, "
            f"at {where(site)})"
        )
    if group.site is not None and group.site["operation"] == "dma_wait":
        advice.append(
            f"No copy that signals {short} is ever started: start one before waiting for it, and "
            "give both the same semaphore."
        )
    elif near:
        advice.append(
            f"Signals meant for {short} go elsewhere: compare the index and the device_id of "
            "signal and wait. Without a device_id a signal goes to the signalling core itself."
        )
    else:
        advice.append(f"Add a signal of {short}, or remove the wait for it.")
    return lines


def _advise(group: Group, helpers: Sequence[Core], short: str, advice: list[str]) -> None:
    if all(core["state"] == "finished" for core in helpers):
        advice.append(
            f"Every core that could signal {short} has finished: it was signalled too little, or "
            "on another core. Compare how often, with what amount and with which device_id it is "
            "signalled and waited for."
        )
    else:
        advice.append(
            f"Those who wait for {short} and those who could signal it wait for each other: let "
            "one side signal before it waits, or signal more often where it has already."
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
