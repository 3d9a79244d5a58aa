"""Knows what JAX has started and has not ended, also where nobody holds a result of it.

On a CPU JAX runs some computations at once and others later, on threads of its own: those of one
thread in turn, but those of several threads, or for several devices, in any order. So that one
which has ended says nothing of the others, and each has to be noted when it starts.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax

from cokernel import _jax


class Executions:
    """The results of computations that may not have ended. Any thread may start one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: list[Any] = []

    def note(self, results: list[Any]) -> None:
        """Takes in what a computation gives that has just been started; one result goes for all."""
        started = [array for array in results if _is_running(array)][:1]
        with self._lock:
            # Others may have ended, and the memory of their results is not to be kept.
            self._running = [array for array in self._running if _is_running(array)] + started

    def wait(self) -> None:
        """Waits until all that was started has ended, however it ended."""
        with self._lock:
            running, self._running = self._running, []
        for array in running:
            # What a computation raises is in its report, or concerns its caller alone.
            with contextlib.suppress(Exception):
                array.block_until_ready()


def _is_running(result: Any) -> bool:
    # What an array can be asked is more than its type tells.
    array: Any = result
    return isinstance(result, jax.Array) and not (array.is_deleted() or array.is_ready())


@contextlib.contextmanager
def noted_executions() -> Iterator[Executions]:
    """Notes, within a `with` block, every computation that JAX starts."""
    executions = Executions()
    call = _jax.ExecuteReplicated.__call__

    def noting(self: Any, *args: Any) -> Any:
        results = call(self, *args)
        refs = [*args, *(self.mut.in_mut if self.mut else ())]
        written = [ref._refs._buf for ref in refs if isinstance(ref, _jax.Ref)]
        executions.note([*results, *written])
        if not results and not written:
            # Its effects are all that is known of it, and only to this thread.
            jax.effects_barrier()
        return results

    # JAX calls again what it has called before without any of its Python, unless it has nothing to
    # do so with.
    with (
        _replaced(_jax.ExecuteReplicated, "__call__", noting),
        _replaced(_jax.pjit_module, "_get_fastpath_data", _nothing),
        _replaced(_jax.MeshExecutable, "create_cpp_call", _nothing),
    ):
        if _jax.backends_are_initialized():
            jax.clear_caches()
        yield executions


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


@contextlib.contextmanager
def _replaced(owner: Any, name: str, value: Callable[..., Any]) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
