"""Strides of reshaped memory agree with what numpy can do without a copy."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cokernel.compiler.values import row_major
from cokernel.compiler.views import reshaped_strides


@st.composite
def _reshapes(draw):
    """An array, perhaps transposed, sliced or reversed, and a shape of as many elements."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    array = np.arange(np.prod(shape) * 8).reshape([extent * 2 for extent in shape[:3]] + [-1])
    array = array.transpose(draw(st.permutations(range(array.ndim))))
    steps = draw(st.lists(st.sampled_from([1, 1, 2, -1]), min_size=array.ndim, max_size=array.ndim))
    array = array[tuple(slice(None, None, step) for step in steps)]
    factors = [n for n in (2, 3) for _ in range(array.size) if array.size % n == 0][:2]
    target = [array.size]
    for factor in factors:
        position = draw(st.integers(0, len(target) - 1))
        if target[position] % factor == 0:
            target[position : position + 1] = [target[position] // factor, factor]
    if draw(st.booleans()):
        target.insert(draw(st.integers(0, len(target))), 1)
    return array, target


@given(_reshapes())
def test_strides_exist_where_numpy_reshapes_without_a_copy_and_are_numpys(case):
    array, target = case
    strides = reshaped_strides(
        array.shape, [stride // array.itemsize for stride in array.strides], target
    )
    reshaped = array.reshape(target)
    assert (strides is not None) == np.shares_memory(reshaped, array)
    if strides is not None:
        view = np.lib.stride_tricks.as_strided(
            array, target, [stride * array.itemsize for stride in strides]
        )
        np.testing.assert_array_equal(view, reshaped)


def test_a_dense_array_takes_any_shape():
    assert reshaped_strides((4, 6), row_major((4, 6)), (2, 3, 1, 4)) == (12, 4, 0, 1)


def test_an_array_repeated_along_a_dimension_can_be_split_but_not_flattened():
    assert reshaped_strides((6, 4), (0, 1), (2, 3, 4)) == (0, 0, 1)
    assert reshaped_strides((6, 4), (0, 1), (24,)) is None
