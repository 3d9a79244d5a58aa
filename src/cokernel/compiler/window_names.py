"""Names of the Refs that `emit_pipeline` allocates, which the user has given none: by the operands
whose blocks they hold.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from cokernel import _jax
from cokernel.compiler.analysis import argument_names, called_jaxprs, passed_on
from cokernel.records import record

# The fields of JAX's `BufferedRef` that hold Refs, behind the name of the pipeline's argument.
_FIELD = re.compile(r"(?P<window>.+)\.(?P<field>window_ref|sem_recvs|sem_sends)(\[.*\])?")
# How JAX itself calls the argument that holds them.
_OF_JAX = re.compile(r"(out_)?allocations\b")
_NUMBERED = re.compile(r"\w+\[(\d+)\]")
_SEMAPHORE = "semaphore of "
# Stands for the operand where it is not known.
_NAMELESS = "emit_pipeline"


@record(frozen=True)
class Slots:
    """How a pipeline keeps blocks of an operand in a Ref of its own."""

    count: int
    # Whether the pipeline copies blocks there, and not only from there.
    is_fetched: bool


@record(frozen=True)
class NamedRef:
    """A Ref that windows may belong to: equal for the same Ref, and how the user calls it."""

    key: Hashable
    name: str = dataclasses.field(compare=False)


@record
class _Window:
    """The Refs that a pipeline allocates for one of its operands."""

    number: int
    # The places of the Refs among those of the scope, by the names of their fields.
    places: dict[str, int]


@record(frozen=True)
class _Copy:
    source: Any
    target: Any
    semaphore: Any
    is_in_loop: bool


def scope_names(body: Any, outer: Mapping[Any, NamedRef]) -> list[str]:
    """How reports call the Refs that `run_scoped` allocates for a jaxpr: as the user does, and
    those of a pipeline by its operands, as in "window of x_ref" and "semaphore of window of x_ref".

    Args:
      body: the jaxpr of a `run_scoped`.
      outer: the Refs that it is given, by its variables.
    """
    names = argument_names(body, len(body.invars), "scoped")
    windows = _windows(names)
    if not windows:
        return names
    refs: dict[Any, Any] = dict(outer)
    refs |= {var: NamedRef(var, name) for var, name in zip(body.invars, names, strict=True)}
    copies: list[_Copy] = []
    _collect(body, refs, copies, is_in_loop=False)
    operands = [_operand(window, body.invars, copies) for window in windows]
    shared = Counter(operands)
    for window, operand in zip(windows, operands, strict=True):
        if operand is None:
            name = f"window {window.number} of {_NAMELESS}"
        elif shared[operand] > 1:
            name = f"window {window.number} of {operand.name}"
        else:
            name = f"window of {operand.name}"
        for field, place in window.places.items():
            names[place] = name if field == "window_ref" else f"{_SEMAPHORE}{name}"
            if len(window.places) == 3 and field != "window_ref":
                direction = "input" if field == "sem_recvs" else "output"
                names[place] = f"{direction} {_SEMAPHORE}{name}"
    return names


def scope_slots(body: Any) -> list[Slots | None]:
    """Which Refs that `run_scoped` allocates for a jaxpr hold blocks of a pipeline, each in a
    slot of its own; None for the others, and for a window of the whole operand, which has no slots.
    """
    slots: list[Slots | None] = [None] * len(body.invars)
    for window in _windows(argument_names(body, len(body.invars), "scoped")):
        place = window.places.get("window_ref")
        # There is a semaphore for each slot.
        semaphores = [body.invars[at].aval.shape for at in window.places.values() if at != place]
        if place is None or not semaphores or len(semaphores[0]) != 1:
            continue
        [count], shape = semaphores[0], body.invars[place].aval.shape
        # Blocks of one dimension lie one behind the other in one Ref.
        is_flat = len(shape) == 1 and shape[0] % count == 0
        if is_flat or (shape and shape[0] == count):
            slots[place] = Slots(count, "sem_recvs" in window.places)
    return slots


def _windows(names: Sequence[str]) -> list[_Window]:
    """The windows that pipelines allocate among the Refs of a scope with these names in JAX."""
    found: dict[str, dict[str, int]] = {}
    for place, name in enumerate(names):
        match = _FIELD.fullmatch(name)
        if match is not None:
            found.setdefault(match["window"], {})[match["field"]] = place
    windows = []
    for ordinal, (name, places) in enumerate(found.items()):
        # A field of the user's own may have such a name as well, but hardly two.
        if len(places) > 1 or _OF_JAX.match(name):
            numbered = _NUMBERED.fullmatch(name)
            windows.append(_Window(int(numbered[1]) if numbered else ordinal, places))
    return windows


def _operand(window: _Window, refs: Sequence[Any], copies: Sequence[_Copy]) -> NamedRef | None:
    """The one Ref that a pipeline copies to a window or from it; None if there is not just one."""
    own = {NamedRef(refs[place], "") for place in window.places.values()}
    found = [copy for copy in copies if copy.semaphore in own]
    if not found:
        # A window of the whole operand is copied at once, outside of the loop and with a semaphore
        # that only the copy knows. So is any window without pipelining, but in the loop: then its
        # own semaphores are of no use but to tell the direction.
        fields = window.places.keys() - {"window_ref"}
        is_input = not fields or "sem_recvs" in fields
        is_output = not fields or "sem_sends" in fields
        touching = [
            copy
            for copy in copies
            if (is_input and copy.target in own) or (is_output and copy.source in own)
        ]
        found = [copy for copy in touching if not copy.is_in_loop] or touching
    ends = {end for copy in found for end in (copy.source, copy.target) if end not in own}
    [operand] = ends if len(ends) == 1 else [None]
    return operand


def _collect(jaxpr: Any, refs: Mapping[Any, Any], copies: list[_Copy], *, is_in_loop: bool) -> None:
    """Adds the copies that a jaxpr starts, in the jaxprs that it runs as well. `refs` tells which
    Ref each variable is.
    """
    for eqn in jaxpr.eqns:
        if eqn.primitive is _jax.tpu_primitives.dma_start_p:
            source, target, semaphore, *_ = eqn.params["tree"].unflatten(eqn.invars)
            source, target, semaphore = (_root(end, refs) for end in (source, target, semaphore))
            copies.append(_Copy(source, target, semaphore, is_in_loop))
        elif eqn.primitive is _jax.pallas_primitives.run_scoped_p:
            body = eqn.params["jaxpr"]
            inside = passed_on(eqn.invars, body.constvars, refs)
            names = argument_names(body, len(body.invars), "scoped")
            inside |= {
                var: NamedRef(var, name) for var, name in zip(body.invars, names, strict=True)
            }
            _collect(body, inside, copies, is_in_loop=is_in_loop)
        else:
            in_loop = is_in_loop or eqn.primitive in (_jax.scan_p, _jax.while_p)
            for body, arguments in called_jaxprs(eqn) or ():
                inside = passed_on(arguments, body.invars, refs)
                _collect(body, inside, copies, is_in_loop=in_loop)


def _root(ref: Any, refs: Mapping[Any, Any]) -> Any:
    variable = ref.ref if isinstance(ref, _jax.TransformedRef) else ref
    return refs.get(variable)


def element_name(name: str, index: str) -> str:
    """A part of a Ref or of an array of semaphores in words: "x_ref[0:4]", and "[0:4] of the window
    of x_ref" for a name that is no identifier. A semaphore is told by its number, as in "semaphore
    1 of window of x_ref".
    """
    if not index.startswith("[") or not name_is_words(name):
        return f"{name}{index}"
    before, found, behind = name.partition(_SEMAPHORE)
    if found:
        return f"{before}semaphore {index.strip('[]') if '...' not in index else index} of {behind}"
    article = "the " if name.startswith("window of ") else ""
    return f"{index} of {article}{name}"


def name_is_words(name: str) -> bool:
    """Whether a name says in words what a Ref is for, since the user has given it none."""
    return "window " in name and " of " in name


def operand_of(window: str) -> str:
    """The operand of a window with this name, as in "'x_ref'" for "window of x_ref"."""
    operand = window.partition(" of ")[2]
    return "the operand" if operand == _NAMELESS else repr(operand)


def semaphore_in_words(name: str) -> str:
    """A semaphore in a sentence, as in "semaphore 'done'"."""
    is_told = name_is_words(name) and "semaphore " in name
    return repr(name) if is_told else f"semaphore {name!r}"
