"""What programs close over becomes inputs that all programs of the kernel have, each once."""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from cokernel import _jax
from cokernel.signature import Signature, is_ref


def unify(signature: Signature, traced: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Turns what programs close over into inputs that all of them have, each once.

    Returns the programs' jaxprs without constants, and the values for the new inputs, which come
    after those of the call.
    """
    fns = [fn for _, fn in signature.spec.programs]
    for jaxpr, fn in zip(traced, fns, strict=True):
        if jaxpr.consts:
            _check_consts(jaxpr, fn)
    consts: dict[int, Any] = {}
    for jaxpr in traced:
        for const in jaxpr.consts:
            consts.setdefault(id(_jax.get_referent(const)), const)
    if not consts:
        return list(traced), []

    arg_names = traced[0].debug_info.arg_names
    passed = {
        id(_jax.get_referent(value)): name
        for value, name in zip(signature.flat_args, arg_names, strict=False)
        if is_ref(value)
    }
    names: dict[int, str] = {}
    for fn in fns:
        names = {**closed_over_names(fn), **names}
    for key in consts:
        if key in passed:
            raise ValueError(
                f"kernel {signature.spec.title!r} receives a Ref as {passed[key]!r} and a program "
                f"closes over the same Ref as {names.get(key, 'a variable')!r}; use only one of "
                "the two"
            )
    const_names = tuple(names.get(key, "") for key in consts)
    return [_with_const_inputs(jaxpr, consts, const_names, signature) for jaxpr in traced], list(
        consts.values()
    )


def _with_const_inputs(
    jaxpr: Any, consts: Mapping[int, Any], const_names: tuple[str, ...], signature: Signature
) -> Any:
    own = {
        id(_jax.get_referent(const)): var
        for const, var in zip(jaxpr.consts, jaxpr.constvars, strict=True)
    }
    const_vars = [
        own[key] if key in own else _jax.Var(jax.typeof(const)) for key, const in consts.items()
    ]
    n = signature.num_inputs
    names = jaxpr.debug_info.arg_names
    info = jaxpr.debug_info._replace(arg_names=(*names[:n], *const_names, *names[n:]))
    return jaxpr.replace(
        constvars=(),
        invars=[*jaxpr.invars[:n], *const_vars, *jaxpr.invars[n:]],
        debug_info=info,
    )


def closed_over_names(fn: Callable[..., Any]) -> dict[int, str]:
    """Returns the names of the variables that a function closes over, by the value's identity."""
    names: dict[int, str] = {}
    for name, leaf in _closed_over_values(fn):
        names.setdefault(id(_jax.get_referent(leaf)), name)
    return names


def _name_of_copy(const: Any, fn: Callable[..., Any]) -> str:
    """Returns the name of the NumPy array that JAX has copied to make `const`."""
    for name, leaf in _closed_over_values(fn):
        if (
            isinstance(leaf, np.ndarray)
            and not isinstance(const, _jax.Tracer)
            and leaf.shape == const.shape
            and np.array_equal(leaf, np.asarray(const))
        ):
            return name
    return "an unnamed array"


def _closed_over_values(fn: Callable[..., Any]) -> Iterator[tuple[str, Any]]:
    """Yields what a function closes over, each with the name of its variable.

    Functions that it closes over are looked through, and so are trees of values.
    """
    seen: set[int] = set()
    functions = [fn]
    while functions:
        current = functions.pop()
        while isinstance(current, functools.partial):
            current = current.func
        current = inspect.unwrap(current)
        if id(current) in seen or not inspect.isfunction(current):
            continue
        seen.add(id(current))
        variables = inspect.getclosurevars(current)
        functions += [value for value in variables.nonlocals.values() if callable(value)]
        for name, value in {**variables.globals, **variables.nonlocals}.items():
            for path, leaf in jax.tree.leaves_with_path(value):
                yield f"{name}{jax.tree_util.keystr(path)}", leaf


def _check_consts(jaxpr: Any, fn: Callable[..., Any]) -> None:
    names = closed_over_names(fn)
    refused = []
    for const in jaxpr.consts:
        aval = jax.typeof(const)
        if isinstance(aval, _jax.AbstractRef) or (
            isinstance(aval, _jax.ShapedArray) and not aval.shape
        ):
            continue
        name = names.get(id(_jax.get_referent(const))) or _name_of_copy(const, fn)
        refused.append(f"{name} of type {aval.str_short()}")
    if refused:
        raise ValueError(
            f"program {jaxpr.debug_info.func_src_info} closes over arrays: {', '.join(refused)}. "
            "A program can close over scalars and Refs; pass arrays to the kernel as arguments"
        )
