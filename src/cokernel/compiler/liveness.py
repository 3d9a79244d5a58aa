"""Which operands of an equation nobody needs afterwards, so that its result may take their place.

A temporary may be overwritten if it is read for the last time, the program that uses it owns it,
and no other value that is still alive lies in the same memory or is computed from it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jax import lax

from cokernel import _jax
from cokernel.compiler.memory import Allocation
from cokernel.compiler.values import Buffer, Expression, Packed, Scalar, Value

# The primitives whose rules ask which operands they may overwrite or hand on to be overwritten.
OVERWRITING = frozenset(
    {
        lax.dynamic_update_slice_p,
        lax.scatter_p,
        lax.scatter_add_p,
        lax.scatter_sub_p,
        lax.scatter_mul_p,
        lax.scatter_min_p,
        lax.scatter_max_p,
        _jax.jit_p,
        _jax.closed_call_p,
        _jax.custom_jvp_call_p,
        _jax.custom_vjp_call_p,
        _jax.remat_p,
        _jax.scan_p,
        _jax.while_p,
    }
)


def allocations(value: Any) -> frozenset[Allocation] | None:
    """The temporary memory that a value reads; None if that is not known."""
    if isinstance(value, Scalar | Packed) or not isinstance(value, Value):
        return frozenset()
    if isinstance(value, Buffer):
        return _of_owner(value.owner)
    if isinstance(value, Expression):
        return _union(value.operands)
    return None


def _union(values: Iterable[Any]) -> frozenset[Allocation] | None:
    found: set[Allocation] = set()
    for value in values:
        inner = allocations(value)
        if inner is None:
            return None
        found |= inner
    return frozenset(found)


def _of_owner(owner: Any) -> frozenset[Allocation] | None:
    if owner is None:
        return frozenset()
    if isinstance(owner, Allocation):
        return frozenset([owner])
    parts = getattr(owner, "parts", None)
    return None if parts is None else _union(parts)


class Ownership:
    """What the code of one jaxpr may overwrite: all but what its caller still needs."""

    def __init__(self, arguments: Iterable[Any], donated: Sequence[Value]):
        given = {id(value) for value in donated}
        self._borrowed = _union(value for value in arguments if id(value) not in given)

    def overwritable(
        self,
        env: Mapping[Any, Any],
        atoms: Sequence[Any],
        operands: Sequence[Any],
        number: int,
        last_use: Mapping[Any, int],
    ) -> list[Value]:
        """Those operands of equation `number`, which reads `atoms`, that its result may take the
        place of."""
        if self._borrowed is None:
            return []
        found: list[Value] = []
        for atom, operand in zip(atoms, operands, strict=True):
            if (
                isinstance(atom, _jax.Var)
                and last_use.get(atom) == number
                and isinstance(operand, Buffer)
                and operand.root is None
                and operand.is_dense
            ):
                memory = allocations(operand)
                others = [value for variable, value in env.items() if variable is not atom]
                needed = _union(others)
                if (
                    memory
                    and needed is not None
                    and sum(other is atom for other in atoms) == 1
                    and not memory & (needed | self._borrowed)
                    and not any(allocation.is_lasting for allocation in memory)
                ):
                    found.append(operand)
        return found
