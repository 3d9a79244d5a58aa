"""Radix sort of the rows of an array: by one digit of a key after the other, the lowest first. It
is stable, and its time grows with the number of elements alone.

What is moved is either the elements themselves, when nothing else goes with them, or each key
together with the place where it was.
"""

from collections.abc import Callable, Sequence

import ml_dtypes
import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes, nests
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import Kind, f32, f64, i32, i64
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.values import Buffer, Value, load_element, store_element
from cokernel.records import record

# Shorter rows are merged faster than the counters are cleared.
SHORTEST_ROW = 64
# From so many elements on, wider digits and so fewer passes pay for the larger tables.
LONG_ROW = 4096


class Elements:
    """Rows of elements that are moved themselves, as integers that ascend as the elements do."""

    def __init__(self, dtype: np.dtype):
        self.dtype = dtype
        self.kind = dtypes.kind(dtype)
        self.width = 8 * dtype.itemsize
        self.type = ir.IntType(self.width)
        if dtypes.is_float(dtype):
            infinity = int(np.array(np.inf, dtype).view(f"u{dtype.itemsize}"))
            # The bits of -inf, with all of them flipped, are where the numbers begin. Counted from
            # there, NaNs of both signs come after the last number.
            self.start = (1 << (self.width - 1)) - 1 - infinity
            self.last = 2 * infinity + 1
            self.negative_zero = infinity
            # How many numbers of one sign are too small for their exponent.
            self.denormals = (1 << int(ml_dtypes.finfo(dtype).nmant)) - 1

    @staticmethod
    def can_move(dtype: np.dtype) -> bool:
        """Whether the elements' order is that of integers made from their bits."""
        return dtypes.kind(dtype) in (Kind.BOOL, Kind.SIGNED, Kind.UNSIGNED, Kind.FLOAT) or (
            dtypes.is_float(dtype) and dtype.itemsize == 2
        )

    def _constant(self, value: int) -> ir.Constant:
        return ir.Constant(self.type, value)

    def encode(self, function: FunctionBuilder, register: ir.Value, place: ir.Value) -> ir.Value:
        """The integer that stands for an element; `place` is not needed."""
        ops = function.builder
        sign = self._constant(1 << (self.width - 1))
        match self.kind:
            case Kind.BOOL:
                return ops.zext(register, self.type)
            case Kind.UNSIGNED:
                return register
            case Kind.SIGNED:
                return ops.xor(register, sign)
        bits = ops.bitcast(register, self.type)
        negative = ops.ashr(bits, self._constant(self.width - 1))
        ordered = ops.xor(bits, ops.or_(negative, sign))
        return ops.sub(ordered, self._constant(self.start))

    def decode(self, function: FunctionBuilder, moved: ir.Value) -> ir.Value:
        """The element that an integer stands for."""
        ops = function.builder
        sign = self._constant(1 << (self.width - 1))
        match self.kind:
            case Kind.BOOL:
                return ops.trunc(moved, dtypes.i1)
            case Kind.UNSIGNED:
                return moved
            case Kind.SIGNED:
                return ops.xor(moved, sign)
        ordered = ops.add(moved, self._constant(self.start))
        positive = ops.ashr(ordered, self._constant(self.width - 1))
        bits = ops.xor(ordered, ops.or_(ops.not_(positive), sign))
        return ops.bitcast(bits, dtypes.register_type(self.dtype))

    def key(self, function: FunctionBuilder, moved: ir.Value) -> ir.Value:
        """What is compared: all zeros are equal, and so are all NaNs."""
        if not dtypes.is_float(self.dtype):
            return moved
        ops = function.builder
        flushed = self._flushed(function)
        from_zeros = ops.sub(moved, ops.sub(self._constant(self.negative_zero), flushed))
        zeros = ops.add(ops.shl(flushed, self._constant(1)), self._constant(1))
        is_zero = ops.icmp_unsigned("<=", from_zeros, zeros)
        key = ops.select(is_zero, self._constant(self.negative_zero), moved)
        nan = self._constant(self.last + 1)
        return function.intrinsic("llvm.umin", self.type, [key, nan])

    def _flushed(self, function: FunctionBuilder) -> ir.Value:
        """How many denormals of one sign the processor takes for zeros at the moment."""
        if self.kind is Kind.FLOAT and self.width == 16:
            # Compared as float32, in which they are ordinary numbers.
            return self._constant(0)
        scalar, bits = (f64, i64) if self.width == 64 else (f32, i32)

        def emit(builder: ir.IRBuilder) -> ir.Value:
            # The two smallest numbers are equal where they are taken for zeros. LLVM, which would
            # compare them by the rules of IEEE 754, does not know what comes out of assembly code,
            # though this one is empty.
            identity = ir.FunctionType(bits, [bits])
            one, other = (
                builder.asm(identity, "", "=r,0", [ir.Constant(bits, number)], False)
                for number in (1, 2)
            )
            is_equal = builder.fcmp_ordered(
                "==", builder.bitcast(one, scalar), builder.bitcast(other, scalar)
            )
            return builder.select(is_equal, self._constant(self.denormals), self._constant(0))

        return function.at_entry(("denormals", self.dtype), emit)


