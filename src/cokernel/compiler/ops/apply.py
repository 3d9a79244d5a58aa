"""The rule of a primitive applied outside of any equation: how one rule builds on another."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import lax

from cokernel.compiler.context import Context
from cokernel.compiler.ops.registry import ElementRule, Rule, apply_elementwise, find_rule
from cokernel.compiler.values import Value
from cokernel.records import record


@record(frozen=True)
class _Aval:
    """As much of an abstract value as rules look at."""

    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=int))


@record(frozen=True)
class _Variable:
    aval: _Aval


@record(frozen=True)
class _Equation:
    """As much of an equation as the rule of an elementwise primitive looks at."""

    primitive: Any
    params: Mapping[str, Any]
    invars: tuple[_Variable, ...]
    outvars: tuple[_Variable, ...]


def _variable(shape: Sequence[int], dtype: Any) -> _Variable:
    return _Variable(_Aval(tuple(shape), np.dtype(dtype)))


def apply(
    context: Context,
    primitive: Any,
    shape: Sequence[int],
    dtype: Any,
    *operands: Value,
    **params: Any,
) -> Value:
    """What a primitive with one result of this shape and dtype gives for these operands."""
    inputs = tuple(_variable(operand.shape, operand.dtype) for operand in operands)
    equation = _Equation(primitive, params, inputs, (_variable(shape, dtype),))
    return _rule(primitive)(context, equation, *operands)


def apply_many(
    context: Context,
    primitive: Any,
    results: Sequence[tuple[Sequence[int], Any]],
    *operands: Value,
    **params: Any,
) -> list[Value]:
    """What a primitive with results of these shapes and dtypes gives for these operands."""
    inputs = tuple(_variable(operand.shape, operand.dtype) for operand in operands)
    outputs = tuple(_variable(shape, dtype) for shape, dtype in results)
    equation = _Equation(primitive, params, inputs, outputs)
    return list(_rule(primitive)(context, equation, *operands))


def _rule(primitive: Any) -> Rule:
    found = find_rule(primitive)
    assert found is not None, f"{primitive} has no rule"
    return found


def emit_elementwise(
    context: Context, emit: ElementRule, shape: Sequence[int], dtype: Any, *operands: Value
) -> Value:
    """The value of an elementwise operation that is no primitive."""
    return apply_elementwise(context, emit, {}, _Aval(tuple(shape), np.dtype(dtype)), operands)


def convert(context: Context, operand: Value, dtype: Any) -> Value:
    """The operand as JAX converts it to another dtype."""
    dtype = np.dtype(dtype)
    if operand.dtype == dtype:
        return operand
    return apply(
        context,
        lax.convert_element_type_p,
        operand.shape,
        dtype,
        operand,
        new_dtype=dtype,
        weak_type=False,
        sharding=None,
    )
