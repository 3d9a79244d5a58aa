"""Findings of checked mode: what is wrong, who did it, on which lines, and what to do."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cokernel.checking.advice import advise
from cokernel.checking.elements import (
    Elements,
    elements_of,
    joined_elements,
    padding_text,
    within_slot,
)
from cokernel.checking.places import Calls, Places, code, told_calls, where
from cokernel.checking.schedules import Schedule
from cokernel.checking.sentences import ACTIONS, sentence_of, use_in_words
from cokernel.compiler.window_names import element_name

# In the order in which a report tells them: what stopped the launch, then what makes it wrong.
KINDS = (
    "Deadlock",
    "Livelock",
    "OutOfBounds",
    "Check",
    "Callback",
    "TimeLimit",
    "Interrupted",
    "Internal",
    "Race",
    "UninitialisedRead",
    "NeverWritten",
    "CopyInFlight",
    "UnwaitedCopy",
    "WaitTooLarge",
    "LeftoverSemaphore",
    "SemaphoreUnderflow",
    "SemaphoreOverflow",
    "ChipLimit",
)


# Their details say who does what, group by group, and more about each than a party holds.
TOLD_IN_DETAILS = ("Deadlock", "TimeLimit", "Interrupted")

# If one of these is of a wait that never ends, it says why, and the deadlock only that it is so.
EXPLAIN_DEADLOCKS = ("WaitTooLarge",)

# These say where the memory comes from as well.
OF_ITS_MEMORY = ("UninitialisedRead", "NeverWritten")

# Whatever was left of a signal, it is one mistake, whoever took a part of it; so is a copy that
# outlives its scope, whichever scope it comes to, and a wait that is too large, whichever copy it
# has met.
_OF_THE_FIRST = ("LeftoverSemaphore", "UnwaitedCopy", "CopyInFlight", "WaitTooLarge")
# Of all that has signalled too often, the schedule says who did it last.
_OF_ITS_SEMAPHORE = ("SemaphoreOverflow",)
_IN_ANY_ORDER = ("Race", "Deadlock", "Livelock")

# A text names so many of the other cores that did the same.
OTHERS_NAMED = 4


@dataclasses.dataclass(frozen=True)
class Party:
    """One of those that a finding is about: a core, or a DMA that it started.

    Attributes:
      program: the name of its program; "" for the kernel, which allocates what lasts as long as
        the launch.
      core: the position of its core, as in "core=0 subcore=3"; "" for the kernel.
      action: what it did: "reads", "writes", "adds to", "signals", "waits for", ...
      is_dma: whether a DMA did it, for which the line is where the DMA was started.
      name: the Ref or semaphore, as the program names it.
      operation: the primitive, such as "dma_start" or "write".
      file, line, function: the place in the user's program; None where it is not known.
      code: the text of that line.
      callers: where the user's own functions were called from that led there, innermost first,
        each with "file", "line", "function" and "code".
      other_callers: from where else it was called and did the same, each way as `callers`, in the
        order in which they stand in the program.
      polled: of a Livelock, what this core polls there, in words: "flags[2]", or "sem (which
        counts 1)".
      memory: of a Livelock, the elements that this core polls there; None for a semaphore.
    """

    program: str
    core: str
    action: str
    is_dma: bool
    name: str
    operation: str
    file: str | None
    line: int | None
    function: str | None
    code: str | None
    callers: tuple[Mapping[str, Any], ...] = ()
    other_callers: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    polled: str = ""
    memory: Elements | None = None

    def to_dict(self) -> dict[str, Any]:
        """The party as plain data, for JSON."""
        plain = dataclasses.asdict(dataclasses.replace(self, memory=None))
        return {**plain, "memory": None if self.memory is None else self.memory.to_dict()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Party":
        """The party that `to_dict`, and JSON after it, made plain data of."""
        memory = None if plain["memory"] is None else Elements.from_dict(plain["memory"])
        others = tuple(map(tuple, plain.get("other_callers", ())))
        changes = {"callers": tuple(plain["callers"]), "other_callers": others, "memory": memory}
        return cls(**{**plain, **changes})

    @property
    def ways(self) -> tuple[Calls, ...]:
        """All ways that led there, `callers` first; none where no function was called."""
        return tuple(way for way in (self.callers, *self.other_callers) if way)

    @property
    def is_at(self) -> tuple[Any, ...]:
        """Equal for parties that do the same on the same line."""
        return (self.program, self.action, self.is_dma, self.file or "", self.line or 0)

    @property
    def who(self) -> str:
        """As in "a DMA of program 'load' on core=0"."""
        if not self.program:
            return "the kernel"
        start = "a DMA of program" if self.is_dma else "program"
        return f"{start} {self.program!r} on {self.core}"


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a kernel.

    Attributes:
      kind: one of `KINDS`.
      sentence: what is wrong, in one sentence.
      parties: who is involved, the one that met the fault first.
      name: the Ref or semaphore it is about.
      indices: which elements of the Ref it is about, as in "[0:16, 3]"; "" where elements are not
        what it is about.
      advice: what to do.
      replay: the string that replays the schedule which showed it; None where every schedule does.
      occurrences: how often it was met, under all schedules together: accesses, each of which
        counts once whatever its size, or copies, signals and waits.
      details: further lines of text, such as what each core waits for.
      memory: the elements, under the schedule that `replay` names: those that `parties` have
        touched and no others; those of a call of the same function from another place are among
        them, under the schedule that showed that first. None where elements are not what it is
        about.
      is_exact: of an UninitialisedRead, whether the value comes from all elements of `memory`;
        otherwise it may be from some of them only.
      batch: under `jax.vmap`, in which element of the batch it was met first; of vmaps within
        others one number each, the outermost first.
      also: the other cores between which the same was met, as many as there are parties that act.
      consequences: of an UninitialisedRead, what came of the use of the value: an OutOfBounds, a
        Deadlock, ...; they are in no report of their own.
      owner: the core whose own memory it is about, if another core has touched it: by a copy.
      other_calls: what other cores have touched by calls of the same function from other places, as
        in "core=2 and core=3: board[0:16]".
    """

    kind: str
    sentence: str
    parties: tuple[Party, ...]
    name: str
    indices: str
    advice: tuple[str, ...]
    replay: str | None
    occurrences: int = 1
    details: tuple[str, ...] = ()
    memory: Elements | None = None
    also: tuple[tuple[str, ...], ...] = ()
    batch: tuple[int, ...] = ()
    consequences: tuple["Finding", ...] = ()
    owner: str = ""
    other_calls: tuple[str, ...] = ()
    is_exact: bool = True

    @property
    def identity(self) -> tuple[Any, ...]:
        """Equal for findings that are the same mistake: same kind, lines, programs and name."""
        lines = [party.is_at for party in self.parties]
        if self.kind in _IN_ANY_ORDER:
            # Who came first is up to the schedule.
            lines = sorted(set(lines))
        if self.kind in _OF_THE_FIRST:
            lines = lines[:1]
        if self.kind in _OF_ITS_SEMAPHORE:
            lines = []
        return (self.kind, self.name, tuple(lines))

    @property
    def lines(self) -> tuple[tuple[str, str, int], ...]:
        """The program, file and line of each party."""
        return tuple((party.program, party.file or "", party.line or 0) for party in self.parties)

    def to_dict(self) -> dict[str, Any]:
        """The finding as plain data, for JSON."""
        plain = dataclasses.asdict(
            dataclasses.replace(self, parties=(), memory=None, consequences=())
        )
        allocation = self.allocation
        return {
            **plain,
            "parties": tuple(party.to_dict() for party in self.parties),
            "memory": None if self.memory is None else self.memory.to_dict(),
            "consequences": [one.to_dict() for one in self.consequences],
            "allocation": None if allocation is None else allocation.to_dict(),
        }

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Finding":
        """The finding that `to_dict`, and JSON after it, made plain data of."""
        parties = tuple(map(Party.from_dict, plain["parties"]))
        tuples = {name: tuple(plain[name]) for name in ("advice", "details", "batch")}
        tuples["other_calls"] = tuple(plain.get("other_calls", ()))
        also = tuple(map(tuple, plain["also"]))
        memory = None if plain["memory"] is None else Elements.from_dict(plain["memory"])
        consequences = tuple(map(cls.from_dict, plain["consequences"]))
        changes = {
            **tuples,
            "parties": parties,
            "also": also,
            "memory": memory,
            "consequences": consequences,
        }
        fields = {field.name for field in dataclasses.fields(cls)}
        return cls(**{**{name: plain[name] for name in fields & plain.keys()}, **changes})

    @property
    def allocation(self) -> Party | None:
        """Who has asked for the memory of an UninitialisedRead or NeverWritten, on which line: a
        core, in a scope of its program, or the kernel."""
        if self.kind not in OF_ITS_MEMORY:
            return None
        allocating = [party for party in self.parties if party.action == ACTIONS["allocate"]]
        return allocating[-1] if allocating else None

    @property
    def acting_cores(self) -> tuple[str, ...]:
        """The cores of `parties`, without who has asked for the memory."""
        return tuple(party.core for party in self.parties if party is not self.allocation)

    @property
    def told_parties(self) -> tuple[Party, ...]:
        """Those that a text lists, because its details do not."""
        return () if self.kind in TOLD_IN_DETAILS else self.parties

    @property
    def told_details(self) -> tuple[str, ...]:
        """The further lines of a text: the details, and what came of it."""
        lines = [f"by other calls, {one}" for one in self.other_calls[:OTHERS_NAMED]]
        if len(self.other_calls) > OTHERS_NAMED:
            lines.append(f"and {len(self.other_calls) - OTHERS_NAMED} more by other calls")
        lines += self.details
        for one in self.consequences:
            lines.append(f"so {one.kind}: {one.sentence}")
            for party in one.told_parties:
                lines.append(f"  at {_where(party)}")
                lines += [f"      {party.code}"] * bool(party.code)
            lines += [f"  {line}" if line else "" for line in one.told_details]
        return tuple(lines)

    def others(self) -> str:
        """Words that name the other cores that did the same; "" if there are none."""
        if not self.also:
            return ""
        named = [" and ".join(dict.fromkeys(cores)) for cores in self.also[:OTHERS_NAMED]]
        if len(self.also) > OTHERS_NAMED:
            named.append("others")
        return f", also with {'; '.join(named)}"

    def text(self) -> str:
        """The finding as lines of text."""
        lines = [f"{self.kind}: {self.sentence}"]
        if self.occurrences > 1:
            lines.append(f"  met {self.occurrences} times{self.others()}")
        if self.batch:
            first = ", for the first time" if self.occurrences > 1 else ""
            lines.append(f"  in batch element {element_of_batch(self.batch)}{first}")
        for party in self.told_parties:
            if party.program:
                lines.append(f"  {party.who} {party.action} {party.polled}".rstrip())
                lines.append(f"    at {_where(party)}")
            else:
                lines.append(f"  allocated by the kernel at {_where(party)}")
            if party.code:
                lines.append(f"        {party.code}")
            for words, caller in told_calls(party.ways):
                lines.append(f"    {words} {where(caller)}" if caller else f"    {words}")
                if caller and caller["code"]:
                    lines.append(f"        {caller['code']}")
        lines += [f"  {line}" if line else "" for line in self.told_details]
        if self.advice:
            lines.append("  What to do:")
            lines += [f"    - {item}" for item in self.advice]
        if self.replay is not None:
            lines.append(f'  Replay: cokernel.Checked(replay="{self.replay}")')
        return "\n".join(lines)


