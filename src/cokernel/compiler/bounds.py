"""The checks that keep what a program does to a Ref in its bounds."""

import dataclasses
import math
from typing import Any

from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i32, i64, pointer, void
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.refs import View
from cokernel.compiler.values import Packed, Scalar, Value, pack


def check_slice(
    context: Context,
    view: View,
    dimension: int,
    start: Index,
    size: Index,
    step: int,
    extent: Index,
    operation: str,
) -> None:
    """Makes the program fail unless `size` elements from `start`, `step` apart, lie within the
    extent.
    """
    function = context.function
    if isinstance(start, int) and isinstance(size, int) and isinstance(extent, int):
        if start >= 0 and size >= 0 and (size == 0 or start + (size - 1) * step < extent):
            return
        good: ir.Value = ir.Constant(dtypes.i1, 0)
    elif not context.kernel.bounds_checks:
        return
    elif isinstance(size, int) and isinstance(extent, int):
        last = extent - ((size - 1) * step + 1 if size else 0)
        if last < 0:
            good = ir.Constant(dtypes.i1, 0)
        else:
            good = function.builder.icmp_unsigned("<=", function.index(start), function.index(last))
            claims = context.claims
            if claims is not None and claims.function is function:
                good = claims.checked_index(function.index(start), last, good)
    else:
        # With a dynamic size each part is checked on its own, so that no sum can overflow.
        builder = function.builder
        used = (
            function.add(function.multiply(function.subtract(size, 1), step), 1)
            if step != 1
            else size
        )
        fits = builder.icmp_signed("<=", function.index(used), function.index(extent))
        known = builder.icmp_signed(">=", function.index(size), function.index(0))
        room = builder.sub(function.index(extent), function.index(used))
        inside = builder.icmp_unsigned("<=", function.index(start), room)
        good = builder.and_(builder.and_(fits, known), inside)

    def record() -> None:
        site = _site(context, view, operation)
        span = function.add(function.multiply(function.subtract(size, 1), step), 1)
        arguments = [function.index(start), function.index(span), function.index(extent)]
        function.call_external(
            "cokernel_fail_index",
            void,
            [function.core, site, ir.Constant(i32, dimension), *arguments],
        )

    function.check(good, record)


def _site(context: Context, view: View, operation: str) -> ir.Constant:
    """The site of a check; it tells the shape of the Ref, and of the part of it that is indexed."""
    # Who takes all slots of a pipeline's window at once knows of them.
    is_of_a_slot = len(view.extents) <= len(view.ref.told_shape)
    shape = tuple(view.ref.told_shape if is_of_a_slot else view.ref.shape)
    is_static = all(isinstance(extent, int) for extent in view.extents)
    part: dict[str, Any] = (
        {} if not is_static or view.extents == shape else {"part": str(tuple(view.extents))}
    )
    if dtypes.is_semaphore(view.ref.dtype):
        part["of_semaphores"] = True
    return context.site(operation, view.ref.name, shape=str(shape), rank=len(view.extents), **part)


def check_array(
    context: Context,
    view: View,
    dimension: int,
    array: Value,
    extent: Index,
    ignored: int | None,
    operation: str,
) -> None:
    """Makes the program fail if an element of an index array lies outside the extent of the
    dimension.
    """
    if not context.kernel.bounds_checks or array.size == 0:
        return
    site = _site(context, view, operation)

    def check_one(function: FunctionBuilder, register: ir.Value, position: Index) -> None:
        wide = widen_index(function, register, array.dtype)
        good = function.builder.icmp_unsigned("<", wide, function.index(extent))
        if ignored is not None:
            good = function.builder.or_(
                good, function.builder.icmp_signed("==", wide, function.index(ignored))
            )

        def record() -> None:
            # One index alone is in no array.
            place = position if array.size > 1 else -1
            arguments = [wide, function.index(extent), function.index(place)]
            function.call_external(
                "cokernel_fail_picked",
                void,
                [function.core, site, ir.Constant(i32, dimension), *arguments],
            )

        function.check(good, record)

    if isinstance(array, Scalar | Packed) and array.size > 1:
        _check_packed(context, array, extent, ignored, check_one)
        return
    if array.size == 1:
        return check_one(context.function, context.scalar(array), 0)
    buffer = context.materialise(array)
    inner = context.function.sibling("check_indices", [pointer])
    inside = dataclasses.replace(buffer, address=inner.parameters[0])
    with inner.nest(buffer.shape) as index:
        steps = [math.prod(buffer.shape[axis + 1 :]) for axis in range(len(buffer.shape))]
        position = inner.linear_index(index, steps)
        check_one(inner, inside.element(ElementBuilder(inner), index), position)
    inner.finish()
    context.call(inner, [buffer.address])


def _check_packed(
    context: Context, array: Value, extent: Index, ignored: int | None, check_one: Any
) -> None:
    """One comparison of all lanes; which lane was bad is looked for only once one is."""
    function = context.function
    builder = ElementBuilder(function, array.size)
    register = pack(function, array)
    limit = function.index(extent)
    wide_type = builder.type(i64)
    signed = dtypes.kind(array.dtype) is dtypes.Kind.SIGNED
    extend = function.builder.sext if signed else function.builder.zext
    wide = register if register.type == wide_type else extend(register, wide_type)
    good = function.builder.icmp_unsigned("<", wide, builder.splat(limit))
    if ignored is not None:
        skipped = function.builder.icmp_signed("==", wide, builder.constant(i64, ignored))
        good = function.builder.or_(good, skipped)
    all_good = function.intrinsic(
        "llvm.vector.reduce.and", dtypes.i1, [good], overloads=[good.type]
    )
    bad = function.function.append_basic_block("bad_lane")
    fine = function.function.append_basic_block("lanes_checked")
    function.builder.cbranch(all_good, fine, bad).set_weights([1 << 20, 1])
    function.builder.position_at_end(bad)
    for lane in range(array.size):
        check_one(
            function, function.builder.extract_element(register, ir.Constant(i32, lane)), lane
        )
    function.builder.branch(fine)
    function.builder.position_at_end(fine)


def widen_index(function: FunctionBuilder, register: ir.Value, dtype: Any) -> ir.Value:
    """An integer of a dtype as an i64 with the same value."""
    if register.type == i64:
        return register
    if dtypes.kind(dtype) is dtypes.Kind.SIGNED:
        return function.builder.sext(register, i64)
    return function.builder.zext(register, i64)
