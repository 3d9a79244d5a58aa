"""Locks for sums in memory to which several cores add at the same time.

A lock for a row costs much less than an atomic sum for each of its elements. For that to be safe
every sum that may meet another must be made under these locks.
"""

import contextlib
from collections.abc import Callable, Iterator

from llvmlite import ir

from cokernel.compiler.dtypes import i32, i64, void
from cokernel.compiler.function import FunctionBuilder, Index

# Memory is divided into pieces of 2**PIECE_BITS bytes, each of which has one of the locks.
PIECE_BITS = 12
LOCKS = 256
# Each lock has a cache line to itself.
LOCK_WORDS = 16


@contextlib.contextmanager
def locked(function: FunctionBuilder, address: ir.Value) -> Iterator[None]:
    """What is emitted inside runs while no other core adds to the piece of memory of an address."""
    number = function.builder.lshr(
        function.builder.ptrtoint(address, i64), ir.Constant(i64, PIECE_BITS)
    )
    lock = _lock_of(function, number)
    _take(function, lock)
    yield
    function.builder.store_atomic(ir.Constant(i32, 0), lock, "release", 4)


def in_locked_pieces(
    function: FunctionBuilder,
    address: ir.Value,
    size: Index,
    emit: Callable[[ir.Value, ir.Value], None],
) -> None:
    """Emits `emit(offset, bytes)` under the lock of each piece that a block of memory touches.

    Pieces are done one after the other, so that no core ever holds two locks.
    """
    builder = function.builder
    shift = ir.Constant(i64, PIECE_BITS)
    start = builder.ptrtoint(address, i64)
    end = builder.add(start, function.index(size))
    first = builder.lshr(start, shift)
    behind = builder.lshr(builder.add(end, ir.Constant(i64, (1 << PIECE_BITS) - 1)), shift)
    with function.loop(first, behind) as loop:
        piece = builder.shl(loop.counter, shift)
        next_piece = builder.add(piece, ir.Constant(i64, 1 << PIECE_BITS))
        low = function.intrinsic("llvm.umax", i64, [start, piece])
        high = function.intrinsic("llvm.umin", i64, [end, next_piece])
        offset = builder.sub(low, start)
        with locked(function, function.advance(address, offset)):
            emit(offset, builder.sub(high, low))


def _lock_of(function: FunctionBuilder, number: ir.Value) -> ir.Value:
    """One of the module's locks, which are zero while nobody holds them."""
    table = function.module.globals.get("sum_locks")
    if table is None:
        kind = ir.ArrayType(ir.ArrayType(i32, LOCK_WORDS), LOCKS)
        table = ir.GlobalVariable(function.module, kind, "sum_locks")
        table.linkage, table.align = "internal", 4 * LOCK_WORDS
        table.initializer = ir.Constant(kind, None)
    which = function.builder.and_(number, ir.Constant(i64, LOCKS - 1))
    zero = ir.Constant(i64, 0)
    return function.builder.gep(table, [zero, which, zero], inbounds=True)


def _take(function: FunctionBuilder, lock: ir.Value) -> None:
    builder = function.builder
    attempt = function.function.append_basic_block("lock_attempt")
    held = function.function.append_basic_block("lock_held_by_another")
    taken = function.function.append_basic_block("lock_taken")
    builder.branch(attempt)
    builder.position_at_end(attempt)
    before = builder.atomic_rmw("xchg", lock, ir.Constant(i32, 1), "acquire")
    is_free = builder.icmp_signed("==", before, ir.Constant(i32, 0))
    builder.cbranch(is_free, taken, held).set_weights([1 << 20, 1])
    builder.position_at_end(held)
    # Asks again only after a moment, so that the holder is not disturbed.
    nothing = ir.Constant(i64, 0)
    function.call_external("cokernel_delay", void, [function.core, nothing])
    builder.branch(attempt)
    builder.position_at_end(taken)
