"""Parts of Refs under a dtype of another width where one of the two has less than a byte: no
addresses describe such a part, so a program reads, changes and writes a copy of it.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from cokernel import _jax
from cokernel.compiler.analysis import with_replaced
from cokernel.compiler.dtypes import bit_width
from cokernel.compiler.moves import is_whole

# A new Ref with the contents of an array, which goes by the name of the Ref that is given first.
copied_part_p = _jax.Primitive("copied_part")
# `bitcast_rows` of a part that is written back once some of it has been changed. What is written to
# a wide element may be less than all of it, and checked mode has one answer for the whole: an
# element counts as undefined only if none of its parts has been written. `is_read`: it is what has
# been read in order to be written back, which is no read of the program's own.
copied_bits_p = _jax.Primitive("copied_bits")

Transforms = tuple[Any, ...]


def without_few_bits(jaxpr: Any) -> Any:
    """The same program, in which no access goes through such a bitcast; itself if none does."""
    return with_replaced(jaxpr, _stand_in)


def _stand_in(eqn: Any) -> list[Any] | None:
    divided = _divide(eqn)
    return None if divided is None else _Copy(eqn, *divided).eqns()


def _divide(eqn: Any) -> tuple[Transforms, Any, Transforms] | None:
    """What an access does to its Ref before such a bitcast, the bitcast, and what comes after it;
    None if there is none.
    """
    if eqn.primitive not in _OPERANDS or not _has_bitcast(eqn.params["tree"]):
        return None
    transforms = _transforms(eqn)
    ref_type = eqn.invars[0].aval
    for number, transform in enumerate(transforms):
        before = ref_type.dtype
        ref_type = transform.transform_type(ref_type)
        if isinstance(transform, _jax.BitcastTransform):
            widths = {bit_width(before), bit_width(transform.dtype)}
            if len(widths) == 2 and min(widths) < 8:
                return transforms[:number], transform, transforms[number + 1 :]
    return None


@functools.lru_cache(1024)
def _has_bitcast(tree: Any) -> bool:
    transforms = jax.tree.unflatten(tree, range(tree.num_leaves))
    return any(isinstance(transform, _jax.BitcastTransform) for transform in transforms)


# How many operands an access has before the indices of its transforms.
_OPERANDS = {_jax.get_p: 1, _jax.swap_p: 2, _jax.addupdate_p: 2}


def _transforms(eqn: Any) -> Transforms:
    return jax.tree.unflatten(eqn.params["tree"], eqn.invars[_OPERANDS[eqn.primitive] :])


class _Copy:
    """An access to a part of a Ref under another dtype, by way of a copy of that part."""

    def __init__(self, eqn: Any, first: Transforms, bitcast: Any, rest: Transforms):
        self.eqn = eqn
        self.ref = eqn.invars[0]
        self.first = first
        self.rest = rest
        part = functools.reduce(lambda kind, step: step.transform_type(kind), first, self.ref.aval)
        self.outer = _jax.ShapedArray(tuple(part.shape), np.dtype(part.dtype))
        seen = bitcast.transform_type(part)
        self.inner = _jax.ShapedArray(tuple(seen.shape), np.dtype(seen.dtype))
        self.is_all = all(_is_all(step) for step in rest)

    def eqns(self) -> list[Any]:
        """The equations that do what the access does."""
        if self.eqn.primitive is _jax.get_p and self.is_all:
            return self.load(self.eqn.outvars[0])
        is_dropped = all(isinstance(item, _jax.DropVar) for item in self.eqn.outvars)
        if self.eqn.primitive is _jax.swap_p and self.is_all and is_dropped:
            return self.store(self.eqn.invars[1])
        contents = _jax.Var(self.inner)
        copy = _jax.Var(_jax.AbstractRef(self.inner))
        flat, tree = jax.tree.flatten(self.rest)
        operands = self.eqn.invars[1 : _OPERANDS[self.eqn.primitive]]
        access = self.eqn.replace(
            invars=[copy, *operands, *flat], params={**self.eqn.params, "tree": tree}
        )
        goes_back = self.eqn.primitive is not _jax.get_p
        eqns = [
            *self.load(contents, goes_back=goes_back),
            self.emit(copied_part_p, [self.ref, contents], [copy], {}),
            # The rest may have such a bitcast, too.
            *(_stand_in(access) or [access]),
        ]
        if not goes_back:
            return eqns
        changed = _jax.Var(self.inner)
        params = {"tree": jax.tree.structure(())}
        read = self.emit(_jax.get_p, [copy], [changed], params)
        return [*eqns, read, *self.store(changed, goes_back=True)]

    def load(self, result: Any, *, goes_back: bool = False) -> list[Any]:
        """Reads the part, under the other dtype."""
        flat, tree = jax.tree.flatten(self.first)
        part = _jax.Var(self.outer)
        read = self.emit(_jax.get_p, [self.ref, *flat], [part], {"tree": tree})
        return [read, self.convert(part, result, goes_back, is_read=True)]

    def store(self, value: Any, *, goes_back: bool = False) -> list[Any]:
        """Writes all of the part."""
        flat, tree = jax.tree.flatten(self.first)
        part = _jax.Var(self.outer)
        dropped = _jax.DropVar(self.outer)
        write = self.emit(_jax.swap_p, [self.ref, part, *flat], [dropped], {"tree": tree})
        return [self.convert(value, part, goes_back, is_read=False), write]

    def convert(self, value: Any, result: Any, goes_back: bool, *, is_read: bool) -> Any:
        """The bits of a value under the dtype of the result."""
        if goes_back:
            return self.emit(
                copied_bits_p, [value], [result], {"dtype": result.aval.dtype, "is_read": is_read}
            )
        aval = jax.ShapeDtypeStruct(value.aval.shape, value.aval.dtype)
        function = functools.partial(bitcast_rows, dtype=result.aval.dtype)
        jaxpr = jax.make_jaxpr(function)(aval)
        eqns = [inner.replace(source_info=self.eqn.source_info) for inner in jaxpr.eqns]
        jaxpr = jaxpr.replace(eqns=eqns)
        return self.emit(_jax.closed_call_p, [value], [result], {"call_jaxpr": jaxpr})

    def emit(
        self, primitive: Any, invars: Sequence[Any], outvars: Sequence[Any], params: dict[str, Any]
    ) -> Any:
        """An equation at the line of the access."""
        return self.eqn.replace(
            primitive=primitive, invars=list(invars), outvars=list(outvars), params=params
        )


def _is_all(transform: Any) -> bool:
    if not isinstance(transform, _jax.NDIndexer):
        return False
    return is_whole(tuple(transform.indices), tuple(transform.shape))


def bitcast_rows(x: jax.Array, dtype: Any) -> jax.Array:
    """The bits of an array under another dtype as Pallas has it of Refs: the parts of a wide
    element lie under each other, the lowest bits first.
    """
    before, after = bit_width(x.dtype), bit_width(dtype)
    *outer, rows, columns = x.shape
    if before < after:
        count = after // before
        parts = lax.reshape(x, (*outer, rows // count, count, columns))
        return lax.bitcast_convert_type(_swapped(parts), dtype)
    parts = _swapped(lax.bitcast_convert_type(x, dtype))
    return lax.reshape(parts, (*outer, rows * (before // after), columns))


def _swapped(x: jax.Array) -> jax.Array:
    *outer, i, j = range(x.ndim)
    return lax.transpose(x, (*outer, j, i))
