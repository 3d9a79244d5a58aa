"""The incomplete gamma and beta functions and their kin are within rounding of XLA's."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tests.compiler import tolerance
from tests.compiler.harness import expect_close, run
from tests.compiler.ops.forms import name_of

FUNCTIONS = {
    "igamma": (lax.igamma, 2),
    "igammac": (lax.igammac, 2),
    "igamma_grad_a": (lax.igamma_grad_a, 2),
    "regularized_incomplete_beta": (lax.betainc, 3),
    "bessel_i0e": (lax.bessel_i0e, 1),
}


# Of those that are rounded once, those that are stored each in its own way.
NARROW_FLOATS = (jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.float8_e4m3fnuz)
PRIMITIVES = {
    lax.igamma: lax.igamma_p,
    lax.igammac: lax.igammac_p,
    lax.igamma_grad_a: lax.igamma_grad_a_p,
    lax.betainc: lax.regularized_incomplete_beta_p,
    lax.bessel_i0e: lax.bessel_i0e_p,
}
# Narrow floats go the same way for all of them.
ROWS = [pytest.param(*each, np.float32, id=name) for name, each in FUNCTIONS.items()]
ROWS.append(pytest.param(lax.bessel_i0e, 1, jnp.bfloat16, id="bessel_i0e-bfloat16"))
ROWS.append(pytest.param(lax.betainc, 3, jnp.bfloat16, id="regularized_incomplete_beta-bfloat16"))


@pytest.mark.parametrize(("function", "count", "dtype"), ROWS)
def test_a_function_of_positive_numbers(function, count, dtype):
    random = np.random.default_rng(0)
    operands = [random.uniform(0.2, 6, 70) for _ in range(count)]
    if function is lax.betainc:
        operands[2] /= 7
    # Chains of some hundred operations, whose functions differ in the last place.
    expect_close(function, *(jnp.asarray(item).astype(dtype) for item in operands), ulps=200)
    tolerance.note(PRIMITIVES[function], dtype, 200.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_float64_is_within_rounding_too(name):
    function, count = FUNCTIONS[name]
    random = np.random.default_rng(2)
    operands = [random.uniform(0.2, 6, 20) for _ in range(count)]
    if function is lax.betainc:
        operands[2] /= 7
    with jax.enable_x64(True):
        expect_close(function, *operands, ulps=200)
    tolerance.note(PRIMITIVES[function], np.float64, 200.0)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_narrow_floats_are_float32_rounded_once(name):
    function, count = FUNCTIONS[name]
    random = np.random.default_rng(3)
    operands = [random.uniform(0.2, 0.9, 9).astype(np.float32) for _ in range(count)]

    rounded = [[item.astype(dtype) for item in operands] for dtype in NARROW_FLOATS]
    wide = [
        np.concatenate([item.astype(np.float32) for item in each])
        for each in zip(*rounded, strict=True)
    ]
    [exact] = run(function, *wide)
    ours = run(
        lambda *xs: [function(*xs[k : k + count]) for k in range(0, len(xs), count)],
        *itertools.chain(*rounded),
    )
    for dtype, our, their in zip(
        NARROW_FLOATS, ours, np.split(exact, len(NARROW_FLOATS)), strict=True
    ):
        tolerance.expect_within(our, their.astype(dtype), 0, f"{name} of {name_of(dtype)}")
        tolerance.note(PRIMITIVES[function], dtype, tolerance.ROUNDED)


@pytest.mark.parametrize(
    ("function", "scalar"), [(lax.igamma, 0), (lax.igamma, 1), (lax.betainc, 0)]
)
def test_a_scalar_stands_for_an_array_of_equal_elements(function, scalar):
    x = np.random.default_rng(1).uniform(0.2, 0.9, 9).astype(np.float32)

    def with_a_scalar(x):
        operands = [x] * (3 if function is lax.betainc else 2)
        operands[scalar] = 0.7
        return function(*operands)

    expect_close(with_a_scalar, x, ulps=200)
