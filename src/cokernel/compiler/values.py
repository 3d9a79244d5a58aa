"""How an array value lives while a program is compiled.

A value takes one of four forms, and every rule accepts all of them:

* `Scalar`: shape (), one LLVM value;
* `Packed`: a small array, all of it in one LLVM vector, row-major;
* `Buffer`: an array in memory, read through strides, so that transposing, slicing and broadcasting
  cost nothing;
* `Expression`: a larger array that nobody has computed yet: it knows how to emit any one of its
  elements, and is fused into the loop nest of whoever needs it.

`leaves()` and `rebuild()` take a value apart into the LLVM values it depends on and put it together
again from others, which is how a value passes into another LLVM function.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.dtypes import i8, i32
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.records import record

# An array of at most this many elements and bytes lives in vector registers.
PACKED_ELEMENTS = 64
PACKED_BYTES = 512

Shape = tuple[int, ...]


def is_small(shape: Sequence[int], dtype: Any) -> bool:
    """Whether an array of this shape and dtype is kept in a vector."""
    size = math.prod(shape)
    return 0 < size <= PACKED_ELEMENTS and size * np.dtype(dtype).itemsize <= PACKED_BYTES


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of a dense row-major array."""
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))


@record(frozen=True, eq=False)
class Value:
    """An array of a static shape and a numpy dtype."""

    shape: Shape
    dtype: np.dtype

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def leaves(self) -> list[ir.Value]:
        """The LLVM values of the current function that this value is made of."""
        raise NotImplementedError

    def rebuild(self, leaves: Iterator[ir.Value]) -> "Value":
        """The same value made of other leaves, consumed in the order of `leaves()`."""
        raise NotImplementedError

    def element(self, builder: ElementBuilder, index: Sequence[Index]) -> ir.Value:
        """Emits the element at an index in bounds, as a register value."""
        raise NotImplementedError

    def roots(self) -> frozenset[object]:
        """The Refs whose memory is read when the value is computed. While it is not empty the value
        must be computed before anything writes to them.
        """
        return frozenset()


@record(frozen=True, eq=False)
class Scalar(Value):
    """One element."""

    register: ir.Value

    def leaves(self) -> list[ir.Value]:
        return [] if isinstance(self.register, ir.Constant) else [self.register]

    def rebuild(self, leaves: Iterator[ir.Value]) -> "Scalar":
        return (
            self
            if isinstance(self.register, ir.Constant)
            else dataclasses.replace(self, register=next(leaves))
        )

    def element(self, builder: ElementBuilder, index: Sequence[Index]) -> ir.Value:
        return self.register


@record(frozen=True, eq=False)
class Packed(Value):
    """A small array in one vector register value, row-major. An array of one element is a plain
    scalar register.
    """

    register: ir.Value

    def leaves(self) -> list[ir.Value]:
        return [] if isinstance(self.register, ir.Constant) else [self.register]

    def rebuild(self, leaves: Iterator[ir.Value]) -> "Packed":
        return (
            self
            if isinstance(self.register, ir.Constant)
            else dataclasses.replace(self, register=next(leaves))
        )

    def element(self, builder: ElementBuilder, index: Sequence[Index]) -> ir.Value:
        if self.size == 1:
            return self.register
        flat = builder.function.linear_index(index, row_major(self.shape))
        return builder.builder.extract_element(self.register, builder.function.index(flat))


@record(frozen=True, eq=False)
class Buffer(Value):
    """An array in memory. Strides are in elements, zero or negative allowed. `root` is the Ref
    whose memory it is, or None for a temporary, which nobody writes to once it is a value; `owner`
    keeps a temporary allocated.
    """

    address: ir.Value
    strides: tuple[int, ...]
    root: object = None
    owner: Any = None

    def leaves(self) -> list[ir.Value]:
        return [] if isinstance(self.address, ir.Constant) else [self.address]

    def rebuild(self, leaves: Iterator[ir.Value]) -> "Buffer":
        return (
            self
            if isinstance(self.address, ir.Constant)
            else dataclasses.replace(self, address=next(leaves))
        )

    def element_address(self, function: FunctionBuilder, index: Sequence[Index]) -> ir.Value:
        """The address of one element."""
        offset = function.linear_index(index, self.strides)
        if isinstance(offset, int) and offset == 0:
            return self.address
        return function.builder.gep(
            self.address,
            [function.index(offset)],
            inbounds=True,
            source_etype=dtypes.memory_type(self.dtype),
        )

    def element(self, builder: ElementBuilder, index: Sequence[Index]) -> ir.Value:
        return load_element(
            builder.function, self.element_address(builder.function, index), self.dtype
        )

    def roots(self) -> frozenset[object]:
        return frozenset() if self.root is None else frozenset([self.root])

    @property
    def is_dense(self) -> bool:
        """Whether the elements lie one after the other, row-major."""
        return all(
            extent == 1 or stride == dense
            for extent, stride, dense in zip(
                self.shape, self.strides, row_major(self.shape), strict=True
            )
        )

    def view(
        self, shape: Shape, strides: tuple[int, ...], address: ir.Value | None = None
    ) -> "Buffer":
        """Other indexing of the same memory."""
        return dataclasses.replace(
            self, shape=shape, strides=strides, address=self.address if address is None else address
        )


