"""The loads and stores of a SparseCore's vector subcore: expanded, compressed, gathered and
scattered.

An index is checked only in lanes that the mask selects, as only those touch memory. Sums in memory
that other cores reach are atomic. What fits in a vector register is done there; anything else in a
loop in a function of its own.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import dtypes, nests
from cokernel.compiler.access import accumulate, read
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1, i32, i64, void
from cokernel.compiler.function import ElementBuilder, Index
from cokernel.compiler.ops.control import outlined
from cokernel.compiler.ops.copies import add_in_place
from cokernel.compiler.ops.masks import (
    count_true,
    fail_index,
    fits_a_register,
    from_memory_type,
    in_memory_type,
    lanes_of,
    masked_load,
    masked_store,
    prefix_mask,
    resize,
)
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.ops.state import add_values
from cokernel.compiler.probes import (
    Access,
    access_site,
    is_probed,
    probe_front,
    probe_lanes,
    probe_run,
    telling,
    vector_gep,
)
from cokernel.compiler.refs import Place, View, root_of
from cokernel.compiler.spots import Spot, Spots, may_hang
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import (
    Buffer,
    Scalar,
    Value,
    is_small,
    lane_count,
    load_element,
    make_packed,
    store_element,
)
from cokernel.records import record

SC = _jax.sc_primitives


def is_shared(view: View) -> bool:
    """Whether other cores may write to a view at the same time."""
    return view.ref.place is not Place.PRIVATE


# Expanded loads, compressed stores.


def front(
    context: Context, ref: Any, transforms: Sequence[Any], mask: Value, operation: str
) -> View:
    """The view whose first elements an expanded load or compressed store touches, as many as the
    mask has true ones; only those must be in bounds.
    """
    last = transforms[-1] if transforms else None
    if not isinstance(last, _jax.NDIndexer):
        return resolve(context, ref, transforms, operation, access=Access.NONE)
    slices = [n for n, index in enumerate(last.indices) if isinstance(index, _jax.Slice)]
    if len(slices) != 1 or isinstance(last.indices[slices[0]].start, int):
        return resolve(context, ref, transforms, operation, access=Access.NONE)
    [dimension] = slices
    whole = last.indices[dimension]
    used = Scalar((), np.dtype(np.int64), count_true(context, mask))
    indices = list(last.indices)
    indices[dimension] = _jax.Slice(whole.start, used, whole.stride)
    front = _jax.NDIndexer(tuple(indices), last.shape, last.int_indexer_shape)
    view = resolve(context, ref, (*transforms[:-1], front), operation, access=Access.NONE)
    return dataclasses.replace(view, extents=(whole.size,))


def _unflatten(eqn: Any, operands: Sequence[Any]) -> tuple[Any, Any]:
    """The transforms and the mask of an expanded load or compressed store."""
    *flat, mask = operands if eqn.params["has_mask"] else (*operands, None)
    return jax.tree.unflatten(eqn.params["tree"], flat), mask


def _probe_front(context: Context, view: View, mask: Value, access: Access, operation: str) -> None:
    if is_probed(context):
        probe_front(context, view, count_true(context, mask), access, operation)


def _access_of_sum(is_atomic: bool) -> Access:
    return Access.ATOMIC if is_atomic else Access.UPDATE


@rule(SC.load_p)
def _load_expanded(context: Context, eqn: Any, ref: Any, *operands: Any) -> Value:
    transforms, mask = _unflatten(eqn, operands)
    if mask is None:
        return read(context, resolve(context, ref, transforms, "read", access=Access.READ))
    view = front(context, ref, transforms, mask, "load_expanded")
    _probe_front(context, view, mask, Access.READ, "load_expanded")
    buffer = view.buffer()
    if fits_a_register(buffer) and not view.hangs:
        taken = lanes_of(context, mask)
        register = masked_load(
            context, "llvm.masked.expandload", buffer.address, taken, buffer.dtype
        )
        return make_packed(buffer.shape, buffer.dtype, register)
    target = nests.dense_buffer(context, buffer.shape, buffer.dtype)

    def step(index: list[Index], taken: ir.Value, find: Find, inside: list[Any]) -> None:
        function = context.function
        [goal] = inside
        with function.builder.if_else(taken) as (then, otherwise):
            with then:
                register = load_element(function, find().address, buffer.dtype)
                place = goal.element_address(function, index)
                store_element(function, register, place, buffer.dtype)
            with otherwise:
                zero = ir.Constant(dtypes.register_type(buffer.dtype), None)
                place = goal.element_address(function, index)
                store_element(function, zero, place, buffer.dtype)

    walk(context, "load_expanded", mask, view, [target], step)
    return _settled(context, target)


def _settled(context: Context, buffer: Buffer) -> Value:
    if buffer.shape and not is_small(buffer.shape, buffer.dtype):
        return buffer
    return make_packed(buffer.shape, buffer.dtype, context.pack(buffer))


# Finds the spot of the next element of a view.
Find = Callable[[], Spot]
# Emits what happens for one element of a mask: (its index, whether it is true, what finds the spot
# of the next element of the view, the operands).
Step = Callable[[list[Index], ir.Value, Find, list[Any]], None]


def walk(
    context: Context, name: str, mask: Value, view: View, operands: Sequence[Any], step: Step
) -> None:
    """Runs a step for each element of a mask in order, counting the true ones."""
    if mask.size == 0:
        return
    spots = Spots(context, view)
    fixed = [view.buffer(), context.materialise(mask), *spots.operands]

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        function = context.function
        base, mask_in, *rest = inside
        origin, rest = rest[: len(spots.operands)], rest[len(spots.operands) :]
        with function.loop(0, mask.size, carry=[ir.Constant(i64, 0)]) as loop:
            index = function.unravel(loop.counter, mask.shape)
            place = function.unravel(loop.carry[0], mask.shape)
            taken = mask_in.element(ElementBuilder(function), index)

            def find() -> Spot:
                address = base.element_address(function, place)
                return spots.at(function, origin, address, place)

            step(index, taken, find, rest)
            loop.next = [function.builder.add(loop.carry[0], function.builder.zext(taken, i64))]
        return []

    outlined(context, name, [*fixed, *operands], [], build)


@rule(SC.swap_p)
def _store_compressed(context: Context, eqn: Any, ref: Any, value: Value, *operands: Any) -> Value:
    transforms, mask = _unflatten(eqn, operands)
    add = eqn.params["add"]
    if mask is None:
        root, _ = root_of(ref)
        access = _access_of_sum(root.place is not Place.PRIVATE)
        _add_whole(context, resolve(context, ref, transforms, "addupdate", access=access), value)
        return value
    operation = "addupdate_compressed" if add else "store_compressed"
    view = front(context, ref, transforms, mask, operation)
    buffer = view.buffer()
    is_atomic = add and is_shared(view)
    access = _access_of_sum(is_atomic) if add else Access.WRITE
    _probe_front(context, view, mask, access, operation)
    is_plain = not is_atomic and not view.hangs
    if fits_a_register(buffer) and _is_compressible(buffer) and is_plain:
        _compress_in_register(context, buffer, value, mask, add)
        return value

    def step(index: list[Index], taken: ir.Value, find: Find, inside: list[Any]) -> None:
        function = context.function
        with function.builder.if_then(taken):
            register = inside[0].element(ElementBuilder(function), index)
            spot = find()
            with spot.written(function):
                if add:
                    add_in_place(context, spot.address, register, buffer.dtype, is_atomic=is_atomic)
                else:
                    store_element(function, register, spot.address, buffer.dtype)

    walk(context, "store_compressed", mask, view, [context.materialise(value)], step)
    return value


# The widest vector that LLVM compresses: it crashes where it would have to split a wider one.
_COMPRESSED_BITS = 512


def _is_compressible(buffer: Buffer) -> bool:
    """Whether `_compress` may have all lanes of a buffer at once, narrow ones widened."""
    bits = math.prod(buffer.shape) * max(32, 8 * dtypes.itemsize(buffer.dtype))
    return bits <= _COMPRESSED_BITS


def _compress_in_register(
    context: Context, buffer: Buffer, value: Value, mask: Value, add: bool
) -> None:
    register, taken = context.pack(value), lanes_of(context, mask)
    dense = _compress(context, register, taken)
    front = prefix_mask(context, taken)
    if add:
        old = masked_load(context, "llvm.masked.load", buffer.address, front, buffer.dtype)
        total = add_values(
            context,
            make_packed(buffer.shape, buffer.dtype, old),
            make_packed(buffer.shape, buffer.dtype, dense),
        )
        dense = context.pack(total)
    masked_store(context, dense, buffer.address, front, buffer.dtype)


def _compress(context: Context, register: ir.Value, taken: ir.Value) -> ir.Value:
    """The lanes in a mask, moved to the front."""
    builder = context.builder
    kind, lanes = register.type, register.type.count
    # Few processors move narrower elements, and LLVM fails on some of them.
    is_narrow = kind.element == dtypes.half or getattr(kind.element, "width", 32) < 32
    if kind.element == dtypes.half:
        register = builder.bitcast(register, ir.VectorType(dtypes.i16, lanes))
    bits = register.type
    if is_narrow:
        register = builder.zext(register, ir.VectorType(i32, lanes))
    undefined = ir.Constant(register.type, ir.Undefined)
    arguments = [register, taken, undefined]
    dense = context.function.intrinsic(
        "llvm.experimental.vector.compress", register.type, arguments
    )
    if is_narrow:
        dense = builder.trunc(dense, bits)
    return dense if bits == kind else builder.bitcast(dense, kind)


def _add_whole(context: Context, view: View, value: Value) -> None:
    if not is_shared(view):
        accumulate(context, view, value, lambda left, right: add_values(context, left, right))
        return
    if value.size == 0:
        return

    spots = Spots(context, view)

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        target, source, *origin = inside
        function = context.function
        with function.nest(target.shape) as index:
            register = source.element(ElementBuilder(function), index)
            spot = spots.at(function, origin, target.element_address(function, index), index)
            with spot.written(function):
                add_in_place(context, spot.address, register, target.dtype, is_atomic=True)
        return []

    operands = [view.buffer(), context.materialise(value), *spots.operands]
    outlined(context, "addupdate", operands, [], build)


# Gathers and scatters: one index array per dimension of the view.


@record
class _Lanes:
    """The elements that index arrays pick, lane by lane, as distances in bytes from the start of
    the view, and which lanes are meant. No offset of a lane that is meant is beyond `span`; it is
    None where the view's extents are known only when the kernel runs.
    """

    base: ir.Value
    offsets: ir.Value
    mask: ir.Value
    span: int | None

    def addresses(self, context: Context) -> ir.Value:
        """Where the elements are, in one register."""
        return vector_gep(context, self.base, self.offsets)


def _pick_lanes(
    context: Context, view: View, indices: Sequence[Value], mask: Value | None, operation: str
) -> _Lanes:
    """The addresses for small index arrays, checked."""
    [count] = {array.size for array in indices if array.shape}
    builder = ElementBuilder(context.function, count)
    taken = builder.constant(i1, 1) if mask is None else context.pack(mask)
    offset: ir.Value | None = None
    for dimension, (array, extent, stride) in enumerate(
        zip(indices, view.extents, view.strides, strict=True)
    ):
        register = builder.splat(context.pack(array))
        wide = _widen(context, register, array.dtype, builder.type(i64))
        position = None if array.shape else -1
        _check_lanes(context, view, dimension, wide, extent, taken, operation, position)
        step = context.builder.mul(wide, builder.constant(i64, stride))
        offset = step if offset is None else context.builder.add(offset, step)
    assert offset is not None
    return _Lanes(view.address, offset, taken, _span(view))


def _span(view: View) -> int | None:
    span = 0
    for extent, stride in zip(view.extents, view.strides, strict=True):
        if not isinstance(extent, int) or stride < 0:
            return None
        span += (extent - 1) * stride
    return span


def _widen(context: Context, register: ir.Value, dtype: Any, kind: ir.Type) -> ir.Value:
    if register.type == kind:
        return register
    is_signed = dtypes.kind(dtype) is dtypes.Kind.SIGNED
    return (context.builder.sext if is_signed else context.builder.zext)(register, kind)


def _check_lanes(
    context: Context,
    view: View,
    dimension: int,
    index: ir.Value,
    extent: Index,
    taken: ir.Value,
    operation: str,
    position: Index | None,
) -> None:
    """Makes the program fail if the index in a selected lane is out of bounds. `position` is that
    of the index in its array, None for the number of its lane.
    """
    if not context.kernel.bounds_checks:
        return
    function, builder = context.function, context.builder
    lanes = ElementBuilder(function, lane_count(index))
    inside = builder.icmp_unsigned("<", index, lanes.splat(function.index(extent)))
    bad = builder.and_(taken, builder.not_(inside))
    bits = bad if lanes.count == 1 else builder.bitcast(bad, ir.IntType(lanes.count))
    good = builder.icmp_unsigned("==", bits, ir.Constant(bits.type, 0))

    def record() -> None:
        first, place = index, position
        if lanes.count > 1:
            lane = function.intrinsic(
                "llvm.cttz", bits.type, [bits, ir.Constant(i1, 0)], overloads=[bits.type]
            )
            lane = resize(builder, lane, i64)
            first = builder.extract_element(index, lane)
            place = lane if position is None else position
        assert place is not None
        fail_index(context, view, dimension, first, extent, operation, place)

    context.check(good, record)


def _is_vector(indices: Sequence[Value], dtype: Any) -> bool:
    return all(
        is_small(array.shape, np.int64) and is_small(array.shape, dtype) for array in indices
    )


@rule(SC.gather_p)
def _load_gather(context: Context, eqn: Any, *operands: Any) -> Value:
    ref, transforms, indices, mask = eqn.params["tree"].unflatten(operands)
    view = resolve(context, ref, transforms, "load_gather", access=Access.NONE)
    dtype = np.dtype(view.dtype)
    shape = tuple(eqn.outvars[0].aval.shape)
    if _is_vector(indices, dtype) and shape != (1,) and not may_hang(view):
        lanes = _pick_lanes(context, view, indices, mask, "load_gather")
        _probe_lanes(context, view, lanes, mask, Access.READ, "load_gather")
        kind = ir.VectorType(dtypes.memory_type(dtype), shape[0])
        addresses = lanes.addresses(context)
        loaded = context.function.intrinsic(
            "llvm.masked.gather",
            kind,
            [addresses, lanes.mask, ir.Constant(kind, None)],
            overloads=[kind, addresses.type],
        )
        return make_packed(shape, dtype, from_memory_type(context, loaded, dtype))
    target = nests.dense_buffer(context, shape, dtype)

    def step(position: Index, spot: Spot, inside: list[Any]) -> None:
        function = context.function
        register = load_element(function, spot.address, dtype)
        store_element(function, register, inside[0].element_address(function, [position]), dtype)

    each_lane(context, view, indices, mask, "load_gather", [target], step, Access.READ)
    return _settled(context, target)


@rule(SC.scatter_p)
def _store_scatter(context: Context, eqn: Any, *operands: Any) -> None:
    ref, transforms, indices, value, mask = eqn.params["tree"].unflatten(operands)
    add = eqn.params["add"]
    operation = "addupdate_scatter" if add else "store_scatter"
    view = resolve(context, ref, transforms, operation, access=Access.NONE)
    dtype = np.dtype(view.dtype)
    is_atomic = add and is_shared(view)
    access = _access_of_sum(is_atomic) if add else Access.WRITE
    is_plain = not is_atomic and not may_hang(view)
    if _is_vector(indices, dtype) and value.size > 1 and is_plain:
        lanes = _pick_lanes(context, view, indices, mask, operation)
        _probe_lanes(context, view, lanes, mask, access, operation)
        if add:
            return _add_lanes(context, lanes, context.pack(value), dtype, mask is not None)
        # Of lanes with one address the last one counts: LLVM stores them in order.
        register = in_memory_type(context, context.pack(value), dtype)
        addresses = lanes.addresses(context)
        overloads = [register.type, addresses.type]
        arguments = [register, addresses, lanes.mask]
        context.function.intrinsic("llvm.masked.scatter", void, arguments, overloads=overloads)
        return None

    def step(position: Index, spot: Spot, inside: list[Any]) -> None:
        function = context.function
        register = inside[0].element(ElementBuilder(function), [position])
        with spot.written(function):
            if add:
                add_in_place(context, spot.address, register, dtype, is_atomic=is_atomic)
            else:
                store_element(function, register, spot.address, dtype)

    values = [context.materialise(value)]
    each_lane(context, view, indices, mask, operation, values, step, access)
    return None


def _probe_lanes(
    context: Context,
    view: View,
    lanes: _Lanes,
    mask: Value | None,
    access: Access,
    operation: str,
) -> None:
    if is_probed(context):
        taken = None if mask is None else lanes.mask
        probe_lanes(context, view, access, operation, lanes.addresses(context), taken)


def _scalars(context: Context, lanes: _Lanes) -> Iterator[ir.Value]:
    """The offsets of the lanes, one after another, as 64-bit integers."""
    builder = context.builder
    count = lane_count(lanes.offsets)
    if lanes.span is not None and lanes.span < 2**31 and count % 2 == 0:
        # Moving a lane out of a vector register costs as much as the addition to come. Two offsets
        # of 32 bits are moved at once.
        narrow = builder.trunc(lanes.offsets, ir.VectorType(i32, count))
        pairs = builder.bitcast(narrow, ir.VectorType(i64, count // 2))
        for place in range(count // 2):
            pair = builder.extract_element(pairs, ir.Constant(i32, place))
            yield builder.and_(pair, ir.Constant(i64, 2**32 - 1))
            yield builder.lshr(pair, ir.Constant(i64, 32))
    else:
        for place in range(count):
            yield builder.extract_element(lanes.offsets, ir.Constant(i32, place))


def _add_lanes(
    context: Context, lanes: _Lanes, value: ir.Value, dtype: np.dtype, is_masked: bool
) -> None:
    """Adds lane after lane, so that equal addresses add up. Lanes that are not meant add to memory
    that nobody reads.
    """
    function, builder = context.function, context.builder
    nowhere = nests.dense_buffer(context, (1,), dtype) if is_masked else None
    for lane, offset in enumerate(_scalars(context, lanes)):
        place = ir.Constant(i32, lane)
        address = function.advance(lanes.base, offset)
        if nowhere is not None:
            taken = builder.extract_element(lanes.mask, place)
            address = builder.select(taken, address, nowhere.address)
        amount = builder.extract_element(value, place)
        add_in_place(context, address, amount, dtype, is_atomic=False)


def each_lane(
    context: Context,
    view: View,
    indices: Sequence[Value],
    mask: Value | None,
    operation: str,
    operands: Sequence[Value],
    step: Callable[[Index, Spot, list[Any]], None],
    access: Access,
) -> None:
    """Runs a step for each selected element of the index arrays, in order, with its position and
    its spot. `access` is what the step does there.
    """
    [count] = {array.size for array in indices if array.shape}
    base = view.buffer()
    spots = Spots(context, view)
    everything = [base, *indices, *([] if mask is None else [mask])]
    passed = [context.materialise(value) if value.shape else value for value in everything]

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        function = context.function
        builder = ElementBuilder(function)
        base_in, *rest = inside
        arrays = rest[: len(indices)]
        others = rest[len(everything) - 1 :]
        origin, others = others[: len(spots.operands)], others[len(spots.operands) :]
        with function.loop(0, count) as loop:
            if mask is None:
                one(base_in, arrays, loop.counter, origin, others)
            else:
                taken = rest[len(indices)].element(builder, [loop.counter])
                with function.builder.if_then(taken):
                    one(base_in, arrays, loop.counter, origin, others)
        return []

    def one(
        base_in: Buffer,
        arrays: list[Any],
        position: Index,
        origin: list[Any],
        others: list[Any],
    ) -> None:
        function = context.function
        index: list[Index] = []
        for dimension, array in enumerate(arrays):
            register = array.element(ElementBuilder(function), [position] if array.shape else [])
            wide = _widen(context, register, array.dtype, i64)
            always = ir.Constant(i1, 1)
            extent = view.limit(dimension)
            place = position if array.shape else -1
            _check_lanes(context, view, dimension, wide, extent, always, operation, place)
            index.append(wide)
        spot = spots.at(function, origin, base_in.element_address(function, index), index)
        if access is not Access.NONE and is_probed(context):
            site = access_site(context, view, operation)
            with telling(context, view, access):
                probe_run(
                    context, site, access, spot.address, base.dtype.itemsize, base.dtype.itemsize
                )
        step(position, spot, others)

    outlined(context, operation, [*passed, *spots.operands, *operands], [], build)
