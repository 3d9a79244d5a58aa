"""Control flow: loops, branches, calls. Loops that cannot block become functions of their own."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, nests
from cokernel.compiler.analysis import (
    CALLS,
    equation_may_suspend,
    inner_jaxprs,
    is_polling,
    may_suspend,
)
from cokernel.compiler.claims import claiming
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1, i32, i64, pointer, void
from cokernel.compiler.function import Index, Loop
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.polling import polls_by_reading, reads_memory
from cokernel.compiler.program import lower_jaxpr
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Value,
    is_small,
    make_packed,
    pack,
    row_major,
)
from cokernel.records import record

# How many loops one function may hold: LLVM's time grows with their square.
LOOPS_IN_A_FUNCTION = 4
# A loop without another loop inside looks only once in so many iterations whether the launch has
# been stopped, and not at all if it has fewer: looking keeps LLVM from unrolling and vectorising.
UNWATCHED_ITERATIONS = 4096
# After so many iterations a polling loop lets the other cores run.
POLLS_BEFORE_YIELD = 64


@rule(*CALLS)
def _call(context: Context, eqn: Any, *operands: Any) -> list[Any]:
    body = eqn.params["jaxpr"] if "jaxpr" in eqn.params else eqn.params["call_jaxpr"]
    return lower_jaxpr(context, body, operands, donated=context.overwritable)


# Carried values. A small one is a register that a phi carries; a large one lives in memory, and the
# loop carries the address of its current contents and of the room for the next.


@record
class Carried:
    """The layout of the values a loop carries."""

    avals: Sequence[Any]

    def is_register(self, aval: Any) -> bool:
        return not aval.shape or is_small(aval.shape, aval.dtype)

    def start(
        self, context: Context, values: Sequence[Value]
    ) -> tuple[list[ir.Value], list[Buffer]]:
        """The registers to carry at first, and the buffers that must stay allocated during the
        loop.
        """
        registers: list[ir.Value] = []
        buffers: list[Buffer] = []
        for aval, value in zip(self.avals, values, strict=True):
            if self.is_register(aval):
                registers.append(context.pack(value))
            else:
                current = context.copy_or_overwrite(value)
                room = nests.dense_buffer(context, aval.shape, np.dtype(aval.dtype))
                registers += [current.address, room.address]
                buffers += [current, room]
        return registers, buffers

    def values(self, registers: Sequence[ir.Value], buffers: Sequence[Buffer]) -> list[Value]:
        """The carried values, as the loop's body sees them."""
        incoming, owners = iter(registers), iter(buffers)
        values: list[Value] = []
        for aval in self.avals:
            dtype = np.dtype(aval.dtype)
            if self.is_register(aval):
                values.append(make_packed(aval.shape, dtype, next(incoming)))
            else:
                address = next(incoming)
                next(incoming)
                owner = _Both((next(owners), next(owners)))
                values.append(
                    Buffer(tuple(aval.shape), dtype, address, row_major(aval.shape), owner=owner)
                )
        return values

    def next(
        self,
        context: Context,
        registers: Sequence[ir.Value],
        current: Sequence[Value],
        results: Sequence[Value],
    ) -> list[ir.Value]:
        """The registers for the next iteration: new contents go to the room, and room and current
        change places.
        """
        incoming = iter(registers)
        following: list[ir.Value] = []
        for aval, before, result in zip(self.avals, current, results, strict=True):
            if self.is_register(aval):
                next(incoming)
                following.append(context.pack(result))
                continue
            address, room = next(incoming), next(incoming)
            if _is_same_memory(result, before):
                following += [address, room]
                continue
            target = Buffer(tuple(aval.shape), np.dtype(aval.dtype), room, row_major(aval.shape))
            context.store(target, result, is_fresh=True)
            following += [room, address]
        return following


@record
class _Both:
    """Keeps two buffers allocated, in either of which a value may lie."""

    parts: tuple[Buffer, Buffer]


def _is_same_memory(result: Value, before: Value) -> bool:
    """Whether a result lies exactly where the carried value lay, unchanged or updated in place."""
    return (
        isinstance(result, Buffer)
        and isinstance(before, Buffer)
        and result.address is before.address
        and result.shape == before.shape
        and result.is_dense
    )


# Outlining.