Emit = Callable[[ElementBuilder, Sequence[Index], tuple[Value, ...]], ir.Value]


@record(frozen=True, eq=False)
class Expression(Value):
    """An array that is computed element by element where it is needed.

    `emit(builder, index, operands)` emits one element; it may use nothing of the function it was
    made in except through `operands`. `elementwise` says that it only passes the index on to
    operands of its own shape (or scalars), so that loops over it can be flattened. `is_cheap` says
    that computing an element twice costs less than storing it.
    """

    operands: tuple[Value, ...]
    emit: Emit
    elementwise: bool = False
    is_cheap: bool = False

    def leaves(self) -> list[ir.Value]:
        return [leaf for operand in self.operands for leaf in operand.leaves()]

    def rebuild(self, leaves: Iterator[ir.Value]) -> "Expression":
        return dataclasses.replace(
            self, operands=tuple(operand.rebuild(leaves) for operand in self.operands)
        )

    def element(self, builder: ElementBuilder, index: Sequence[Index]) -> ir.Value:
        key = (id(self), tuple(i if isinstance(i, int) else id(i) for i in index))
        block = builder.builder.block
        known = builder.memo.get(key)
        # A remembered element may be used again only where it dominates, which is certain within
        # one block.
        if known is None or known[0] is not block:
            known = (builder.builder.block, self.emit(builder, index, self.operands), self)
            builder.memo[key] = known if known[0] is builder.builder.block else (None, *known[1:])
        return known[1]

    def roots(self) -> frozenset[object]:
        return frozenset().union(*(operand.roots() for operand in self.operands))


def load_element(function: FunctionBuilder, address: ir.Value, dtype: Any) -> ir.Value:
    """Loads one element of a dtype into a register."""
    kind = dtypes.memory_type(dtype)
    loaded = function.builder.load(address, typ=kind, align=np.dtype(dtype).itemsize)
    if np.dtype(dtype) == np.bool_:
        return function.builder.icmp_unsigned("!=", loaded, ir.Constant(i8, 0))
    return loaded


def store_element(
    function: FunctionBuilder, register: ir.Value, address: ir.Value, dtype: Any
) -> None:
    """Stores one register to memory as an element of a dtype."""
    if np.dtype(dtype) == np.bool_:
        register = function.builder.zext(register, i8)
    function.builder.store(register, address, align=np.dtype(dtype).itemsize)


def constant(value: Any, dtype: Any) -> Scalar:
    """A scalar constant of a dtype."""
    dtype = np.dtype(dtype)
    kind = dtypes.register_type(dtype)
    element = np.asarray(value, dtype=dtype)
    if dtypes.kind(dtype) is dtypes.Kind.BITS_FLOAT:
        return Scalar((), dtype, ir.Constant(kind, int(element.view(f"u{dtype.itemsize}"))))
    if isinstance(kind, ir.IntType):
        return Scalar((), dtype, ir.Constant(kind, int(element)))
    return Scalar((), dtype, ir.Constant(kind, float(element)))


def array_constant(function: FunctionBuilder, array: np.ndarray) -> Value:
    """A constant array: a scalar, a vector constant, or a read-only table in the module."""
    if array.shape == ():
        return constant(array, array.dtype)
    bits = array
    if dtypes.kind(array.dtype) is dtypes.Kind.BITS_FLOAT:
        bits = array.view(f"u{array.dtype.itemsize}")
    flat = bits.astype(np.int8 if bits.dtype == np.bool_ else bits.dtype).ravel().tolist()
    if is_small(array.shape, array.dtype):
        kind = dtypes.register_type(array.dtype)
        register = ir.Constant(dtypes.lanes(kind, len(flat)), flat[0] if len(flat) == 1 else flat)
        return Packed(array.shape, array.dtype, register)
    table = function.constant_data(dtypes.memory_type(array.dtype), flat)
    return Buffer(array.shape, array.dtype, table, row_major(array.shape))


def pack(function: FunctionBuilder, value: Value) -> ir.Value:
    """The elements of a small value as one register value: a vector, or a scalar if there is one
    element.
    """
    if isinstance(value, Scalar | Packed):
        return value.register
    builder = ElementBuilder(function)
    kind = dtypes.register_type(value.dtype)
    if value.size == 1:
        return value.element(builder, [0] * len(value.shape))
    if isinstance(value, Buffer):
        rows = _contiguous_rows(value)
        if rows is not None:
            return _load_rows(function, value, rows)
    vector: ir.Value = ir.Constant(ir.VectorType(kind, value.size), ir.Undefined)
    for lane, index in enumerate(itertools.product(*map(range, value.shape))):
        vector = function.builder.insert_element(
            vector, value.element(builder, list(index)), ir.Constant(i32, lane)
        )
    return vector


