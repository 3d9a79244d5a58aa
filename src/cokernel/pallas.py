"""Runs stock Pallas kernels, those of `pl.kernel`, on Cokernel's CPU backend.

JAX's own primitive stays as it is: tracing, transformations and every other platform are JAX's.
Only the lowering for the CPU is ours, and only while it is enabled.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from cokernel import _jax, meshes, primitive

# Part of the key of JAX's caches, so that nothing compiled with it serves without it.
_enabled: Any = _jax.config_ext.Config(
    "cokernel_pallas", False, include_in_jit_key=True, include_in_trace_context=True
)


class _Registration:
    """Keeps our rule in JAX's table for the CPU while anybody needs it there."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                _jax.register_lowering(_jax.stock_mpmd_map_p, _lower, platform="cpu")
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del _jax.platform_lowerings["cpu"][_jax.stock_mpmd_map_p]


_registration = _Registration()
_setting_lock = threading.Lock()


def enable() -> None:
    """Runs the kernels of `pl.kernel` on Cokernel's CPU backend from now on, in all threads.

    That holds for kernels of one mesh or several, with any `interpret=` argument: they are compiled
    and not interpreted. Build meshes that ask for a chip inside `cokernel.target(...)`.
    """
    with _setting_lock:
        if not _enabled.get_global():
            _registration.acquire()
            _enabled.set_global(True)


def disable() -> None:
    """Ends what `enable` began: JAX runs the kernels of `pl.kernel` as it does by itself."""
    with _setting_lock:
        if _enabled.get_global():
            _enabled.set_global(False)
            _registration.release()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Runs the kernels of `pl.kernel` on Cokernel's CPU backend, in this thread and block."""
    _registration.acquire()
    previous = _enabled.swap_local(True)
    try:
        yield
    finally:
        _enabled.set_local(previous)
        _registration.release()


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers JAX's primitive by our rule, or by JAX's where it is not enabled in this thread."""
    if not _enabled.value:
        return _jax.common_lowerings[_jax.stock_mpmd_map_p].rule(ctx, *operands, **params)
    params["input_output_aliases"] = tuple(sorted(params["input_output_aliases"].items()))
    if params["name"] is None:
        params["name"] = "_and_".join(jaxpr.debug_info.func_name for jaxpr in params["jaxprs"])
    return primitive.lower(ctx, *operands, target=meshes.current_target(), **params)
