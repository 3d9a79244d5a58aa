"""Walks a program's jaxpr and emits its code; decides what is computed when."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.analysis import (
    finished_copies,
    inner_jaxprs,
    writes_memory,
)
from cokernel.compiler.context import Context
from cokernel.compiler.liveness import OVERWRITING, Ownership
from cokernel.compiler.ops.registry import ADDED_RULES, find_rule
from cokernel.compiler.polling import polling_reads
from cokernel.compiler.refs import AnyRef, root_of
from cokernel.compiler.stored_products import StoredProduct, stored_products
from cokernel.compiler.values import Expression, Value, array_constant
from cokernel.source_lines import SourceLine, user_line


def lower_jaxpr(
    context: Context,
    jaxpr: Any,
    arguments: Sequence[Any],
    constants: Sequence[Any] | None = None,
    donated: Sequence[Value] = (),
) -> list[Any]:
    """Emits the code of a jaxpr and returns its results. Arguments are Values or RefValues;
    `constants` stands for the jaxpr's constvars where the caller supplies them. The arguments that
    are in `donated` are needed by nobody else, so the code may overwrite them.
    """
    if constants is None:
        constants = [array_constant(context.function, np.asarray(const)) for const in jaxpr.consts]
    env: dict[Any, Any] = {}
    env.update(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))
    ownership = Ownership([*constants, *arguments], donated)
    uses, last_use = _uses(jaxpr)
    is_checked = context.is_checked
    silent = frozenset() if is_checked else finished_copies(jaxpr)
    if is_checked:
        context.polled |= polling_reads(jaxpr)
    stored = stored_products(jaxpr, is_checked=is_checked)
    products = {product.store: product for product in stored}
    clearings = {item.clearing.number: item for item in stored if item.clearing is not None}
    _use_operands_later(jaxpr, products.values(), last_use)
    deferred = {product.product for product in products.values()}
    deferred |= {product.addition for product in products.values() if product.addition is not None}
    enclosing = context.line
    context.open_scopes.append([])
    context.equations.append(None)
    for number, eqn in enumerate(jaxpr.eqns):
        if number in deferred:
            continue
        context.equations[-1] = eqn
        context.line = source_line(eqn) or enclosing
        if number in clearings:
            product = clearings[number]
            if _is_cleared_apart(env, jaxpr, product):
                _keep_live_values(context, env, eqn, number, last_use)
                continue
            products[product.store] = dataclasses.replace(product, clearing=None)
        if number in products:
            _keep_live_values(context, env, eqn, number, last_use)
            _store_product(context, env, jaxpr, products[number])
            for item in products[number].equations():
                _forget(env, jaxpr.eqns[item], number, last_use)
            continue
        operands = [read_atom(context, env, atom) for atom in eqn.invars]
        if writes_memory(eqn, is_checked=is_checked):
            _keep_live_values(context, env, eqn, number, last_use)
            operands = [read_atom(context, env, atom) for atom in eqn.invars]
        context.is_silent = number in silent
        context.overwritable = (
            ownership.overwritable(env, eqn.invars, operands, number, last_use)
            if eqn.primitive in OVERWRITING
            else []
        )
        eqn = _without_unused(eqn, uses)
        _refuse_complex_values(context, eqn)
        probe_count = context.probe_count
        context.is_polled = not context.polled.isdisjoint(eqn.outvars)
        results = apply_rule(context, eqn, operands)
        if is_checked and context.probe_count == probe_count:
            _note_unseen_accesses(context, eqn, operands)
        del operands
        for variable, result in zip(eqn.outvars, results, strict=True):
            if isinstance(variable, _jax.DropVar):
                continue
            if isinstance(result, Expression) and uses[variable] > 1 and not result.is_cheap:
                result = context.materialise(result)
            env[variable] = result
        del results
        _forget(env, eqn, number, last_use)
    context.line = enclosing
    context.equations.pop()
    context.overwritable = []
    results = [read_atom(context, env, atom) for atom in jaxpr.outvars]
    return _leave_scopes(context, results)


def _leave_scopes(context: Context, results: list[Any]) -> list[Any]:
    """Ends the scopes that checked mode has to be told of, and returns the jaxpr's results in a
    form that outlasts them.
    """
    scopes = context.open_scopes.pop()
    if not scopes:
        return results
    escaping = [root_of(result)[0] for result in results if isinstance(result, AnyRef)]
    results = [context.keep(item) if not isinstance(item, AnyRef) else item for item in results]
    for ref, operation in scopes:
        if ref in escaping:
            context.open_scopes[-1].append((ref, operation))
        else:
            context.kernel.layout.release_scoped(context, ref, operation)
    return results


def _without_unused(eqn: Any, uses: Counter) -> Any:
    """The equation, its results that nobody uses marked as such: a store need not keep what was
    there before, for one.
    """
    if all(uses[variable] for variable in eqn.outvars):
        return eqn
    outvars = [
        variable if uses[variable] else _jax.DropVar(variable.aval) for variable in eqn.outvars
    ]
    return eqn.replace(outvars=outvars)


def _forget(env: dict[Any, Any], eqn: Any, number: int, last_use: dict[Any, int]) -> None:
    """Drops the variables of an equation that nobody uses after the equation of this number."""
    for atom in (*eqn.invars, *eqn.outvars):
        if isinstance(atom, _jax.Var) and last_use.get(atom, -1) <= number:
            env.pop(atom, None)


def _use_operands_later(
    jaxpr: Any, products: Iterable[StoredProduct], last_use: dict[Any, int]
) -> None:
    """The operands of a product that is computed when it is stored are needed until then."""
    for product in products:
        for number in product.equations():
            for atom in jaxpr.eqns[number].invars:
                if isinstance(atom, _jax.Var):
                    last_use[atom] = max(last_use[atom], product.store)


def _is_cleared_apart(env: dict[Any, Any], jaxpr: Any, product: StoredProduct) -> bool:
    """Whether what is cleared in front of a product lies elsewhere than all that is read between
    the two."""
    assert product.clearing is not None
    cleared = root_of(env[jaxpr.eqns[product.store].invars[0]])[0].memory
    return all(
        ref in env and root_of(env[ref])[0].memory != cleared for ref in product.clearing.beside
    )


def _store_product(
    context: Context, env: dict[Any, Any], jaxpr: Any, product: StoredProduct
) -> None:
    """Emits the product, the addition if there is one, and the store."""
    dot, store = jaxpr.eqns[product.product], jaxpr.eqns[product.store]
    # Of what is stored this way nobody uses what was there before.
    store = store.replace(outvars=[_jax.DropVar(variable.aval) for variable in store.outvars])
    factors = [read_atom(context, env, atom) for atom in dot.invars]
    other: Any = None
    if product.addition is not None:
        addition = jaxpr.eqns[product.addition]
        [other] = [
            read_atom(context, env, atom) for atom in addition.invars if atom is not dot.outvars[0]
        ]
    ref, *indices = (read_atom(context, env, atom) for atom in (store.invars[0], *store.invars[2:]))
    from cokernel.compiler.ops.dot import store_product

    store_line = context.line
    adds_if = None
    if product.clearing is not None:
        clearing = jaxpr.eqns[product.clearing.number]
        chosen = [read_atom(context, env, atom) for atom in clearing.invars]
        which = context.scalar(chosen[0])
        # All numbers but 0 choose the second branch.
        comparison = "!=" if product.clearing.branch == 0 else "=="
        adds_if = context.builder.icmp_signed(comparison, which, ir.Constant(which.type, 0))
    if store_product(context, dot, factors, other, store, ref, indices, adds_if):
        return
    if product.clearing is not None:
        context.line = source_line(clearing) or store_line
        apply_rule(context, clearing, chosen)
        if product.clearing.read is not None:
            # What has been read before may be in a register, without the zeros.
            reading = jaxpr.eqns[product.clearing.read]
            context.line = source_line(reading) or store_line
            [other] = apply_rule(context, reading, [ref])
    context.line = source_line(dot) or store_line
    [value] = apply_rule(context, dot, factors)
    if other is not None:
        is_second = addition.invars[1] is dot.outvars[0]
        [value] = apply_rule(context, addition, [other, value] if is_second else [value, other])
    context.line = store_line
    apply_rule(context, store, [ref, value, *indices])


# These are given Refs, and neither read nor write their memory.
_WITHOUT_ACCESS = frozenset(
    {
        _jax.tpu_primitives.touch_p,
        _jax.tpu_primitives.has_memory_space_p,
        _jax.tpu_primitives.dma_wait_p,
    }
)


def _note_unseen_accesses(context: Context, eqn: Any, operands: Sequence[Any]) -> None:
    """Says of a primitive that reads or writes Refs without a probe that checked mode is blind to
    it.
    """
    checked = context.kernel.checked
    if checked is None or not (checked.races or checked.uninitialised):
        # Nobody asked for accesses to be looked at, which the report says.
        return
    is_silent = eqn.primitive in _WITHOUT_ACCESS or eqn.primitive in ADDED_RULES
    if is_silent or any(True for _ in inner_jaxprs(eqn)):
        return
    if any(isinstance(item, AnyRef) and not _is_semaphore(item) for item in operands):
        why = "what it does to Refs is not seen"
        context.kernel.note_unchecked(context, eqn.primitive.name, why)


def _is_semaphore(ref: Any) -> bool:
    return dtypes.is_semaphore(root_of(ref)[0].dtype)


def _refuse_complex_values(context: Context, eqn: Any) -> None:
    for atom in (*eqn.invars, *eqn.outvars):
        dtype = atom.aval.dtype if isinstance(atom.aval, _jax.ShapedArray) else None
        if isinstance(dtype, np.dtype) and dtype.kind == "c":
            raise NotImplementedError(
                f"{context.describe()}: primitive {eqn.primitive.name!r} has a value of dtype "
                f"{dtype}, and the CPU compiler does not support complex values; keep the real and "
                "the imaginary part in two arrays"
            )


def _uses(jaxpr: Any) -> tuple[Counter, dict[Any, int]]:
    """How many equations use each variable (the results count as one more), and the number of the
    last that does.
    """
    uses: Counter = Counter()
    last_use: dict[Any, int] = {}
    for number, eqn in enumerate(jaxpr.eqns):
        for variable in {atom for atom in eqn.invars if isinstance(atom, _jax.Var)}:
            # Code inside a loop would compute an expression once in each iteration.
            uses[variable] += 2 if any(True for _ in inner_jaxprs(eqn)) else 1
            last_use[variable] = number
    for variable in jaxpr.outvars:
        if isinstance(variable, _jax.Var):
            uses[variable] += 1
            last_use[variable] = len(jaxpr.eqns)
    return uses, last_use


def _keep_live_values(
    context: Context, env: dict[Any, Any], eqn: Any, number: int, last_use: dict[Any, int]
) -> None:
    """Computes, before memory changes, the values that read it and are needed afterwards."""
    is_store = eqn.primitive in (_jax.swap_p, _jax.addupdate_p)
    written = root_of(env[eqn.invars[0]])[0].memory if is_store else None
    for variable, value in list(env.items()):
        if not isinstance(value, Value):
            continue
        roots = value.roots()
        if not roots or (written is not None and written not in roots):
            continue
        # A store reads its operand before it writes, and sees to overlaps itself.
        if is_store and last_use.get(variable, -1) <= number:
            continue
        env[variable] = context.keep(value)


def read_atom(context: Context, env: dict[Any, Any], atom: Any) -> Any:
    """The value of a variable or a literal."""
    if isinstance(atom, _jax.Literal):
        return array_constant(context.function, np.asarray(atom.val, dtype=atom.aval.dtype))
    return env[atom]


def apply_rule(context: Context, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Emits one equation through its rule and returns its results as a list."""
    rule = find_rule(eqn.primitive)
    if rule is None:
        rule = _fallback()
    results = rule(context, eqn, *operands)
    if results is None:
        return []
    return list(results) if isinstance(results, list | tuple) else [results]


def _fallback() -> Any:
    from cokernel.compiler.ops.fallback import through_xla

    return through_xla


def source_line(eqn: Any) -> SourceLine | None:
    """The user's line that an equation comes from, None inside library helpers."""
    return user_line(eqn.source_info.traceback)