def _contiguous_rows(value: Buffer) -> int | None:
    """How many elements in a row lie one after the other, if that is more than one and each row
    starts anew.
    """
    run = 1
    for extent, stride in zip(reversed(value.shape), reversed(value.strides), strict=True):
        if extent != 1 and stride != run:
            break
        run *= extent
    return run if run > 1 else None


def _load_rows(function: FunctionBuilder, value: Buffer, run: int) -> ir.Value:
    starts = [index for number, index in enumerate(np.ndindex(*value.shape)) if number % run == 0]
    rows = [
        load_vector(
            function, value.element_address(function, [int(i) for i in start]), value.dtype, run
        )
        for start in starts
    ]
    return concatenate_vectors(function, rows)


def load_vector(function: FunctionBuilder, address: ir.Value, dtype: Any, count: int) -> ir.Value:
    """Loads `count` elements that lie one after the other."""
    if count == 1:
        return load_element(function, address, dtype)
    kind = ir.VectorType(dtypes.memory_type(dtype), count)
    loaded = function.builder.load(address, typ=kind, align=np.dtype(dtype).itemsize)
    if np.dtype(dtype) == np.bool_:
        return function.builder.icmp_unsigned("!=", loaded, ir.Constant(kind, [0] * count))
    return loaded


def store_vector(
    function: FunctionBuilder, register: ir.Value, address: ir.Value, dtype: Any
) -> None:
    """Stores a vector (or a scalar) of elements one after the other."""
    if not isinstance(register.type, ir.VectorType):
        return store_element(function, register, address, dtype)
    if np.dtype(dtype) == np.bool_:
        register = function.builder.zext(register, ir.VectorType(i8, register.type.count))
    function.builder.store(register, address, align=np.dtype(dtype).itemsize)


def lane_count(register: ir.Value) -> int:
    """How many elements a register holds."""
    return register.type.count if isinstance(register.type, ir.VectorType) else 1


def concatenate_vectors(function: FunctionBuilder, parts: Sequence[ir.Value]) -> ir.Value:
    """One vector holding the elements of all parts in order."""
    if len(parts) == 1:
        return parts[0]
    middle = len(parts) // 2
    left = concatenate_vectors(function, parts[:middle])
    right = concatenate_vectors(function, parts[middle:])
    counts = lane_count(left), lane_count(right)
    width = max(counts)
    total = sum(counts)
    left, right = (widen(function, part, width) for part in (left, right))
    mask = [*range(counts[0]), *range(width, width + counts[1])]
    if width == 1:
        kind = ir.VectorType(left.type, 2)
        vector = function.builder.insert_element(
            ir.Constant(kind, ir.Undefined), left, ir.Constant(i32, 0)
        )
        return function.builder.insert_element(vector, right, ir.Constant(i32, 1))
    return function.builder.shuffle_vector(
        left, right, ir.Constant(ir.VectorType(i32, total), mask)
    )


def widen(function: FunctionBuilder, register: ir.Value, width: int) -> ir.Value:
    """The same leading lanes in a vector of `width` lanes; the other lanes are undefined."""
    count = lane_count(register)
    if count == width:
        return register
    if count == 1:
        kind = ir.VectorType(register.type, width)
        return function.builder.insert_element(
            ir.Constant(kind, ir.Undefined), register, ir.Constant(i32, 0)
        )
    mask = ir.Constant(ir.VectorType(i32, width), [*range(count), *[0] * (width - count)])
    return function.builder.shuffle_vector(register, ir.Constant(register.type, ir.Undefined), mask)


def shuffle(function: FunctionBuilder, register: ir.Value, lanes: Sequence[int]) -> ir.Value:
    """Picks lanes of a register, in any order and any number; returns a scalar if one lane is asked
    for.
    """
    if list(lanes) == list(range(lane_count(register))):
        return register
    if len(lanes) == 1:
        if lane_count(register) == 1:
            return register
        return function.builder.extract_element(register, ir.Constant(i32, lanes[0]))
    if lane_count(register) == 1:
        return ElementBuilder(function, len(lanes)).splat(register)
    mask = ir.Constant(ir.VectorType(i32, len(lanes)), list(lanes))
    return function.builder.shuffle_vector(register, ir.Constant(register.type, ir.Undefined), mask)


def make_packed(shape: Sequence[int], dtype: Any, register: ir.Value) -> Value:
    """The value of a register that holds the elements of a small array."""
    return (Packed if shape else Scalar)(tuple(shape), np.dtype(dtype), register)
