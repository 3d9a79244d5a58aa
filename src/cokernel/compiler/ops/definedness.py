"""The rules by which compiled code says and asks what is undefined of values and of memory; only
programs that `compiler/definedness.py` has rewritten contain these primitives.
"""

import operator
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from llvmlite import ir

from cokernel.compiler import claims, dtypes, nests, padding, views
from cokernel.compiler.context import Context
from cokernel.compiler.definedness import mark_undefined_p, report_undefined_p, undefined_p
from cokernel.compiler.definedness_sources import ANYWHERE
from cokernel.compiler.dtypes import i1, i8, i32, i64, pointer, void
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops.registry import added_rule
from cokernel.compiler.ops.undefined_elements import (
    AT_ONCE,
    Reads,
    ask_one,
    ask_spot,
    for_each_element,
    for_selected,
    mark_one,
    number_of,
    sources,
)
from cokernel.compiler.probes import Access, Answer, access_site, merged, table
from cokernel.compiler.refs import View
from cokernel.compiler.spots import Spot
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import Buffer, Packed, Scalar, Value, is_small, make_packed, pack

_BOOL = np.dtype(np.bool_)

# What probes call the reads of primitives, by how these select what they read.
OPERATIONS = {
    ("view", "get"): "read",
    ("view", "load"): "read",
    ("view", "swap"): "write",
    ("view", "masked_load"): "load",
    ("view", "masked_swap"): "store",
    ("masked", "masked_load"): "load",
    ("masked", "masked_swap"): "store",
    ("front", "load"): "load_expanded",
    ("front", "swap"): "addupdate_compressed",
    ("lanes", "gather"): "load_gather",
    ("lanes", "scatter"): "addupdate_scatter",
}


def _view(context: Context, ref: Any, transforms: Sequence[Any], operation: str) -> View:
    return resolve(context, ref, transforms, operation, access=Access.NONE)


@added_rule(undefined_p)
def _undefined(context: Context, eqn: Any, *operands: Any) -> Value:
    selection = jax.tree.unflatten(eqn.params["tree"], operands)
    shape = tuple(eqn.outvars[0].aval.shape)
    operation = eqn.params["operation"]
    told = OPERATIONS.get((eqn.params["form"], operation), operation)
    if eqn.params["form"] == "view":
        answer, context.answer = context.answer, None
        if answer is not None and _is_same(answer.atoms, eqn.invars):
            return _mask_after_read(context, answer, shape, eqn.params["read"])
        ref, transforms = selection
        view = _view(context, ref, transforms, operation)
        return _settled(context, _mask_of_view(context, view, shape, told, eqn.params["read"]))
    target = nests.dense_buffer(context, shape, _BOOL)
    nests.fill_zero(context, target.address, target.size)

    def ask(spot: Spot, view: View, inside: Buffer, index: Sequence[Index]) -> None:
        function = context.function
        number = number_of(function, inside, index)
        found = ask_spot(context, view, spot, number, told, eqn.params["read"])
        place = inside.element_address(function, list(index))
        function.builder.store(function.builder.trunc(found, i8), place, align=1)

    for_selected(context, eqn.params["form"], selection, operation, [target], ask)
    return _settled(context, target)


@added_rule(mark_undefined_p)
def _mark_undefined(context: Context, eqn: Any, *operands: Any) -> None:
    selection, mask = jax.tree.unflatten(eqn.params["tree"], operands)
    operation, reads = eqn.params["operation"], eqn.params["reads"]
    if eqn.params["form"] == "view":
        ref, transforms = selection
        return _mark_view(context, _view(context, ref, transforms, operation), mask, reads)

    def mark(spot: Spot, view: View, inside: Buffer, index: Sequence[Index]) -> None:
        function = context.function
        is_bad = inside.element(ElementBuilder(function), list(index))
        # Of the padding the runtime notes nothing.
        with function.builder.if_then(is_bad, likely=False):
            told = sources(function, reads, mask.shape, inside.shape)
            number = number_of(function, inside, index)
            mark_one(function, spot.address, dtypes.itemsize(view.dtype), told, number)

    held = context.materialise(mask)
    return for_selected(context, eqn.params["form"], selection, operation, [held], mark)


