"""The text of the error that a failed launch raises."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cokernel.checking.deadlock import describe_deadlock, group_blocked, state_of
from cokernel.checking.findings import Party, party_at
from cokernel.checking.places import Places, where_and_code

# Cores that are not at any line.
_AT_REST = ("finished", "unstarted")

# What the core did that ended a launch.
_ACTIONS = {
    "OutOfBounds": "asks for what is not there",
    "Check": "fails a check",
    "Callback": "calls what raised",
}


def failed_parties(failure: Mapping[str, Any], places: Places) -> tuple[Party, ...]:
    """Who is involved in a failure: the core that failed, or those that were blocked when the
    launch ended, equal ones together.
    """
    if failure.get("program") is not None:
        core = places.core(failure["program"], failure["coordinates"])
        action = _ACTIONS.get(failure["kind"], "fails")
        return (party_at(places.site(failure.get("site")), failure["program_name"], core, action),)
    cores = failure.get("cores", ())
    blocked = [core for core in cores if core["state"] in ("semaphore", "barrier")]
    others = [core for core in cores if core["state"] not in ("semaphore", "barrier", "finished")]
    if not blocked:
        return tuple(_busy(others, places))
    return tuple(
        party_at(
            group.site,
            group.name,
            places.cores(group.program, [core["coordinates"] for core in group.cores]),
            "waits in" if group.is_barrier else "waits for",
            name=group.short.strip("'"),
        )
        for group in group_blocked(blocked, places)
    )


def _busy(cores: Sequence[Mapping[str, Any]], places: Places) -> Iterator[Party]:
    """Those that were stopped while they ran, with where they were last seen."""
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for core in cores:
        groups.setdefault((core["program"], core["site"], core["state"]), []).append(core)
    for (program, site, state), some in groups.items():
        label = places.cores(program, [core["coordinates"] for core in some])
        yield party_at(places.site(site), some[0]["program_name"], label, f"is {state}")


def failed_indices(failure: Mapping[str, Any], site: Mapping[str, Any] | None) -> str:
    """The elements that a bad index asks for, as in "[:, 90:110]"; "" for other failures."""
    if failure["kind"] != "OutOfBounds":
        return ""
    dimension, start, size = failure["dimension"], failure["start"], failure["size"]
    rank = max((site or {}).get("rank", 0), dimension + 1)
    asked = str(start) if size == 1 else f"{start}:{start + size}"
    return f"[{', '.join(asked if axis == dimension else ':' for axis in range(rank))}]"


def describe(
    failure: Mapping[str, Any], sites: Sequence[Mapping[str, Any]], memory: Mapping[str, Any]
) -> str:
    """The text of a failure.

    Args:
      failure: what the runtime recorded; see `Failure` in `_runtime.pyi`.
      sites: the places of the user's program, as `SiteTable.to_list` gives them.
      memory: where semaphores lie, as `Kernel.describe_memory` gives it.
    """
    places = Places(sites, memory)
    match failure["kind"]:
        case "Deadlock":
            return describe_deadlock(failure, places)
        case "OutOfBounds":
            return _out_of_bounds(failure, places)
        case "Check":
            return _check(failure, places)
        case "Callback":
            return _callback(failure, places)
        case "TimeLimit":
            return _stopped(failure, places, _time_limit(failure))
        case "Interrupted":
            name, elapsed = failure["executable"], failure.get("elapsed_s", 0.0)
            headline = f"Interrupted: kernel {name!r} was stopped by Ctrl-C after {elapsed:.3g} s."
            return _stopped(failure, places, headline)
        case kind:
            return f"{kind}: kernel {failure.get('executable')!r}: {failure.get('text', failure)}"


def _who(failure: Mapping[str, Any], places: Places) -> str:
    """The program and core that failed."""
    if failure.get("program") is None:
        return f"kernel {failure.get('executable')!r}"
    core = places.core(failure["program"], failure["coordinates"])
    return f"program {failure['program_name']!r} on {core}"


def _out_of_bounds(failure: Mapping[str, Any], places: Places) -> str:
    site = places.site(failure.get("site"))
    name = site["name"] if site is not None else "a Ref"
    operation = site["operation"] if site is not None else "access"
    start, size, extent = failure["start"], failure["size"], failure["extent"]
    dimension = failure["dimension"]
    if size == 1:
        asked = f"index {start}{_place_of_index(failure, site)}"
    elif size < 1:
        asked = f"a slice of {size} elements from {start}"
    else:
        asked = f"elements {start} to {start + size - 1}"
    valid = f"valid are 0 to {extent - 1}" if extent else "it has no elements"
    nothing = "Nothing was read or written there."
    if site is not None and site.get("of_semaphores"):
        name = f"semaphores {name!r}"
        nothing = "No semaphore was signalled or waited for."
    else:
        name = repr(name)
    lines = [
        f"OutOfBounds: {operation} of {name} by {_who(failure, places)} asks for {asked} of "
        f"dimension {dimension}, but {valid}. {nothing}"
    ]
    if site is not None and site.get("shape"):
        lines.append(f"  {site['name']!r} has the shape {site['shape']}")
        if site.get("part"):
            lines.append(f"  the part of it, or the view, that is indexed here: {site['part']}")
    if -extent <= start < 0:
        lines.append(
            f"  indices of Refs do not count from the end as Python's do: {start} is not "
            f"{extent + start}"
        )
    return "\n".join([*lines, *where_and_code(site, "  ")])


def _place_of_index(failure: Mapping[str, Any], site: Mapping[str, Any] | None) -> str:
    """Where among the indices of a gather a bad one is; "" for an index that stands alone."""
    position = failure.get("position", -1)
    if position < 0:
        return ""
    indices = (site or {}).get("indices")
    return f" (at position {position} of {repr(indices) if indices else 'the indices'})"


def _check(failure: Mapping[str, Any], places: Places) -> str:
    site = places.site(failure.get("site"))
    messages = site.get("messages", ()) if site is not None else ()
    code = failure["code"]
    if 0 <= code < len(messages):
        text = messages[code].replace("{value}", str(failure["value"]))
    else:
        text = f"check {code} failed with the value {failure['value']}"
    what = f"{site['operation']} of {site['name']!r} by " if site is not None else ""
    headline = f"Check: {what}{_who(failure, places)}: {text}"
    return "\n".join([headline, *where_and_code(site, "  ")])


def _callback(failure: Mapping[str, Any], places: Places) -> str:
    site = places.site(failure.get("site"))
    kind = failure.get("exception_type", "an error")
    text = str(failure.get("text", "")).rstrip()
    if kind.rpartition(".")[2] == "CheckFailed":
        # A check of the user's program is made in Python, so that its message can be formatted.
        message = text.partition("CheckFailed: ")[2] or text
        return "\n".join(
            [f"Check: {_who(failure, places)}: {message}", *where_and_code(site, "  ")]
        )
    operation = site["operation"] if site is not None else "a Python callback"
    message = text.splitlines()[-1] if text else kind
    lines = [f"Callback: {operation} called by {_who(failure, places)} raised {message}"]
    lines += where_and_code(site, "  ")
    if text:
        lines += ["", text]
    return "\n".join(lines)


def _time_limit(failure: Mapping[str, Any]) -> str:
    return (
        f"TimeLimit: kernel {failure['executable']!r} was stopped after "
        f"{failure.get('elapsed_s', 0.0):.3g} s, because its time_limit_s is "
        f"{failure.get('limit_s', 0.0):g}."
    )


def _stopped(failure: Mapping[str, Any], places: Places, headline: str) -> str:
    """A headline, and where each core was."""
    lines = [headline]
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for core in failure.get("cores", ()):
        key = core["program"], state_of(core, places), core["site"]
        groups.setdefault(key, []).append(core)
    for (program, state, number), some in groups.items():
        label = places.cores(program, [core["coordinates"] for core in some])
        lines.append(f"  {some[0]['program_name']} {label}: {state}")
        site = places.site(number)
        if site is not None and site.get("file") and some[0]["state"] not in _AT_REST:
            lines += where_and_code(site, "    ")
    return "\n".join(lines)
