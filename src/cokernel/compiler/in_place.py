"""Blocks that are computed where they will be copied to: a core's own Ref that is always written
whole and then copied, whole, to an operand becomes that part of the operand.

`emit_pipeline` has its body write each block of an output to a slot of a Ref and copies the slot to
the output; users write such copies themselves. Where the writing covers the block, nothing ever
reads it, and the copy follows in the same iteration, the block is written to the operand at once
and the copy is left out. Nobody can tell the difference, because between the two

- the core does not touch the operand in any other way, so its own order does not matter;
- the core does not wait, poll or read what others sign with. Whoever reads or writes that part of
  the operand on another core is ordered with the copy only through something that the core does
  before the writing or after the copy, and so is ordered with the writing in the same way;
- each element gets its final value in the end whatever another core writes there at the same time,
  because nothing is computed from what is in the block. Two cores that both do all of the work
  write the same values in any order.

An `aim` in front of the writing tells where the block will be copied to, or, where a `cond` around
the copy does not copy, that memory of the core's takes it, as nobody will see it. The block lies
there with the strides of the operand, for which the Ref's own memory may not suffice.
"""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.analysis import (
    called_jaxprs,
    equation_may_suspend,
    finished_copies,
    inner_jaxprs,
    is_known,
    over_jaxprs,
    passed_on,
)
from cokernel.compiler.covering import covers, unused_results
from cokernel.compiler.moves import (
    Block,
    Copy,
    Expressions,
    Slot,
    block_of,
    copy_of,
    expressions_of,
    is_scalar,
    part_of,
    root,
    slot_of,
    slot_of_transforms,
)
from cokernel.compiler.pipelines import is_written_by_pipeline
from cokernel.compiler.stored_products import stored_products
from cokernel.records import record

# Given a Ref and, where it is to be that, a part of an operand.
aim_p = _jax.Primitive("aim")
aim_p.multiple_results = True

# Fewer bytes are copied faster than found.
LEAST_BYTES = 4096
# The most memory that a core may need for one block that lies there as it would in an operand.
MOST_SPARE_BYTES = 1 << 22


@record(frozen=True)
class Placement:
    """How the blocks that a Ref becomes lie in operands."""

    # In bytes, of the dimensions of a block.
    strides: tuple[int, ...]
    # Whether the Ref has slots, a dimension in front of the block's.
    has_slots: bool
    # The bytes from the beginning of a block to its end, if some are written that are not copied.
    spare_bytes: int = 0


class _Body:
    """A jaxpr, with what is asked of it for each of its copies."""

    def __init__(self, jaxpr: Any):
        self.eqns = jaxpr.eqns
        self.expressions = expressions_of(jaxpr)
        self.unused = unused_results(jaxpr)
        # By the numbers of equations: copies that are waited for straight away, which suspends
        # nobody, and stores of products.
        self.silent = finished_copies(jaxpr)
        self.products = {product.store for product in stored_products(jaxpr, is_checked=False)}


@record(frozen=True)
class _Pair:
    """The equations of one jaxpr that write a block and copy it, by their numbers."""

    ref: Any
    operand: Any
    written: int
    copied: int
    copy: Copy
    block: Block
    placement: Placement
    # The equations behind the first one that what the `aim` needs is computed by.
    moved: tuple[int, ...]


def placed_blocks(
    jaxpr: Any, memory: Callable[[Any], Any], is_own: Callable[[Any], bool]
) -> tuple[Any, dict[Any, Placement]]:
    """The program with its aims, and the Refs that they are for, by their variables: parameters of
    the program or of its scopes.

    `memory` tells which memory a parameter of the program is if that is an operand, else None.
    `is_own` tells of one whether it is memory of the core's that no other program reaches.
    """
    search = _Search()
    operands: dict[Any, Any] = {}
    names: dict[Any, Any] = {}
    for var in jaxpr.invars:
        place = memory(var)
        names[var] = var if place is None else operands.setdefault(place, var)
        if is_own(var) and _may_be_placed(var.aval):
            search.candidates.add(var)
    search.operands = set(operands.values())
    search.visit(jaxpr, names)
    found = search.placements()
    if not found:
        return jaxpr, {}
    rewriter = _Rewriter(search, found)
    rewritten = rewriter.jaxpr(jaxpr)
    expected = sum(pair.ref in found for pairs in search.pairs.values() for pair in pairs)
    if rewriter.aims != expected:
        # Without its aim a block would be written to the wrong place.
        raise AssertionError(f"{rewriter.aims} aims for {expected} blocks")
    return rewritten, found


