"""What a deadlock says of the copies that a core waits for, and of what else was signalled."""

from collections.abc import Mapping, Sequence
from typing import Any

from cokernel.checking.places import Places, called_at, code, where

# So many lines that started copies are told.
LINES = 6

# Parties of the runtime's record, each with the bytes "moved" and how many "times".
Copies = Sequence[Mapping[str, Any]]


def missing_copy(
    semaphore: str,
    copies: Copies | None,
    counts: bool,
    others: Sequence[str] = (),
    has_others_cores: bool = True,
) -> str:
    """Advice for a wait for a copy that nobody will start.

    Args:
      semaphore: what is waited for, in words.
      copies: those that have signalled it; None where nobody has noted them.
      counts: whether some of what they moved is still there to be taken.
      others: the semaphores that copies have signalled instead, in words.
      has_others_cores: whether there are other cores, of which one could be mistaken for another.
    """
    start = f"No copy is in flight that could end the wait for {semaphore}"
    if copies is None:
        return (
            f"{start}: call wait() once for each start(), on every path, and wait for no more "
            "bytes than the copies move."
        )
    if not copies and others:
        return (
            f"{start}, and none has ever signalled it: copies have signalled "
            f"{' and '.join(others)} instead. If one of them is meant, let its start() and this "
            "wait() name the same semaphore of the same core."
        )
    if not copies:
        device_id = " and the right device_id" if has_others_cores else ""
        return (
            f"{start}, and none has ever signalled it: the start() was not reached. Start the copy "
            f"on every path that leads to its wait(), with the same semaphore{device_id}, or leave "
            "out the wait on the others."
        )
    if counts:
        return (
            f"{start}, and those there were moved less than is waited for: wait on descriptors "
            "of the size of what was copied, or start the copies that are missing."
        )
    return (
        f"{start}, and all that was copied has been waited for: there is one wait() too many, or "
        "one start() too few. Call wait() once for each start()."
    )


def describe_copies(copies: Copies, places: Places) -> list[str]:
    """The copies that have signalled a semaphore, as lines of text."""
    if not copies:
        return ["  no copy is in flight for it, and none has signalled it so far"]
    lines = ["  no copy is in flight for it; so far it was signalled"]
    return [*lines, *_signals(copies, places)]


def describe_untaken(name: str, count: int, signals: Copies, places: Places) -> list[str]:
    """A semaphore that counts what nobody has taken, and those that have signalled it."""
    unit = " bytes" if any(signal["is_dma"] for signal in signals) else ""
    lines = [f"  meanwhile semaphore {name} counts {count}{unit} that nobody has taken:"]
    return [*lines, *_signals(signals, places)]


def _signals(signals: Copies, places: Places) -> list[str]:
    """Those that have signalled a semaphore, from each line together."""
    lines: list[str] = []
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for signal in signals:
        site = places.site(signal["site"])
        key = (signal["program"], where(site), signal["moved"], signal["is_dma"])
        groups.setdefault(key, []).append(signal)
    for (program, place, moved, is_dma), some in list(groups.items())[:LINES]:
        cores = places.cores(program, [signal["coordinates"] for signal in some])
        times = sum(signal["times"] for signal in some)
        often = (f"{moved} bytes" if is_dma else f"{moved}") + f", {times} times," * (times > 1)
        who = f"{some[0]['program_name']} {cores}"
        lines.append(f"    {often} by {f'{_dmas(times)} of {who}' if is_dma else who}")
        lines.append(f"      {'started ' if is_dma else ''}at {place}")
        sites = [places.site(signal["site"]) for signal in some]
        quoted = code(sites[0])
        if quoted is not None:
            lines.append(f"          {quoted}")
        lines += called_at(sites, "      ")
    if len(groups) > LINES:
        lines.append(f"    ... and from {len(groups) - LINES} more lines")
    return lines


def _dmas(times: int) -> str:
    return "a DMA" if times == 1 else "DMAs"
