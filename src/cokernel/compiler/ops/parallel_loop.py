"""`parallel_loop`: a counted loop whose iterations may run in any order, and here run one after the
other.
"""

from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i64
from cokernel.compiler.ops.control import Carried, counted_loop, run_loop
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.ops.targets import require
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.values import Buffer, Value, make_packed


@rule(_jax.sc_primitives.parallel_loop_p)
def _parallel_loop(context: Context, eqn: Any, *operands: Any) -> list[Value]:
    body = _jax.partial_eval.convert_constvars_jaxpr(eqn.params["jaxpr"])
    lower, upper, step, constants, initial = eqn.params["tree"].unflatten(operands)
    bounds = [context.index(bound) for bound in (lower, upper, step)]
    _require_positive(context, context.function.index(bounds[2]))
    # Those that are known stay known inside a function of the loop's own.
    dynamic = [make_packed((), np.int64, bound) for bound in bounds if not isinstance(bound, int)]
    carried = Carried([variable.aval for variable in body.outvars])

    def emit(items: list[Any], registers: list[ir.Value], buffers: list[Buffer]) -> list[ir.Value]:
        passed = iter(items)
        first, stop, stride = (
            bound if isinstance(bound, int) else context.scalar(next(passed)) for bound in bounds
        )
        constants_inside = list(passed)
        # Bounds have 32 bits, so their sum in 64 does not overflow.
        with counted_loop(context, body, first, stop, stride, registers) as loop:
            index = context.builder.trunc(loop.counter, dtypes.i32)
            current = carried.values(loop.carry, buffers)
            arguments = [*constants_inside, make_packed((), np.int32, index), *current]
            results = lower_jaxpr(context, body, arguments)
            loop.next = carried.next(context, loop.carry, current, results)
        return loop.carry

    return run_loop(context, eqn, [*dynamic, *constants], carried, initial, emit)


def _require_positive(context: Context, step: ir.Value) -> None:
    if isinstance(step, ir.Constant):
        if step.constant > 0:
            return
        good: ir.Value = ir.Constant(dtypes.i1, 0)
    else:
        good = context.builder.icmp_signed(">", step, ir.Constant(i64, 0))
    message = "the step of a parallel_loop must be positive, but is {value}"
    require(context, good, "parallel_loop", "step", message, step)
