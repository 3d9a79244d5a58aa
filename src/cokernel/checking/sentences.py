"""What is wrong, in one sentence, for each kind of finding."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cokernel.compiler.window_names import semaphore_in_words

if TYPE_CHECKING:
    from cokernel.checking.findings import Party

ACTIONS = {
    "read": "reads",
    "write": "writes",
    "atomic update": "adds to",
    "update": "updates",
    "copy reads": "reads",
    "copy writes": "writes",
    "copy writes again": "writes again",
    "signal": "signals",
    "wait": "waits for",
    "allocate": "allocates",
    "poll": "polls",
    "use": "uses it",
    "release": "ends the scope",
}


def sentence_of(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    """What is wrong, in one sentence.

    Args:
      raw: what the runtime recorded.
      parties: who is involved.
      what: the Ref with the elements, or the semaphore, that it is about.
    """
    return _SENTENCES.get(raw["kind"], _other)(raw, parties, what)


def _race(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    one, other = parties
    if other.action == ACTIONS["copy writes again"]:
        return (
            f"{one.who} writes {what} more than once, because its indices pick that place more "
            "than once, and nothing says which of the values stays"
        )
    if one.program == other.program and one.core == other.core:
        relation = "without waiting for it"
        return (
            f"{one.who} {one.action} {what} that {other.who} {other.action}, {relation}"
            if one.is_dma != other.is_dma
            else f"two DMAs of program {one.program!r} on {one.core} both touch {what}, and "
            "nothing orders them"
        )
    return (
        f"{one.who} {one.action} {what}, which {other.who} {other.action}, and nothing orders the "
        "two"
    )


def use_in_words(raw: Mapping[str, Any]) -> str:
    """What has become of an undefined value, as in "decides a branch"."""
    return {
        "branch": "decides a branch",
        "index": "is used as an index",
        "output": "ends in an output of the kernel",
        "amount": "is used as an amount",
        "callback": "is handed to Python",
        "loop": "decides when a loop ends",
    }.get(str(raw.get("use")), "is used")


def _uninitialised(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    joint = " and" if raw.get("window") or raw.get("padding") else ", which"
    return (
        f"{parties[0].who} reads {what}{joint} nobody has written, and the value "
        f"{use_in_words(raw)}"
    )


def _leftover(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    return (
        f"{semaphore_in_words(what)} still counts {raw['value']} at the end of its scope, so more "
        "was signalled than waited for"
    )


def _unwaited(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    return (
        f"{parties[0].who} was started, and nobody waited for the {raw.get('moved', 0)} bytes it "
        f"signals to {what!r}"
    )


def _in_flight(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    return f"{parties[0].who} may still be copying when the scope of {what} ends"


def _too_large(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    if "brought" in raw:
        return (
            f"{parties[0].who} waits for {raw['wanted']} bytes on {what!r}, but none of the "
            f"{raw['brought']} copies on it, nor several together, moved as many"
        )
    start = f"{parties[0].who} waits for {raw['wanted']} bytes on {what!r}"
    if "left" in raw:
        copies = "one copy" if raw["copies"] == 1 else f"{raw['copies']} copies"
        return f"{start}, but only {raw['left']} are there, of {copies}, and no more will come"
    return (
        f"{start}, and ends within a copy that another wait is for: no copy on it has moved more "
        f"than {raw['moved']}"
    )


def _never_written(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    count = raw.get("count", 0)
    elements = "element has" if count == 1 else "elements have"
    least = "at least " if (raw.get("memory") or {}).get("is_cut_off") else ""
    return f"output {what}: {least}{count} {elements} never been written"


def _underflow(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    return (
        f"{parties[0].who} takes {raw['wanted']} from {what!r} by a negative signal, but it counts "
        f"{raw['value']}"
    )


def _overflow(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    return (
        f"{parties[0].who} brings {what!r} to {raw['value']}, which is more than a semaphore of "
        "the chip counts to"
    )


def _livelock(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    return (
        f"{parties[0].who} polls {what} and can make no progress: every core that has not "
        "finished only polls, and nobody is left who could change what is polled"
    )


def _other(raw: Mapping[str, Any], parties: "Sequence[Party]", what: str) -> str:
    return str(raw.get("text", what))


_SENTENCES = {
    "Race": _race,
    "UninitialisedRead": _uninitialised,
    "NeverWritten": _never_written,
    "CopyInFlight": _in_flight,
    "UnwaitedCopy": _unwaited,
    "WaitTooLarge": _too_large,
    "LeftoverSemaphore": _leftover,
    "SemaphoreUnderflow": _underflow,
    "SemaphoreOverflow": _overflow,
    "Livelock": _livelock,
}
