"""What a deadlock says of the copies that a core waits for."""

from collections.abc import Mapping, Sequence
from typing import Any

from cokernel.checking.places import Places, code, where

# So many lines that started copies are told.
LINES = 6

# Parties of the runtime's record, each with the bytes "moved" and how many "times".
Copies = Sequence[Mapping[str, Any]]


def missing_copy(semaphore: str, copies: Copies | None, counts: bool) -> str:
    """Advice for a wait for a copy that nobody will start.

    Args:
      semaphore: what is waited for, in words.
      copies: those that have signalled it; None where nobody has noted them.
      counts: whether some of what they moved is still there to be taken.
    """
    start = f"No copy is in flight that could end the wait for {semaphore}"
    if copies is None:
        return (
            f"{start}: call wait() once for each start(), on every path, and wait for no more "
            "bytes than the copies move."
        )
    if not copies:
        return (
            f"{start}, and none has ever signalled it: the start() was not reached. Start the copy "
            "on every path that leads to its wait(), with the same semaphore and the right "
            "device_id, or leave out the wait on the others."
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
    groups: dict[Any, list[Mapping[str, Any]]] = {}
    for copy in copies:
        site = places.site(copy["site"])
        groups.setdefault((copy["program"], where(site), copy["moved"]), []).append(copy)
    lines = ["  no copy is in flight for it; so far it was signalled"]
    for (program, place, moved), some in list(groups.items())[:LINES]:
        cores = places.cores(program, [copy["coordinates"] for copy in some])
        times = sum(copy["times"] for copy in some)
        often = f"{moved} bytes" + (f", {times} times," if times > 1 else "")
        lines.append(f"    {often} by {_dmas(times)} of {some[0]['program_name']} {cores}")
        lines.append(f"      started at {place}")
        quoted = code(places.site(some[0]["site"]))
        if quoted is not None:
            lines.append(f"          {quoted}")
    if len(groups) > LINES:
        lines.append(f"    ... and from {len(groups) - LINES} more lines")
    return lines


def _dmas(times: int) -> str:
    return "a DMA" if times == 1 else "DMAs"
