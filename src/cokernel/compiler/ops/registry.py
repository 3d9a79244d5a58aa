"""The table of rules: one function per primitive that emits code for an equation."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler.context import Context
from cokernel.compiler.function import ElementBuilder, Index
from cokernel.compiler.values import Expression, Packed, Scalar, Value, is_small, make_packed
from cokernel.compiler.views import broadcast, take_view
from cokernel.records import record

# A rule takes the context, the equation, and its operands in order (Values, or RefValues for Refs),
# and returns the results: one, a sequence of them, or None where the equation has none.
Rule = Callable[..., Any]

RULES: dict[Any, Rule] = {}
# The rules of primitives that no user writes: those that the compiler adds to a program.
ADDED_RULES: dict[Any, Rule] = {}


def find_rule(primitive: Any) -> Rule | None:
    """The rule of a primitive, None if it has none. Imports families of rules until one has it."""
    found = RULES.get(primitive) or ADDED_RULES.get(primitive)
    if found is not None:
        return found
    from cokernel.compiler.ops import families, load_family

    for name in families():
        load_family(name)
        found = RULES.get(primitive) or ADDED_RULES.get(primitive)
        if found is not None:
            return found
    return None


def element_rule(primitive: Any) -> "ElementRule":
    """The rule of an elementwise primitive, for other rules that need it, such as a reduction its
    addition. Raises KeyError for another primitive."""
    find_rule(primitive)
    return ELEMENT_RULES[primitive]


def rule(*primitives: Any) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of primitives. Keyed by the primitive object, since names
    are not unique.
    """

    def register(function: Rule) -> Rule:
        for primitive in primitives:
            if primitive in RULES:
                raise AssertionError(f"{primitive} has a rule already")
            RULES[primitive] = function
        return function

    return register


def added_rule(primitive: Any) -> Callable[[Rule], Rule]:
    """Registers a function as the rule of a primitive that the compiler adds to programs."""

    def register(function: Rule) -> Rule:
        ADDED_RULES[primitive] = function
        return function

    return register


@record(frozen=True)
class Operation:
    """What an elementwise rule may know of its equation."""

    params: Mapping[str, Any]
    operand_dtypes: tuple[np.dtype, ...]
    result_dtype: np.dtype


# Emits one element, or as many as the builder has lanes, from registers of the same width.
ElementRule = Callable[..., ir.Value]

# The rules of elementwise primitives of the families that have been imported: see `element_rule`.
ELEMENT_RULES: dict[Any, ElementRule] = {}


def elementwise(*primitives: Any) -> Callable[[ElementRule], ElementRule]:
    """Registers `function(builder, operation, *registers) -> register` as the rule of elementwise
    primitives.
    """

    def register(function: ElementRule) -> ElementRule:
        def whole(context: Context, eqn: Any, *operands: Value) -> Value:
            return apply_elementwise(context, function, eqn.params, eqn.outvars[0].aval, operands)

        rule(*primitives)(whole)
        ELEMENT_RULES.update(dict.fromkeys(primitives, function))
        return function

    return register


def apply_elementwise(
    context: Context,
    emit: ElementRule,
    params: Mapping[str, Any],
    aval: Any,
    operands: Sequence[Value],
) -> Value:
    """The value of an elementwise operation: computed now if it is small, else an expression.
    Operands have the shape of the result, or one that broadcasts to it: that of a scalar, or with
    extents of one.
    """
    shape, dtype = tuple(aval.shape), np.dtype(aval.dtype)
    operands = [
        operand
        if operand.shape in ((), shape)
        else take_view(context, operand, broadcast(operand.shape, shape, range(len(shape))))
        for operand in operands
    ]
    operation = Operation(params, tuple(operand.dtype for operand in operands), dtype)
    if not shape or is_small(shape, dtype):
        registers = [context.pack(operand) for operand in operands]
        count = max(aval.size, 1)
        builder = ElementBuilder(context.function, count)
        register = emit(builder, operation, *(builder.splat(register) for register in registers))
        return make_packed(shape, dtype, register)
    # Packed operands of a large result can only differ from it in dtype, so they are of its shape
    # and must be in memory.
    prepared = tuple(
        context.materialise(operand) if isinstance(operand, Packed) and operand.shape else operand
        for operand in operands
    )

    def emit_element(
        builder: ElementBuilder, index: Sequence[Index], inputs: tuple[Value, ...]
    ) -> ir.Value:
        registers = [item.element(builder, index if item.shape else ()) for item in inputs]
        return emit(builder, operation, *registers)

    is_cheap = all(isinstance(operand, Scalar) for operand in prepared)
    return Expression(shape, dtype, prepared, emit_element, elementwise=True, is_cheap=is_cheap)