@added_rule(report_undefined_p)
def _report_undefined(context: Context, eqn: Any, *masks: Value) -> None:
    function, builder = context.function, context.builder
    before: ir.Value = ir.Constant(i1, 0)
    for number, mask in enumerate(masks):
        if mask.size == 0:
            continue
        reads = eqn.params["reads"][number]
        # A mask in a register is stored only if it says anything.
        taken: Value = mask if _is_in_register(mask) else context.dense(mask)
        bad = _any(context, taken)
        with builder.if_then(bad, likely=False):
            held = context.dense(taken)
            function.call_external(
                "cokernel_checked_report_undefined",
                void,
                [
                    function.core,
                    context.site(eqn.params["operation"]),
                    ir.Constant(i32, eqn.params["use"]),
                    held.address,
                    ir.Constant(i64, held.size),
                    sources(function, reads, mask.shape, held.shape),
                    builder.zext(before, i32),
                ],
            )
        before = builder.or_(before, bad)


def require_defined(context: Context, view: View, operation: str, use: int) -> None:
    """Reports where an element of a view is undefined that has just been read and put to use."""
    checked = context.kernel.checked
    if checked is None or not checked.uninitialised:
        return
    function, builder = context.function, context.builder
    if view.indices is not None or view.pieces is not None:
        found: ir.Value = _any(
            context, _mask_of_view(context, view, view.shape, operation, AT_ONCE)
        )
    else:
        answer = _ask_view(context, view, ir.Constant(pointer, None), AT_ONCE)
        found = builder.icmp_signed("!=", answer, ir.Constant(i32, 0))
    with builder.if_then(found, likely=False):
        site = context.site(operation, view.ref.name)
        report_read(function, site, use)


def report_read(function: FunctionBuilder, site: ir.Constant, use: int) -> None:
    """Tells the runtime that all that is undefined of what has just been read is put to use."""
    function.call_external(
        "cokernel_checked_report_undefined",
        void,
        [
            function.core,
            site,
            ir.Constant(i32, use),
            ir.Constant(pointer, None),
            ir.Constant(i64, 0),
            sources(function, [(AT_ONCE, ANYWHERE)], (), ()),
            ir.Constant(i32, 0),
        ],
    )


