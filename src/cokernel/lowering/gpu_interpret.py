"""GPU kernels on a CPU: JAX's interpreter, which is stopped when it hangs.

The interpreter runs the threads of a kernel as threads of this process. One that waits for an
arrival that never comes would wait for ever, so a clock runs beside it. A loop looks at it as well.
"""

import itertools
import threading
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from cokernel import _jax, parameters, primitive
from cokernel.lowering import gpu, stock

DEFAULT_TIME_LIMIT_S = 120.0


def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a kernel of GPU programs for a CPU.

    Raises:
      NotImplementedError: if the kernel does not ask for the interpreter.
    """
    gpu.check_meshes(params)
    if not params["interpret"]:
        raise NotImplementedError(
            f"kernel {params['name']!r} has programs for a GPU, which a CPU can only interpret: "
            "pass interpret=plgpu.InterpretGPUParams()"
        )
    _check_semaphores(params)
    time_limit_s = _time_limit_s(params["compiler_params"])
    one = gpu.as_one_program(len(operands), params)
    for name in stock.OWN_PARAMETERS:
        one.pop(name, None)
    one["input_output_aliases"] = _jax.FrozenDict(dict(one["input_output_aliases"]))
    one["jaxprs"] = tuple(_stoppable(jaxpr) for jaxpr in one["jaxprs"])
    name = params["name"]

    def run(*args: Any) -> Any:
        jax.experimental.io_callback(lambda: _clock.start(name, time_limit_s), None, ordered=True)
        results = stock.bind(*args, **one)
        jax.experimental.io_callback(_clock.stop, None, ordered=True)
        return results

    return _jax.mlir.lower_fun(run, multiple_results=True)(ctx, *operands)


def _stoppable(jaxpr: Any) -> Any:
    """Returns a program whose loops look at the clock, at any depth: one that goes on for ever and
    uses no memory would not notice that the interpreter has failed."""
    eqns = []
    for eqn in jaxpr.eqns:
        params = {name: _stoppable_parameter(value) for name, value in eqn.params.items()}
        if eqn.primitive is _jax.while_p:
            params["cond_jaxpr"] = _looking_at_the_clock(params["cond_jaxpr"])
        eqns.append(eqn.replace(params=params))
    return jaxpr.replace(eqns=eqns)


def _stoppable_parameter(value: Any) -> Any:
    if isinstance(value, _jax.Jaxpr):
        return _stoppable(value)
    if isinstance(value, tuple) and any(isinstance(item, _jax.Jaxpr) for item in value):
        return tuple(map(_stoppable_parameter, value))
    return value


def _looking_at_the_clock(condition: Any) -> Any:
    """Returns the condition of a loop, which fails when the time is up."""

    def go_on(holds: jax.Array) -> jax.Array:
        in_time = jax.experimental.io_callback(
            _clock.check, jax.ShapeDtypeStruct((), np.bool_), holds
        )
        return holds & in_time

    [holds] = condition.outvars
    asks = jax.make_jaxpr(go_on)(jax.ShapeDtypeStruct((), np.bool_))
    names = dict(zip(asks.jaxpr.invars, [holds], strict=True))
    eqns = [
        eqn.replace(
            invars=[names.get(a, a) if isinstance(a, _jax.Var) else a for a in eqn.invars],
        )
        for eqn in asks.jaxpr.eqns
    ]
    return condition.replace(
        eqns=[*condition.eqns, *eqns],
        outvars=asks.jaxpr.outvars,
        effects={*condition.effects, *asks.jaxpr.effects},
    )


def _check_semaphores(params: Mapping[str, Any]) -> None:
    for jaxpr in params["jaxprs"]:
        scopes = [eqn.params["jaxpr"] for eqn in primitive.all_equations(jaxpr) if _scopes(eqn)]
        for var in itertools.chain(jaxpr.invars, *[scope.invars for scope in scopes]):
            dtype = getattr(getattr(var.aval, "inner_aval", None), "dtype", None)
            if isinstance(dtype, _jax.AbstractSemaphoreTy):
                raise NotImplementedError(
                    f"kernel {params['name']!r} has a semaphore in program "
                    f"{jaxpr.debug_info.func_src_info}, which JAX's GPU interpreter has not: "
                    "programs of one block can use plgpu.Barrier instead"
                )


def _scopes(eqn: Any) -> bool:
    return eqn.primitive is _jax.pallas_primitives.run_scoped_p


def _time_limit_s(compiler_params: Any) -> float:
    if isinstance(compiler_params, parameters.CompilerParams) and compiler_params.time_limit_s:
        return compiler_params.time_limit_s
    return DEFAULT_TIME_LIMIT_S


class _Clock:
    """Stops the interpreter when a kernel takes too long. It interprets one kernel at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._error: TimeoutError | None = None

    def start(self, name: str, limit_s: float) -> None:
        # After a failure nobody stopped the clock, and the interpreter has to be reset.
        self.stop()
        timer = threading.Timer(limit_s, self._ring, (name, limit_s))
        timer.daemon = True
        with self._lock:
            self._timer, self._error = timer, None
        timer.start()

    def stop(self) -> None:
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def check(self, holds: Any) -> Any:
        """Returns True; raises TimeoutError when the time is up and a loop would go on."""
        if holds and self._error is not None:
            raise self._error
        return np.True_

    def _ring(self, name: str, limit_s: float) -> None:
        error = TimeoutError(
            f"kernel {name!r} had not ended after {limit_s:g} s in JAX's GPU interpreter: its "
            "threads wait for each other, a loop does not end, or it needs a longer "
            "CompilerParams(time_limit_s=...)"
        )
        with self._lock:
            if self._timer is not threading.current_thread():
                # This kernel has ended, and another one runs.
                return
            self._error = error
        memory = _jax.gpu_interpreter()._shared_memory
        if memory is not None:
            # Waiting threads wake up, see the failure, and end.
            memory.set_failed(error, top_level=False)


_clock = _Clock()
