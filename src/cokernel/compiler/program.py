"""Walks a program's jaxpr and emits its code; decides what is computed when."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from cokernel import _jax
from cokernel.compiler.context import Context
from cokernel.compiler.ops.registry import RULES
from cokernel.compiler.refs import RefValue
from cokernel.compiler.sites import SourceLine
from cokernel.compiler.values import Expression, Value, array_constant

# Primitives at which a core can block, or must let others run.
SUSPENDING = frozenset(
    {
        _jax.pallas_primitives.semaphore_wait_p,
        _jax.pallas_primitives.semaphore_read_p,
        _jax.tpu_primitives.dma_wait_p,
        _jax.sc_primitives.barrier_p,
    }
)


def inner_jaxprs(eqn: Any) -> Iterable[Any]:
    """The jaxprs among an equation's parameters."""
    for parameter in eqn.params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, _jax.Jaxpr):
                yield item


def may_suspend(jaxpr: Any) -> bool:
    """Whether running the jaxpr can suspend the core."""
    return any(equation_may_suspend(eqn) for eqn in jaxpr.eqns)


def equation_may_suspend(eqn: Any) -> bool:
    """Whether an equation can suspend the core, itself or in a jaxpr it runs."""
    return (
        eqn.primitive in SUSPENDING or is_polling(eqn) or any(map(may_suspend, inner_jaxprs(eqn)))
    )


def is_polling(eqn: Any) -> bool:
    """Whether an equation is a loop that may wait for another core's write: a `while` that reads memory others can reach.
    Such a loop lets other cores run every so often."""
    if eqn.primitive is not _jax.while_p:
        return False
    private = (_jax.TpuMemorySpace.VMEM, _jax.TpuMemorySpace.SMEM)
    for effect in eqn.effects:
        if isinstance(effect, _jax.ReadEffect):
            aval = _effect_aval(eqn, effect)
            if _plain_space(aval.memory_space) not in private:
                return True
    return False


def _effect_aval(eqn: Any, effect: Any) -> Any:
    target = effect.input
    return (eqn.invars[target] if isinstance(target, int) else target).aval


def _plain_space(space: Any) -> Any:
    return space.memory_space if isinstance(space, _jax.CoreMemorySpace) else space


def writes_memory(eqn: Any) -> bool:
    """Whether memory may change while the equation runs, by its own doing or, as it may suspend, by another core's."""
    return equation_may_suspend(eqn) or any(
        not isinstance(effect, _jax.ReadEffect | _jax.NamedAxisEffect) for effect in eqn.effects
    )


def lower_jaxpr(
    context: Context, jaxpr: Any, arguments: Sequence[Any], constants: Sequence[Any] | None = None
) -> list[Any]:
    """Emits the code of a jaxpr and returns its results. Arguments are Values or RefValues; `constants` stands for the
    jaxpr's constvars where the caller supplies them."""
    if constants is None:
        constants = [array_constant(context.function, np.asarray(const)) for const in jaxpr.consts]
    env: dict[Any, Any] = {}
    env.update(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))
    uses, last_use = _uses(jaxpr)
    enclosing = context.line
    for number, eqn in enumerate(jaxpr.eqns):
        context.line = source_line(eqn) or enclosing
        operands = [read_atom(context, env, atom) for atom in eqn.invars]
        if writes_memory(eqn):
            _keep_live_values(context, env, eqn, number, last_use)
            operands = [read_atom(context, env, atom) for atom in eqn.invars]
        results = apply_rule(context, eqn, operands)
        del operands
        for variable, result in zip(eqn.outvars, results, strict=True):
            if isinstance(variable, _jax.DropVar):
                continue
            if isinstance(result, Expression) and uses[variable] > 1 and not result.is_cheap:
                result = context.materialise(result)
            env[variable] = result
        del results
        for atom in (*eqn.invars, *eqn.outvars):
            if isinstance(atom, _jax.Var) and last_use.get(atom, -1) <= number:
                env.pop(atom, None)
    context.line = enclosing
    return [read_atom(context, env, atom) for atom in jaxpr.outvars]


def _uses(jaxpr: Any) -> tuple[Counter, dict[Any, int]]:
    """How many equations use each variable (the results count as one more), and the number of the last that does."""
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
    written = env[eqn.invars[0]] if is_store else None
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
    rule = RULES.get(eqn.primitive)
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
    frame = _jax.user_frame(eqn.source_info.traceback)
    if frame is None:
        return None
    return SourceLine(frame.file_name, frame.start_line, frame.function_name)


def argument_names(jaxpr: Any, count: int, default: str) -> list[str]:
    """The user's names of the last `count` parameters of a jaxpr."""
    names = list(jaxpr.debug_info.arg_names or ()) if jaxpr.debug_info is not None else []
    names = names[-count:] if count else []
    if len(names) != count:
        return [f"{default}{number}" for number in range(count)]
    return [name or f"{default}{number}" for number, name in enumerate(names)]


def is_ref(operand: Any) -> bool:
    """Whether an operand is a Ref rather than a value."""
    return isinstance(operand, RefValue)
