"""Blocks that need not be copied: a core's own Ref whose contents always come, whole, from an
operand that nobody writes is read where the operand lies.

`emit_pipeline` copies each block of its inputs to one of two slots of a Ref, and its body reads the
slot. Where nothing else is done with the Ref, a copy to a slot only notes the address of the block,
and a read of the slot goes there. Nobody can tell the difference, because the operand stays as it
is for as long as the kernel runs.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.analysis import called_jaxprs, is_known, passed_on
from cokernel.compiler.values import row_major

# Fewer bytes are copied faster than found.
LEAST_BYTES = 4096


@dataclasses.dataclass(frozen=True)
class Borrowing:
    """How the slots of a Ref lie in the operand that they come from."""

    # The operand's variable among the program's parameters.
    operand: Any
    # The strides, in bytes, of the dimensions behind the slot's.
    strides: tuple[int, ...]


def borrowed_blocks(jaxpr: Any, constant: Callable[[Any], bool]) -> dict[Any, Borrowing]:
    """The Refs that scopes of a program allocate and that can be borrowed, by their variables.
    `constant` tells of a parameter of the program whether it is an operand that nobody writes.
    """
    search = _Search({var for var in jaxpr.invars if constant(var)})
    search.visit(jaxpr, {var: var for var in jaxpr.invars})
    return {
        var: found[0]
        for var, found in search.sources.items()
        if var not in search.refused and found and all(item == found[0] for item in found)
    }


class _Search:
    """A walk through a program that follows Refs into the jaxprs of its equations."""

    def __init__(self, operands: set[Any]):
        self.operands = operands
        # What is copied to each candidate, and the candidates that are used in another way.
        self.sources: dict[Any, list[Borrowing]] = {}
        self.refused: set[Any] = set()

    def visit(self, jaxpr: Any, names: dict[Any, Any]) -> None:
        """`names` tells which Ref of the program each Ref variable of the jaxpr is."""
        for eqn in jaxpr.eqns:
            if eqn.primitive is _jax.get_p:
                self._read(eqn, names)
            elif eqn.primitive is _jax.tpu_primitives.dma_start_p:
                self._copy(eqn, names)
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
                self.visit(body, inside)
            elif (passing := called_jaxprs(eqn)) is not None:
                for body, arguments in passing:
                    self.visit(body, passed_on(arguments, body.invars, names))
            else:
                self._refuse(eqn.invars, names)

    def _refuse(self, atoms: Iterable[Any], names: dict[Any, Any]) -> None:
        self.refused |= {names[atom] for atom in atoms if is_known(atom, names)}

    def _read(self, eqn: Any, names: dict[Any, Any]) -> None:
        ref, *flat = eqn.invars
        transforms = eqn.params["tree"].unflatten(flat)
        if not transforms or not _begins_with_slot(transforms[0]):
            self._refuse([ref], names)
        self._refuse(flat, names)

    def _copy(self, eqn: Any, names: dict[Any, Any]) -> None:
        source, target, _, departure, device = eqn.params["tree"].unflatten(eqn.invars)
        borrowing = None
        if isinstance(source, _jax.TransformedRef) and isinstance(target, _jax.TransformedRef):
            is_plain = not eqn.params["add"] and departure is None and device is None
            if is_plain and _is_whole_slot(target):
                borrowing = self._borrowing(source, names)
        if borrowing is None:
            self._refuse(eqn.invars, names)
            return
        target_ref: Any = names.get(target.ref)
        if target_ref in self.sources and borrowing.shape == tuple(target_ref.aval.shape[1:]):
            self.sources[target_ref].append(Borrowing(borrowing.operand, borrowing.strides))
            self._refuse(set(eqn.invars) - {target.ref}, names)
        else:
            self._refuse(eqn.invars, names)

    def _borrowing(self, source: Any, names: dict[Any, Any]) -> "_Block | None":
        """The block of an operand that a transformed Ref is, if it always lies inside of it."""
        operand: Any = names.get(source.ref) if is_known(source.ref, names) else None
        if operand not in self.operands or len(source.transforms) != 1:
            return None
        [indexer] = source.transforms
        if not isinstance(indexer, _jax.NDIndexer):
            return None
        itemsize = dtypes.itemsize(operand.aval.dtype)
        shape, strides = [], []
        for index, extent, stride in zip(
            indexer.indices, operand.aval.shape, row_major(operand.aval.shape), strict=True
        ):
            if not isinstance(index, _jax.Slice):
                if getattr(getattr(index, "aval", index), "shape", ()):
                    return None
                continue
            # A block that does not divide the extent may hang over the end.
            if not isinstance(index.size, int | np.integer) or index.stride != 1:
                return None
            if extent % index.size:
                return None
            shape.append(int(index.size))
            strides.append(stride * itemsize)
        return _Block(operand, tuple(strides), tuple(shape))


@dataclasses.dataclass(frozen=True)
class _Block:
    operand: Any
    strides: tuple[int, ...]
    shape: tuple[int, ...]


def _may_be_borrowed(aval: Any) -> bool:
    if not isinstance(aval, _jax.AbstractRef) or dtypes.is_semaphore(aval.dtype):
        return False
    if aval.memory_space is not _jax.TpuMemorySpace.VMEM or len(aval.shape) < 2:
        return False
    return aval.size // aval.shape[0] * dtypes.itemsize(aval.dtype) >= LEAST_BYTES


def _begins_with_slot(transform: Any) -> bool:
    """Whether a transform picks one slot."""
    if not isinstance(transform, _jax.NDIndexer):
        return False
    slot = transform.indices[0]
    if isinstance(slot, _jax.Slice | _jax.Indices | _jax.TransformedRef):
        return False
    aval = getattr(slot, "aval", None)
    return not isinstance(aval, _jax.AbstractRef) and not getattr(aval or slot, "shape", ())


def _is_whole_slot(ref: Any) -> bool:
    """Whether a transformed Ref is just one slot."""
    if len(ref.transforms) != 1 or not _begins_with_slot(ref.transforms[0]):
        return False
    [indexer] = ref.transforms
    return all(
        isinstance(index, _jax.Slice)
        and isinstance(index.start, int | np.integer)
        and index.start == 0
        and index.size == extent
        and index.stride == 1
        for index, extent in zip(indexer.indices[1:], indexer.shape[1:], strict=True)
    )
