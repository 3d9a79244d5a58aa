"""What to do about each kind of finding, in the terms of the language kernels are written in."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cokernel.compiler.window_names import operand_of

if TYPE_CHECKING:
    from cokernel.checking.findings import Party


def advise(
    raw: Mapping[str, Any],
    parties: "Sequence[Party]",
    name: str,
    owner: str = "",
    is_copied_to: bool = True,
    hangs_over: bool = False,
) -> Iterator[str]:
    """Yields sentences that say what to do about a finding.

    Args:
      raw: what the runtime recorded.
      parties: who is involved.
      name: the Ref or semaphore it is about.
      owner: the core whose own memory it is about, if others have touched it.
      is_copied_to: whether there are copies that could write the Ref.
      hangs_over: whether it is a pipeline's window, of which the part is concerned that hangs over
        the end of the operand.
    """
    match raw["kind"]:
        case "Race":
            yield from _race(parties, name, owner)
        case "UninitialisedRead" if raw.get("window"):
            yield f"read no further than {name!r} is long: make the last window smaller, or mask it"
        case "UninitialisedRead" if raw.get("padding"):
            yield f"pick no element that lies beyond the end of {name!r}, or mask those that do"
            yield f"or give {name!r} the shape of whole tiles, and write all of it"
        case "UninitialisedRead" if name == "lax.empty":
            yield "write all of the array that lax.empty gives before its values are used"
            yield "or begin with values, such as jnp.zeros"
        case "UninitialisedRead" if hangs_over:
            operand = operand_of(name)
            yield (
                f"mask the part of the last block that hangs over the end of {operand} before its "
                "values are used: by jnp.where, or pl.when, on the index"
            )
            yield f"or choose a block whose size divides the extent of {operand}"
        case "UninitialisedRead" if not is_copied_to:
            yield f"write {name!r} before it is read, on every path that leads there"
        case "UninitialisedRead":
            yield f"write {name!r} before it is read, or wait for the DMA that fills it"
        case "NeverWritten":
            yield "let a program write every element, or pass an input that the output overwrites"
            yield "look at the index maps and trip counts of the loops that should cover it"
        case "CopyInFlight":
            yield "call wait() on the descriptor before the end of the run_scoped body"
        case "UnwaitedCopy":
            yield "call wait() on the descriptor of the DMA, once for each start()"
            yield f"or let the core that {name!r} belongs to wait for as many bytes"
        case "WaitTooLarge":
            yield "wait on a descriptor whose target has the shape of what was copied"
            yield "or start all the copies that the wait stands for"
        case "LeftoverSemaphore":
            yield f"wait for {name!r} as often as it is signalled, on every path through the loop"
            yield "a count that is left over is what the next launch, or phase, begins with"
        case "SemaphoreUnderflow":
            yield f"take from {name!r} by semaphore_wait, which waits until there is enough"
            yield f"compare what is signalled to {name!r} with what is taken"
        case "SemaphoreOverflow":
            yield f"compare what is signalled to {name!r} with what is waited for"
        case "Livelock":
            yield from _livelock(parties)


def _livelock(parties: "Sequence[Party]") -> Iterator[str]:
    written = dict.fromkeys(repr(party.name) for party in parties if party.memory is not None)
    counted = dict.fromkeys(repr(p.name) for p in parties if p.polled.endswith(")"))
    steps = [f"write {' and '.join(written)}"] * bool(written)
    steps += [f"signal {' and '.join(counted)}"] * bool(counted)
    if not steps:
        yield "bound the loop: nothing that it looks at can change"
        return
    yield f"let a core {' or '.join(steps)} before it finishes, or bound the polling"
    yield "prefer semaphore_wait to polling: a deadlock then says who is missing"


def advise_failure(
    kind: str, name: str, site: Mapping[str, Any] | None = None, is_picked: bool = False
) -> Iterator[str]:
    """Yields what to do about a failure of some kind that ended a launch, at a Ref or semaphore.

    Args:
      kind: the kind of the finding that it is.
      name: the Ref or semaphore.
      site: where it happened; None if it is not known.
      is_picked: whether the index is one of an array of them.
    """
    match kind:
        case "OutOfBounds" if site is not None and site.get("of_semaphores"):
            yield f"compare the index of the semaphore with how many there are in {name!r}"
            yield "if a slot picks it, take the number of the slot modulo the number of slots"
        case "OutOfBounds" if is_picked:
            yield f"compare the values of the indices with the shape of {name!r}"
            yield "look at where the indices come from, and at padding that is left in them"
        case "OutOfBounds":
            yield f"compare the index and the size of the slice with the shape of {name!r}"
            yield "look at the last window, and at the trip count of the loop around it"
        case "Check":
            yield "follow the value of the message back to where the program gets it from"
        case "Callback":
            yield "look at the traceback: what the kernel calls has raised it"
        case "TimeLimit":
            yield "look at where the cores are: a loop there does not end, or takes too long"
            yield "a kernel that needs longer is given a larger time_limit_s"


def _race(parties: "Sequence[Party]", name: str, owner: str) -> Iterator[str]:
    one, other = parties
    if other.action == "writes again":
        yield f"let the indices of {name!r} differ from each other"
        yield "or copy with add=True, if the sum of the rows is meant"
        return
    copies = [party for party in parties if party.is_dma]
    same_core = one.program == other.program and one.core == other.core
    if copies and owner:
        yield from _race_over_others_memory(parties, copies, name, owner)
        return
    if copies and same_core:
        party = copies[0]
        if party.action == "writes":
            yield f"wait for the DMA that writes {name!r} before its target is touched"
        else:
            yield f"wait for the DMA that reads {name!r} before its source is changed"
        yield "or give the DMA a buffer of its own (two slots, taken in turn)"
        return
    if {one.action, other.action} == {"adds to", "writes"} or (
        one.action == other.action == "updates"
    ):
        yield f"add to {name!r} on all sides with an atomic update, such as addupdate or a DMA add"
    if copies:
        yield (
            "let the core that started the DMA signal the other core behind its wait() for the "
            "DMA, and let the other core wait for that signal before its own access"
        )
        yield (
            "or put a barrier between the two, behind the wait() for the DMA, or give each core a "
            "part of its own"
        )
        return
    if one.program == other.program:
        yield (
            "let one core signal a semaphore after its access, and let the other wait for it "
            "before its own"
        )
        yield "or put a barrier between the two accesses, or give each core a part of its own"
        return
    yield (
        f"let {one.program!r} signal a semaphore after its access, and let {other.program!r} wait "
        "for it before its own (or the other way round)"
    )


def _race_over_others_memory(
    parties: "Sequence[Party]", copies: "Sequence[Party]", name: str, owner: str
) -> Iterator[str]:
    """Advice for copies to, or from, memory of another core than the one that started them."""
    starters = dict.fromkeys(copy.core for copy in copies)
    if len(starters) > 1:
        yield f"give each core that copies a part of {name!r} of {owner} for itself"
        yield (
            "or let one of them signal the other behind the wait() for its copy, and let the other "
            "wait for that signal before it starts its own"
        )
        return
    [starter] = starters
    others = [party for party in parties if not party.is_dma]
    if others and others[0].core == owner and others[0].action == "reads":
        yield (
            f"if {owner} is to read what this copy brings: let it wait for the copy before it "
            "reads, by wait_recv() on a descriptor of the same shape"
        )
        yield (
            f"if {owner} still reads what an earlier copy brought: let it signal {starter} when it "
            f"is done with {name!r}, and let {starter} wait for that signal before it starts the "
            "copy"
        )
        return
    yield (
        f"let {owner} signal {starter} when it is done with {name!r}, and let {starter} wait for "
        "that signal before it starts the copy"
    )
    yield f"or give each copy a slot of {name!r} of its own, taken in turn"