class KeysAndPlaces:
    """Rows of keys, signed integers of at most 32 bits, each moved with the place where it was."""

    type = i64

    def __init__(self, dtype: np.dtype):
        self.width = 8 * dtype.itemsize

    def encode(self, function: FunctionBuilder, register: ir.Value, place: ir.Value) -> ir.Value:
        """A key and its place in one integer."""
        ops = function.builder
        sign = ir.Constant(register.type, 1 << (self.width - 1))
        key = ops.zext(ops.xor(register, sign), i64)
        return ops.or_(ops.shl(key, ir.Constant(i64, 32)), place)

    def decode(self, function: FunctionBuilder, moved: ir.Value) -> ir.Value:
        """The place."""
        return function.builder.and_(moved, ir.Constant(i64, 0xFFFFFFFF))

    def key(self, function: FunctionBuilder, moved: ir.Value) -> ir.Value:
        """The key."""
        return function.builder.lshr(moved, ir.Constant(i64, 32))


Form = Elements | KeysAndPlaces


@record(frozen=True)
class Digits:
    """How a key of `width` bits is divided for rows of `count` elements."""

    width: int
    count: int

    @property
    def passes(self) -> int:
        """How many digits a key has."""
        return -(-self.width // (8 if self.count < LONG_ROW else 11))

    @property
    def bits(self) -> int:
        """How many bits a digit has."""
        return -(-self.width // self.passes)

    def of(self, function: FunctionBuilder, key: ir.Value, number: ir.Value) -> ir.Value:
        """A digit of a key, the lowest being number 0; an i64."""
        ops = function.builder
        shift = ops.mul(number, ir.Constant(i64, self.bits))
        if key.type.width < 64:
            shift = ops.trunc(shift, key.type)
        digit = ops.and_(ops.lshr(key, shift), ir.Constant(key.type, (1 << self.bits) - 1))
        return digit if key.type == i64 else ops.zext(digit, i64)


def rooms(context: Context, form: Form, count: int) -> tuple[Buffer, Buffer]:
    """Room to move a row back and forth in, and room for the counters."""
    digits = Digits(form.width, count)
    integer = np.dtype(f"u{form.type.width // 8}")
    return (
        nests.dense_buffer(context, (2, count), integer),
        nests.dense_buffer(context, (digits.passes, 1 << digits.bits), np.int32),
    )


def sort_row(
    context: Context,
    form: Form,
    source: Value,
    row: Sequence[Index],
    room: Buffer,
    counters: Buffer,
    emit: Callable[[Index, ir.Value], None],
) -> None:
    """Sorts the row of `source` at the index `row`. `emit(place, decoded)` emits what happens with
    each element in its new place.
    """
    function = context.function
    count = room.shape[1]
    digits = Digits(form.width, count)
    nests.fill_zero(context, counters.address, 4 * counters.size)
    with function.loop(0, count) as loop:
        element = source.element(ElementBuilder(function), [*row, loop.counter])
        moved = form.encode(function, element, loop.counter)
        store_element(
            function, moved, room.element_address(function, [0, loop.counter]), room.dtype
        )
        key = form.key(function, moved)
        for number in range(digits.passes):
            digit = digits.of(function, key, ir.Constant(i64, number))
            _count(function, counters.element_address(function, [number, digit]))
    halves = [room.element_address(function, [half, 0]) for half in (0, 1)]
    with function.loop(0, digits.passes, carry=halves, rolled=True) as loop:
        loop.next = _move_by_digit(
            function, form, digits, loop.counter, room, loop.carry, counters, count
        )
    settled = room.view((count,), (1,), loop.carry[0])
    with function.loop(0, count) as loop:
        moved = settled.element(ElementBuilder(function), [loop.counter])
        emit(loop.counter, form.decode(function, moved))


def _count(function: FunctionBuilder, address: ir.Value) -> ir.Value:
    """Adds one to a counter and returns what it was."""
    before = load_element(function, address, np.int32)
    after = function.builder.add(before, ir.Constant(i32, 1))
    store_element(function, after, address, np.int32)
    return before


def _move_by_digit(
    function: FunctionBuilder,
    form: Form,
    digits: Digits,
    number: ir.Value,
    room: Buffer,
    halves: Sequence[ir.Value],
    counters: Buffer,
    count: int,
) -> list[ir.Value]:
    """Moves a row from one half of the room to the other in the order of one digit, unless all
    have the same; returns the half that the row is in afterwards, and the other one.
    """
    ops = function.builder
    source, target = (room.view((count,), (1,), half) for half in halves)
    table = counters.view(counters.shape[1:], (1,), counters.element_address(function, [number, 0]))

    def digit_at(place: Index) -> tuple[ir.Value, ir.Value]:
        moved = source.element(ElementBuilder(function), [place])
        return moved, digits.of(function, form.key(function, moved), number)

    _, first = digit_at(0)
    common = load_element(function, table.element_address(function, [first]), np.int32)
    differ = ops.icmp_unsigned("!=", common, ir.Constant(i32, count))
    with ops.if_then(differ):
        with function.loop(0, table.size, carry=[ir.Constant(i32, 0)]) as loop:
            address = table.element_address(function, [loop.counter])
            size = load_element(function, address, np.int32)
            store_element(function, loop.carry[0], address, np.int32)
            loop.next = [ops.add(loop.carry[0], size)]
        with function.loop(0, count) as loop:
            moved, digit = digit_at(loop.counter)
            place = _count(function, table.element_address(function, [digit]))
            place = ops.zext(place, i64)
            store_element(function, moved, target.element_address(function, [place]), room.dtype)
    one, other = halves
    return [ops.select(differ, other, one), ops.select(differ, one, other)]