def element_of_batch(numbers: Sequence[int]) -> str:
    """As in "3", or "(3, 0)" where a vmap is within another."""
    return str(numbers[0]) if len(numbers) == 1 else f"({', '.join(map(str, numbers))})"


def _where(party: Party) -> str:
    if party.file is None:
        return "a line that is not known"
    function = (party.function or "").replace(".<locals>", "")
    return f"{party.file}:{party.line}" + (f" in {function}" if function else "")


def finding_of(raw: Mapping[str, Any], places: Places) -> Finding:
    """Puts what the runtime recorded into words.

    Args:
      raw: one of the record's "findings".
      places: the names of the kernel's sites, cores and memory.
    """
    looks = raw.get("polled", ())
    if looks:
        parties = tuple(_polling(look, places) for look in looks)
        what, name, indices, memory = _polled_by_first(parties, raw, places)
    else:
        told = (raw.get("first"), raw.get("second"), *raw.get("more", ()))
        parties = tuple(party_of(party, places) for party in told if party is not None)
        name, indices, memory = _what(raw, parties, places)
        what = element_name(name, indices)
    owner = _other_owner(raw, places)
    if owner:
        what = f"{what} of {owner}"
    is_exact = not raw.get("is_inexact") or memory is None or memory.count == 1
    if not is_exact:
        what = f"some of {what}"
    padding = padding_text(name, raw)
    if padding:
        what = _in_padding(name, indices if memory else "", padding)
    if raw["kind"] in OF_ITS_MEMORY:
        parties += tuple(_allocating(raw, parties, places))
    schedule = raw.get("schedule")
    advice = advise(
        raw,
        parties,
        name,
        owner,
        is_copied_to=_is_copied_to(raw, name, parties, places),
        hangs_over=_hangs_over(raw, memory, parties, places),
    )
    return Finding(
        kind=raw["kind"],
        sentence=sentence_of(raw, parties, what),
        parties=parties,
        name=name,
        indices=" and ".join(filter(None, (indices, padding))),
        advice=tuple(advice),
        replay=replay_text(schedule) if schedule is not None else None,
        occurrences=raw.get("occurrences", 1),
        memory=memory,
        owner=owner,
        is_exact=is_exact,
        details=tuple(_details(raw, parties)),
        also=tuple(
            tuple(places.core(party["program"], party["coordinates"]) for party in others)
            for others in raw.get("also", ())
        ),
    )