def outlined(
    context: Context,
    name: str,
    operands: Sequence[Any],
    result_types: Sequence[ir.Type],
    build: Callable[[list[Any]], Sequence[ir.Value]],
) -> list[ir.Value]:
    """Emits `build(operands)` as a function of its own and a call of it; returns the registers that
    `build` returned.
    """
    leaves = [
        leaf for operand in operands if isinstance(operand, Value) for leaf in operand.leaves()
    ]
    inner = context.function.sibling(name, [leaf.type for leaf in leaves], result_types)
    incoming = iter(inner.parameters)
    inside = [
        operand.rebuild(incoming) if isinstance(operand, Value) else operand for operand in operands
    ]
    with context.inside(inner):
        results = build(inside)
        inner.finish(results)
    return context.call(inner, leaves)


def passable(context: Context, operands: Sequence[Any]) -> list[Any]:
    """Operands in forms that can be used many times and in another function."""
    return [
        context.materialise(item) if isinstance(item, Expression) else item for item in operands
    ]


def run_loop(
    context: Context,
    eqn: Any,
    operands: Sequence[Any],
    carried: Carried,
    initial: Sequence[Value],
    emit: Callable[[list[Any], list[ir.Value], list[Buffer]], list[ir.Value]],
) -> list[Value]:
    """Runs a loop in place or in a function of its own. `emit(operands, registers, buffers)` emits
    the loop and returns the registers carried last.
    """
    registers, buffers = carried.start(context, initial)
    operands = passable(context, operands)
    in_place = equation_may_suspend(eqn, is_checked=context.is_checked) or (
        not context.function.is_program and context.function.loop_count < LOOPS_IN_A_FUNCTION
    )
    if in_place:
        context.function.loop_count += 1
        final = emit(operands, registers, buffers)
    else:
        holders = [_Register(register) for register in registers]

        def build(inside: list[Any]) -> list[ir.Value]:
            context.function.loop_count += 1
            count = len(holders)
            return emit(inside[count:], [holder.register for holder in inside[:count]], buffers)

        types = [register.type for register in registers]
        final = outlined(context, eqn.primitive.name, [*holders, *operands], types, build)
    return carried.values(final, buffers)


class _Register(Value):
    """A bare register on its way into another function."""

    register: ir.Value

    def __init__(self, register: ir.Value):
        object.__setattr__(self, "register", register)

    def leaves(self) -> list[ir.Value]:
        return [self.register]

    def rebuild(self, leaves: Iterator[ir.Value]) -> "_Register":
        return _Register(next(leaves))


@rule(_jax.scan_p)
def _scan(context: Context, eqn: Any, *operands: Any) -> list[Value]:
    params = eqn.params
    body, length = params["jaxpr"], params["length"]
    constants, initial, sequences = map(list, params["ft_in"].update(list(operands)).unpack())
    carry_out, stacked_out = map(list, params["ft_out"].update(list(eqn.outvars)).unpack())
    carry_avals = [variable.aval for variable in body.outvars[: len(carry_out)]]
    stacked = [
        nests.dense_buffer(context, variable.aval.shape, np.dtype(variable.aval.dtype))
        for variable in stacked_out
    ]
    sequences = [context.materialise(sequence) for sequence in sequences]
    carried = Carried(carry_avals)
    split = len(constants), len(sequences)

    def emit(items: list[Any], registers: list[ir.Value], buffers: list[Buffer]) -> list[ir.Value]:
        consts, inputs = items[: split[0]], items[split[0] : sum(split)]
        outputs = items[sum(split) :]
        with counted_loop(context, body, 0, length, 1, registers) as loop:
            place: Index = loop.counter
            if params["reverse"]:
                place = context.function.subtract(length - 1, place)
            current = carried.values(loop.carry, buffers)
            slices = [_slice_of(context, sequence, place) for sequence in inputs]
            # An iteration is the last to need what the one before has left.
            results = lower_jaxpr(context, body, [*consts, *current, *slices], donated=current)
            for output, result in zip(outputs, results[len(carry_avals) :], strict=True):
                context.store(_row(context, output, place), result, is_fresh=True)
            loop.next = carried.next(context, loop.carry, current, results[: len(carry_avals)])
        return loop.carry

    final = run_loop(context, eqn, [*constants, *sequences, *stacked], carried, initial, emit)
    return [*final, *(_settled(context, buffer) for buffer in stacked)]


