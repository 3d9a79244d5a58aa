"""Cases that run every primitive over every dtype it takes, and compare with XLA.

All cases of a family share the operands of a dtype and one kernel, since a kernel takes longer to
compile than to run.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests.compiler import tolerance
from tests.compiler.harness import kernel_of
from tests.compiler.ops.forms import (
    FLOAT8,
    FLOATS,
    INTEGERS,
    NARROW_INTEGERS,
    hard_values,
    name_of,
)

FEW_BITS = (ml_dtypes.float4_e2m1fn, ml_dtypes.float8_e8m0fnu)
INTS = (*NARROW_INTEGERS, *INTEGERS)
# Those that have a sign to take away: JAX gives int2 and int4 no absolute value.
SIGNED_INTS = (jnp.int8, jnp.int16, jnp.int32, jnp.int64)
NARROW_FLOATS = (jnp.float16, jnp.bfloat16, *FEW_BITS, *FLOAT8)
FLOATING = (*FEW_BITS, *FLOAT8, *FLOATS)
BITS = (jnp.bool_, *INTS)
NUMBERS = (*INTS, *FLOATING)
ANY = (jnp.bool_, *NUMBERS)

SHAPE = (6, 50)
PLACES = 12


class Operands(NamedTuple):
    """What every case of a family is given: three arrays of the dtype and of SHAPE, and PLACES
    numbers of int32, of which some lie outside of either dimension."""

    a: Any
    b: Any
    c: Any
    places: Any


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """One primitive in one use: `function(operands)` gives arrays to compare.

    `ulps` are how far from XLA's results its floats may be, by name of the dtype of the operands;
    where it is not listed, and for all other results, the bits are the same. `reference` is what
    XLA computes instead where it cannot compute the function, or errs.
    """

    primitive: Any
    function: Callable[[Operands], Any]
    dtypes: Sequence[Any] = ANY
    ulps: Mapping[str, float] = dataclasses.field(default_factory=dict)
    reference: Callable[[Operands], Any] | None = None

    def tolerance(self, dtype: Any) -> float:
        return self.ulps.get(name_of(dtype), 0.0)


def without(dtypes: Sequence[Any], *left_out: Any) -> tuple[Any, ...]:
    return tuple(dtype for dtype in dtypes if dtype not in left_out)


def itself(dtype: Any) -> Any:
    """XLA computes in the dtype."""
    return dtype


def plainer(dtype: Any) -> Any:
    """XLA computes with the same numbers of a dtype that it can fold, order and multiply: in some
    narrow ones it writes past the end of an array, takes NaN for a number, or compiles nothing."""
    if dtype in NARROW_INTEGERS:
        return jnp.int8
    if dtype == jnp.float8_e8m0fnu:
        return jnp.float64  # In float32 the least of its numbers is a denormal.
    return jnp.float32 if dtype in (*FEW_BITS, *FLOAT8) else dtype


def bits(dtype: Any) -> Any:
    """XLA moves the same bits under a dtype that all dtypes of that width share."""
    if dtype in NARROW_INTEGERS:
        return jnp.int8
    return np.dtype(f"u{np.dtype(dtype).itemsize}").type


def _carried(arrays: Sequence[Any], dtype: Any, *, by_bits: bool) -> list[np.ndarray]:
    """Arrays of one dtype in the form that another has for them: XLA converts them together."""
    arrays = [np.asarray(array) for array in arrays]
    if not arrays or arrays[0].dtype == dtype:
        return arrays
    if by_bits:
        return [array.view(dtype) for array in arrays]
    flat = jnp.asarray(np.concatenate([array.ravel() for array in arrays])).astype(dtype)
    ends = np.cumsum([array.size for array in arrays])[:-1]
    parts = np.split(np.asarray(flat), ends)
    return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]


def values(dtype: Any, shape: Sequence[int], generator: np.random.Generator) -> np.ndarray:
    """Numbers of all kinds: any bits, limits, infinities, NaN, denormals, and ordinary ones."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape))
    if dtype == np.bool_:
        return generator.integers(0, 2, shape).astype(bool)
    if dtype in tuple(map(np.dtype, INTS)):
        few = dtype.itemsize == 1 and ml_dtypes.iinfo(dtype).bits < 8
        known = np.arange(16).astype(dtype) if few else hard_values(dtype)
        width = ml_dtypes.iinfo(dtype).bits
    else:
        limits = ml_dtypes.finfo(dtype)
        width = limits.bits
        with np.errstate(all="ignore"):
            denormals = float(limits.smallest_subnormal) * np.array([1.0, -1.0, 3.0])
            ordinary = generator.standard_normal(40) * np.exp2(generator.uniform(-3, 5, 40))
            known = np.concatenate(
                [hard_values(dtype), denormals.astype(dtype), ordinary.astype(dtype)]
            )
    anything = generator.integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    if width < 8 and dtype in tuple(map(np.dtype, NARROW_INTEGERS)):
        anything = generator.integers(0, 1 << width, size).astype(dtype)
    elif width < 8:
        anything = (anything % (1 << width)).view(dtype)
    else:
        anything = anything.view(dtype)
    if dtype == ml_dtypes.float8_e8m0fnu:
        # Not the least, which is a denormal float32.
        known, anything = (
            np.where(x == x.dtype.type(2.0**-127), x.dtype.type(1), x) for x in (known, anything)
        )
    chosen = known[generator.integers(0, len(known), size)]
    mixed = np.where(generator.integers(0, 3, size) == 0, anything, chosen).reshape(shape)
    return tolerance.without_doubtful_denormals(mixed)


