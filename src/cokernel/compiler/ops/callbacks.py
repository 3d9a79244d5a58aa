"""Calling Python from a program, with numpy arrays in and out."""

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import nests
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32, pointer
from cokernel.compiler.values import Buffer, Value, is_small, make_packed, pack

# Takes the runtime's description of the calling core and the operands, returns the results.
PythonFunction = Callable[..., Sequence[Any]]


def call_python(
    context: Context,
    function: PythonFunction,
    operands: Sequence[Value],
    result_avals: Sequence[Any],
    operation: str,
    name: str = "",
) -> list[Value]:
    """Emits a call of `function(core_info, *arrays)` with the operands as numpy arrays.

    The program fails with the exception if it raises one. Its results must have the shapes and
    dtypes of `result_avals`.
    """
    inputs = [context.dense(operand) for operand in operands]
    outputs = [
        nests.dense_buffer(context, aval.shape, np.dtype(aval.dtype)) for aval in result_avals
    ]
    wrapped = _wrap(
        function,
        [(buffer.shape, buffer.dtype) for buffer in inputs],
        [(buffer.shape, buffer.dtype) for buffer in outputs],
        operation,
    )
    number = context.kernel.add_callback(wrapped, len(inputs), len(outputs))
    tables = [_address_table(context, buffers) for buffers in (inputs, outputs)]
    site = context.site(operation, name)
    arguments = [context.function.core, ir.Constant(i32, number), *(t for t, _ in tables), site]
    outcome = context.function.call_external("cokernel_callback", i32, arguments)
    good = context.builder.icmp_signed("==", outcome, ir.Constant(i32, 0))
    # The runtime has recorded the failure already.
    context.function.check(good, lambda: None)
    return [_settled(context, buffer) for buffer in outputs]


def _address_table(context: Context, buffers: Sequence[Buffer]) -> tuple[ir.Value, Any]:
    """An array of the buffers' addresses in the core's memory, and what keeps it reserved."""
    if not buffers:
        return ir.Constant(pointer, None), None
    owner = context.program.arena.allocate(8 * len(buffers))
    table = context.private_address(owner.offset)
    for number, buffer in enumerate(buffers):
        context.builder.store(buffer.address, context.function.advance(table, 8 * number))
    return table, owner


def _settled(context: Context, buffer: Buffer) -> Value:
    if not buffer.shape or is_small(buffer.shape, buffer.dtype):
        return make_packed(buffer.shape, buffer.dtype, pack(context.function, buffer))
    return buffer


Described = tuple[tuple[int, ...], np.dtype]


def _wrap(
    function: PythonFunction, inputs: list[Described], outputs: list[Described], operation: str
) -> Callable[..., None]:
    """What the runtime calls: it has addresses where `function` has arrays."""

    def call(core: dict[str, Any], operands: list[int], results: list[int]) -> None:
        # The arena is used again afterwards, so the function gets copies that it may keep.
        arrays = [
            _array_at(address, *described).copy()
            for address, described in zip(operands, inputs, strict=True)
        ]
        values = function(core, *arrays)
        if len(values) != len(outputs):
            raise ValueError(
                f"{operation} returned {len(values)} results where {len(outputs)} are expected"
            )
        for address, (shape, dtype), value in zip(results, outputs, values, strict=True):
            array = np.asarray(value)
            if array.shape != shape or array.dtype != dtype:
                raise ValueError(
                    f"{operation} returned {array.dtype}{list(array.shape)} where "
                    f"{dtype}{list(shape)} is expected"
                )
            _array_at(address, shape, dtype)[...] = array

    return call


def _array_at(address: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The memory at an address as a dense array."""
    size = int(np.prod(shape, dtype=int)) * dtype.itemsize
    if size == 0:
        return np.empty(shape, dtype)
    memory = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(memory, dtype).reshape(shape)
