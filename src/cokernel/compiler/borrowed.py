"""Blocks that need not be copied: a core's own Ref whose contents always come, whole, from an
operand that nobody writes is read where the operand lies.

`emit_pipeline` copies each block of its inputs to one of two slots of a Ref, and its body reads the
slot; users copy blocks to whole Refs. Where nothing else is done with the Ref, a copy to it or to a
slot only notes the address of the block, and a read goes there. Nobody can tell the difference,
because the operand stays as it is for as long as the kernel runs.
"""

from collections.abc import Callable, Iterable
from typing import Any

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.analysis import called_jaxprs, is_known, passed_on
from cokernel.compiler.moves import (
    Expressions,
    begins_with_slot,
    block_of,
    expressions_of,
    part_of,
    root,
    slot_of,
)
from cokernel.compiler.pipelines import is_written_by_pipeline
from cokernel.records import record

# Fewer bytes are copied faster than found.
LEAST_BYTES = 4096


@record(frozen=True)
class Borrowing:
    """How a Ref, or each of its slots, lies in the operand that it comes from."""

    # The operand's variable among the program's parameters.
    operand: Any
    # The strides, in bytes, of the dimensions of a block.
    strides: tuple[int, ...]
    # Whether the Ref has slots, along a dimension in front of those.
    has_slots: bool


def borrowed_blocks(
    jaxpr: Any, constant: Callable[[Any], bool], is_own: Callable[[Any], bool]
) -> dict[Any, Borrowing]:
    """The Refs that can be borrowed, by their variables: parameters of a program or of its scopes.

    `constant` tells of a parameter of the program whether it is an operand that nobody writes, and
    `is_own` whether it is memory of the core's that no other program reaches.
    """
    search = _Search({var for var in jaxpr.invars if constant(var)})
    for var in jaxpr.invars:
        if is_own(var) and _may_be_borrowed(var.aval):
            search.sources[var] = []
    search.visit(jaxpr, {var: var for var in jaxpr.invars})
    return {
        var: found[0]
        for var, found in search.sources.items()
        if var not in search.refused
        and found
        and all(item == found[0] for item in found)
        and not (found[0].has_slots and var in search.read_at_large)
    }


class _Search:
    """A walk through a program that follows Refs into the jaxprs of its equations."""

    def __init__(self, operands: set[Any]):
        self.operands = operands
        # What is copied to each candidate, the candidates that are used in another way, and those
        # of which more than one slot is read at once.
        self.sources: dict[Any, list[Borrowing]] = {}
        self.refused: set[Any] = set()
        self.read_at_large: set[Any] = set()

    def visit(self, jaxpr: Any, names: dict[Any, Any], around: tuple[Any, ...] = ()) -> None:
        """`names` tells which Ref of the program each Ref variable of the jaxpr is; `around` are
        the equations that run the jaxpr, the innermost first.
        """
        expressions = expressions_of(jaxpr)
        for eqn in jaxpr.eqns:
            if eqn.primitive is _jax.get_p:
                ref, *flat = eqn.invars
                self._read(ref, eqn.params["tree"].unflatten(flat), names)
                self._refuse(flat, names)
            elif eqn.primitive is _jax.tpu_primitives.dma_start_p:
                self._copy(eqn, names, expressions, around)
            elif eqn.primitive is _jax.tpu_primitives.dma_wait_p:
                continue
            elif eqn.primitive is _jax.pallas_primitives.run_scoped_p:
                body = eqn.params["jaxpr"]
                inside = passed_on(eqn.invars, body.constvars, names)
                if eqn.params["collective_axes"]:
                    self._refuse(eqn.invars, names)
                for var in body.invars:
                    inside[var] = var
                    if _may_be_borrowed(var.aval) and not eqn.params["collective_axes"]:
                        self.sources[var] = []
                self.visit(body, inside, (eqn, *around))
            elif (passing := called_jaxprs(eqn)) is not None:
                for body, arguments in passing:
                    inside = passed_on(arguments, body.invars, names)
                    self.visit(body, inside, (eqn, *around))
            else:
                self._refuse(eqn.invars, names)

    def _refuse(self, atoms: Iterable[Any], names: dict[Any, Any]) -> None:
        self.refused |= {names[atom] for atom in atoms if is_known(atom, names)}

    def _read(self, ref: Any, transforms: Any, names: dict[Any, Any]) -> None:
        if not transforms or not begins_with_slot(transforms[0]):
            self.read_at_large.add(root(ref, names))

    def _copy(
        self, eqn: Any, names: dict[Any, Any], expressions: Expressions, around: tuple[Any, ...]
    ) -> None:
        source, target, _, departure, device = eqn.params["tree"].unflatten(eqn.invars)
        source_ref, transforms = part_of(source)
        target_ref, _ = part_of(target)
        if not isinstance(source_ref, _jax.Var) or not isinstance(target_ref, _jax.Var):
            # One of several Refs, chosen as the program runs.
            self._refuse(eqn.invars, names)
            return
        is_plain = not eqn.params["add"] and departure is None and device is None
        borrowing = self._borrowing(source, target, names) if is_plain else None
        if is_written_by_pipeline((eqn, *around)):
            block = block_of(source)
            if block is not None and not block.is_inside(expressions):
                # What hangs over the end would be cut off there.
                borrowing = None
        copied_to = self.sources.get(root(target_ref, names))
        if borrowing is not None and copied_to is not None:
            copied_to.append(borrowing)
        else:
            self._refuse([target_ref], names)
        if is_plain:
            self._read(source_ref, transforms, names)
        else:
            self._refuse([source_ref], names)
        # What is left are semaphores and indices.
        ends = (source_ref, target_ref)
        rest = [atom for atom in eqn.invars if not any(atom is end for end in ends)]
        self._refuse(rest, names)
        if sum(atom is source_ref for atom in eqn.invars) > 1:
            self._refuse([source_ref], names)

    def _borrowing(self, source: Any, target: Any, names: dict[Any, Any]) -> Borrowing | None:
        """What a copy makes of its target if it always fills all of it, or of a slot, with a block
        of an operand."""
        block, filled = block_of(source), slot_of(target)
        if block is None or filled is None:
            return None
        operand = root(block.ref, names)
        if operand not in self.operands or filled.shape(part_of(target)[0].aval) != block.shape:
            return None
        return Borrowing(operand, block.strides, filled.slot is not None)


def _may_be_borrowed(aval: Any) -> bool:
    if not isinstance(aval, _jax.AbstractRef) or dtypes.is_semaphore(aval.dtype):
        return False
    if aval.memory_space not in (_jax.TpuMemorySpace.VMEM, _jax.TpuMemorySpace.SMEM):
        return False
    return aval.size * dtypes.itemsize(aval.dtype) >= LEAST_BYTES
