"""What a jaxpr tells about copies: which part of a Ref each moves to which, and whether two indices
are always equal.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.analysis import is_known
from cokernel.compiler.values import row_major
from cokernel.records import record


@record(frozen=True)
class Block:
    """A part of a Ref in HBM that always lies inside of it."""

    # The variable of the Ref in the jaxpr at hand.
    ref: Any
    # In bytes.
    strides: tuple[int, ...]
    shape: tuple[int, ...]
    # Where each slice starts, and its size.
    slices: tuple[tuple[Any, int], ...]

    def extent_bytes(self) -> int:
        """The bytes from the first element to behind the last."""
        steps = zip(self.shape, self.strides, strict=True)
        last = sum((extent - 1) * stride for extent, stride in steps)
        return last + dtypes.itemsize(self.ref.aval.dtype)

    def is_inside(self, expressions: "Expressions") -> bool:
        """Whether the block lies inside of the Ref if it begins there. Its slices divide the
        extents, so it does where each starts at a multiple of its size."""
        return all(expressions.is_multiple(start, size) for start, size in self.slices)


def part_of(ref: Any) -> tuple[Any, tuple[Any, ...]]:
    """The variable of a Ref and the transforms on it."""
    if isinstance(ref, _jax.TransformedRef):
        return ref.ref, tuple(ref.transforms)
    return ref, ()


def block_of(ref: Any) -> Block | None:
    """The block that a Ref or a part of one is, if whole slices and single indices describe it and
    it can only reach over the end where one of its slices starts at no multiple of its size.
    """
    variable, transforms = part_of(ref)
    if not isinstance(variable, _jax.Var) or len(transforms) > 1:
        return None
    shape, strides, slices = [], [], []
    itemsize = dtypes.itemsize(variable.aval.dtype)
    extents = variable.aval.shape
    indices = tuple(_jax.Slice(0, extent) for extent in extents)
    if transforms:
        [indexer] = transforms
        if not isinstance(indexer, _jax.NDIndexer):
            return None
        indices = indexer.indices
    for index, extent, stride in zip(indices, extents, row_major(extents), strict=True):
        if not isinstance(index, _jax.Slice):
            if not is_single_index(index):
                return None
            continue
        if not isinstance(index.size, int | np.integer) or index.stride != 1:
            return None
        # A block that does not divide the extent may hang over the end.
        if index.size == 0 or extent % index.size or isinstance(index.start, _jax.TransformedRef):
            return None
        shape.append(int(index.size))
        strides.append(stride * itemsize)
        slices.append((index.start, int(index.size)))
    return Block(variable, tuple(strides), tuple(shape), tuple(slices))


def is_single_index(index: Any) -> bool:
    """Whether an index of an indexer picks one element of its dimension."""
    if isinstance(index, _jax.Slice | _jax.Indices | _jax.TransformedRef):
        return False
    aval = getattr(index, "aval", None)
    return not isinstance(aval, _jax.AbstractRef) and not getattr(aval or index, "shape", ())


def is_whole(indices: tuple[Any, ...], extents: tuple[int, ...]) -> bool:
    """Whether indices leave dimensions of these extents as they are."""
    return all(
        isinstance(index, _jax.Slice)
        and isinstance(index.start, int | np.integer)
        and index.start == 0
        and index.size == extent
        and index.stride == 1
        for index, extent in zip(indices, extents, strict=True)
    )


@record(frozen=True)
class Slot:
    """All of a Ref, or all of one slot of it."""

    slot: Any = None

    def shape(self, aval: Any) -> tuple[int, ...]:
        """The extents of it, given the type of the Ref."""
        return tuple(aval.shape) if self.slot is None else tuple(aval.shape[1:])


def slot_of(ref: Any) -> Slot | None:
    """The slot that a part of a Ref is, if it is all of one or of the Ref."""
    variable, transforms = part_of(ref)
    return slot_of_transforms(variable.aval, transforms) if isinstance(variable, _jax.Var) else None


def slot_of_transforms(aval: Any, transforms: Sequence[Any]) -> Slot | None:
    """The same for a Ref of that type and the transforms on it."""
    if not transforms:
        return Slot()
    if len(transforms) > 1 or not isinstance(transforms[0], _jax.NDIndexer):
        return None
    indices = transforms[0].indices
    if is_whole(indices, aval.shape):
        return Slot()
    if is_single_index(indices[0]) and is_whole(indices[1:], aval.shape[1:]):
        return Slot(indices[0])
    return None


def begins_with_slot(transform: Any) -> bool:
    """Whether a transform picks one slot."""
    return isinstance(transform, _jax.NDIndexer) and is_single_index(transform.indices[0])


@record(frozen=True)
class Copy:
    """An equation that starts one DMA of the core's own, or does so if a `cond` takes a branch."""

    eqn: Any
    start: Any
    # The jaxpr that the DMA is started in, if not that of `eqn`, the equations in front of it
    # there, and what each of its parameters is outside.
    inner: Any = None
    before: tuple[Any, ...] = ()
    outside: dict[Any, Any] = dataclasses.field(default_factory=dict)
    # The branch of a `cond`.
    branch: int | None = None

    def parts(self) -> tuple[Any, Any]:
        """Source and target."""
        return self.start.params["tree"].unflatten(self.start.invars)[:2]

    def outer(self, variable: Any) -> Any:
        """What a variable of the jaxpr that the DMA is started in is outside; None if nothing."""
        if self.inner is None:
            return variable
        return self.outside.get(variable) if isinstance(variable, _jax.Var) else None


