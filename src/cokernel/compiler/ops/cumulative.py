"""Prefix scans along one axis: cumsum, cumprod, cummax, cummin, cumlogsumexp."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from llvmlite import ir

from cokernel.compiler import dtypes, nests, views
from cokernel.compiler.context import Context
from cokernel.compiler.dtypes import i1, i32
from cokernel.compiler.function import ElementBuilder, FunctionBuilder, Index
from cokernel.compiler.ops.apply import apply, convert
from cokernel.compiler.ops.combine import Combiner, Fold, working_dtype
from cokernel.compiler.ops.reduce import in_function, innermost_dimension
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.values import (
    Buffer,
    Value,
    constant,
    is_small,
    make_packed,
    shuffle,
    store_element,
)

# Emits the fold of two registers of the builder's width.
Combine = Callable[[ElementBuilder, ir.Value, ir.Value], ir.Value]


def _register(primitive: Any, fold: Fold) -> None:
    @rule(primitive)
    def scan(context: Context, eqn: Any, operand: Value) -> Value:
        wide = convert(context, operand, working_dtype(operand.dtype))
        if fold is Fold.ADD and dtypes.is_float(wide.dtype):
            # A sum begins with zero, and is not a negative one.
            zero = constant(0, wide.dtype)
            wide = apply(context, lax.add_p, wide.shape, wide.dtype, wide, zero)
        combine = Combiner(fold, wide.dtype)
        result = prefix_scan(context, combine, combine.identity(), wide, **_direction(eqn))
        return convert(context, result, operand.dtype)


_register(lax.cumsum_p, Fold.ADD)
_register(lax.cumprod_p, Fold.MULTIPLY)
_register(lax.cummax_p, Fold.MAXIMUM)
_register(lax.cummin_p, Fold.MINIMUM)


def _direction(eqn: Any) -> dict[str, Any]:
    return {"axis": eqn.params["axis"], "reverse": eqn.params["reverse"]}


@rule(lax.cumlogsumexp_p)
def cumlogsumexp(context: Context, eqn: Any, operand: Value) -> Value:
    """The logarithm of the running sum of exponentials."""
    if not dtypes.is_float(operand.dtype):
        raise NotImplementedError(
            f"{context.describe()}: primitive 'cumlogsumexp' takes floats, and not {operand.dtype}"
        )
    wide = convert(context, operand, working_dtype(operand.dtype))
    dtype = wide.dtype

    def combine(builder: ElementBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
        shape = (builder.count,) if builder.count > 1 else ()
        a, b = (make_packed(shape, dtype, register) for register in (left, right))

        def do(primitive: Any, *operands: Value, result: Any = dtype, **params: Any) -> Value:
            return apply(context, primitive, shape, result, *operands, **params)

        difference = do(lax.sub_p, a, b)
        distance = do(lax.neg_p, do(lax.abs_p, difference))
        tail = do(lax.log1p_p, do(lax.exp_p, distance, accuracy=None), accuracy=None)
        ordinary = do(lax.add_p, do(lax.max_p, a, b), tail)
        # Two infinities of one sign have no difference; their sum is what they add up to, and NaN
        # stays NaN.
        has_none = do(lax.ne_p, difference, difference, result=np.bool_)
        return context.scalar(do(lax.select_n_p, has_none, ordinary, do(lax.add_p, a, b)))

    nothing = constant(-np.inf, dtype).register
    result = prefix_scan(context, combine, nothing, wide, **_direction(eqn))
    return convert(context, result, operand.dtype)


def prefix_scan(
    context: Context,
    combine: Combine,
    identity: ir.Value,
    operand: Value,
    *,
    axis: int,
    reverse: bool,
) -> Value:
    """Each element folded with all those before it along `axis`, or after it if `reverse`."""
    if operand.size == 0 or operand.shape[axis] == 1:
        return operand
    if is_small(operand.shape, operand.dtype):
        register = context.pack(operand)
        if reverse:
            flip = _reversed_lanes(operand.shape, axis)
            register = shuffle(context.function, register, flip)
        register = _scan_register(
            context.function, combine, identity, register, operand.shape, axis
        )
        if reverse:
            register = shuffle(context.function, register, flip)
        return make_packed(operand.shape, operand.dtype, register)
    target = nests.dense_buffer(context, operand.shape, operand.dtype)
    along: Value = target
    if reverse:
        view = views.reversed_along(operand.shape, [axis])
        operand, along = (views.take_view(context, value, view) for value in (operand, target))
    assert isinstance(along, Buffer)
    if innermost_dimension(operand) == axis:
        _scan_rows(context, combine, identity, along, operand, axis)
    else:
        _scan_columns(context, combine, along, operand, axis)
    return target


def _reversed_lanes(shape: Sequence[int], axis: int) -> list[int]:
    return np.flip(np.arange(math.prod(shape)).reshape(shape), axis).ravel().tolist()


def _scan_register(
    function: FunctionBuilder,
    combine: Combine,
    identity: ir.Value,
    register: ir.Value,
    shape: Sequence[int],
    axis: int,
) -> ir.Value:
    """Folds each lane with the one 1, 2, 4, ... places before it, or with the identity if there is
    none.
    """
    lanes = np.arange(math.prod(shape)).reshape(shape)
    builder = ElementBuilder(function, lanes.size)
    stride = math.prod(shape[axis + 1 :])
    positions = (lanes // stride % shape[axis]).ravel()
    nothing = builder.splat(identity)
    distance = 1
    while distance < shape[axis]:
        places = np.roll(lanes.ravel(), distance * stride)
        has_one = positions >= distance
        if 2 * distance * stride >= lanes.size:
            # The front half is filled with the identity, which takes no instruction. Were it just
            # ignored, LLVM would put any register there, such as one that the iteration before
            # computes last, and each would wait for the one before it.
            mask = np.where(has_one, places, lanes.size)
            filled = ir.Constant(ir.VectorType(i32, lanes.size), mask.tolist())
            turned = function.builder.shuffle_vector(register, nothing, filled)
            register = combine(builder, turned, register)
        else:
            # All lanes turn round and those at the front are ignored: processors do that in one
            # instruction, but not the filling of some lanes with an identity.
            turned = shuffle(function, register, places.tolist())
            is_taken = ir.Constant(ir.VectorType(i1, lanes.size), has_one.astype(int).tolist())
            folded = combine(builder, turned, register)
            register = builder.builder.select(is_taken, folded, register)
        distance *= 2
    return register


def _scan_rows(
    context: Context,
    combine: Combine,
    identity: ir.Value,
    target: Buffer,
    operand: Value,
    axis: int,
) -> None:
    """Scans along the innermost dimension with the running result in a register."""
    others = [extent for dimension, extent in enumerate(operand.shape) if dimension != axis]

    def build(
        function: FunctionBuilder, out: Buffer | None, values: list[Value]
    ) -> Sequence[ir.Value]:
        assert out is not None
        with (
            function.nest(others) as outer,
            function.loop(0, operand.shape[axis], carry=[identity]) as loop,
        ):
            index = [*outer[:axis], loop.counter, *outer[axis:]]
            builder = ElementBuilder(function)
            result = combine(builder, loop.carry[0], values[0].element(builder, index))
            store_element(function, result, out.element_address(function, index), operand.dtype)
            loop.next = [result]
        return []

    in_function(context, "scan", target, [operand], [], build)


def _scan_columns(
    context: Context, combine: Combine, target: Buffer, operand: Value, axis: int
) -> None:
    """Scans row by row, each from the one before it, with the innermost loop along another axis."""
    before, after = operand.shape[:axis], operand.shape[axis + 1 :]

    def build(
        function: FunctionBuilder, out: Buffer | None, values: list[Value]
    ) -> Sequence[ir.Value]:
        assert out is not None

        def row(outer: list[Index], position: Index, is_first: bool) -> None:
            with function.nest(after) as inner:
                builder = ElementBuilder(function)
                index = [*outer, position, *inner]
                result = values[0].element(builder, index)
                if not is_first:
                    previous = [*outer, function.subtract(position, 1), *inner]
                    result = combine(builder, out.element(builder, previous), result)
                store_element(function, result, out.element_address(function, index), operand.dtype)

        with function.nest(before) as outer:
            row(outer, 0, True)
            with function.loop(1, operand.shape[axis]) as loop:
                row(outer, loop.counter, False)
        return []

    in_function(context, "scan", target, [operand], [], build)