def party_of(raw: Mapping[str, Any], places: Places) -> Party:
    """Names one of the parties of a finding."""
    site = places.site(raw.get("dma_site" if raw.get("is_dma") else "site"))
    own = places.site(raw.get("site")) or site or {}
    return party_at(
        site,
        raw["program_name"],
        places.core(raw["program"], raw["coordinates"]),
        ACTIONS.get(raw["access"], raw["access"]),
        is_dma=bool(raw.get("is_dma")),
        name=own.get("name") or "",
    )


def _other_owner(raw: Mapping[str, Any], places: Places) -> str:
    """The core whose own memory a finding is about, if anybody else has touched it; else ""."""
    memory = raw.get("memory")
    if memory is None or memory["owner"] != "private" or "coordinates" not in memory:
        return ""
    own = (memory["program"], memory["index"])
    acting = [one for one in (raw.get("first"), raw.get("second")) if one is not None]
    if all((one["program"], one["index"]) == own for one in acting):
        return ""
    return places.core(memory["program"], memory["coordinates"])


def _polling(look: Mapping[str, Any], places: Places) -> Party:
    """A core that polls, with what it polls."""
    party = party_of(look["party"], places)
    if look["memory"] is None and look["semaphore"] is None:
        return dataclasses.replace(party, polled="nothing that others can change")
    name, indices, memory = _what(look, [party], places)
    polled = element_name(name, indices) + _counting(look)
    return dataclasses.replace(party, name=name, polled=polled, memory=memory)


