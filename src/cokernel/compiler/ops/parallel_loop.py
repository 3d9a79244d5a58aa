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
from cokernel.compiler.ops.control import Carried, run_loop
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.ops.targets import require
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.values import Buffer, Value, make_packed


@rule(_jax.sc_primitives.parallel_loop_p)
def _parallel_loop(context: Context, eqn: Any, *operands: Any) -> list[Value]:
    body = _jax.partial_eval.convert_constvars_jaxpr(eqn.params["jaxpr"])
    lower, upper, step, constants, initial = eqn.params["tree"].unflatten(operands)
    bounds = [context.function.index(context.index(bound)) for bound in (lower, upper, step)]
    _require_positive(context, bounds[2])
    numbers = [make_packed((), np.int64, bound) for bound in bounds]
    carried = Carried([variable.aval for variable in body.outvars])

    def emit(items: list[Any], registers: list[ir.Value], buffers: list[Buffer]) -> list[ir.Value]:
        first, stop, stride = (context.scalar(number) for number in items[:3])
        function, builder = context.function, context.builder
        header = function.function.append_basic_block("parallel_loop")
        inside = function.function.append_basic_block("parallel_body")
        done = function.function.append_basic_block("parallel_done")
        before = builder.block
        builder.branch(header)
        builder.position_at_end(header)
        phis = []
        for register in (first, *registers):
            phi = builder.phi(register.type)
            phi.add_incoming(register, before)
            phis.append(phi)
        counter, *carry = phis
        builder.cbranch(builder.icmp_signed("<", counter, stop), inside, done)
        builder.position_at_end(inside)
        index = builder.trunc(counter, dtypes.i32)
        current = carried.values(carry, buffers)
        arguments = [*items[3:], make_packed((), np.int32, index), *current]
        results = lower_jaxpr(context, body, arguments)
        following = carried.next(context, carry, current, results)
        function.stop_check()
        # Bounds have 32 bits, so their sum in 64 does not overflow.
        following.insert(0, builder.add(counter, stride, flags=["nsw"]))
        for phi, register in zip(phis, following, strict=True):
            phi.add_incoming(register, builder.block)
        builder.branch(header)
        builder.position_at_end(done)
        return carry

    return run_loop(context, eqn, [*numbers, *constants], carried, initial, emit)


def _require_positive(context: Context, step: ir.Value) -> None:
    if isinstance(step, ir.Constant):
        if step.constant > 0:
            return
        good: ir.Value = ir.Constant(dtypes.i1, 0)
    else:
        good = context.builder.icmp_signed(">", step, ir.Constant(i64, 0))
    message = "the step of a parallel_loop must be positive, but is {value}"
    require(context, good, "parallel_loop", "step", message, step)
