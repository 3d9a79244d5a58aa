"""Which matrix products can be summed in the memory of the Ref that they are meant for."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import lax

from cokernel import _jax
from cokernel.compiler.analysis import writes_memory
from cokernel.records import record


@record(frozen=True)
class Clearing:
    """A conditional that may store zeros where a product is added right afterwards, by the number
    of its equation, and which of its two branches does. Nobody but the addition sees the zeros, so
    that they need not be stored: in that branch the product can be stored instead.

    `beside` are the Refs that are read in between. It holds only if those lie elsewhere. `read` is
    the number of the equation that reads what is cleared, for an addition that is no store by
    itself.
    """

    number: int
    branch: int
    beside: tuple[Any, ...]
    read: int | None


@record(frozen=True)
class StoredProduct:
    """A matrix product that is only stored to a Ref or added to it, by the numbers of the equations
    for the product, for the addition of something else if there is one, and for the store.
    """

    product: int
    addition: int | None
    store: int
    clearing: Clearing | None = None

    def equations(self) -> list[int]:
        """The numbers of all of them."""
        clearing = None if self.clearing is None else self.clearing.number
        numbers = (clearing, self.product, self.addition, self.store)
        return [number for number in numbers if number is not None]


def stored_products(jaxpr: Any, *, is_checked: bool) -> list[StoredProduct]:
    """The products that can be summed in the memory of the Ref that they are meant for."""
    users: dict[Any, list[int]] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        for atom in eqn.invars:
            if isinstance(atom, _jax.Var):
                users.setdefault(atom, []).append(number)
    for atom in jaxpr.outvars:
        if isinstance(atom, _jax.Var):
            users.setdefault(atom, []).append(len(jaxpr.eqns))

    def only_user(number: int) -> int | None:
        [variable] = jaxpr.eqns[number].outvars
        found = users.get(variable, [])
        return found[0] if len(found) == 1 and found[0] < len(jaxpr.eqns) else None

    products = []
    for number, eqn in enumerate(jaxpr.eqns):
        if eqn.primitive is not lax.dot_general_p:
            continue
        addition, store = None, only_user(number)
        if store is not None and jaxpr.eqns[store].primitive is lax.add_p:
            addition, store = store, only_user(store)
        if store is None or not _only_stores(jaxpr.eqns[store], jaxpr.eqns[addition or number]):
            continue
        if any(result in users for result in jaxpr.eqns[store].outvars):
            continue
        # What the product reads must still be there when it is stored.
        between = jaxpr.eqns[number + 1 : store]
        if not any(writes_memory(other, is_checked=is_checked) for other in between):
            product = StoredProduct(number, addition, store)
            if not is_checked:
                product = dataclasses.replace(product, clearing=_clearing(jaxpr, product, users))
            products.append(product)
    return products


def _only_stores(store: Any, value: Any) -> bool:
    """Whether an equation stores, or adds, the value of another one to a Ref."""
    is_store = store.primitive in (_jax.swap_p, _jax.addupdate_p)
    return is_store and store.invars[1] is value.outvars[0]


def _clearing(
    jaxpr: Any, product: StoredProduct, users: Mapping[Any, Sequence[int]]
) -> Clearing | None:
    """The conditional in front of a product that clears what it is added to, None if there is none
    or if somebody else may see the zeros.
    """
    store = jaxpr.eqns[product.store]
    is_sum = store.primitive is _jax.addupdate_p
    if is_sum == (product.addition is not None) or len(store.invars) != 2:
        return None
    own = {product.product}
    read = None
    if product.addition is not None:
        own.add(product.addition)
        operands = jaxpr.eqns[product.addition].invars
        result = jaxpr.eqns[product.product].outvars[0]
        [read] = [atom for atom in operands if atom is not result] or [None]
        if not isinstance(read, _jax.Var) or len(users[read]) != 1:
            return None
    beside = []
    read_at = None
    for number in reversed(range(product.store)):
        eqn = jaxpr.eqns[number]
        if number in own:
            continue
        if eqn.primitive is _jax.get_p:
            if eqn.outvars[0] is read:
                is_same_ref = len(eqn.invars) == 1 and eqn.invars[0] is store.invars[0]
                if not is_same_ref or _transforms(eqn) != _transforms(store):
                    return None
                read, read_at = None, number
            elif eqn.invars[0] is store.invars[0]:
                return None
            else:
                beside.append(eqn.invars[0])
        elif eqn.effects:
            branch = _clearing_branch(eqn, store)
            # Where nothing has been read since, what is added to is not what was cleared.
            if branch is None or read is not None:
                return None
            return Clearing(number, branch, tuple(beside), read_at)
    return None


def _transforms(access: Any) -> Any:
    """Which part of its Ref an access is to that has no computed indices."""
    return jax.tree.unflatten(access.params["tree"], [])


def _clearing_branch(eqn: Any, store: Any) -> int | None:
    """The number of the branch of a conditional that does nothing but store zeros where another
    equation stores to; None if there is no such branch, or if the other branch does anything.
    """
    if eqn.primitive is not _jax.cond_p or eqn.outvars or len(eqn.params["branches"]) != 2:
        return None
    branches = [getattr(branch, "jaxpr", branch) for branch in eqn.params["branches"]]
    lengths = [len(branch.eqns) for branch in branches]
    if min(lengths) != 0:
        return None
    which = lengths.index(max(lengths))
    branch = branches[which]
    zeros: set[Any] = set()
    for inner in branch.eqns[:-1]:
        if inner.primitive is not lax.broadcast_in_dim_p or not _is_zero(inner.invars[0]):
            return None
        zeros.update(inner.outvars)
    last = branch.eqns[-1]
    if last.primitive is not _jax.swap_p or len(last.invars) != 2 or last.invars[1] not in zeros:
        return None
    outer = dict(zip(branch.invars, eqn.invars[1:], strict=True))
    is_same = outer.get(last.invars[0]) is store.invars[0]
    return which if is_same and _transforms(last) == _transforms(store) else None


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, _jax.Literal) and bool(atom.val == 0)
