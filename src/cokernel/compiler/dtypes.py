"""How JAX's dtypes live in LLVM: the type in memory and the type in a register."""

import enum
from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir

from cokernel import _jax

i1 = ir.IntType(1)
i8 = ir.IntType(8)
i16 = ir.IntType(16)
i32 = ir.IntType(32)
i64 = ir.IntType(64)
half = ir.HalfType()
f32 = ir.FloatType()
f64 = ir.DoubleType()
pointer = ir.PointerType()
void = ir.VoidType()

SEMAPHORE_BYTES = 16

# The dtypes of less than a byte, and how many bits of theirs count.
NARROW_BITS: dict[np.dtype, int] = {
    np.dtype(ml_dtypes.int4): 4,
    np.dtype(ml_dtypes.uint4): 4,
    np.dtype(ml_dtypes.int2): 2,
    np.dtype(ml_dtypes.uint2): 2,
    np.dtype(ml_dtypes.float4_e2m1fn): 4,
}


class Kind(enum.Enum):
    """What arithmetic a dtype has."""

    BOOL = "bool"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    FLOAT = "float"
    # A float that LLVM has no portable arithmetic for: its bits live in an integer, and arithmetic
    # goes through float32.
    BITS_FLOAT = "bits float"
    COMPLEX = "complex"


def is_semaphore(dtype: Any) -> bool:
    """Whether `dtype` is one of Pallas' semaphore dtypes (regular, barrier, DMA)."""
    return isinstance(dtype, _jax.AbstractSemaphoreTy)


def kind(dtype: Any) -> Kind:
    """The arithmetic of a dtype. Raises NotImplementedError for a dtype that has none here."""
    dtype = np.dtype(dtype)
    if dtype == np.bool_:
        return Kind.BOOL
    if dtype.kind == "i" or dtype in (ml_dtypes.int4, ml_dtypes.int2):
        return Kind.SIGNED
    if dtype.kind == "u" or dtype in (ml_dtypes.uint4, ml_dtypes.uint2):
        return Kind.UNSIGNED
    if dtype.kind == "f" and dtype.itemsize in (2, 4, 8):
        return Kind.FLOAT
    if dtype.kind == "c":
        return Kind.COMPLEX
    if ml_dtypes.finfo(dtype).bits in (4, 8, 16):
        return Kind.BITS_FLOAT
    raise NotImplementedError(f"the CPU compiler has no arithmetic for dtype {dtype}")


def is_float(dtype: Any) -> bool:
    """Whether the dtype holds real floating-point numbers of any width."""
    return kind(dtype) in (Kind.FLOAT, Kind.BITS_FLOAT)


def register_type(dtype: Any) -> ir.Type:
    """The LLVM type of one element in a register: i1 for bool, the bits for bfloat16 and float8."""
    dtype = np.dtype(dtype)
    match kind(dtype):
        case Kind.BOOL:
            return i1
        case Kind.FLOAT:
            return {2: half, 4: f32, 8: f64}[dtype.itemsize]
        case Kind.COMPLEX:
            raise NotImplementedError(f"the CPU compiler does not support complex values ({dtype})")
        case _:
            return ir.IntType(8 * dtype.itemsize)


def memory_type(dtype: Any) -> ir.Type:
    """The LLVM type of one element in memory: a bool takes a byte, as XLA stores it."""
    return i8 if np.dtype(dtype) == np.bool_ else register_type(dtype)


def itemsize(dtype: Any) -> int:
    """Bytes of one element in memory, semaphores included."""
    return SEMAPHORE_BYTES if is_semaphore(dtype) else np.dtype(dtype).itemsize


def bit_width(dtype: Any) -> int:
    """The number of bits of an element; four for int4, though in memory it takes a byte."""
    dtype = np.dtype(dtype)
    return NARROW_BITS.get(dtype, 8 * dtype.itemsize)


def lanes(scalar: ir.Type, count: int) -> ir.Type:
    """`scalar` itself for one lane, else the vector type of `count` lanes."""
    return scalar if count == 1 else ir.VectorType(scalar, count)