class _Search:
    """A walk through a program that pairs what writes candidates with what copies them."""

    def __init__(self) -> None:
        self.operands: set[Any] = set()
        # The Refs that may be placed, those that something else is done with, and the operands
        # that are used otherwise than by DMAs.
        self.candidates: set[Any] = set()
        self.refused: set[Any] = set()
        self.touched: set[Any] = set()
        # By the identity of the jaxpr, which `_kept` keeps alive.
        self.pairs: dict[int, list[_Pair]] = {}
        self._kept: list[Any] = []

    def placements(self) -> dict[Any, Placement]:
        """The Refs that can be placed."""
        found: dict[Any, Placement] = {}
        refused = set(self.refused)
        spare: dict[Any, int] = {}
        for pairs in self.pairs.values():
            for pair in pairs:
                if pair.operand in self.touched:
                    refused.add(pair.ref)
                if found.setdefault(pair.ref, pair.placement) != pair.placement:
                    refused.add(pair.ref)
                if pair.copy.branch is not None:
                    # A block that is not copied is written to memory of the core's, with the same
                    # strides.
                    spare[pair.ref] = pair.block.extent_bytes()
        refused |= {ref for ref, size in spare.items() if size > MOST_SPARE_BYTES}
        return {
            ref: dataclasses.replace(placement, spare_bytes=spare.get(ref, 0))
            for ref, placement in found.items()
            if ref not in refused
        }

    def visit(self, jaxpr: Any, names: dict[Any, Any], around: tuple[Any, ...] = ()) -> None:
        """`names` tells which Ref of the program each Ref variable of the jaxpr is; `around` are
        the equations that run the jaxpr, the innermost first.
        """
        pairs = self._pairs(jaxpr, names, around)
        if id(jaxpr) in self.pairs:
            # It is called more than once, so it cannot be rewritten for one of the calls.
            self.refused |= {pair.ref for pair in (*pairs, *self.pairs[id(jaxpr)])}
            pairs = []
        self.pairs.setdefault(id(jaxpr), []).extend(pairs)
        self._kept.append(jaxpr)
        explained = {(pair.ref, number) for pair in pairs for number in (pair.written, pair.copied)}
        for number, eqn in enumerate(jaxpr.eqns):
            used = _refs(eqn, names)
            open_ones = {ref for ref in used if (ref, number) not in explained}
            if eqn.primitive is _jax.tpu_primitives.dma_wait_p:
                continue
            if eqn.primitive is _jax.tpu_primitives.dma_start_p:
                self.refused |= open_ones
            elif eqn.primitive is _jax.pallas_primitives.run_scoped_p:
                body = eqn.params["jaxpr"]
                inside = passed_on(eqn.invars, body.constvars, names)
                if eqn.params["collective_axes"]:
                    self.refused |= open_ones
                for var in body.invars:
                    inside[var] = var
                    if _may_be_placed(var.aval) and not eqn.params["collective_axes"]:
                        self.candidates.add(var)
                self.visit(body, _without(inside, used - open_ones), (eqn, *around))
            elif (passing := called_jaxprs(eqn)) is not None:
                for body, arguments in passing:
                    inside = passed_on(arguments, body.invars, names)
                    self.visit(body, _without(inside, used - open_ones), (eqn, *around))
            else:
                self.refused |= open_ones
                self.touched |= used

    def _pairs(self, jaxpr: Any, names: dict[Any, Any], around: tuple[Any, ...]) -> list[_Pair]:
        copies = {number: copy for number, eqn in enumerate(jaxpr.eqns) if (copy := copy_of(eqn))}
        if not copies:
            return []
        body = _Body(jaxpr)
        found = (self._pair(body, names, number, copy, around) for number, copy in copies.items())
        return [pair for pair in found if pair is not None]

    def _pair(
        self,
        body: _Body,
        names: dict[Any, Any],
        number: int,
        copy: Copy,
        around: tuple[Any, ...],
    ) -> _Pair | None:
        """The pair of a copy, if what it copies is a candidate that was written before."""
        source, target = copy.parts()
        variable, _ = part_of(source)
        ref = root(copy.outer(variable), names)
        block = block_of(target)
        if ref not in self.candidates or block is None:
            return None
        operand = root(copy.outer(block.ref), names)
        if operand not in self.operands:
            return None
        expressions = body.expressions
        for inside, outside in copy.outside.items():
            if not isinstance(inside.aval, _jax.AbstractRef):
                expressions.equate(inside, outside)
        for eqn in copy.before:
            expressions.define(eqn)
        is_of_pipeline = is_written_by_pipeline((copy.start, copy.eqn, *around))
        if is_of_pipeline and not block.is_inside(expressions):
            # A block that hangs over the end would be cut off there.
            return None
        found = slot_of(source)
        if found is None or block.shape != found.shape(variable.aval):
            return None
        written = self._writer(body, names, ref, number)
        if written is None:
            return None
        between = range(written, number)
        if any(_acquires(body.eqns[other]) for other in between if other not in body.silent):
            return None
        if any(operand in _refs(body.eqns[other], names) for other in between):
            return None
        if not self._writes(body, written, ref, names, found):
            return None
        moved = _computed_between(body.eqns, written, number, copy.eqn.invars)
        if moved is None:
            return None
        placement = Placement(block.strides, found.slot is not None)
        return _Pair(ref, operand, written, number, copy, block, placement, moved)

    def _writer(self, body: _Body, names: dict[Any, Any], ref: Any, copied: int) -> int | None:
        """The last equation in front of a copy that does something with the Ref."""
        for number in reversed(range(copied)):
            eqn = body.eqns[number]
            is_wait = eqn.primitive is _jax.tpu_primitives.dma_wait_p
            if not is_wait and ref in _refs(eqn, names):
                return number
        return None

    def _writes(
        self, body: _Body, number: int, ref: Any, names: dict[Any, Any], slot: Slot
    ) -> bool:
        """Whether an equation writes the whole slot, does not read it, and does nothing else with
        the Ref."""
        eqn, expressions = body.eqns[number], body.expressions
        places = [place for place, atom in enumerate(eqn.invars) if root(atom, names) is ref]
        if len(places) != 1:
            return False
        if eqn.primitive is _jax.swap_p:
            if number in body.products:
                # The sums of a product grow where it is stored.
                return False
            stored = slot_of_transforms(
                eqn.invars[0].aval, eqn.params["tree"].unflatten(eqn.invars[2:])
            )
            return eqn.outvars[0] in body.unused and _is_same(stored, slot, expressions)
        copy = copy_of(eqn)
        if copy is None:
            return slot.slot is None and covers(eqn, places[0])
        target = copy.parts()[1]
        if copy.branch is not None or root(copy.outer(part_of(target)[0]), names) is not ref:
            return False
        filled = slot_of(target)
        # What an index is called inside of another jaxpr says nothing out here.
        is_comparable = copy.inner is None or slot.slot is None
        return is_comparable and _is_same(filled, slot, expressions)


