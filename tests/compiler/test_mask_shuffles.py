"""Masks of which lanes are constantly false keep them so, wherever their register goes."""

import ctypes

import numpy as np
import pytest

from cokernel.compiler.codegen import LoadedCode, compile_object
from cokernel.compiler.mask_shuffles import without_constant_lanes

# Nothing stays in a register for masks across this, as across a call.
CLOBBER = 'call void asm sideeffect "", "' + ",".join(f"~{{k{n}}}" for n in range(8)) + '"()'


def module(size: int, kept: int, swapped: bool) -> str:
    """A function that returns the bits of a mask less all behind the lanes that are kept."""
    mask, zeros = f"<{size} x i1> %mask", f"<{size} x i1> zeroinitializer"
    lanes = ", ".join(
        f"i32 {lane + (size if (lane < kept) == swapped else 0)}" for lane in range(size)
    )
    left, right = (zeros, mask) if swapped else (mask, zeros)
    return f"""
define i64 @bits(ptr %from) {{
  %values = load <{size} x i8>, ptr %from, align 1
  %mask = icmp ne <{size} x i8> %values, zeroinitializer
  %kept = shufflevector {left}, {right}, <{size} x i32> <{lanes}>
  {CLOBBER}
  %packed = bitcast <{size} x i1> %kept to i{size}
  %result = {"zext" if size < 64 else "add"} i{size} %packed{" to i64" if size < 64 else ", 0"}
  ret i64 %result
}}
"""


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("size", "kept"), [(16, 8), (32, 8), (32, 16), (64, 8), (64, 16), (64, 32), (16, 7), (32, 20)]
)
def test_what_is_cut_off_a_mask_stays_away_where_the_register_is_spilled(size, kept, swapped):
    code = LoadedCode(compile_object(module(size, kept, swapped)))
    bits = ctypes.CFUNCTYPE(ctypes.c_uint64, ctypes.c_void_p)(code.address("bits"))
    values = np.ones(size, np.int8)
    assert bits(values.ctypes.data) == (1 << kept) - 1
    values[:kept] = 0
    assert bits(values.ctypes.data) == 0


@pytest.mark.parametrize("swapped", [False, True])
def test_no_shuffle_brings_in_lanes_that_are_constantly_false(swapped):
    text = without_constant_lanes(module(16, 8, swapped))
    assert "and <16 x i1>" in text
    assert "i1> zeroinitializer, <" not in text


def test_shuffles_with_lanes_that_are_constantly_true_are_left_alone():
    text = """
  %a = shufflevector <4 x i1> %b, <4 x i1> splat (i1 true), <4 x i32> <i32 0, i32 1, i32 6, i32 7>
  %c = shufflevector <2 x i1> %d, <2 x i1> %e, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
"""
    assert without_constant_lanes(text) == text
