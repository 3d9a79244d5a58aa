"""Follows undefined values through a program, for checked mode.

A pass over a program's jaxpr gives values that may come from memory nobody wrote a *mask*: an array
of truth values of the same shape that says which elements are undefined. Reads ask the runtime for
it, arithmetic combines the masks of its operands, stores hand it back to the runtime, and where a
value decides something (a branch, an index, an amount) the mask is reported. A value without a mask
is known to be defined.

Masks say "undefined" rather too often than too rarely where an operation mixes elements in a way
that this module has no rule for.
"""

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cokernel import _jax
from cokernel.compiler.definedness_sources import (
    Move,
    Source,
    all_united,
    anywhere,
    broadcast,
    of_read,
)
from cokernel.compiler.ops.traced import without_lines
from cokernel.records import record

# Asks the runtime which elements of a part of a Ref are undefined; tells it which are; says that
# undefined elements are used. See `ops/definedness.py`.
undefined_p = _jax.Primitive("undefined")
mark_undefined_p = _jax.Primitive("mark_undefined")
report_undefined_p = _jax.Primitive("report_undefined")
# Memory that nobody has written, as a Ref: what `lax.empty` is where undefined values are followed.
unwritten_p = _jax.Primitive("empty")
# The same of the memory of matrix units, which is no Ref: of staged weights, of the weights that
# are multiplied with once they are loaded, and of a queue of results.
load_staged_p = _jax.Primitive("load_staged")
mark_staged_p = _jax.Primitive("mark_staged")
weights_undefined_p = _jax.Primitive("weights_undefined")
mark_queue_p = _jax.Primitive("mark_queue")
queue_undefined_p = _jax.Primitive("queue_undefined")
load_staged_p.multiple_results = True
mark_staged_p.multiple_results = mark_queue_p.multiple_results = True
mark_undefined_p.multiple_results = report_undefined_p.multiple_results = True

# What an undefined value is used as, by the numbers of the runtime.
BRANCH, INDEX, OUTPUT, AMOUNT, CALLBACK, LOOP = range(6)

# A mask, or None for a value that is known to be defined.
Mask = Any


def follow_undefined_values(jaxprs: Sequence[Any], operand_count: int) -> tuple[Any, ...]:
    """The programs of a kernel, which also follow undefined values through what they do."""
    from cokernel.compiler.definedness_rules import load

    load()
    defined = never_undefined(jaxprs, operand_count)
    return tuple(with_definedness(jaxpr, defined) for jaxpr in jaxprs)


def with_definedness(jaxpr: Any, defined: Sequence[bool]) -> Any:
    """The same program, which also follows undefined values. `defined` says for each parameter
    whether it is a Ref (or a value) that never holds undefined elements.
    """
    known = {variable for variable, is_known in zip(jaxpr.invars, defined, strict=True) if is_known}
    scope = Scope({}, known, Origins())
    scope.rewrite(jaxpr)
    return jaxpr.replace(eqns=scope.eqns)


def never_undefined(jaxprs: Sequence[Any], operand_count: int) -> list[bool]:
    """For each parameter of the programs, whether it is an operand that no program writes to."""
    count = len(jaxprs[0].invars)
    written: set[int] = set()
    for jaxpr in jaxprs:
        positions = {variable: number for number, variable in enumerate(jaxpr.invars)}
        for effect in jaxpr.effects:
            if isinstance(effect, _jax.JaxprInputEffect) and not isinstance(
                effect, _jax.ReadEffect
            ):
                target = effect.input
                number = target if isinstance(target, int) else positions.get(target)
                if number is not None:
                    written.add(number)
    return [number < operand_count and number not in written for number in range(count)]


def is_array(aval: Any) -> bool:
    """Whether an abstract value has elements that can be undefined."""
    return isinstance(aval, _jax.ShapedArray) and isinstance(aval.dtype, np.dtype)


def bools(shape: Sequence[int]) -> Any:
    """The abstract value of a mask."""
    return _jax.ShapedArray(tuple(shape), np.dtype(np.bool_))


@record(frozen=True)
class Groups:
    """Stands for the trees by which `scan` groups its operands and results."""

    sizes: tuple[int, ...]
    items: tuple[Any, ...] = ()

    def update(self, items: Sequence[Any]) -> "Groups":
        """The same grouping of other items."""
        return dataclasses.replace(self, items=tuple(items))

    def unpack(self) -> list[list[Any]]:
        """The groups."""
        found, rest = [], list(self.items)
        for size in self.sizes:
            found.append(rest[:size])
            rest = rest[size:]
        return found