def _polled_by_first(
    parties: Sequence[Party], raw: Mapping[str, Any], places: Places
) -> tuple[str, str, str, Elements | None]:
    """What the core that a livelock names first polls, which may be several things: in words, and
    of the Ref or semaphore that it polls first the name and the elements, in words and as data.
    """
    first = parties[0]
    own = [party for party in parties if party.program and _is_same_core(party, first)]
    what = " and ".join(dict.fromkeys(party.polled for party in own))
    if first.memory is None:
        return what, *_what(raw, [first], places)
    same = [party.memory for party in own if party.memory and party.name == first.name]
    memory = joined_elements(same)
    return what, first.name, memory.text, memory


def _is_same_core(one: Party, other: Party) -> bool:
    return one.program == other.program and one.core == other.core


def _details(raw: Mapping[str, Any], parties: Sequence[Party]) -> Iterator[str]:
    """What a finding says beside its parties."""
    if raw["kind"] == "Livelock":
        left_out = raw.get("pollers", 0) - len({(party.program, party.core) for party in parties})
        if left_out > 0:
            yield (
                f"... and {left_out} more cores poll"
                if left_out > 1
                else ("... and one more core polls")
            )


def _allocating(
    raw: Mapping[str, Any], parties: Sequence[Party], places: Places
) -> Iterator[Party]:
    """Who has asked for the memory that a finding is about: the core whose scope it is of, or the
    kernel, of all that lasts as long as the launch.
    """
    if raw.get("allocator") is not None:
        yield party_of(raw["allocator"], places)
        return
    memory = raw.get("memory")
    ref = memory and places.ref(memory, [party.name for party in parties])
    name = ref["name"] if ref else next((party.name for party in parties if party.name), "")
    if ref and ref.get("kind") == "scoped" and parties:
        # Memory that several cores share, each of which comes to the line.
        yield party_at(ref, parties[0].program, parties[0].core, ACTIONS["allocate"], name=name)
    elif places.made_at is not None:
        yield party_at(places.made_at, "", "", ACTIONS["allocate"], name=name)


