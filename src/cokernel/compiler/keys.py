"""Random keys: a program is compiled with every array of keys replaced by the words it is made of.

A key of JAX is an element of an extended dtype; behind it stands an array of uint32 with trailing
dimensions. This pass rewrites a jaxpr so that only those arrays are left: random primitives become
calls of what they mean, operations that only move elements move rows instead, and Refs of keys
become Refs of words.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax

from cokernel import _jax
from cokernel.compiler.analysis import over_jaxprs
from cokernel.source_lines import user_line

PRNG = _jax.prng
TPU = _jax.tpu_primitives


def without_keys(jaxpr: Any) -> Any:
    """The same program on the words of its keys; itself if it has none."""
    return Rewriter().jaxpr(jaxpr) if _has_keys(jaxpr) else jaxpr


def is_key(aval: Any) -> bool:
    """Whether an abstract value is an array of keys, or a Ref of one."""
    return isinstance(getattr(aval, "dtype", None), _jax.KeyTy)


def physical(aval: Any) -> Any:
    """The abstract value of the words behind an array of keys, or a Ref of keys."""
    if not is_key(aval):
        return aval
    if isinstance(aval, _jax.AbstractRef):
        return aval.update(inner_aval=_jax.physical_aval(aval.inner_aval))
    return _jax.physical_aval(aval)


def _has_keys(jaxpr: Any) -> bool:
    variables = (*jaxpr.constvars, *jaxpr.invars, *jaxpr.outvars)
    return any(is_key(variable.aval) for variable in variables) or any(map(_touches, jaxpr.eqns))


def _touches(eqn: Any) -> bool:
    """Whether an equation has to do with keys, itself or in a jaxpr that it runs."""
    if any(is_key(atom.aval) for atom in (*eqn.invars, *eqn.outvars)):
        return True
    return any(_has_keys(inner) for inner in _inner_jaxprs(eqn.params))


def _inner_jaxprs(params: dict[str, Any]) -> list[Any]:
    found = []
    for parameter in params.values():
        for item in parameter if isinstance(parameter, tuple | list) else (parameter,):
            if isinstance(item, _jax.Jaxpr):
                found.append(item)
    return found


class Rewriter:
    """Rewrites one jaxpr. Each variable that holds keys gets another one in its place."""

    def __init__(self) -> None:
        self.replaced: dict[Any, Any] = {}

    def atom(self, atom: Any) -> Any:
        """The atom in the new jaxpr that stands for one of the old."""
        if isinstance(atom, _jax.Literal):
            return atom
        if is_key(atom.aval) and atom not in self.replaced:
            kind = _jax.DropVar if isinstance(atom, _jax.DropVar) else _jax.Var
            self.replaced[atom] = kind(physical(atom.aval))
        return self.replaced.get(atom, atom)

    def atoms(self, atoms: Sequence[Any]) -> list[Any]:
        return [self.atom(atom) for atom in atoms]

    def effects(self, effects: Any) -> Any:
        return {
            effect.replace(self.replaced[effect.input])
            if isinstance(effect, _jax.JaxprInputEffect) and effect.input in self.replaced
            else effect
            for effect in effects
        }

    def jaxpr(self, jaxpr: Any) -> Any:
        constvars, invars = self.atoms(jaxpr.constvars), self.atoms(jaxpr.invars)
        eqns = [self.equation(eqn) for eqn in jaxpr.eqns]
        return _jax.Jaxpr(
            constvars,
            invars,
            self.atoms(jaxpr.outvars),
            eqns,
            self.effects(jaxpr.effects),
            jaxpr.debug_info,
            consts=[_words(const) for const in jaxpr.consts],
        )

    def equation(self, eqn: Any) -> Any:
        if not _touches(eqn):
            return eqn.replace(invars=self.atoms(eqn.invars), effects=self.effects(eqn.effects))
        if eqn.primitive in MEANING:
            return self.called(eqn, functools.partial(MEANING[eqn.primitive], eqn))
        if eqn.primitive in (_jax.get_p, _jax.swap_p):
            return self.access(eqn)
        if eqn.primitive in _UNCHANGED or _inner_jaxprs(eqn.params):
            params = {
                name: over_jaxprs(parameter, without_keys) for name, parameter in eqn.params.items()
            }
            return eqn.replace(
                invars=self.atoms(eqn.invars),
                outvars=self.atoms(eqn.outvars),
                params=params,
                effects=self.effects(eqn.effects),
            )
        if eqn.primitive in (lax.eq_p, lax.ne_p):
            return self.called(eqn, functools.partial(_compared, eqn))
        if eqn.primitive in _MOVES:
            return self.called(eqn, _moving(eqn))
        line = user_line(eqn.source_info.traceback)
        raise NotImplementedError(
            f"primitive {eqn.primitive.name!r} of random keys{f' in {line}' if line else ''}: work "
            "on their words (jax.random.key_data), or use the keys outside the kernel"
        )

    def called(self, eqn: Any, function: Callable[..., Any]) -> Any:
        """An equation that calls what `function` is traced to."""
        invars, outvars = self.atoms(eqn.invars), self.atoms(eqn.outvars)
        avals = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in invars]
        # What a primitive means may be said in terms of keys again.
        body = without_keys(jax.make_jaxpr(function)(*avals))
        return eqn.replace(
            invars=invars,
            outvars=outvars,
            primitive=_jax.closed_call_p,
            params={"call_jaxpr": body},
            effects=body.effects,
        )

    def access(self, eqn: Any) -> Any:
        """A read or write of a Ref of keys: all words of the keys that its indices select."""
        first = 2 if eqn.primitive is _jax.swap_p else 1
        transforms = jax.tree.unflatten(eqn.params["tree"], eqn.invars[first:])
        words = eqn.invars[0].aval.dtype._impl.key_shape
        flat, tree = jax.tree.flatten(tuple(_extended(item, words) for item in transforms))
        return eqn.replace(
            invars=[*self.atoms(eqn.invars[:first]), *flat],
            outvars=self.atoms(eqn.outvars),
            params={**eqn.params, "tree": tree},
            effects=self.effects(eqn.effects),
        )


def _extended(transform: Any, words: tuple[int, ...]) -> Any:
    if not isinstance(transform, _jax.NDIndexer):
        raise NotImplementedError(f"{type(transform).__name__} of a Ref of random keys")
    whole = tuple(_jax.Slice(0, count) for count in words)
    return _jax.NDIndexer(
        (*transform.indices, *whole), (*transform.shape, *words), transform.int_indexer_shape
    )


def _words(const: Any) -> Any:
    is_keys = isinstance(getattr(const, "dtype", None), _jax.KeyTy)
    return jax.random.key_data(const) if is_keys and isinstance(const, jax.Array) else const


def _moving(eqn: Any) -> Callable[..., Any]:
    """An operation that only moves elements, applied to each word of the keys."""
    impl = next(atom.aval.dtype._impl for atom in (*eqn.invars, *eqn.outvars) if is_key(atom.aval))
    axes = [-1 if is_key(atom.aval) else None for atom in eqn.invars]

    def function(*operands: Any) -> Any:
        return eqn.primitive.bind(*operands, **eqn.params)

    for _ in impl.key_shape:
        function = jax.vmap(function, in_axes=axes, out_axes=-1)
    return function


def _compared(eqn: Any, left: Any, right: Any) -> Any:
    """Keys are equal if all of their words are."""
    words = eqn.invars[0].aval.dtype._impl.key_shape
    same = (left == right).all(axis=tuple(range(-len(words), 0)))
    return same if eqn.primitive is lax.eq_p else ~same


# What the random primitives mean, on words.


def _seed(eqn: Any, seeds: Any) -> Any:
    return PRNG.random_seed_impl_base(seeds, impl=eqn.params["impl"])


def _split(eqn: Any, keys: Any) -> Any:
    aval = eqn.invars[0].aval
    impl = aval.dtype._impl
    return PRNG.random_split_impl_base(impl, keys, aval.ndim, shape=eqn.params["shape"])


def _bits(eqn: Any, keys: Any) -> Any:
    aval, params = eqn.invars[0].aval, eqn.params
    return PRNG.random_bits_impl_base(
        aval.dtype._impl, keys, aval.ndim, bit_width=params["bit_width"], shape=params["shape"]
    )


def _fold_in(eqn: Any, keys: Any, numbers: Any) -> Any:
    aval = eqn.invars[0].aval
    impl = aval.dtype._impl
    if impl is not _jax.pallas_key_impl:
        return PRNG.random_fold_in_impl_base(impl, keys, numbers, aval.shape)
    # Pallas says this one with keys rather than with words.
    if aval.shape or numbers.shape:
        raise NotImplementedError("fold_in of an array of Pallas keys")
    key = impl.fold_in(jax.random.wrap_key_data(keys, impl=impl.name), numbers)
    return jax.random.key_data(key)


def _gamma(eqn: Any, keys: Any, shapes: Any) -> Any:
    """Each number by rejection, from a key of its own; one after the other, as JAX does too where
    it computes eagerly, so that each takes no more attempts than it needs."""
    impl = eqn.invars[0].aval.dtype._impl.name
    return _jax.random_gamma_p.impl(jax.random.wrap_key_data(keys, impl=impl), shapes, **eqn.params)


def _same(eqn: Any, keys: Any) -> Any:
    return keys


def _unwrap_pallas(eqn: Any, key: Any) -> list[Any]:
    return [key[0, number] for number in range(key.shape[1])]


def _wrap_pallas(eqn: Any, *words: Any) -> Any:
    return lax.concatenate([lax.reshape(word, (1, 1)) for word in words], 1).astype(np.uint32)


MEANING: dict[Any, Callable[..., Any]] = {
    PRNG.random_seed_p: _seed,
    PRNG.random_split_p: _split,
    PRNG.random_bits_p: _bits,
    PRNG.random_fold_in_p: _fold_in,
    PRNG.random_wrap_p: _same,
    PRNG.random_unwrap_p: _same,
    _jax.random_clone_p: _same,
    _jax.random_gamma_p: _gamma,
    TPU.split_key_p: _unwrap_pallas,
    TPU.join_key_p: _wrap_pallas,
}

# Primitives that only move elements.
_MOVES = frozenset(
    {
        lax.broadcast_in_dim_p,
        lax.concatenate_p,
        lax.copy_p,
        lax.dynamic_slice_p,
        lax.dynamic_update_slice_p,
        lax.gather_p,
        lax.optimization_barrier_p,
        lax.reshape_p,
        lax.rev_p,
        lax.scatter_p,
        lax.select_n_p,
        lax.slice_p,
        lax.split_p,
        lax.squeeze_p,
        lax.stack_p,
        lax.tile_p,
        lax.transpose_p,
        lax.unstack_p,
        _jax.stop_gradient_p,
    }
)

# Primitives that take keys as well as words, or Refs whole.
_UNCHANGED = frozenset(
    {
        TPU.prng_seed_p,
        TPU.dma_start_p,
        TPU.dma_wait_p,
        TPU.touch_p,
        _jax.empty_ref_p,
        _jax.ref_p,
        _jax.freeze_p,
    }
)