class Origins:
    """Which reads the masks of a program come from, so that a report names the right one. Reads
    are numbered in the order in which they are met.
    """

    def __init__(self) -> None:
        self._reads: dict[Any, dict[int, Source]] = {}
        # By where they are, with the equation itself so that its identity stays its own: the body
        # of a loop is rewritten more than once, and a function that is called twice is two.
        self._numbers: dict[tuple[int, ...], tuple[int, Any]] = {}
        # The shape of the weights of each matrix unit.
        self.weights: dict[int, tuple[int, ...]] = {}

    def number(self, path: Sequence[Any], eqn: Any) -> int:
        """The number of the read that an equation is, inside others."""
        key = (*map(id, path), id(eqn))
        return self._numbers.setdefault(key, (len(self._numbers), (*path, eqn)))[0]

    def of(self, mask: Mask) -> Mapping[int, Source]:
        """The reads that a mask comes from, by their numbers."""
        return self._reads.get(mask, {}) if isinstance(mask, _jax.Var) else {}

    def add(self, mask: Any, reads: Mapping[int, Source]) -> None:
        """Says that a mask comes from some reads, besides those known."""
        self._reads[mask] = all_united([self.of(mask), reads])


class Scope:
    """One jaxpr while it is rewritten."""

    def __init__(
        self,
        masks: dict[Any, Any],
        defined: set[Any],
        origins: Origins,
        path: tuple[Any, ...] = (),
        *,
        is_repeated: bool = False,
    ):
        # The equations and jaxprs that it is inside of, and whether one of those is a loop.
        self.path = path
        self.is_repeated = is_repeated
        self.current: Any = None
        self.masks = masks
        self.origins = origins
        # Refs that never hold undefined elements.
        self.defined = defined
        self.eqns: list[Any] = []
        self.used: set[Any] = set()

    def is_used(self, variable: Any) -> bool:
        """Whether anything in the jaxpr uses a result."""
        return variable in self.used

    def rewrite(self, jaxpr: Any) -> list[Mask]:
        """Rewrites the equations of a jaxpr; returns the masks of its results."""
        atoms = [*jaxpr.outvars, *(atom for eqn in jaxpr.eqns for atom in eqn.invars)]
        self.used = {atom for atom in atoms if isinstance(atom, _jax.Var)}
        for eqn in jaxpr.eqns:
            self.equation(eqn)
        return [self.mask(atom) for atom in jaxpr.outvars]

    def equation(self, eqn: Any) -> None:
        """Rewrites one equation."""
        from cokernel.compiler.definedness_rules import RULES, any_element

        self.current = eqn
        rule = RULES.get(eqn.primitive)
        if rule is None:
            self.eqns.append(eqn)
            if not self.has_masks(eqn.invars):
                return
            masks = any_element(self, eqn)
        else:
            masks = rule(self, eqn)
        for variable, mask in zip(eqn.outvars, masks or (), strict=bool(masks)):
            if mask is not None and not isinstance(variable, _jax.DropVar):
                self.masks[variable] = mask

    # Masks.

    def mask(self, atom: Any) -> Mask:
        """The mask of a variable or literal."""
        return None if isinstance(atom, _jax.Literal) else self.masks.get(atom)

    def has_masks(self, atoms: Sequence[Any]) -> bool:
        return any(self.mask(atom) is not None for atom in atoms)

    def filled(self, atom: Any) -> Any:
        """The mask of an atom, of zeros where it is defined."""
        mask = self.mask(atom)
        return self.nothing(atom.aval.shape) if mask is None else mask

    def nothing(self, shape: Sequence[int]) -> Any:
        """A mask that says that all is defined."""
        shape = tuple(shape)
        return self.call(None, lambda: jax.numpy.zeros(shape, bool), [], shape)

    def union(self, eqn: Any, masks: Sequence[Mask], shape: Sequence[int]) -> Mask:
        """What is undefined if anything of the masks is; each of the shape, or a scalar."""
        known = [mask for mask in masks if mask is not None]
        if not known:
            return None
        shape = tuple(shape)
        if len(known) == 1 and tuple(known[0].aval.shape) == shape:
            return known[0]

        def combine(*parts: Any) -> Any:
            total = jax.numpy.broadcast_to(parts[0], shape)
            for part in parts[1:]:
                total = total | part
            return total

        return self.call(eqn, combine, known, shape, broadcast)

    def read(self, eqn: Any, shape: Sequence[int]) -> tuple[int, Any]:
        """The number of the read that an equation is, and a variable for its mask."""
        result = _jax.Var(bools(shape))
        number = self.origins.number(self.path, eqn)
        self.origins.add(result, {number: of_read(shape)})
        return number, result

    # Equations.

    def emit(
        self,
        eqn: Any,
        primitive: Any,
        invars: Sequence[Any],
        outvars: Sequence[Any],
        params: dict[str, Any],
    ) -> None:
        """Adds an equation at the source line of another one."""
        source = eqn.source_info if eqn is not None else _jax.new_source_info()
        self.eqns.append(
            _jax.new_jaxpr_eqn(list(invars), list(outvars), primitive, params, frozenset(), source)
        )

    def call(
        self,
        eqn: Any,
        function: Callable[..., Any],
        operands: Sequence[Any],
        shape: Sequence[int],
        moves: Move | Sequence[Move] = anywhere,
    ) -> Any:
        """A mask of the given shape that a function of arrays computes. `moves` say, for each
        operand or for all, which of its elements those of the result come from.
        """
        avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in operands]
        body = without_lines(jax.make_jaxpr(function)(*avals))
        result = _jax.Var(bools(shape))
        self.emit(eqn, _jax.closed_call_p, operands, [result], {"call_jaxpr": body})
        each = [moves] * len(operands) if callable(moves) else moves
        for atom, move in zip(operands, each, strict=True):
            before = tuple(atom.aval.shape)
            reads = {
                number: move(source, before, tuple(shape))
                for number, source in self.origins.of(atom).items()
            }
            self.origins.add(result, reads)
        return result

    def report(self, eqn: Any, atoms: Sequence[Any], use: int) -> None:
        """Says where one of the atoms is undefined that it matters."""
        self.report_masks(eqn, list(map(self.mask, atoms)), use)

    def report_masks(self, eqn: Any, masks: Sequence[Mask], use: int) -> None:
        """The same of masks."""
        known = [mask for mask in masks if mask is not None]
        if known:
            reads = tuple(self.reads(mask) for mask in known)
            params = {"use": use, "operation": eqn.primitive.name, "reads": reads}
            self.emit(eqn, report_undefined_p, known, [], params)

    def reads(self, mask: Any) -> tuple[tuple[int, Source], ...]:
        """The reads that a mask comes from, by their numbers."""
        return tuple(sorted(self.origins.of(mask).items(), key=operator.itemgetter(0)))

    # Jaxprs inside equations.

    def inside(
        self,
        jaxpr: Any,
        inputs: Sequence[Any],
        operands: Sequence[Any],
        masked: Sequence[bool],
        more: Sequence[Mapping[int, Source]] | None = None,
        *,
        is_loop: bool = False,
    ) -> "Inner":
        """Rewrites a jaxpr whose `inputs` stand for `operands` of this one (None for what only the
        inside has); those marked in `masked` get masks. `more` are reads, besides those of the
        operand, that the mask of each input may come from. `is_loop`: it may run several times.
        """
        masks = {
            variable: _jax.Var(bools(variable.aval.shape))
            for variable, is_masked in zip(inputs, masked, strict=True)
            if is_masked
        }
        known = {
            variable
            for variable, atom in zip(inputs, operands, strict=True)
            if atom is not None and not isinstance(atom, _jax.Literal) and atom in self.defined
        }
        for variable, atom in zip(inputs, operands, strict=True):
            if variable in masks and atom is not None:
                # A loop over the rows of an array is given one at a time.
                is_whole = atom.aval.shape == variable.aval.shape
                reads = self.origins.of(self.mask(atom))
                self.origins.add(masks[variable], reads if is_whole else _anywhere(reads))
        for variable, reads in zip(inputs, more or [{}] * len(inputs), strict=True):
            if variable in masks:
                self.origins.add(masks[variable], reads)
        scope = Scope(
            dict(masks),
            known,
            self.origins,
            (*self.path, self.current, jaxpr),
            is_repeated=self.is_repeated or is_loop,
        )
        results = scope.rewrite(jaxpr)
        return Inner(jaxpr, scope, list(masks.values()), results)


def _anywhere(reads: Mapping[int, Source]) -> dict[int, Source]:
    return {number: anywhere(source, (), ()) for number, source in reads.items()}


@record
class Inner:
    """A jaxpr inside an equation, rewritten."""

    jaxpr: Any
    scope: Scope
    # The masks of the inputs that have one, and those of the results.
    inputs: list[Any]
    results: list[Mask]

    def outvars(self, wanted: Sequence[bool]) -> list[Any]:
        """The masks of the results that are wanted, computed where there is none."""
        return [
            self.scope.nothing(atom.aval.shape) if mask is None else mask
            for atom, mask, is_wanted in zip(self.jaxpr.outvars, self.results, wanted, strict=True)
            if is_wanted
        ]

    def build(self, invars: Sequence[Any], outvars: Sequence[Any], **changes: Any) -> Any:
        """The jaxpr with the rewritten equations."""
        return self.jaxpr.replace(
            invars=list(invars),
            outvars=list(outvars),
            eqns=self.scope.eqns,
            # Names count from the end, so they stay right where only constvars are added.
            debug_info=self.jaxpr.debug_info,
            **changes,
        )
