"""How far a kernel's result may be from XLA's, asserted and told to whoever records it.

A distance in units in the last place (ulps) is the number of steps from one number of the dtype to
the next, zeros of both signs apart; NaNs are all alike, and as far as can be from any number.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np

from cokernel.compiler import codegen
from tests.compiler.ops.forms import NARROW_INTEGERS, name_of

# In the place of a number of ulps: the dtype is refused; or the result is that of float32, rounded.
REFUSED = "refused"
ROUNDED = "rounded"
# Told of a primitive, the name of a dtype, and the ulps that were asserted, REFUSED or ROUNDED.
Listener = Callable[[Any, str, "float | str"], None]

_listeners: list[Listener] = []
_NOT_A_NUMBER = 1 << 62


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tells `listener` of every tolerance that is asserted meanwhile."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def note(primitive: Any, dtype: Any, tolerance: float | str) -> None:
    """Tells those who listen what a test has just asserted of a primitive."""
    for listener in _listeners:
        listener(primitive, name_of(dtype), tolerance)


def positions(array: np.ndarray) -> np.ndarray:
    """The numbers of a dtype counted from the least to the greatest, as int64."""
    array = np.asarray(array)
    if array.dtype.kind in "biu":
        return array.astype(np.uint64).view(np.int64)
    if array.dtype in (np.dtype(item) for item in NARROW_INTEGERS):
        return array.astype(np.int64)
    bits = np.atleast_1d(array).view(f"u{array.dtype.itemsize}").reshape(array.shape)
    bits = bits.astype(np.uint64).view(np.int64)
    with np.errstate(invalid="ignore"):
        is_nan = np.isnan(array.astype(np.float64))
    if array.dtype != ml_dtypes.float8_e8m0fnu:
        sign = (
            np.int64(1 << (ml_dtypes.finfo(array.dtype).bits - 1))
            if array.itemsize < 8
            else (np.int64(-(1 << 63)))
        )
        bits = np.where(bits & sign, -1 - (bits & ~sign), bits)
    return np.where(is_nan, _NOT_A_NUMBER, bits)


def without_doubtful_denormals(array: np.ndarray) -> np.ndarray:
    """The array with zeros for those denormal numbers that XLA treats now so and now otherwise.

    They are those of bfloat16 where the processor has instructions for it: the instructions flush
    them, and XLA uses them for some operations only. Zeros then lose their signs.
    """
    if array.dtype != ml_dtypes.bfloat16 or not codegen.host_has("avx512bf16"):
        return array
    is_normal = ~(np.abs(array) < ml_dtypes.finfo(array.dtype).smallest_normal)
    return np.where(is_normal, array, np.zeros_like(array))


def distances(ours: np.ndarray, theirs: np.ndarray) -> np.ndarray:
    """The ulps between two arrays, element by element; 0 is the same bits, or NaN twice."""
    ours, theirs = without_doubtful_denormals(ours), without_doubtful_denormals(theirs)
    left, right = positions(ours), positions(theirs)
    with np.errstate(over="ignore"):
        return np.where(left == right, 0.0, np.abs(left.astype(np.float64) - right))


def expect_within(ours: Any, theirs: Any, ulps: float, what: str) -> None:
    """Asserts that two arrays are of one dtype and shape, and no elements further apart."""
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape), what
    if not ours.size:
        return
    apart = distances(ours, theirs)
    worst = np.unravel_index(np.argmax(apart), apart.shape)
    assert apart[worst] <= ulps, (
        f"{what} at {tuple(map(int, worst))} is {ours[worst]}, by XLA {theirs[worst]}: "
        f"{apart[worst]} ulps apart"
    )
