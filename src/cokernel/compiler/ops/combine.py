"""The operations that reductions, prefix scans and products fold elements with."""

import enum
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir

from cokernel.compiler import dtypes
from cokernel.compiler.dtypes import Kind
from cokernel.compiler.function import ElementBuilder
from cokernel.compiler.values import constant
from cokernel.records import record

# Sums and products of floats may be regrouped, which is what lets a loop keep several partial sums,
# and a sum of products may round once instead of twice.
REGROUP = ["reassoc", "contract"]


class Fold(enum.Enum):
    """An associative operation on two elements."""

    ADD = "add"
    MULTIPLY = "mul"
    MAXIMUM = "max"
    MINIMUM = "min"
    AND = "and"
    OR = "or"
    XOR = "xor"


@record(frozen=True)
class Combiner:
    """One fold on elements of one dtype. Narrow floats have none: they are folded as float32."""

    fold: Fold
    dtype: np.dtype

    def identity(self) -> ir.Constant:
        """The element that changes no other: what a reduction over nothing gives."""
        value: Any
        match self.fold:
            case Fold.ADD | Fold.OR | Fold.XOR:
                value = 0
            case Fold.MULTIPLY:
                value = 1
            case Fold.AND:
                value = True if self.dtype == np.bool_ else np.array(-1).astype(self.dtype)
            case Fold.MAXIMUM:
                value = _lowest(self.dtype)
            case Fold.MINIMUM:
                value = _highest(self.dtype)
        register = constant(value, self.dtype).register
        assert isinstance(register, ir.Constant)
        return register

    def __call__(self, builder: ElementBuilder, left: ir.Value, right: ir.Value) -> ir.Value:
        """Emits the fold of two registers of the builder's width."""
        ops = builder.builder
        kind = dtypes.kind(self.dtype)
        if kind is Kind.BITS_FLOAT:
            raise AssertionError(f"{self.dtype} is folded as float32")
        if kind is Kind.FLOAT:
            match self.fold:
                case Fold.ADD:
                    return ops.fadd(left, right, flags=REGROUP)
                case Fold.MULTIPLY:
                    return ops.fmul(left, right, flags=REGROUP)
                case Fold.MAXIMUM:
                    return builder.intrinsic("llvm.maximum", left.type, [left, right])
                case Fold.MINIMUM:
                    return builder.intrinsic("llvm.minimum", left.type, [left, right])
        # On truth values a sum and a maximum are "or", a product and a minimum "and".
        fold = _ON_BOOL.get(self.fold, self.fold) if kind is Kind.BOOL else self.fold
        match fold:
            case Fold.ADD:
                return ops.add(left, right)
            case Fold.MULTIPLY:
                return ops.mul(left, right)
            case Fold.AND:
                return ops.and_(left, right)
            case Fold.OR:
                return ops.or_(left, right)
            case Fold.XOR:
                return ops.xor(left, right)
            case Fold.MAXIMUM | Fold.MINIMUM:
                sign = "s" if kind is Kind.SIGNED else "u"
                return builder.intrinsic(f"llvm.{sign}{fold.value}", left.type, [left, right])

    def whole(self, builder: ElementBuilder, register: ir.Value) -> ir.Value:
        """Emits the fold of all lanes of a vector into one element.

        By LLVM's own operation for it: LLVM 22 compiles the equivalent shuffles of a sum of
        products of signed and unsigned bytes wrongly for processors with the instruction vpdpbusd.
        """
        kind = dtypes.kind(self.dtype)
        element = register.type.element
        fold = _ON_BOOL.get(self.fold, self.fold) if kind is Kind.BOOL else self.fold
        name = fold.value
        arguments = [register]
        if kind is Kind.FLOAT and fold in (Fold.ADD, Fold.MULTIPLY):
            name, arguments = f"f{name}", [self.identity(), register]
        elif kind is Kind.FLOAT:
            name = f"f{fold.name.lower()}"
        elif fold in (Fold.MAXIMUM, Fold.MINIMUM):
            name = ("s" if kind is Kind.SIGNED else "u") + name
        result = builder.intrinsic(
            f"llvm.vector.reduce.{name}", element, arguments, overloads=[register.type]
        )
        if len(arguments) == 2:
            set.add(result.fastmath, "reassoc")
        return result


_ON_BOOL = {
    Fold.ADD: Fold.OR,
    Fold.MAXIMUM: Fold.OR,
    Fold.MULTIPLY: Fold.AND,
    Fold.MINIMUM: Fold.AND,
}


def _lowest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return False
    return -np.inf if dtypes.is_float(dtype) else ml_dtypes.iinfo(dtype).min


def _highest(dtype: np.dtype) -> Any:
    if dtype == np.bool_:
        return True
    return np.inf if dtypes.is_float(dtype) else ml_dtypes.iinfo(dtype).max


def working_dtype(dtype: Any) -> np.dtype:
    """The dtype in which elements of `dtype` are folded: narrow floats as float32, rounded once at
    the end, and integers of less than a byte as int32."""
    dtype = np.dtype(dtype)
    if dtypes.kind(dtype) in (Kind.SIGNED, Kind.UNSIGNED) and ml_dtypes.iinfo(dtype).bits < 8:
        return np.dtype(np.int32)
    if dtypes.is_float(dtype) and dtype.itemsize < 4:
        return np.dtype(np.float32)
    return dtype