def operands_of(dtype: Any, seed: int) -> Operands:
    generator = np.random.default_rng(seed)
    arrays = [jnp.asarray(values(dtype, SHAPE, generator)) for _ in range(3)]
    places = generator.integers(-2, SHAPE[1] + 2, PLACES).astype(np.int32)
    places[::2] %= SHAPE[0]
    return Operands(*arrays, jnp.asarray(places))


def bits_of(array: Any) -> np.ndarray:
    """The bits of an array's elements, as integers; of two and four bits, their values."""
    array = np.asarray(array)
    if array.dtype in tuple(map(np.dtype, NARROW_INTEGERS)):
        return array.astype(np.int8)
    return np.atleast_1d(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)


def _named(name: str) -> Any:
    return next(dtype for dtype in ANY if name_of(dtype) == name)


@functools.cache
def _kernel(cases: tuple[Case, ...], dtype_name: str) -> Any:
    """What runs all cases of a dtype in one kernel."""

    def whole(*arrays: Any) -> list[Any]:
        return [jax.tree.leaves(case.function(Operands(*arrays))) for case in cases]

    arrays = operands_of(_named(dtype_name), 0)
    return jax.jit(kernel_of(whole, *(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays)))


@functools.cache
def _xla(cases: tuple[Case, ...]) -> Any:
    """What runs all cases by XLA, for operands of any dtype."""

    def whole(*arrays: Any) -> list[Any]:
        functions = [case.reference or case.function for case in cases]
        return [jax.tree.leaves(function(Operands(*arrays))) for function in functions]

    # Which takes XLA half the time, and gives the same results.
    return jax.jit(whole, compiler_options={"xla_backend_optimization_level": 0})


def expect_like_xla(
    cases: Sequence[Case], dtype: Any, seed: int, stand_in: Callable[[Any], Any] = itself
) -> None:
    """Asserts that all cases which take a dtype are as near to XLA's results as they say.

    `stand_in` says in which dtype XLA computes; its results become those of the dtype in one step.
    """
    taking = tuple(case for case in cases if dtype in case.dtypes)
    *arrays, places = operands_of(dtype, seed)
    ours = iter(_kernel(taking, name_of(dtype))(*arrays, places))
    other = stand_in(dtype)
    by_bits = stand_in is bits and dtype not in NARROW_INTEGERS
    theirs = _xla(taking)(*_carried(arrays, other, by_bits=by_bits), places)
    same = [their for their in jax.tree.leaves(theirs) if their.dtype == other]
    carried = iter(_carried(same, dtype, by_bits=by_bits))
    for case, expected in zip(taking, theirs, strict=True):
        for number, item in enumerate(expected):
            their = next(carried) if item.dtype == other else item
            what = f"result {number} of {case.primitive} of {name_of(dtype)}"
            tolerance.expect_within(next(ours), their, case.tolerance(dtype), what)
        tolerance.note(case.primitive, dtype, case.tolerance(dtype))


def expect_refused(case: Case, dtype: Any) -> None:
    """Asserts that a dtype is refused: by JAX as it traces the primitive, or here by its name."""
    try:
        jax.eval_shape(case.function, operands_of(dtype, 0))
    except (TypeError, ValueError, NotImplementedError):
        return
    operands = operands_of(dtype, 0)
    kernel = kernel_of(lambda *arrays: case.function(Operands(*arrays)), *operands)
    with pytest.raises(NotImplementedError, match=case.primitive.name):
        jax.jit(kernel).lower(*operands)
    tolerance.note(case.primitive, dtype, tolerance.REFUSED)