def _is_same(atoms: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two equations name the same part of the same Ref."""
    return len(atoms) == len(others) and all(map(operator.is_, atoms, others))


def is_followed(context: Context) -> bool:
    """Whether undefined values are followed."""
    checked = context.kernel.checked
    return checked is not None and checked.uninitialised


def copy_undefined(context: Context, target: Buffer, source: Buffer) -> None:
    """Makes undefined in one buffer what is so in another; what lies in each lies together."""
    size = dtypes.itemsize(target.dtype)
    function = context.function
    function.call_external(
        "cokernel_checked_copy_undefined",
        void,
        [
            function.core,
            target.address,
            source.address,
            ir.Constant(i64, size),
            ir.Constant(i64, 1),
            table(context, [target.size]),
            table(context, [size]),
            table(context, [size]),
        ],
    )


# Masks as values.


def _settled(context: Context, buffer: Buffer) -> Value:
    if buffer.shape and not is_small(buffer.shape, _BOOL):
        return buffer
    return make_packed(buffer.shape, _BOOL, pack(context.function, buffer))


def _any(context: Context, mask: Value) -> ir.Value:
    """Whether any element of a mask is true."""
    if mask.size == 0:
        return ir.Constant(i1, 0)
    if not mask.shape or is_small(mask.shape, _BOOL):
        register = context.pack(mask)
        if not isinstance(register.type, ir.VectorType):
            return register
        return context.function.intrinsic(
            "llvm.vector.reduce.or", i1, [register], overloads=[register.type]
        )
    dense = context.dense(mask)
    address = context.function.call_external(
        "memchr", pointer, [dense.address, ir.Constant(i32, 1), ir.Constant(i64, dense.size)]
    )
    return context.builder.icmp_unsigned("!=", address, ir.Constant(pointer, None))


# Whole views.


def _mask_of_view(
    context: Context, view: View, shape: Sequence[int], operation: str, read: int
) -> Buffer:
    """The mask of all that a view shows, in memory."""
    target = nests.dense_buffer(context, shape, _BOOL)
    if target.size == 0:
        return target
    if view.overhang is not None and view.pieces is None:
        _fill_mask_of_overhang(context, view, target, operation, read)
        return target
    if view.pieces is not None or view.indices is not None:
        nests.fill_zero(context, target.address, target.size)

        def ask(spot: Spot, view: View, inside: Buffer, index: Sequence[Index]) -> None:
            function = context.function
            place = inside.element_address(function, list(index))
            builder = function.builder
            number = number_of(function, inside, index)
            found = builder.trunc(ask_spot(context, view, spot, number, operation, read), i8)
            # An element in pieces is undefined if one of them is.
            before = builder.load(place, typ=i8, align=1)
            builder.store(builder.or_(before, found), place, align=1)

        for_each_element(context, view, target, ask)
        return target
    return _fill_mask(context, view, target, read)


def _fill_mask_of_overhang(
    context: Context, view: View, target: Buffer, operation: str, read: int
) -> None:
    """The mask of a view that may reach into the padding, which is never defined."""
    padding.fill(context, target, 1)

    def ask(
        function: FunctionBuilder, address: ir.Value, held: list[Buffer], index: list[Index]
    ) -> None:
        number = number_of(function, held[0], index)
        found = ask_one(function, address, dtypes.itemsize(view.dtype), read, number)
        place = held[0].element_address(function, index)
        function.builder.store(function.builder.trunc(found, i8), place, align=1)

    padding.tell_if_read(context, view, access_site(context, view, operation), read)
    padding.for_each_inside(context, "undefined_inside", view, [target], ask)


def _fill_mask(context: Context, view: View, target: Buffer, read: int) -> Buffer:
    """Asks the runtime for the mask of what strides describe."""
    return _filled(context, target, _ask_view(context, view, target.address, read))


def _filled(context: Context, target: Buffer, answer: ir.Value) -> Buffer:
    """A mask for which the runtime has been asked, and what it answered."""
    builder = context.builder
    # The runtime fills the mask only where there is something to say.
    is_clean = builder.icmp_signed("==", answer, ir.Constant(i32, 0))
    with builder.if_then(is_clean, likely=True):
        nests.fill_zero(context, target.address, target.size)
    return target


def _mask_after_read(context: Context, answer: Answer, shape: Sequence[int], read: int) -> Value:
    """The mask of what has just been read. The runtime is asked for it only if it said then that
    there is one.
    """
    if answer.view.overhang is not None:
        return _settled(context, _mask_of_view(context, answer.view, shape, "read", read))
    builder = context.builder
    target = nests.dense_buffer(context, shape, _BOOL)
    is_bad = builder.icmp_signed("!=", answer.register, ir.Constant(i32, 0))
    if shape and not is_small(shape, _BOOL):
        with builder.if_else(is_bad, likely=False) as (bad, clean):
            with bad:
                _fill_mask(context, answer.view, target, read)
            with clean:
                nests.fill_zero(context, target.address, target.size)
        return target
    before = builder.block
    with builder.if_then(is_bad, likely=False):
        _fill_mask(context, answer.view, target, read)
        mask = pack(context.function, target)
        filled = builder.block
    register = builder.phi(mask.type)
    register.add_incoming(ir.Constant(mask.type, None), before)
    register.add_incoming(mask, filled)
    return make_packed(shape, _BOOL, register)


def mask_of_buffer(context: Context, buffer: Buffer, read: int) -> Buffer:
    """The mask of all that a buffer holds which lies together."""
    target = nests.dense_buffer(context, buffer.shape, _BOOL)
    size = dtypes.itemsize(buffer.dtype)
    answer = _ask_block(context, buffer.address, [buffer.size], [size], size, target.address, read)
    return _filled(context, target, answer)


def mark_buffer(context: Context, buffer: Buffer, mask: Value, reads: Reads) -> None:
    """Makes undefined what a mask says of a buffer which lies together."""
    size = dtypes.itemsize(buffer.dtype)
    held = context.dense(mask)
    with context.builder.if_then(_any(context, held), likely=False):
        told = sources(context.function, reads, mask.shape, mask.shape)
        _mark_block(context, buffer.address, [buffer.size], [size], size, held.address, told)


def _ask_view(context: Context, view: View, mask: ir.Value, read: int) -> ir.Value:
    extents, strides = merged(context.function, view.extents, view.strides)
    size = dtypes.itemsize(view.dtype)
    return _ask_block(context, view.address, extents, strides, size, mask, read)


def _ask_block(
    context: Context,
    address: ir.Value,
    extents: Sequence[Index],
    strides: Sequence[int],
    itemsize: int,
    mask: ir.Value,
    read: int,
) -> ir.Value:
    function = context.function
    return function.call_external(
        "cokernel_checked_undefined",
        i32,
        [
            function.core,
            address,
            ir.Constant(i64, itemsize),
            ir.Constant(i64, len(extents)),
            table(context, extents),
            table(context, strides),
            mask,
            ir.Constant(i32, read),
            ir.Constant(i64, 0),
        ],
    )


def _mark_view(context: Context, view: View, mask: Value, reads: Reads) -> None:
    own_shape = mask.shape
    if mask.shape != view.shape:
        first = len(view.shape) - len(mask.shape)
        broadcast = views.broadcast(mask.shape, view.shape, range(first, len(view.shape)))
        mask = views.take_view(context, mask, broadcast)
    if mask.size == 0:
        return
    builder = context.builder
    if view.overhang is not None and view.pieces is None:
        held = context.materialise(mask)

        def mark_inside(
            function: FunctionBuilder, address: ir.Value, held: list[Buffer], index: list[Index]
        ) -> None:
            is_bad = held[0].element(ElementBuilder(function), index)
            with function.builder.if_then(is_bad, likely=False):
                told = sources(function, reads, own_shape, held[0].shape)
                number = number_of(function, held[0], index)
                mark_one(function, address, dtypes.itemsize(view.dtype), told, number)

        padding.for_each_inside(context, "mark_inside", view, [held], mark_inside)
        return
    if view.pieces is not None or view.indices is not None:
        held = context.materialise(mask)

        def mark(spot: Spot, view: View, inside: Buffer, index: Sequence[Index]) -> None:
            function = context.function
            is_bad = inside.element(ElementBuilder(function), list(index))
            with function.builder.if_then(is_bad, likely=False):
                told = sources(function, reads, own_shape, inside.shape)
                number = number_of(function, inside, index)
                mark_one(function, spot.address, dtypes.itemsize(view.dtype), told, number)

        with builder.if_then(_any(context, held), likely=False):
            for_each_element(context, view, held, mark)
        return
    # A mask in a register is stored only if it says anything.
    taken: Value = mask if _is_in_register(mask) else context.dense(mask)
    with builder.if_then(_any(context, taken), likely=False):
        held = context.dense(taken)
        extents, strides = merged(context.function, view.extents, view.strides)
        size = dtypes.itemsize(view.dtype)
        told = sources(context.function, reads, own_shape, view.shape)
        _mark_block(context, view.address, extents, strides, size, held.address, told)


def _is_in_register(mask: Value) -> bool:
    return isinstance(mask, Scalar | Packed)


def _mark_block(
    context: Context,
    address: ir.Value,
    extents: Sequence[Index],
    strides: Sequence[int],
    itemsize: int,
    mask: ir.Value,
    told: ir.Value,
) -> None:
    function = context.function
    claims.before_mark(context)
    function.call_external(
        "cokernel_checked_mark_undefined",
        void,
        [
            function.core,
            address,
            ir.Constant(i64, itemsize),
            ir.Constant(i64, len(extents)),
            table(context, extents),
            table(context, strides),
            mask,
            ir.Constant(i64, 0),
            told,
        ],
    )
