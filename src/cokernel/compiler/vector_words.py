"""Vectors of words, as the loops over panels of `matrix_product.py` load and shuffle them."""

import enum

from llvmlite import ir

from cokernel.compiler import codegen
from cokernel.compiler.dtypes import f32, i8, i16, i32, i64, pointer, void
from cokernel.compiler.function import FunctionBuilder, Index


def floats(lanes: int) -> ir.VectorType:
    """So many float32."""
    return ir.VectorType(f32, lanes)


def words(lanes: int) -> ir.VectorType:
    """So many words of 32 bits."""
    return ir.VectorType(i32, lanes)


def halves(lanes: int) -> ir.VectorType:
    """So many words of 16 bits."""
    return ir.VectorType(i16, lanes)


def least(function: FunctionBuilder, left: Index, right: Index) -> Index:
    """The smaller of two integers."""
    if isinstance(left, int) and isinstance(right, int):
        return min(left, right)
    left, right = function.index(left), function.index(right)
    return function.intrinsic("llvm.smin", i64, [left, right])


def splat(function: FunctionBuilder, value: ir.Value, kind: ir.VectorType) -> ir.Value:
    """A vector with the same word in all lanes."""
    undefined = ir.Constant(kind, ir.Undefined)
    first = function.builder.insert_element(undefined, value, ir.Constant(i32, 0))
    mask = ir.Constant(ir.VectorType(i32, kind.count), [0] * kind.count)
    return function.builder.shuffle_vector(first, undefined, mask)


def first_lanes(function: FunctionBuilder, lanes: int, count: Index) -> ir.Value:
    """The first `count` of so many lanes; none if it is negative."""
    kind = ir.VectorType(i32, lanes)
    few = function.index(least(function, count, lanes))
    few = splat(function, function.builder.trunc(few, i32), kind)
    return function.builder.icmp_signed("<", ir.Constant(kind, list(range(lanes))), few)


def load_first(
    function: FunctionBuilder, kind: ir.VectorType, address: ir.Value, count: Index
) -> ir.Value:
    """The first `count` elements at an address, followed by zeros."""
    builder = function.builder
    mask = first_lanes(function, kind.count, count)
    arguments = [address, mask, ir.Constant(kind, None)]

    def masked() -> ir.Value:
        return function.intrinsic("llvm.masked.load", kind, arguments, overloads=[kind, pointer])

    if codegen.host_has("avx512bw"):
        return masked()
    # A masked load takes longer here, and of narrow elements LLVM makes one load for each lane.
    is_whole = builder.icmp_signed(">=", function.index(count), ir.Constant(i64, kind.count))
    with builder.if_else(is_whole) as (whole, partial):
        with whole:
            all_lanes = builder.load(address, typ=kind, align=kind.element.width // 8)
            whole_block = builder.block
        with partial:
            some_lanes = masked()
            partial_block = builder.block
    loaded = builder.phi(kind)
    loaded.add_incoming(all_lanes, whole_block)
    loaded.add_incoming(some_lanes, partial_block)
    return loaded


class Cache(enum.IntEnum):
    """A level of the cache, as LLVM numbers them."""

    FIRST = 3
    SECOND = 2


def prefetch(
    function: FunctionBuilder,
    base: ir.Value,
    offset: Index,
    level: Cache,
    *,
    is_read: bool = True,
) -> None:
    """Begins to bring the line of memory at so many bytes from an address, which is to be read or
    to be written, into the cache. It may be any address."""
    address = function.builder.gep(base, [function.index(offset)], source_etype=i8)
    hints = [ir.Constant(i32, hint) for hint in (int(not is_read), level, 1)]
    function.intrinsic("llvm.prefetch", void, [address, *hints], overloads=[pointer])


def widened(function: FunctionBuilder, register: ir.Value) -> ir.Value:
    """bfloat16 as the bits of float32."""
    kind = words(register.type.count)
    wide = function.builder.zext(register, kind)
    return function.builder.shl(wide, ir.Constant(kind, [16] * kind.count))


def transposed(function: FunctionBuilder, rows: list[ir.Value]) -> list[ir.Value]:
    """A square of words, given as its rows, transposed: by perfect shuffles of halves."""
    for _ in range(len(rows).bit_length() - 1):
        half = len(rows) // 2
        shuffled = []
        for low, high in zip(rows[:half], rows[half:], strict=True):
            for start in (0, half):
                lanes = [lane for i in range(start, start + half) for lane in (i, i + len(rows))]
                mask = ir.Constant(ir.VectorType(i32, len(lanes)), lanes)
                shuffled.append(function.builder.shuffle_vector(low, high, mask))
        rows = shuffled
    return rows
