"""The kernels that are measured give the right answer, and every case has one at a small size."""

import pathlib
import sys

import jax
import numpy as np
import pytest

import cokernel

sys.path.append(str(pathlib.Path(__file__).parents[2] / "benchmarks"))

import cases
from kernels import CHIP


def test_every_case_has_a_sample_for_the_interpret_modes():
    assert set(cases.SAMPLES) == set(cases.CASES)


@pytest.mark.parametrize("key", list(cases.SAMPLES))
def test_a_measured_kernel_gives_the_right_answer(key):
    sample = cases.SAMPLES[key]
    with cokernel.target(CHIP):
        kernel, arguments, expected = sample.prepare(cokernel.kernel, {})
        result = jax.block_until_ready(jax.jit(kernel)(*arguments))
    if expected is not None:
        np.testing.assert_allclose(
            np.asarray(result, np.float64),
            np.asarray(expected, np.float64),
            rtol=sample.tolerance,
            atol=sample.tolerance,
        )