def copy_of(eqn: Any) -> Copy | None:
    """The copy that an equation makes, if that is all that it does to memory."""
    if eqn.primitive is _jax.tpu_primitives.dma_start_p:
        return Copy(eqn, eqn) if _is_plain(eqn) else None
    if eqn.primitive is _jax.pallas_primitives.run_scoped_p:
        body = eqn.params["jaxpr"]
        if eqn.params["collective_axes"] or any(eqn.params["ref_transforms"]) or body.outvars:
            return None
        if not all(dtypes.is_semaphore(getattr(v.aval, "dtype", None)) for v in body.invars):
            return None
        return _copy_inside(eqn, body, body.constvars, eqn.invars, None)
    if eqn.primitive is _jax.cond_p and not eqn.outvars:
        branches = eqn.params["branches"]
        busy = [number for number, branch in enumerate(branches) if branch.eqns]
        if len(branches) == 2 and len(busy) == 1:
            [number] = busy
            inner = branches[number]
            return _copy_inside(eqn, inner, inner.invars, eqn.invars[1:], number)
    return None


def _is_plain(start: Any) -> bool:
    *_, device = start.params["tree"].unflatten(start.invars)
    return not start.params["add"] and device is None


def _copy_inside(
    eqn: Any, inner: Any, parameters: Any, arguments: Any, branch: int | None
) -> Copy | None:
    before: list[Any] = []
    start = None
    for item in inner.eqns:
        if item.primitive is _jax.tpu_primitives.dma_start_p and start is None:
            if not _is_plain(item):
                return None
            start = item
        elif start is None and is_scalar(item):
            before.append(item)
        elif start is None or item.primitive is not _jax.tpu_primitives.dma_wait_p:
            return None
    if start is None:
        return None
    outside = dict(zip(parameters, arguments, strict=True))
    return Copy(eqn, start, inner, tuple(before), outside, branch)


def is_scalar(eqn: Any) -> bool:
    """Whether an equation only computes a scalar from scalars."""
    return (
        not eqn.effects
        and len(eqn.outvars) == 1
        and all(
            not isinstance(atom.aval, _jax.AbstractRef) and getattr(atom.aval, "shape", None) == ()
            for atom in (*eqn.invars, *eqn.outvars)
        )
    )


class Expressions:
    """Numbers for scalars: equal ones are computed from the same variables in the same way, and so
    have the same value wherever both exist.
    """

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._of: dict[Any, int] = {}
        # How each was computed, by its number: the primitive and the numbers of its operands.
        self._made: dict[int, tuple[Any, tuple[int, ...]]] = {}
        self._constants: dict[int, int] = {}

    def define(self, eqn: Any) -> None:
        """Makes an equation of scalars known."""
        operands = tuple(map(self.number, eqn.invars))
        [variable] = eqn.outvars
        dtype = variable.aval.dtype
        result = self._number(("eqn", eqn.primitive, str(eqn.params), str(dtype), operands))
        self._made[result] = (eqn.primitive, operands)
        if eqn.primitive is lax.add_p and 0 in map(self.constant, operands):
            # The same value, so the same number.
            result = operands[1] if self.constant(operands[0]) == 0 else operands[0]
        elif eqn.primitive is lax.convert_element_type_p and eqn.invars[0].aval.dtype == dtype:
            result = operands[0]
        self._of[variable] = result

    def equate(self, variable: Any, atom: Any) -> None:
        """Makes a variable known as another atom."""
        self._of[variable] = self.number(atom)

    def number(self, atom: Any) -> int:
        """The number of an atom, or of a Python integer."""
        if isinstance(atom, int | np.integer):
            return self._constant(int(atom))
        if isinstance(atom, _jax.Literal):
            if np.issubdtype(atom.aval.dtype, np.integer):
                return self._constant(int(atom.val))
            return self._number(("literal", str(atom.aval), repr(atom.val)))
        if atom not in self._of:
            self._of[atom] = self._number(("variable", atom))
        return self._of[atom]

    def constant(self, number: int) -> int | None:
        """The integer that a number stands for, if it is known."""
        return self._constants.get(number)

    def is_multiple(self, atom: Any, size: int) -> bool:
        """Whether an integer is a multiple of `size`, as far as its last operation tells."""
        number = self.number(atom)
        candidates = (number, *self._operands(number, lax.mul_p))
        return any(
            constant is not None and constant % size == 0
            for constant in map(self.constant, candidates)
        )

    def is_sum(self, atom: Any, term: Any, constant: int) -> bool:
        """Whether an atom is another one and a constant."""
        operands = self._operands(self.number(atom), lax.add_p)
        return sorted(operands) == sorted((self.number(term), self._constant(constant)))

    def is_product(self, atom: Any, factor: int, constant: int) -> bool:
        """Whether an atom is the value of a number times a constant."""
        if constant == 1 and self.number(atom) == factor:
            return True
        operands = self._operands(self.number(atom), lax.mul_p)
        return sorted(operands) == sorted((factor, self._constant(constant)))

    def _operands(self, number: int, primitive: Any) -> tuple[int, ...]:
        """The operands of a number if that primitive has computed it."""
        made, operands = self._made.get(number, (None, ()))
        return operands if made is primitive else ()

    def _constant(self, value: int) -> int:
        number = self._number(("integer", value))
        self._constants[number] = value
        return number

    def _number(self, key: Any) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def expressions_of(jaxpr: Any) -> Expressions:
    """The scalars that a jaxpr computes."""
    expressions = Expressions()
    for eqn in jaxpr.eqns:
        if is_scalar(eqn):
            expressions.define(eqn)
    return expressions


def root(atom: Any, names: dict[Any, Any]) -> Any:
    """The Ref of the program that a variable stands for, by `names`; None if none is known."""
    return names[atom] if is_known(atom, names) else None
