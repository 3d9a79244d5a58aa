"""Printing, callbacks and checks, and what only profilers look at."""

import copy
import logging
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler.access import read
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1
from cokernel.compiler.ops.callbacks import call_python
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.probes import Access
from cokernel.compiler.refs import AnyRef, RefValue, root_of
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import Value


class CheckFailed(Exception):
    """A check inside a kernel did not hold."""


def core_label(core: dict[str, Any], axes: Sequence[str]) -> str:
    """How a core introduces itself: "[program core=1 subcore=3]"."""
    position = " ".join(
        f"{axis}={index}" for axis, index in zip(axes, core["coordinates"], strict=True)
    )
    return f"[{core['program_name']} {position}]"


def _contents(context: Context, operand: Any) -> Value:
    """An operand that may be a Ref as a value."""
    if isinstance(operand, AnyRef):
        root, transforms = root_of(operand)
        return read(context, resolve(context, root, transforms, "debug_print", access=Access.READ))
    return operand


def _plain(arrays: Sequence[np.ndarray]) -> list[Any]:
    """Arrays as people want them formatted: those without dimensions as scalars."""
    return [array[()] if array.shape == () else array for array in arrays]


@rule(_jax.debug_print_p)
def _debug_print(context: Context, eqn: Any, *operands: Any) -> list[Any]:
    params = eqn.params
    axes = [str(axis) for axis in context.program.mesh.shape]
    record = params["logging_record"]

    def show(core: dict[str, Any], *arrays: np.ndarray) -> Sequence[Any]:
        args, kwargs = _jax.merge_callback_args(
            params["in_tree"], _plain(arrays), params["static_args"]
        )
        with np.printoptions(**dict(params["np_printoptions"])):
            if params["has_placeholders"]:
                text = params["fmt"].format(*args, **kwargs)
            else:
                text = " ".join((params["fmt"], *map(str, args)))
        text = f"{core_label(core, axes)} {text}"
        if record is not None:
            line = copy.copy(record)
            line.msg = text
            logging.getLogger(record.name).handle(line)
        else:
            # One call, so that lines of several cores do not mix.
            sys.stdout.write(text + "\n")
        return ()

    # Cores print as they come to it; to what a core prints itself, its own order is kept.
    values = [_contents(context, operand) for operand in operands]
    return call_python(context, show, values, (), "debug_print")


@rule(_jax.debug_callback_p)
def _debug_callback(context: Context, eqn: Any, *operands: Value) -> list[Any]:
    callback = eqn.params["callback"]

    def call(core: dict[str, Any], *arrays: np.ndarray) -> Sequence[Any]:
        callback(*_plain(arrays))
        return ()

    values = [_contents(context, operand) for operand in operands]
    context.kernel.note_unchecked(context, "debug_callback", "what Python does is not seen")
    return call_python(context, call, values, (), "debug_callback")


@rule(_jax.pure_callback_p, _jax.io_callback_p)
def _callback(context: Context, eqn: Any, *operands: Value) -> list[Value]:
    callback = eqn.params["callback"]
    has_wide_types = bool(jax.config.jax_enable_x64)

    def call(core: dict[str, Any], *arrays: np.ndarray) -> Sequence[Any]:
        results = [np.asarray(result) for result in callback(*arrays)]
        # As in JAX, numpy's 64-bit defaults become what they are in the rest of the program.
        return results if has_wide_types else [_without_wide_types(result) for result in results]

    avals = eqn.params["result_avals"]
    context.kernel.note_unchecked(context, eqn.primitive.name, "what Python does is not seen")
    return call_python(context, call, operands, avals, eqn.primitive.name)


def _without_wide_types(array: np.ndarray) -> np.ndarray:
    narrow = {"int64": np.int32, "uint64": np.uint32, "float64": np.float32}
    return array.astype(narrow.get(array.dtype.name, array.dtype), copy=False)


@rule(_jax.check_p)
def _check(context: Context, eqn: Any, *operands: Value) -> None:
    if eqn.params["debug"] and not _jax.debug_checks_enabled():
        why = "JAX has it switched off (pl.enable_debug_checks(True) switches it on)"
        context.kernel.note_unchecked(context, "debug_check", why)
        return
    err_tree = eqn.params["err_tree"]
    # The predicates of an error say what went wrong, not what is as it should be.
    bad: ir.Value = ir.Constant(i1, 0)
    for predicate in jax.tree.unflatten(err_tree, operands)._pred.values():
        bad = context.builder.or_(bad, _any(context, predicate))
    if isinstance(bad, ir.Constant) and not bad.constant:
        return

    def complain(core: dict[str, Any], *arrays: np.ndarray) -> Sequence[Any]:
        raise CheckFailed(jax.tree.unflatten(err_tree, arrays).get())

    _when(context, bad, lambda: call_python(context, complain, operands, (), "check"))


def _any(context: Context, predicate: Value) -> ir.Value:
    register = context.pack(predicate)
    if not isinstance(register.type, ir.VectorType):
        return register
    overloads = [register.type]
    return context.function.intrinsic("llvm.vector.reduce.or", i1, [register], overloads=overloads)


def _when(context: Context, condition: ir.Value, emit: Callable[[], Any]) -> None:
    """Emits code that runs if a condition holds."""
    function, builder = context.function, context.builder
    inside = function.function.append_basic_block("check_failed")
    after = function.function.append_basic_block("check_passed")
    builder.cbranch(condition, inside, after).set_weights([1, 1 << 20])
    builder.position_at_end(inside)
    emit()
    builder.branch(after)
    builder.position_at_end(after)


@rule(_jax.tpu_primitives.trace_value_p)
def _trace_value(context: Context, eqn: Any, value: Value) -> None:
    # A mark for the TPU's profiler, which sees nothing of this.
    return None


@rule(_jax.tpu_primitives.touch_p)
def _touch(context: Context, eqn: Any, ref: RefValue) -> None:
    # It only keeps JAX from reordering what touches the Ref.
    return None
