"""Primitives without a rule: XLA compiles them, and the program calls the result through Python."""

import functools
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from cokernel import _jax
from cokernel.compiler.context import Context
from cokernel.compiler.ops.callbacks import call_python
from cokernel.compiler.refs import AnyRef
from cokernel.compiler.values import Value


class ThroughXlaWarning(UserWarning):
    """A primitive runs outside the compiled program, which is slow."""


_lock = threading.Lock()
_warned: set[Any] = set()


def through_xla(context: Context, eqn: Any, *operands: Any) -> list[Value]:
    """Emits a call of an equation that XLA has compiled. Warns once for each primitive.

    Raises:
      NotImplementedError: if the equation takes Refs or has side effects, or XLA has no rule for
        its primitive either.
    """
    primitive = eqn.primitive
    where = f"{context.describe()}: primitive {primitive.name!r}"
    if any(isinstance(operand, AnyRef) for operand in operands):
        raise NotImplementedError(f"{where} reads or writes Refs, and has no rule for the CPU")
    if any(isinstance(effect, _jax.NamedAxisEffect) for effect in eqn.effects):
        raise NotImplementedError(
            f"{where} is a collective, and cores have none: let them exchange data through "
            "semaphores and DMAs, or call it around the kernel"
        )
    if eqn.effects:
        raise NotImplementedError(f"{where} has side effects, and has no rule for the CPU")
    run = _compile(eqn, [(operand.shape, operand.dtype) for operand in operands], where)
    _warn_once(primitive, where)
    context.kernel.note_unchecked(context, primitive.name, "XLA runs it, outside the program")

    def call(core: dict[str, Any], *arrays: np.ndarray) -> Sequence[np.ndarray]:
        return run(*arrays)

    avals = [variable.aval for variable in eqn.outvars]
    return call_python(context, call, operands, avals, primitive.name)


def _warn_once(primitive: Any, where: str) -> None:
    with _lock:
        if primitive in _warned:
            return
        _warned.add(primitive)
    warnings.warn(
        f"{where} has no rule for the CPU yet, so XLA compiles it and every use of it is a call "
        "through Python",
        ThroughXlaWarning,
        # The frames in between are ours and JAX's; the text names the user's line.
        stacklevel=2,
    )


@functools.cache
def _device() -> Any:
    """The device on which such equations run, of an XLA client of their own.

    A kernel runs on threads of the client that launched it. If all of those wait for computations
    that the same client would have to run, nothing runs any more. This client has its own threads,
    and runs a computation before the call of it returns.
    """
    client = _jax.xla_client.make_cpu_client(asynchronous=False, num_devices=1)
    return client.local_devices()[0]


Described = tuple[tuple[int, ...], np.dtype]


def _compile(
    eqn: Any, operands: Sequence[Described], where: str
) -> Callable[..., list[np.ndarray]]:
    """Returns a function of numpy arrays that runs the equation."""
    with_x64 = bool(jax.config.jax_enable_x64)

    def evaluate(*arrays: Any) -> Any:
        return eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))

    def compile_it() -> Any:
        with _lock:
            sharding = jax.sharding.SingleDeviceSharding(_device())
        types = [jax.ShapeDtypeStruct(*operand, sharding=sharding) for operand in operands]
        with jax.enable_x64(with_x64):
            return jax.jit(evaluate, keep_unused=True).lower(*types).compile()

    try:
        # On another thread, because what is being traced or lowered on this one would show through.
        with ThreadPoolExecutor(1) as executor:
            compiled = executor.submit(compile_it).result()
    except Exception as error:
        raise NotImplementedError(
            f"{where} has no rule for the CPU, and XLA cannot compile it there: {error}"
        ) from error

    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        with jax.enable_x64(with_x64):
            return [np.asarray(result) for result in jax.tree.leaves(compiled(*arrays))]

    return run
