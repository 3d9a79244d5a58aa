"""Sorting along one axis: a sorting network for arrays in registers; in memory a radix sort for
long rows with one key, a merge sort for others. All are stable.

Elements are compared by integer keys whose order is that of the elements. For `sort`, XLA's order
of floats: the two zeros are equal, and NaNs are equal and come last.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax
from llvmlite import ir

from cokernel.compiler import dtypes, nests, views
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import Kind, i8, i16, i32, i64
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops import radix_sort
from cokernel.compiler.ops.apply import convert, emit_elementwise
from cokernel.compiler.ops.reduce import in_function, in_registers_if_small
from cokernel.compiler.ops.registry import Operation, rule
from cokernel.compiler.ops.shape import positions
from cokernel.compiler.values import (
    Buffer,
    Expression,
    Value,
    concatenate_vectors,
    is_small,
    make_packed,
    shuffle,
    store_element,
)


@rule(lax.sort_p)
def sort(context: Context, eqn: Any, *operands: Value) -> list[Value]:
    """Several arrays reordered alike, so that the first `num_keys` of them ascend
    lexicographically."""
    if len(operands) == 1 and _moves_elements(operands[0], eqn.params["dimension"]):
        return [_sort_elements(context, operands[0], eqn.params["dimension"])]
    keys = [sort_key(context, operand) for operand in operands[: eqn.params["num_keys"]]]
    return sort_by(context, keys, operands, eqn.params["dimension"])


@rule(lax.top_k_p)
def top_k(context: Context, eqn: Any, operand: Value) -> list[Value]:
    """The k greatest elements along an axis in descending order, and where they were; NaN is
    greatest."""
    axis = eqn.params["axis"] % len(operand.shape)
    index_dtype = np.dtype(eqn.outvars[1].aval.dtype)
    key = sort_key(context, operand, is_descending=True)
    places = positions(context, operand.shape, axis, np.int32)
    results = sort_by(context, [key], [operand, places], axis)
    shape = eqn.outvars[0].aval.shape
    view = views.sliced([0] * len(shape), shape)
    values, places = (views.take_view(context, result, view) for result in results)
    return [values, convert(context, places, index_dtype)]


def sort_key(context: Context, operand: Value, *, is_descending: bool = False) -> Value:
    """Signed integers in the order of the operand's elements. In the descending order, which is
    that of top_k, the zeros and the NaNs of either sign differ."""
    if operand.dtype == np.float16 and is_descending:
        # As the bits are, since a conversion changes those of a NaN.
        return emit_elementwise(context, _half_descending, operand.shape, np.int16, operand)
    if dtypes.is_float(operand.dtype) and operand.dtype.itemsize < 4:
        operand = convert(context, operand, np.float32)
    result = np.dtype(f"int{8 * operand.dtype.itemsize}")

    def emit(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
        key = _key_element(builder, operand.dtype, register, unify=not is_descending)
        return builder.builder.not_(key) if is_descending else key

    return emit_elementwise(context, emit, operand.shape, result, operand)


def _key_element(
    builder: ElementBuilder, dtype: np.dtype, register: ir.Value, *, unify: bool
) -> ir.Value:
    ops = builder.builder
    kind = dtypes.kind(dtype)
    if kind is Kind.BOOL:
        return ops.zext(register, builder.type(i8))
    if kind is Kind.SIGNED:
        return register
    integer = ir.IntType(8 * dtype.itemsize)
    if kind is Kind.UNSIGNED:
        return ops.xor(register, builder.constant(integer, -(1 << (integer.width - 1))))
    if unify:
        scalar = dtypes.register_type(dtype)
        zero, nan = (builder.constant(scalar, value) for value in (0.0, math.nan))
        register = ops.select(ops.fcmp_ordered("==", register, zero), zero, register)
        register = ops.select(ops.fcmp_unordered("uno", register, register), nan, register)
    return _ordered_bits(builder, integer, register)


def _ordered_bits(builder: ElementBuilder, integer: ir.IntType, register: ir.Value) -> ir.Value:
    """The bits of a float as an integer of the same order."""
    ops = builder.builder
    bits = ops.bitcast(register, builder.type(integer))
    # Negative floats ascend as their magnitude, which is what remains of the bits, descends.
    sign = ops.ashr(bits, builder.constant(integer, integer.width - 1))
    return ops.xor(bits, ops.and_(sign, builder.constant(integer, (1 << (integer.width - 1)) - 1)))


def _half_descending(builder: ElementBuilder, operation: Operation, register: ir.Value) -> ir.Value:
    return builder.builder.not_(_ordered_bits(builder, i16, register))


def sort_by(
    context: Context, keys: Sequence[Value], operands: Sequence[Value], axis: int
) -> list[Value]:
    """The operands reordered along an axis so that the keys, signed integers, ascend
    lexicographically."""
    shape = operands[0].shape
    if operands[0].size == 0 or shape[axis] == 1:
        return list(operands)
    if all(is_small(shape, value.dtype) for value in (*keys, *operands)):
        return _sort_registers(context, keys, operands, axis)
    is_long = shape[axis] >= radix_sort.SHORTEST_ROW
    if is_long and len(keys) == 1 and keys[0].dtype.itemsize <= 4:
        return _sort_by_places(context, keys[0], operands, axis)
    return _sort_memory(context, keys, operands, axis)


def _moves_elements(operand: Value, axis: int) -> bool:
    return (
        operand.size > 0
        and operand.shape[axis] >= radix_sort.SHORTEST_ROW
        and not is_small(operand.shape, operand.dtype)
        and radix_sort.Elements.can_move(operand.dtype)
    )


def _rows_along(context: Context, value: Value, axis: int, *, keep_lazy: bool = False) -> Value:
    """The value with `axis` last, in memory unless it is lazy and may stay so."""
    is_lazy = isinstance(value, Expression) and keep_lazy
    last = [*(d for d in range(len(value.shape)) if d != axis), axis]
    view = views.transposed(value.shape, last)
    return views.take_view(context, value if is_lazy else context.materialise(value), view)


def _sort_elements(context: Context, operand: Value, axis: int) -> Value:
    """Radix sort of rows with which nothing else is moved."""
    form = radix_sort.Elements(operand.dtype)
    count = operand.shape[axis]
    target = nests.dense_buffer(context, operand.shape, operand.dtype)
    values = [
        _rows_along(context, operand, axis, keep_lazy=True),
        _rows_along(context, target, axis),
        *radix_sort.rooms(context, form, count),
    ]

    def build(
        function: FunctionBuilder, _: Buffer | None, inside: list[Value]
    ) -> Sequence[ir.Value]:
        source, result, room, counters = inside
        assert isinstance(result, Buffer)
        with function.nest(source.shape[:-1]) as row:

            def store(place: Index, element: ir.Value) -> None:
                address = result.element_address(function, [*row, place])
                store_element(function, element, address, result.dtype)

            radix_sort.sort_row(context, form, source, row, _buffer(room), _buffer(counters), store)
        return []

    in_function(context, "sort", None, values, [], build)
    return target


def _sort_by_places(
    context: Context, key: Value, operands: Sequence[Value], axis: int
) -> list[Value]:
    """Radix sort of each row's keys together with where they were; the operands are fetched at the
    end.
    """
    form = radix_sort.KeysAndPlaces(key.dtype)
    targets = [nests.dense_buffer(context, value.shape, value.dtype) for value in operands]
    values = [
        _rows_along(context, key, axis, keep_lazy=True),
        *(_rows_along(context, value, axis, keep_lazy=_is_cheap(value)) for value in operands),
        *(_rows_along(context, target, axis) for target in targets),
        *radix_sort.rooms(context, form, key.shape[axis]),
    ]

    def build(
        function: FunctionBuilder, _: Buffer | None, inside: list[Value]
    ) -> Sequence[ir.Value]:
        keys, *others, room, counters = inside
        sources, results = others[: len(operands)], others[len(operands) :]
        with function.nest(keys.shape[:-1]) as row:

            def fetch(to: Index, place: ir.Value) -> None:
                builder = ElementBuilder(function)
                for source, result in zip(sources, results, strict=True):
                    element = source.element(builder, [*row, place])
                    address = _buffer(result).element_address(function, [*row, to])
                    store_element(function, element, address, result.dtype)

            radix_sort.sort_row(context, form, keys, row, _buffer(room), _buffer(counters), fetch)
        return []

    in_function(context, "sort", None, values, [], build)
    return [in_registers_if_small(context, target) for target in targets]


def _is_cheap(value: Value) -> bool:
    return isinstance(value, Expression) and value.is_cheap


def _sort_registers(
    context: Context, keys: Sequence[Value], operands: Sequence[Value], axis: int
) -> list[Value]:
    """Sorts in a function that all sorts of such values share: a network is hundreds of
    instructions long, and programs that sort in registers do so many times."""
    values = [*keys, *operands]
    registers = [context.pack(value) for value in values]
    kinds = tuple(value.dtype for value in keys), tuple(value.dtype for value in operands)

    def build(parameters: Sequence[ir.Value]) -> list[ir.Value]:
        inside = [
            make_packed(value.shape, value.dtype, parameter)
            for value, parameter in zip(values, parameters, strict=True)
        ]
        results = _sort_by_network(context, inside[: len(keys)], inside[len(keys) :], axis)
        return [context.pack(result) for result in results]

    results = context.call_shared(
        ("sort", values[0].shape, axis, kinds),
        registers,
        [register.type for register in registers[len(keys) :]],
        build,
    )
    return [
        make_packed(operand.shape, operand.dtype, register)
        for operand, register in zip(operands, results, strict=True)
    ]


def _sort_by_network(
    context: Context, keys: Sequence[Value], operands: Sequence[Value], axis: int
) -> list[Value]:
    """Batcher's bitonic network, on all rows at once. A row is padded to a power of two with
    greatest keys."""
    function = context.function
    shape = operands[0].shape
    lanes = np.moveaxis(np.arange(operands[0].size).reshape(shape), axis, -1)
    rows, count = lanes.reshape(-1, shape[axis]).shape
    padded = 1 << (count - 1).bit_length()
    size = operands[0].size
    # Lane `size` is the padding.
    spread = np.full((rows, padded), size)
    spread[:, :count] = lanes.reshape(rows, count)
    picks = spread.ravel().tolist()
    builder = ElementBuilder(function, rows * padded)

    def load(value: Value, padding: ir.Value) -> ir.Value:
        register = concatenate_vectors(function, [context.pack(value), padding])
        return shuffle(function, register, picks)

    width = keys[0].dtype.itemsize * 8
    order = ir.Constant(
        ir.VectorType(ir.IntType(width), rows * padded),
        [lane % padded for lane in range(rows * padded)],
    )
    # The place that an element had decides between equals, which makes the order total and the sort
    # stable.
    compared = [
        *(
            load(key, ir.Constant(ir.IntType(w := 8 * key.dtype.itemsize), (1 << (w - 1)) - 1))
            for key in keys
        ),
        order,
    ]
    moved = [
        load(operand, ir.Constant(dtypes.register_type(operand.dtype), ir.Undefined))
        for operand in operands
    ]
    registers = [*compared, *moved]
    for merged in (1 << level for level in range(1, padded.bit_length())):
        distance = merged // 2
        while distance:
            descends = ((np.arange(rows * padded) % padded) & merged) != 0
            registers = _exchange(builder, registers, len(compared), descends, distance)
            distance //= 2
    back = np.empty(size, dtype=int)
    back[lanes.reshape(rows, count)] = np.arange(rows * padded).reshape(rows, padded)[:, :count]
    return [
        make_packed(shape, operand.dtype, shuffle(function, register, back.tolist()))
        for operand, register in zip(operands, registers[len(compared) :], strict=True)
    ]


def _exchange(
    builder: ElementBuilder,
    registers: Sequence[ir.Value],
    compared: int,
    descends: np.ndarray,
    distance: int,
) -> list[ir.Value]:
    """One step of the network: lanes that are `distance` apart are put in order, descending where
    `descends` says so."""
    ops = builder.builder
    lanes = np.arange(builder.count)
    partners = [
        shuffle(builder.function, register, (lanes ^ distance).tolist()) for register in registers
    ]
    wants_greater = ((lanes & distance) != 0) ^ descends
    flip = ir.Constant(ir.VectorType(dtypes.i1, builder.count), wants_greater.astype(int).tolist())
    is_less = _precedes(builder, registers[:compared], partners[:compared])
    keep = ops.xor(is_less, flip)
    return [ops.select(keep, mine, other) for mine, other in zip(registers, partners, strict=True)]


def _precedes(
    builder: ElementBuilder, left: Sequence[ir.Value], right: Sequence[ir.Value]
) -> ir.Value:
    """Whether one tuple of keys comes before the other."""
    ops = builder.builder
    is_less = ops.icmp_signed("<", left[-1], right[-1])
    for one, other in reversed(list(zip(left[:-1], right[:-1], strict=True))):
        is_equal = ops.icmp_signed("==", one, other)
        is_less = ops.or_(ops.icmp_signed("<", one, other), ops.and_(is_equal, is_less))
    return is_less


def _sort_memory(
    context: Context, keys: Sequence[Value], operands: Sequence[Value], axis: int
) -> list[Value]:
    """Merge sort of each row's first keys together with where they were; the other keys are looked
    up between equals, and the operands are fetched at the end."""
    shape = operands[0].shape
    count = shape[axis]
    rows = [extent for dimension, extent in enumerate(shape) if dimension != axis]
    targets = [nests.dense_buffer(context, shape, operand.dtype) for operand in operands]
    rooms = [
        nests.dense_buffer(context, (2, count), keys[0].dtype),
        nests.dense_buffer(context, (2, count), np.int32),
        *(nests.dense_buffer(context, (count,), key.dtype) for key in keys[1:]),
    ]
    values = [
        *(_rows_along(context, key, axis, keep_lazy=True) for key in keys),
        *(_rows_along(context, value, axis, keep_lazy=_is_cheap(value)) for value in operands),
        *(_rows_along(context, target, axis) for target in targets),
        *rooms,
    ]

    def build(
        function: FunctionBuilder, target: Buffer | None, inside: list[Value]
    ) -> Sequence[ir.Value]:
        parts = iter(inside)
        key_values = [next(parts) for _ in keys]
        sources = [next(parts) for _ in operands]
        results = [_buffer(next(parts)) for _ in operands]
        key_room, place_room = _buffer(next(parts)), _buffer(next(parts))
        others = [_buffer(next(parts)) for _ in keys[1:]]
        with function.nest(rows) as row:
            _fill(function, row, count, key_values, [_line(key_room), *others], _line(place_room))
            places = _merge_passes(function, count, key_room, place_room, others)
            with function.loop(0, count) as loop:
                builder = ElementBuilder(function)
                place = function.builder.sext(places.element(builder, [loop.counter]), i64)
                for source, result in zip(sources, results, strict=True):
                    element = source.element(builder, [*row, place])
                    address = result.element_address(function, [*row, loop.counter])
                    store_element(function, element, address, result.dtype)
        return []

    in_function(context, "sort", None, values, [], build)
    return [in_registers_if_small(context, target) for target in targets]


def _buffer(value: Value) -> Buffer:
    assert isinstance(value, Buffer)
    return value


def _line(room: Buffer, address: ir.Value | None = None) -> Buffer:
    """One of the two rows of a room to merge in: the first, or the one at an address."""
    return room.view(room.shape[1:], room.strides[1:], address)


def _fill(
    function: FunctionBuilder,
    row: Sequence[Index],
    count: int,
    keys: Sequence[Value],
    rooms: Sequence[Buffer],
    places: Buffer,
) -> None:
    with function.loop(0, count) as loop:
        builder = ElementBuilder(function)
        for key, room in zip(keys, rooms, strict=True):
            element = key.element(builder, [*row, loop.counter])
            store_element(
                function, element, room.element_address(function, [loop.counter]), room.dtype
            )
        place = function.builder.trunc(loop.counter, i32)
        store_element(
            function, place, places.element_address(function, [loop.counter]), places.dtype
        )


def _merge_passes(
    function: FunctionBuilder, count: int, keys: Buffer, places: Buffer, others: Sequence[Buffer]
) -> Buffer:
    """Merges runs of 1, 2, 4, ... elements, back and forth between the two halves of the rooms;
    returns the half that the sorted places end up in."""
    starts = [
        room.element_address(function, [half, 0]) for half in (0, 1) for room in (keys, places)
    ]
    passes = (count - 1).bit_length()
    with function.loop(0, passes, carry=[*starts, ir.Constant(i64, 1)]) as loop:
        from_keys, from_places, to_keys, to_places, width = loop.carry
        _merge_runs(
            function,
            count,
            width,
            (_line(keys, from_keys), _line(places, from_places)),
            (_line(keys, to_keys), _line(places, to_places)),
            others,
        )
        doubled = function.builder.shl(width, ir.Constant(i64, 1))
        loop.next = [to_keys, to_places, from_keys, from_places, doubled]
    return _line(places, loop.carry[1])


def _merge_runs(
    function: FunctionBuilder,
    count: int,
    width: ir.Value,
    source: tuple[Buffer, Buffer],
    target: tuple[Buffer, Buffer],
    others: Sequence[Buffer],
) -> None:
    ops = function.builder
    total = ir.Constant(i64, count)
    both = ops.shl(width, ir.Constant(i64, 1))
    runs = ops.udiv(ops.add(total, ops.sub(both, ir.Constant(i64, 1))), both)

    def bounded(position: ir.Value) -> ir.Value:
        return function.intrinsic("llvm.umin", i64, [position, total])

    with function.loop(0, runs) as run:
        low = ops.mul(run.counter, both)
        middle = bounded(ops.add(low, width))
        high = bounded(ops.add(low, both))
        with function.loop(low, high, carry=[low, middle]) as loop:
            left, right = loop.carry
            builder = ElementBuilder(function)
            # A run that is used up is still read, at its last element, and what was read is
            # ignored.
            places = [
                function.intrinsic("llvm.umin", i64, [item, ir.Constant(i64, count - 1)])
                for item in (left, right)
            ]
            (left_key, left_place), (right_key, right_place) = (
                tuple(part.element(builder, [place]) for part in source) for place in places
            )
            left_keys, right_keys = [left_key], [right_key]
            for other in others:
                for found, place in ((left_keys, left_place), (right_keys, right_place)):
                    found.append(other.element(builder, [ops.sext(place, i64)]))
            is_right = _precedes(builder, right_keys, left_keys)
            is_right = ops.or_(is_right, ops.icmp_signed(">=", left, middle))
            is_right = ops.and_(is_right, ops.icmp_signed("<", right, high))
            pairs = ((left_key, right_key), (left_place, right_place))
            for part, (one, other_one) in zip(target, pairs, strict=True):
                element = ops.select(is_right, other_one, one)
                address = part.element_address(function, [loop.counter])
                store_element(function, element, address, part.dtype)
            step = ops.zext(is_right, i64)
            loop.next = [
                ops.add(left, ops.sub(ir.Constant(i64, 1), step)),
                ops.add(right, step),
            ]
