"""What a core remembers during a launch apart from its Refs: its random number generator, its
matrix units.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.context import Context, Program
from cokernel.compiler.dtypes import i1, i8, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder
from cokernel.compiler.values import Buffer, row_major


def state_address(context: Context, key: Any, size: int) -> ir.Value:
    """The address of `size` bytes that are zero when the core starts, the same for the same key."""
    known = context.program.state
    if key not in known:
        known[key] = context.program.arena.allocate_unused(size)
    return context.private_address(known[key].offset)


def lasting_buffer(context: Context, shape: Sequence[int], dtype: Any) -> Buffer:
    """Room for an array that lasts as long as the program; it is not cleared."""
    shape = tuple(shape)
    owner = context.program.arena.allocate_unused(math.prod(shape) * dtypes.itemsize(dtype))
    address = context.private_address(owner.offset)
    return Buffer(shape, np.dtype(dtype), address, row_major(shape), owner=owner)


def clear_state(function: FunctionBuilder, program: Program) -> None:
    """Clears, at the entry of a program, the state that its rules have asked for."""
    builder = function.entry_builder
    for allocation in program.state.values():
        memory = function.core_field("Core.memory", pointer)
        address = function.advance(memory, allocation.offset, builder)
        clear = function.external("llvm.memset.p0.i64", void, [pointer, i8, i64, i1])
        size = ir.Constant(i64, allocation.size)
        builder.call(clear, [address, ir.Constant(i8, 0), size, ir.Constant(i1, 0)])