@contextlib.contextmanager
def counted_loop(
    context: Context,
    body: Any,
    start: Index,
    stop: Index,
    step: Index,
    carry: Sequence[ir.Value],
) -> Iterator[Loop]:
    """A loop, as `FunctionBuilder.loop`, that leaves the function in time if the launch has been
    stopped. `body` is the jaxpr of one iteration.
    """
    function = context.function
    bounds = [bound for bound in (start, stop, step) if isinstance(bound, int)]
    iterations = len(range(*bounds)) if len(bounds) == 3 else None
    if _has_loop(body):
        site = context.site("loop", "")
        with (
            claiming(context, is_simple=False),
            function.loop(start, stop, step=step, carry=carry) as loop,
        ):
            yield loop
            function.stop_check(site)
        return
    is_simple = not may_suspend(body, is_checked=context.is_checked)
    if iterations is not None and iterations < UNWATCHED_ITERATIONS:
        with (
            claiming(context, is_simple=is_simple),
            function.loop(start, stop, step=step, carry=carry) as loop,
        ):
            yield loop
        return
    site = context.site("loop", "")
    stride = function.multiply(step, _iterations_between_looks(iterations))
    with function.loop(start, stop, step=stride, carry=carry) as outer:
        function.stop_check(site)
        end = function.add(outer.counter, stride)
        if iterations is None or iterations % _iterations_between_looks(iterations):
            end = function.intrinsic("llvm.smin", i64, [function.index(end), function.index(stop)])
        with (
            claiming(context, is_simple=is_simple),
            function.loop(outer.counter, end, step=step, carry=outer.carry) as loop,
        ):
            yield loop
        outer.next = loop.carry
    loop.carry = outer.carry