def _is_same(one: Slot | None, other: Slot, expressions: Expressions) -> bool:
    if one is None or (one.slot is None) != (other.slot is None):
        return False
    return one.slot is None or expressions.number(one.slot) == expressions.number(other.slot)


def _may_be_placed(aval: Any) -> bool:
    if not isinstance(aval, _jax.AbstractRef) or dtypes.is_semaphore(aval.dtype):
        return False
    if aval.memory_space not in (_jax.TpuMemorySpace.VMEM, _jax.TpuMemorySpace.SMEM):
        return False
    return aval.size * dtypes.itemsize(aval.dtype) >= LEAST_BYTES


def _without(names: dict[Any, Any], refs: set[Any]) -> dict[Any, Any]:
    """`names` without Refs of which it is known what is done with them."""
    return {var: ref for var, ref in names.items() if ref not in refs}


def _refs(eqn: Any, names: dict[Any, Any]) -> set[Any]:
    """The Refs of the program that an equation is given."""
    return {names[atom] for atom in eqn.invars if is_known(atom, names)}


def _acquires(eqn: Any) -> bool:
    """Whether an equation may be ordered behind what another core has done."""
    return equation_may_suspend(eqn, is_checked=False) or _has(
        eqn, _jax.sc_primitives.fetch_and_add_p
    )