def party_at(
    site: Mapping[str, Any] | None,
    program: str,
    core: str,
    action: str,
    *,
    is_dma: bool = False,
    name: str = "",
) -> Party:
    """A party whose operation is at a site; None for a place that is not known."""
    site = site or {}
    return Party(
        program=program,
        core=core,
        action=action,
        is_dma=is_dma,
        name=name or site.get("name") or "",
        operation=site.get("operation") or "",
        file=site.get("file"),
        line=site.get("line"),
        function=site.get("function"),
        code=code(site) if site else None,
        callers=tuple({**caller, "code": code(caller)} for caller in site.get("callers", ())),
    )


def replay_text(schedule: Mapping[str, Any]) -> str:
    """The string that replays what the runtime says of a schedule."""
    return Schedule(
        strategy=schedule["strategy"],
        seed=schedule.get("seed", 0),
        depth=schedule.get("depth", 3),
        launch=max(schedule.get("launch", 0), 0),
        choices=tuple(schedule.get("choices", ())),
    ).to_text()


def _what(
    raw: Mapping[str, Any], parties: Sequence[Party], places: Places
) -> tuple[str, str, Elements | None]:
    """The Ref or semaphore that a finding is about, and which elements, in words and as data."""
    fallback = next((party.name for party in parties if party.name), "a Ref")
    memory = raw.get("memory")
    if memory is None:
        semaphore = raw.get("semaphore")
        place = places.semaphore(semaphore) if semaphore is not None else None
        return (place.element if place is not None else fallback), "", None
    ref = places.ref(memory, [party.name for party in parties])
    if ref is None:
        size = sum(length for _, length in memory["parts"])
        return fallback, f" ({size} bytes)", None
    elements = elements_of(ref, memory)
    if ref.get("slots"):
        # The pipeline picks the slot, and the user only knows of blocks.
        elements = within_slot(elements, ref["slots"])
    return ref["name"], elements.text, elements


def _is_copied_to(
    raw: Mapping[str, Any], name: str, parties: Sequence[Party], places: Places
) -> bool:
    """Whether there are copies that could write the Ref."""
    memory = raw.get("memory")
    ref = memory and places.ref(memory, [party.name for party in parties])
    return ref["is_fetched"] if ref and ref.get("slots") else places.is_copied_to(name)


def _hangs_over(
    raw: Mapping[str, Any], elements: Elements | None, parties: Sequence[Party], places: Places
) -> bool:
    """Whether elements are of what a pipeline could not fetch of a block that hangs over the end of
    the operand. Every block begins within it, so the first element of a block is never of those.
    """
    memory = raw.get("memory")
    ref = memory and places.ref(memory, [party.name for party in parties])
    if not ref or elements is None or not ref.get("is_fetched"):
        return False
    return all(first > 0 for first, _ in elements.runs)


def _in_padding(name: str, indices: str, padding: str) -> str:
    """What is read beyond the end of a Ref, and of the Ref itself."""
    own = f"{element_name(name, indices)} and " if indices else ""
    return f"{own}{padding} of {name!r}, which is the padding of its tiles"


def _counting(look: Mapping[str, Any]) -> str:
    """What a semaphore counts that a core polls: it may have passed what the core waits for."""
    semaphore = look.get("semaphore")
    return "" if semaphore is None else f" (which counts {semaphore['count']})"


def effect(finding: Finding, raw: Mapping[str, Any]) -> str:
    """What follows from the mistake that another finding tells of, as a line of its text."""
    parties = finding.parties
    if raw.get("is_too_early"):
        # Which cores come too early is up to the schedule.
        return (
            f"so {finding.name} is read before anybody has written it, and the value "
            f"{use_in_words(raw)} ({_where(parties[1] if len(parties) > 1 else parties[0])})"
        )
    if finding.kind == "Race":
        # The copy is what the other finding is about.
        parties = tuple(sorted(parties, key=lambda party: party.is_dma))
        what = element_name(finding.name, finding.indices)
        what += f" of {finding.owner}" * bool(finding.owner)
        return f"so {sentence_of(raw, parties, what)} ({_where(parties[0])})"
    last = parties[-1] if finding.kind == "CopyInFlight" else parties[0]
    return f"so {finding.sentence} ({_where(last)})"
