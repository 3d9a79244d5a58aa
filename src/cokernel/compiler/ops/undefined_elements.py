"""Asks and tells the runtime about undefined elements one by one, wherever an access reaches them,
and says which reads they come from. The rules are in `definedness.py`.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from cokernel.compiler import dtypes, spots
from cokernel.compiler.access import in_memory, picked_spot
from cokernel.compiler.context import Context
from cokernel.compiler.definedness_sources import ANYWHERE, Source, dense, words
from cokernel.compiler.dtypes import i8, i32, i64, pointer, void
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops import masked, sparsecore_memory
from cokernel.compiler.ops.control import outlined
from cokernel.compiler.ops.sparsecore_memory import Find
from cokernel.compiler.pieces import piece
from cokernel.compiler.probes import Access, access_site
from cokernel.compiler.refs import View
from cokernel.compiler.spots import Spot, Spots
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import Buffer, Value

# The number of reads whose values are put to use at once, and in no other place.
AT_ONCE = -1
# The number of what a copy reads from the padding of tiles.
FROM_PADDING = -2
# A report looks for its read among so many; where more could be meant it tells the last one.
MOST_READS = 64

# The reads that values come from, by their numbers, and which of what they read.
Reads = Sequence[tuple[int, Source]]


def sources(
    function: FunctionBuilder, reads: Reads, before: Sequence[int], after: Sequence[int]
) -> ir.Value:
    """Where a mask that is broadcast from one shape to another comes from, as the runtime takes it;
    null where that is too much to tell.
    """
    if len(reads) > MOST_READS:
        return ir.Constant(pointer, None)
    told = function.constant_data(i64, words(reads, tuple(before), tuple(after)))
    # llvmlite gives it a typed pointer, which LLVM no longer has.
    told.type = pointer
    return told


def mark_from_padding(function: FunctionBuilder, address: ir.Value, itemsize: int) -> None:
    """Tells the runtime that an element holds what a copy has read from the padding of tiles."""
    mark_one(function, address, itemsize, sources(function, [(FROM_PADDING, ANYWHERE)], (), ()), 0)


def number_of(function: FunctionBuilder, buffer: Buffer, index: Sequence[Index]) -> Index:
    """The row-major number of an element of a buffer."""
    return function.linear_index(index, dense(buffer.shape))


# Emits what happens for one element: (where it is, the view, the mask, its index in the mask).
Step = Callable[[Spot, View, Buffer, Sequence[Index]], None]


def ask_spot(
    context: Context, view: View, spot: Spot, number: Index, operation: str, read: int
) -> ir.Value:
    """Whether the element at a spot is undefined, which has this number among those that are read;
    in the padding all are.
    """
    function = context.function
    found = ask_one(function, spot.address, dtypes.itemsize(view.dtype), read, number)
    if spot.number is None:
        return found
    site = access_site(context, view, operation)
    return function.builder.or_(found, spots.tell_if_read(context, view, spot, site, read))


def ask_one(
    function: FunctionBuilder, address: ir.Value, itemsize: int, read: int, number: Index
) -> ir.Value:
    """Whether the element at an address is undefined, as the runtime answers, which notes that the
    read has met it under this number.
    """
    nothing = ir.Constant(pointer, None)
    return function.call_external(
        "cokernel_checked_undefined",
        i32,
        [
            function.core,
            address,
            ir.Constant(i64, itemsize),
            ir.Constant(i64, 0),
            nothing,
            nothing,
            nothing,
            ir.Constant(i32, read),
            function.index(number),
        ],
    )


def mark_one(
    function: FunctionBuilder, address: ir.Value, itemsize: int, told: ir.Value, number: Index
) -> None:
    """Tells the runtime that an element is undefined, which has this number in the mask that the
    sources are about.
    """
    nothing = ir.Constant(pointer, None)
    one = function.constant_data(i8, [1])
    one.type = pointer
    function.call_external(
        "cokernel_checked_mark_undefined",
        void,
        [
            function.core,
            address,
            ir.Constant(i64, itemsize),
            ir.Constant(i64, 0),
            nothing,
            nothing,
            one,
            function.index(number),
            told,
        ],
    )


def for_each_element(
    context: Context, view: View, mask: Buffer, step: Step, taken: Value | None = None
) -> None:
    """Runs a step for each element of a view and of its mask, of those that are taken if that is
    given.
    """
    if view.pieces is not None:
        count = dtypes.itemsize(view.dtype) // dtypes.itemsize(view.pieces.dtype)
        for number in range(count):
            for_each_element(context, piece(context, view, number), mask, step, taken)
        return
    indices = view.indices
    arrays = [] if indices is None else [in_memory(context, array) for array in indices.arrays]
    places = Spots(context, view) if indices is None else None
    starts = [] if places is None else places.operands

    def build(inside: list[Any]) -> Sequence[ir.Value]:
        base, held, *rest = inside
        origin, rest = rest[: len(starts)], rest[len(starts) :]
        picks, chosen = rest[: len(arrays)], rest[len(arrays) :]
        function = context.function
        with function.nest(view.shape) as index, contextlib.ExitStack() as stack:
            if chosen:
                is_taken = chosen[0].element(ElementBuilder(function), index)
                stack.enter_context(function.builder.if_then(is_taken))
            if places is not None:
                address = base.element_address(function, index)
                spot = places.at(function, origin, address, index)
            else:
                builder = ElementBuilder(function)
                assert indices is not None
                spot = picked_spot(context, builder, indices, base, picks, index)
            step(spot, view, held, index)
        return []

    chosen = [] if taken is None else [context.materialise(taken)]
    fixed = [view.strided_part(), mask, *starts]
    outlined(context, "undefined", [*fixed, *arrays, *chosen], [], build)


def for_selected(
    context: Context,
    form: str,
    selection: Any,
    operation: str,
    held: list[Buffer],
    step: Step,
) -> None:
    """Runs a step for each element that a masked, compressed, or picked access reaches. `held` is
    the mask of undefined elements, of the shape of the value.
    """
    if form == "masked":
        ref, transforms, mask = selection
        place = masked.Place(context, ref, transforms, operation)
        mask = masked.broadcast(context, mask, place.shape)
        if place.is_checked:
            return for_each_element(context, place.view, held[0], step, mask)
        masked.walk(
            context,
            place,
            mask,
            held,
            lambda function, index, spot, inside: step(spot, place.view, inside[0], index),
            Access.NONE,
        )
    elif form == "front":
        ref, transforms, mask = selection
        view = sparsecore_memory.front(context, ref, transforms, mask, operation)

        def visit(index: list[Index], taken: ir.Value, find: Find, inside: list[Any]) -> None:
            with context.builder.if_then(taken):
                step(find(), view, inside[0], index)

        sparsecore_memory.walk(context, operation, mask, view, held, visit)
    else:
        ref, transforms, indices, mask = selection
        view = resolve(context, ref, transforms, operation, access=Access.NONE)
        sparsecore_memory.each_lane(
            context,
            view,
            indices,
            mask,
            operation,
            held,
            lambda position, spot, inside: step(spot, view, inside[0], [position]),
            Access.NONE,
        )