def _has(eqn: Any, primitive: Any) -> bool:
    return eqn.primitive is primitive or any(
        _has(inner, primitive) for body in inner_jaxprs(eqn) for inner in body.eqns
    )


def _computed_between(
    eqns: Sequence[Any], written: int, copied: int, needed: Iterable[Any]
) -> tuple[int, ...] | None:
    """The equations from `written` to `copied` that compute atoms, in order; None if not all of
    them could as well come first.
    """
    wanted = {atom for atom in needed if isinstance(atom, _jax.Var)}
    moved = []
    for number in reversed(range(written, copied)):
        eqn = eqns[number]
        if wanted.isdisjoint(eqn.outvars):
            continue
        if not is_scalar(eqn):
            return None
        moved.append(number)
        wanted |= {atom for atom in eqn.invars if isinstance(atom, _jax.Var)}
    return tuple(reversed(moved))


class _Rewriter:
    """Puts an aim in front of what writes a block."""

    def __init__(self, search: _Search, placed: dict[Any, Placement]):
        self.search = search
        self.placed = placed
        self.aims = 0

    def jaxpr(self, jaxpr: Any) -> Any:
        pairs = [p for p in self.search.pairs.get(id(jaxpr), []) if p.ref in self.placed]
        moved: set[int] = set()
        eqns = []
        for number, eqn in enumerate(jaxpr.eqns):
            # A loop may write several Refs.
            for pair in (pair for pair in pairs if pair.written == number):
                early = [other for other in pair.moved if other not in moved]
                moved.update(early)
                eqns += [jaxpr.eqns[other] for other in early]
                eqns.append(_aim(pair.copy))
                self.aims += 1
            if number not in moved:
                params = {
                    name: over_jaxprs(parameter, self.jaxpr)
                    for name, parameter in eqn.params.items()
                }
                eqns.append(eqn.replace(params=params))
        return jaxpr.replace(eqns=eqns)


def _aim(copy: Copy) -> Any:
    """The equation of a copy with an aim in place of the copy."""
    source, target = copy.parts()
    variable, _ = part_of(source)
    aim = _aim_at(copy.start, variable, target)
    if copy.inner is None:
        return aim
    if copy.branch is None:
        body = copy.inner
        call = body.replace(
            constvars=[], invars=[*body.constvars], eqns=[*copy.before, aim], effects=set()
        )
        return copy.eqn.replace(
            primitive=_jax.closed_call_p, params={"call_jaxpr": call}, effects=set()
        )
    place = copy.inner.invars.index(variable)
    branches = []
    for number, branch in enumerate(copy.eqn.params["branches"]):
        if number == copy.branch:
            eqns = [*copy.before, aim]
        else:
            eqns = [_aim_at(copy.start, branch.invars[place], None)]
        branches.append(branch.replace(eqns=eqns, effects=set()))
    params = {**copy.eqn.params, "branches": tuple(branches)}
    return copy.eqn.replace(params=params, effects=set())


def _aim_at(start: Any, variable: Any, target: Any) -> Any:
    flat, tree = jax.tree.flatten((variable, None if target is None else part_of(target)))
    return start.replace(
        primitive=aim_p, invars=flat, outvars=[], params={"tree": tree}, effects=set()
    )