def _iterations_between_looks(iterations: int | None) -> int:
    """A divisor of the number of iterations, if there is one that is large enough and not too
    large: LLVM then knows how long the inner loop is.
    """
    if iterations is not None:
        for divisor in range(UNWATCHED_ITERATIONS, UNWATCHED_ITERATIONS // 16, -1):
            if iterations % divisor == 0:
                return divisor
    return UNWATCHED_ITERATIONS


def _row(context: Context, buffer: Value, place: Index) -> Buffer:
    """One slice along the leading dimension."""
    assert isinstance(buffer, Buffer)
    address = buffer.element_address(context.function, [place, *[0] * (len(buffer.shape) - 1)])
    return buffer.view(buffer.shape[1:], buffer.strides[1:], address)


def _slice_of(context: Context, sequence: Value, place: Index) -> Value:
    row = _row(context, sequence, place)
    return _settled(context, row)


def _settled(context: Context, buffer: Buffer) -> Value:
    if not buffer.shape or is_small(buffer.shape, buffer.dtype):
        return make_packed(buffer.shape, buffer.dtype, pack(context.function, buffer))
    return buffer


def _has_loop(jaxpr: Any) -> bool:
    return any(
        eqn.primitive in (_jax.scan_p, _jax.while_p, _jax.sc_primitives.parallel_loop_p)
        or any(map(_has_loop, inner_jaxprs(eqn)))
        for eqn in jaxpr.eqns
    )


@rule(_jax.while_p)
def _while(context: Context, eqn: Any, *operands: Any) -> list[Value]:
    params = eqn.params
    condition, body = params["cond_jaxpr"], params["body_jaxpr"]
    cond_count, body_count = params["cond_nconsts"], params["body_nconsts"]
    constants, initial = operands[: cond_count + body_count], operands[cond_count + body_count :]
    carried = Carried([variable.aval for variable in body.outvars])
    polls = is_polling(eqn) and not any(
        may_suspend(part, is_checked=context.is_checked) for part in (body, condition)
    )
    if context.is_checked:
        # Each of these yields costs a decision of the scheduler.
        polls = polls_by_reading(eqn)

    is_simple = not any(
        may_suspend(part, is_checked=context.is_checked) or _has_loop(part)
        for part in (condition, body)
    )

    def emit(items: list[Any], registers: list[ir.Value], buffers: list[Buffer]) -> list[ir.Value]:
        with claiming(context, is_simple=is_simple and not polls):
            return emit_loop(items, registers, buffers)

    def emit_loop(
        items: list[Any], registers: list[ir.Value], buffers: list[Buffer]
    ) -> list[ir.Value]:
        function = context.function
        builder = function.builder
        # The line of the loop, and not that of what it has come to.
        site = context.site("loop", "")
        header = function.function.append_basic_block("while")
        inside = function.function.append_basic_block("while_body")
        done = function.function.append_basic_block("while_done")
        # In checked mode it lets others run whenever it has looked in vain, so not in front of the
        # first look: who sees what it waits for goes on.
        counter = []
        if polls:
            has_looked = int(reads_memory(condition))
            counter = [ir.Constant(i1, has_looked) if context.is_checked else ir.Constant(i64, 0)]
        before = builder.block
        builder.branch(header)
        builder.position_at_end(header)
        phis = []
        for register in [*registers, *counter]:
            phi = builder.phi(register.type)
            phi.add_incoming(register, before)
            phis.append(phi)
        carry = phis[: len(registers)]
        current = carried.values(carry, buffers)
        [go_on] = lower_jaxpr(context, condition, [*items[:cond_count], *current])
        builder.cbranch(context.scalar(go_on), inside, done)
        builder.position_at_end(inside)
        if polls and context.is_checked:
            _yield_if(context, phis[-1])
        results = lower_jaxpr(context, body, [*items[cond_count:], *current], donated=current)
        following = carried.next(context, carry, current, results)
        function.stop_check(site)
        if polls:
            following.append(
                ir.Constant(i1, 1) if context.is_checked else _yield_sometimes(context, phis[-1])
            )
        for phi, register in zip(phis, following, strict=True):
            phi.add_incoming(register, builder.block)
        builder.branch(header)
        builder.position_at_end(done)
        return carry

    return run_loop(context, eqn, constants, carried, initial, emit)


def _yield_sometimes(context: Context, counter: ir.Value) -> ir.Value:
    """Lets other cores run after every so many iterations of a loop that polls memory; returns the
    next count.
    """
    builder = context.builder
    following = builder.add(counter, ir.Constant(i64, 1))
    is_time = builder.icmp_unsigned(
        "==", builder.urem(following, ir.Constant(i64, POLLS_BEFORE_YIELD)), ir.Constant(i64, 0)
    )
    _yield_if(context, is_time)
    return following


def _yield_if(context: Context, condition: ir.Value) -> None:
    """Lets other cores run in a loop that polls memory."""
    function, builder = context.function, context.builder
    pause = function.function.append_basic_block("let_others_run")
    proceed = function.function.append_basic_block("poll_again")
    builder.cbranch(condition, pause, proceed)
    builder.position_at_end(pause)
    yield_core(context, "while")
    builder.branch(proceed)
    builder.position_at_end(proceed)


def yield_core(
    context: Context, operation: str, name: str = "", semaphore: ir.Value | None = None
) -> None:
    """Suspends the core and puts it at the end of its queue. `semaphore` is the address of what it
    looks at next, None if that is memory.
    """
    arguments = [context.function.core, context.site(operation, name)]
    if context.is_checked:
        arguments.append(ir.Constant(pointer, None) if semaphore is None else semaphore)

    def call() -> None:
        name = "cokernel_checked_yield" if context.is_checked else "cokernel_yield"
        context.function.call_external(name, void, arguments)

    context.function.suspend_unless(call)


@rule(_jax.cond_p)
def _cond(context: Context, eqn: Any, selector: Value, *operands: Any) -> list[Value]:
    branches = eqn.params["branches"]
    operands = tuple(passable(context, operands))
    function = context.function
    which = context.scalar(selector)
    carried = Carried([variable.aval for variable in branches[0].outvars])
    rooms = [
        None
        if carried.is_register(aval)
        else nests.dense_buffer(context, aval.shape, np.dtype(aval.dtype))
        for aval in carried.avals
    ]
    blocks = [
        function.function.append_basic_block(f"branch{number}") for number in range(len(branches))
    ]
    done = function.function.append_basic_block("branches_done")
    builder = context.builder
    if which.type == dtypes.i1:
        which = builder.zext(which, i32)
    switch = builder.switch(which, blocks[-1])
    for number, block in enumerate(blocks[:-1]):
        switch.add_case(ir.Constant(which.type, number), block)
    arriving: list[tuple[ir.Block, list[ir.Value]]] = []
    for block, branch in zip(blocks, branches, strict=True):
        builder.position_at_end(block)
        results = lower_jaxpr(context, branch, operands)
        registers = []
        for room, result in zip(rooms, results, strict=True):
            if room is None:
                registers.append(context.pack(result))
            else:
                context.store(room, result, is_fresh=True)
        del results
        arriving.append((builder.block, registers))
        builder.branch(done)
    builder.position_at_end(done)
    return _join(context, carried, rooms, arriving)


def _join(
    context: Context,
    carried: Carried,
    rooms: Sequence[Buffer | None],
    arriving: Sequence[tuple[ir.Block, list[ir.Value]]],
) -> list[Value]:
    values: list[Value] = []
    number = 0
    for aval, room in zip(carried.avals, rooms, strict=True):
        if room is not None:
            values.append(room)
            continue
        phi = context.builder.phi(arriving[0][1][number].type)
        for block, registers in arriving:
            phi.add_incoming(registers[number], block)
        values.append(make_packed(aval.shape, np.dtype(aval.dtype), phi))
        number += 1
    return values
