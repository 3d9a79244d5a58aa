"""The staged matrix units of a TensorCore: weights are pushed, loaded, and multiplied with.

Each unit has staging registers, the weights loaded last, and either accumulators (Refs in the ACC
memory space) or a queue of results. All of it is memory of the core here, so that a program may
push in one iteration of a loop what it multiplies with in the next.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import nests, views
from cokernel.compiler.access import accumulate, read, write
from cokernel.compiler.context import Context
from cokernel.compiler.core_state import lasting_buffer, state_address
from cokernel.compiler.definedness import (
    load_staged_p,
    mark_queue_p,
    mark_staged_p,
    queue_undefined_p,
    weights_undefined_p,
)
from cokernel.compiler.dtypes import i64
from cokernel.compiler.function import Index
from cokernel.compiler.layout import space_of
from cokernel.compiler.ops.control import outlined
from cokernel.compiler.ops.definedness import (
    copy_undefined,
    is_followed,
    mark_buffer,
    mask_of_buffer,
)
from cokernel.compiler.ops.registry import added_rule, rule
from cokernel.compiler.ops.state import add_values
from cokernel.compiler.ops.targets import require
from cokernel.compiler.ops.traced import lower_traced
from cokernel.compiler.probes import Access, is_probed, probe_run
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import Buffer, Value, array_constant, make_packed
from cokernel.records import record

TPU = _jax.tpu_primitives

# How many rows of results a queue holds.
QUEUE_ROWS = 2048


@record
class MatrixUnit:
    """The memory of one matrix unit: buffers are made by the first equation that needs them."""

    staged: dict[int, Buffer] = dataclasses.field(default_factory=dict)
    weights: Buffer | None = None
    queue: Buffer | None = None


def _unit(context: Context, number: int) -> MatrixUnit:
    return context.program.matrix_units.setdefault(number, MatrixUnit())


def _inside(context: Context, buffer: Buffer) -> Buffer:
    """The buffer of a matrix unit, addressed in the function that is being built."""
    assert buffer.owner is not None
    address = context.private_address(buffer.owner.offset)
    return buffer.view(buffer.shape, buffer.strides, address)


def _same_type(context: Context, buffer: Buffer, other: Value, what: str) -> None:
    if buffer.shape != other.shape or buffer.dtype != other.dtype:
        raise NotImplementedError(
            f"{context.describe()}: {what} holds {buffer.dtype}{list(buffer.shape)} elsewhere in "
            f"this program, so it cannot take {other.dtype}{list(other.shape)}"
        )


@rule(TPU.matmul_push_rhs_p)
def _matmul_push_rhs(context: Context, eqn: Any, weights: Value) -> None:
    register, number = eqn.params["staging_register"], eqn.params["mxu_index"]
    if eqn.params["transpose"]:
        weights = views.take_view(context, weights, views.transposed(weights.shape, (1, 0)))
    unit = _unit(context, number)
    if register not in unit.staged:
        unit.staged[register] = lasting_buffer(context, weights.shape, weights.dtype)
    staged = unit.staged[register]
    _same_type(context, staged, weights, f"staging register {register} of matrix unit {number}")
    context.store(_inside(context, staged), weights, is_fresh=True)
    _probe(
        context, _inside(context, staged), Access.WRITE, "matmul_push_rhs", f"staged in {number}"
    )


def _probe(context: Context, buffer: Buffer, access: Access, operation: str, name: str) -> None:
    """Tells checked mode of an access to the memory of a matrix unit."""
    if not is_probed(context):
        return
    size = buffer.dtype.itemsize
    site = context.site(operation, name)
    probe_run(context, site, access, buffer.address, buffer.size * size, size)


def _loaded(context: Context, number: int, register: int | None) -> Buffer:
    """The weights of a unit, after loading those in a staging register if one is given."""
    unit = _unit(context, number)
    if register is not None:
        if register not in unit.staged:
            raise ValueError(
                f"{context.describe()}: staging register {register} of matrix unit {number} is "
                "loaded, but matmul_push_rhs has put nothing there"
            )
        staged = _inside(context, unit.staged[register])
        if unit.weights is None:
            unit.weights = lasting_buffer(context, staged.shape, staged.dtype)
        _same_type(context, unit.weights, staged, f"matrix unit {number}")
        weights = _inside(context, unit.weights)
        context.store(weights, staged, is_fresh=True)
        name = f"weights of matrix unit {number}"
        _probe(context, weights, Access.WRITE, "load_staged_rhs", name)
        if is_followed(context):
            copy_undefined(context, weights, staged)
    if unit.weights is None:
        raise ValueError(
            f"{context.describe()}: matrix unit {number} multiplies before any weights are loaded; "
            "give load_staged_rhs"
        )
    return _inside(context, unit.weights)


def _product(context: Context, left: Value, weights: Value, dtype: Any) -> Value:
    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        if a.dtype != b.dtype:
            a, b = a.astype(dtype), b.astype(dtype)
        return lax.dot(a, b, preferred_element_type=dtype)

    return context.keep(lower_traced(context, multiply, left, weights)[0])


def _accumulator(operands: Sequence[Any], eqn: Any) -> Sequence[Any]:
    return jax.tree.unflatten(eqn.params["acc_transforms_tree"], operands)


@added_rule(mark_staged_p)
def _mark_staged(context: Context, eqn: Any, mask: Value) -> None:
    unit = _unit(context, eqn.params["number"])
    staged = _inside(context, unit.staged[eqn.params["register"]])
    mark_buffer(context, staged, mask, eqn.params["reads"])


@added_rule(load_staged_p)
def _load_staged(context: Context, eqn: Any) -> None:
    _loaded(context, eqn.params["number"], eqn.params["register"])


@added_rule(weights_undefined_p)
def _weights_undefined(context: Context, eqn: Any) -> Value:
    number, operation = eqn.params["number"], eqn.params["operation"]
    weights = _unit(context, number).weights
    assert weights is not None
    inside = _inside(context, weights)
    _probe(context, inside, Access.READ, operation, f"weights of matrix unit {number}")
    return mask_of_buffer(context, inside, eqn.params["read"])


@rule(TPU.matmul_acc_lhs_p)
def _matmul_acc_lhs(context: Context, eqn: Any, ref: Any, left: Value, *operands: Any) -> None:
    space, _ = space_of(eqn.invars[0].aval)
    number = space.mxu_id
    weights = _loaded(context, number, eqn.params["load_staged_rhs"])
    transforms = _accumulator(operands, eqn)
    view = resolve(context, ref, transforms, "matmul_acc_lhs", access=Access.UPDATE)
    product = _product(context, left, weights, view.dtype)
    accumulate(context, view, product, lambda one, other: add_values(context, one, other))


@rule(TPU.matmul_pop_p)
def _matmul_pop(context: Context, eqn: Any, ref: Any, *operands: Any) -> Value:
    transforms = _accumulator(operands, eqn)
    view = resolve(context, ref, transforms, "matmul_pop", access=Access.UPDATE)
    result = context.keep(read(context, view))
    zero = array_constant(context.function, np.zeros((), view.dtype))
    register = context.scalar(zero)
    write(context, view, views.broadcast_scalar(context, register, view.shape, view.dtype))
    return result


# The queue of results: rows, numbered from the first one that was ever pushed.


def _ends(context: Context, number: int) -> tuple[ir.Value, ir.Value]:
    """The addresses of the number of the first row in a queue, and of the next one to come."""
    address = state_address(context, ("matrix unit queue", number), 16)
    return address, context.function.advance(address, 8)


@rule(TPU.matmul_lhs_fifo_p)
def _matmul_lhs_fifo(context: Context, eqn: Any, left: Value) -> None:
    number = eqn.params["mxu_index"]
    weights = _loaded(context, number, eqn.params["load_staged_rhs"])
    dtype = jnp.float32 if jnp.issubdtype(left.dtype, jnp.floating) else jnp.int32
    product = context.materialise(_product(context, left, weights, dtype))
    rows, columns = product.shape
    unit = _unit(context, number)
    if unit.queue is None:
        unit.queue = lasting_buffer(context, (QUEUE_ROWS, columns), product.dtype)
    queue = unit.queue
    if queue.shape[1] != columns or queue.dtype != product.dtype:
        raise NotImplementedError(
            f"{context.describe()}: the result queue of matrix unit {number} holds rows of "
            f"{queue.shape[1]} {queue.dtype}, not of {columns} {product.dtype}"
        )
    first, last = _ends(context, number)
    builder = context.builder
    start, end = builder.load(first, typ=i64), builder.load(last, typ=i64)
    held = builder.sub(end, start)
    fits = builder.icmp_signed("<=", held, ir.Constant(i64, QUEUE_ROWS - rows))
    message = f"the result queue holds {{value}} rows, {QUEUE_ROWS} at most, and gets {rows} more"
    require(context, fits, "matmul_lhs_fifo", f"mxu {number}", message, held)
    _move_rows(context, _inside(context, queue), product, end, into_queue=True)
    builder.store(builder.add(end, ir.Constant(i64, rows)), last)


@rule(TPU.matmul_pop_fifo_p)
def _matmul_pop_fifo(context: Context, eqn: Any) -> Value:
    number, dtype = eqn.params["mxu_index"], np.dtype(eqn.params["dtype"])
    rows, columns = eqn.params["shape"]
    queue = _unit(context, number).queue
    if queue is None or queue.shape[1] != columns or queue.dtype != dtype:
        holds = "nothing" if queue is None else f"rows of {queue.shape[1]} {queue.dtype}"
        raise ValueError(
            f"{context.describe()}: matmul_pop_fifo asks for {dtype}[{rows}, {columns}], but the "
            f"result queue of matrix unit {number} holds {holds}"
        )
    first, last = _ends(context, number)
    builder = context.builder
    start, end = builder.load(first, typ=i64), builder.load(last, typ=i64)
    held = builder.sub(end, start)
    enough = builder.icmp_signed(">=", held, ir.Constant(i64, rows))
    message = f"the result queue holds {{value}} rows, but {rows} are taken"
    require(context, enough, "matmul_pop_fifo", f"mxu {number}", message, held)
    result = nests.dense_buffer(context, (rows, columns), dtype)
    _move_rows(context, _inside(context, queue), result, start, into_queue=False)
    builder.store(builder.add(start, ir.Constant(i64, rows)), first)
    return result


def _move_rows(
    context: Context, queue: Buffer, block: Buffer, start: ir.Value, *, into_queue: bool
) -> None:
    """Copies a block of rows to or from the places in a queue that begin with number `start`."""
    rows, columns = block.shape
    block = context.dense(block)
    where = make_packed((), np.int64, start)

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        queue_in, block_in, where_in = inside
        function = context.function
        with function.loop(0, rows) as loop:
            row = function.add(context.scalar(where_in), loop.counter)
            place: Index = function.remainder(row, QUEUE_ROWS)
            ours = queue_in.element_address(function, [place, 0])
            theirs = block_in.element_address(function, [loop.counter, 0])
            target, source = (ours, theirs) if into_queue else (theirs, ours)
            nests.copy_dense(function, target, source, columns * queue.dtype.itemsize)
        return []

    outlined(context, "result_queue", [queue, block, where], [], build)


@added_rule(mark_queue_p)
def _mark_queue(context: Context, eqn: Any, *masks: Value) -> None:
    """Says of the rows pushed last that they are defined, but for what a mask says."""
    number, rows = eqn.params["number"], eqn.params["rows"]
    _, last = _ends(context, number)
    start = context.builder.sub(context.builder.load(last, typ=i64), ir.Constant(i64, rows))

    def visit(row: Buffer, held: Buffer | None) -> None:
        name = f"results of matrix unit {number}"
        _probe(context, row, Access.WRITE, "matmul_lhs_fifo", name)
        if held is not None:
            mark_buffer(context, row, held, eqn.params["reads"])

    _each_row(context, number, rows, start, masks[0] if masks else None, visit)


@added_rule(queue_undefined_p)
def _queue_undefined(context: Context, eqn: Any) -> Value:
    """The mask of the rows that are popped next."""
    number, (rows, columns) = eqn.params["number"], eqn.outvars[0].aval.shape
    first, _ = _ends(context, number)
    target = nests.dense_buffer(context, (rows, columns), np.dtype(np.bool_))

    def visit(row: Buffer, held: Buffer | None) -> None:
        assert held is not None
        name = f"results of matrix unit {number}"
        _probe(context, row, Access.READ, "matmul_pop_fifo", name)
        found = mask_of_buffer(context, row, eqn.params["read"])
        nests.copy_dense(context.function, held.address, found.address, columns)

    start = context.builder.load(first, typ=i64)
    _each_row(context, number, rows, start, target, visit)
    return target


def _each_row(
    context: Context,
    number: int,
    rows: int,
    start: ir.Value,
    beside: Value | None,
    visit: Callable[[Buffer, Buffer | None], None],
) -> None:
    """Visits rows of a queue from number `start` on, each with its row of a mask beside them."""
    queue = _unit(context, number).queue
    if queue is None:
        # Its rule says so.
        return
    mask = [] if beside is None else [context.dense(beside)]
    where = make_packed((), np.int64, start)

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        queue_in, where_in, *masks = inside
        function = context.function
        columns = queue_in.shape[1]
        with function.loop(0, rows) as loop:
            row = function.add(context.scalar(where_in), loop.counter)
            place: Index = function.remainder(row, QUEUE_ROWS)
            ours = queue_in.element_address(function, [place, 0])
            single = Buffer((columns,), queue_in.dtype, ours, (queue_in.dtype.itemsize,))
            held = None
            if masks:
                theirs = masks[0].element_address(function, [loop.counter, 0])
                held = Buffer((columns,), np.dtype(np.bool_), theirs, (1,))
            visit(single, held)
        return []

    outlined(context, "queue_definedness", [_inside(context, queue), where, *mask], [], build)
