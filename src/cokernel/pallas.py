"""Runs stock Pallas kernels, those of `pl.kernel`, by Cokernel.

Everything by which such a program is written (`pl.kernel` in its three forms, `pl.core_map`, with
their decorators) ends in one place: JAX binds its own primitive. While stock kernels are enabled,
Cokernel's primitive is bound there instead, with the same jaxprs. So they have its behaviour under
every transformation as well. On the way there, two functions of JAX are made to keep the names of
what programs close over, for messages. `pl.pallas_call` is not touched.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cokernel import _jax, closures, meshes, primitive, source_lines, trace_errors
from cokernel.checking import state
from cokernel.signature import function_name

# A message that names a line shall name the user's, and not one of these.
_jax.exclude_from_sources(__file__)

# Part of the key of JAX's caches, so that nothing traced or compiled with it serves without it.
_enabled: Any = _jax.config_ext.Config(
    "cokernel_pallas", False, include_in_jit_key=True, include_in_trace_context=True
)


_stock_make_kernel: Any = _jax.stock_mpmd._mpmd_map
_stock_unify: Any = _jax.stock_mpmd._dedup_consts_and_unify_jaxpr_signatures


class _Hooks:
    """Our rules in JAX's primitive, for the whole process while anybody needs them there.

    In threads for which stock kernels are not enabled they do what JAX does.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                # An attribute of the one object hides the method of its class.
                _jax.stock_mpmd_map_p.bind = _bind
                _jax.stock_mpmd._mpmd_map = _make_kernel
                _jax.stock_mpmd._dedup_consts_and_unify_jaxpr_signatures = _unify
                _jax.register_lowering(_jax.stock_mpmd_map_p, _lower, platform="cpu")
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                del _jax.stock_mpmd_map_p.bind
                _jax.stock_mpmd._mpmd_map = _stock_make_kernel
                _jax.stock_mpmd._dedup_consts_and_unify_jaxpr_signatures = _stock_unify
                del _jax.platform_lowerings["cpu"][_jax.stock_mpmd_map_p]


_hooks = _Hooks()
_setting_lock = threading.Lock()


def enable() -> None:
    """Runs the kernels of `pl.kernel` by Cokernel from now on, in all threads.

    That holds for kernels of one mesh or several, made before or after. They are compiled and not
    interpreted: `interpret=True` means what False does, and JAX's `pltpu.InterpretParams` run the
    kernel in checked mode. Build meshes that ask for a chip, and call
    kernels whose programs ask for it, inside `cokernel.target(...)`. What was jitted before is
    traced again, as it is after `disable`.
    """
    with _setting_lock:
        if not _enabled.get_global():
            _hooks.acquire()
            _enabled.set_global(True)


def disable() -> None:
    """Ends what `enable` began: JAX runs the kernels of `pl.kernel` as it does by itself."""
    with _setting_lock:
        if _enabled.get_global():
            _enabled.set_global(False)
            _hooks.release()


@contextlib.contextmanager
def enabled() -> Iterator[None]:
    """Runs the kernels of `pl.kernel` on Cokernel's CPU backend, in this thread and block."""
    _hooks.acquire()
    previous = _enabled.swap_local(True)
    try:
        yield
    finally:
        _enabled.set_local(previous)
        _hooks.release()


def _bind(*args: Any, **params: Any) -> Any:
    """Binds JAX's primitive, or ours in its place where that is enabled in this thread."""
    if not _enabled.value:
        return _jax.Primitive.bind(_jax.stock_mpmd_map_p, *args, **params)
    for jaxpr, mesh in zip(params["jaxprs"], params["meshes"], strict=True):
        trace_errors.check_axis_names(jaxpr, mesh, params["meshes"], params["external_meshes"])
    return primitive.mpmd_map_p.bind(*args, **_own_params(params))


def _lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers for a CPU what was traced while stock kernels were not enabled.

    A kernel for a GPU comes from Cokernel itself, which hands it to JAX's interpreter.
    """
    if not _enabled.value or any(map(meshes.is_gpu_mesh, params["meshes"])):
        return _jax.common_lowerings[_jax.stock_mpmd_map_p].rule(ctx, *operands, **params)
    return primitive.lower(ctx, *operands, **_own_params(params))


class _Tracing(threading.local):
    """The functions of the kernel that this thread traces, and who made it."""

    fns: tuple[Callable[..., None], ...] = ()
    made_by: Any = None


_tracing = _Tracing()


def _make_kernel(meshes_and_fns: Sequence[Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
    """Makes a kernel as JAX does, which remembers its functions for `_unify`, and its line."""
    made_by = source_lines.traceback_here()
    run = _stock_make_kernel(meshes_and_fns, *args, **kwargs)
    fns = tuple(fn for _, fn in meshes_and_fns)
    programs = [(repr(function_name(fn)), mesh) for mesh, fn in meshes_and_fns]

    def wrapper(*operands: Any) -> Any:
        outer = _tracing.fns, _tracing.made_by
        _tracing.fns, _tracing.made_by = fns, made_by
        try:
            with trace_errors.explained(programs) if _enabled.value else contextlib.nullcontext():
                return run(*operands)
        finally:
            _tracing.fns, _tracing.made_by = outer

    return wrapper


def _unify(jaxprs: Sequence[Any], consts_per_fn: Any, flat_args: Sequence[Any], *rest: Any) -> Any:
    """Makes inputs of what programs close over, as JAX does, and keeps the names of all inputs."""
    unified, consts = _stock_unify(jaxprs, consts_per_fn, flat_args, *rest)
    names = jaxprs[0].debug_info.arg_names
    if not _enabled.value or names is None:
        return unified, consts
    closed_over: dict[int, str] = {}
    for fn in _tracing.fns:
        closed_over = {**closures.closed_over_names(fn), **closed_over}
    new_names = [closed_over.get(id(_jax.get_referent(const)), "") for const in consts]
    end = len(flat_args)
    names = (*names[:end], *new_names, *names[end:])
    return [
        jaxpr.replace(debug_info=jaxpr.debug_info._replace(arg_names=names)) for jaxpr in unified
    ], consts


def _own_params(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of JAX's primitive as those of ours."""
    name = params["name"]
    if name is None:
        name = "_and_".join(jaxpr.debug_info.func_name for jaxpr in params["jaxprs"])
    aliases = tuple(sorted(params["input_output_aliases"].items()))
    interpret = state.effective(params["interpret"]) or False
    extra: dict[str, Any] = {}
    # A kernel that was made while stock kernels were not enabled has no known line.
    if interpret and _tracing.made_by is not None:
        made_at = source_lines.line_that_made(_tracing.made_by)
        extra = {} if made_at is None else {"made_at": made_at}
    return {
        **params,
        "interpret": interpret,
        "name": name,
        "input_output_aliases": aliases,
        "target": meshes.current_target(),
        **extra,
    }
