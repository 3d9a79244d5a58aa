"""Arithmetic, comparison, selection, logic and rounding give XLA's results, bit by bit."""

import functools

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax import lax

from cokernel import _jax
from tests.compiler.harness import expect_same, run
from tests.compiler.ops.forms import UNSIGNED, expect_same_bits, name_of

# One of each width and kind: test_every_dtype.py has all others, in one form.
SIGNED = (jnp.int8, jnp.int32)
INTEGERS = (*SIGNED, jnp.uint16, jnp.uint64)
FLOATS = (jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64)
NUMBERS = INTEGERS + FLOATS
BITS = (jnp.bool_, *INTEGERS)
ANY = (jnp.bool_, *NUMBERS)
EIGHT_BIT = (jnp.float8_e4m3fn,)


@pytest.fixture(autouse=True, scope="module")
def wide_types():
    with jax.enable_x64(True):
        yield


def rounded(method):
    return functools.partial(lax.round, rounding_method=method)


def power(exponent):
    return functools.partial(lax.integer_pow, y=exponent)


# For each name: the function, how many operands it takes, and their dtypes.
OPERATIONS = {
    "add": (lax.add, 2, NUMBERS + EIGHT_BIT),
    "sub": (lax.sub, 2, NUMBERS + EIGHT_BIT),
    "mul": (lax.mul, 2, NUMBERS + EIGHT_BIT),
    "div": (lax.div, 2, NUMBERS + EIGHT_BIT),
    "rem": (lax.rem, 2, NUMBERS),
    "mulhi": (lax.mulhi_p.bind, 2, INTEGERS),
    "neg": (lax.neg, 1, NUMBERS + EIGHT_BIT),
    "abs": (lax.abs, 1, SIGNED + FLOATS + EIGHT_BIT),
    "sign": (lax.sign, 1, NUMBERS),
    "max": (lax.max, 2, ANY + EIGHT_BIT),
    "min": (lax.min, 2, ANY + EIGHT_BIT),
    "clamp": (lax.clamp, 3, NUMBERS),
    "square": (lax.square, 1, NUMBERS),
    "one_minus_square": (lax.one_minus_square_p.bind, 1, NUMBERS),
    "integer_pow 0": (power(0), 1, NUMBERS),
    "integer_pow 3": (power(3), 1, NUMBERS),
    "integer_pow 6": (power(6), 1, NUMBERS),
    "integer_pow -2": (power(-2), 1, FLOATS),
    "eq": (lax.eq, 2, ANY + EIGHT_BIT),
    "ne": (lax.ne, 2, ANY + EIGHT_BIT),
    "lt": (lax.lt, 2, ANY + EIGHT_BIT),
    "le": (lax.le, 2, ANY),
    "gt": (lax.gt, 2, ANY),
    "ge": (lax.ge, 2, ANY),
    "eq_to": (lax.eq_to_p.bind, 2, NUMBERS),
    "lt_to": (lax.lt_to_p.bind, 2, NUMBERS + EIGHT_BIT),
    "le_to": (lax.le_to_p.bind, 2, NUMBERS),
    "and": (lax.bitwise_and, 2, BITS),
    "or": (lax.bitwise_or, 2, BITS),
    "xor": (lax.bitwise_xor, 2, BITS),
    "not": (lax.bitwise_not, 1, BITS),
    "shift_left": (lax.shift_left, 2, INTEGERS),
    "shift_right_arithmetic": (lax.shift_right_arithmetic, 2, INTEGERS),
    "shift_right_logical": (lax.shift_right_logical, 2, INTEGERS),
    "population_count": (lax.population_count, 1, INTEGERS),
    "clz": (lax.clz, 1, INTEGERS),
    "floor": (lax.floor, 1, FLOATS),
    "ceil": (lax.ceil, 1, FLOATS),
    "round to even": (rounded(lax.RoundingMethod.TO_NEAREST_EVEN), 1, FLOATS),
    "round away from zero": (rounded(lax.RoundingMethod.AWAY_FROM_ZERO), 1, FLOATS),
    "is_finite": (lax.is_finite, 1, FLOATS + EIGHT_BIT),
    "nextafter": (lax.nextafter, 2, FLOATS),
    "sqrt": (lax.sqrt, 1, FLOATS),
}
ROWS = [
    pytest.param(function, count, dtype, id=f"{name}-{name_of(dtype)}")
    for name, (function, count, dtypes) in OPERATIONS.items()
    for dtype in dtypes
]


@pytest.mark.parametrize(("function", "count", "dtype"), ROWS)
def test_an_operation_gives_the_bits_of_xla_in_every_form(function, count, dtype):
    expect_same_bits(function, dtype, count)


@pytest.mark.parametrize("dtype", ANY, ids=name_of)
def test_select_takes_the_case_its_predicate_names(dtype):
    def by_comparison(left, right):
        return lax.select_n(lax.ne(left, right), right, left)

    def by_number(left, right):
        which = lax.convert_element_type(lax.ne(left, right), jnp.int32)
        return lax.select_n(which * 5 - 2, left, right, left, right)

    expect_same_bits(by_comparison, dtype, 2)
    expect_same_bits(by_number, dtype, 2)


@pytest.mark.parametrize("which", [-7, 0, 1, 2, 3, 100])
def test_select_clamps_a_scalar_number_of_a_case(which):
    cases = [np.full((3, 70), number, np.float32) for number in range(3)]
    expect_same(lax.select_n, np.int32(which), *cases)


@pytest.mark.parametrize("shape", [(4,), (3, 70)])
@pytest.mark.parametrize("which", [False, True])
def test_select_takes_a_scalar_predicate(which, shape):
    cases = [np.full(shape, number, np.int32) for number in range(2)]
    expect_same(lax.select_n, np.bool_(which), *cases)


@pytest.mark.parametrize("shape", [(5,), (3, 70)])
def test_clamp_takes_scalar_limits(shape):
    values = np.linspace(-9, 9, int(np.prod(shape)), dtype=np.float32).reshape(shape)
    expect_same(lax.clamp, np.float32(-2), values, np.float32(3))


@pytest.mark.parametrize("shape", [(), (5,), (3, 70)])
def test_a_product_converts_its_operands_to_out_dtype_first(shape):
    values = np.full(shape, 100, np.int8)
    [result] = run(lambda x, y: lax.mul(x, y, out_dtype=jnp.int32), values, values)
    np.testing.assert_array_equal(result, np.full(shape, 10_000, np.int32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64, jnp.int32, jnp.bfloat16], ids=name_of)
def test_a_polynomial_equals_horners_rule(dtype):
    expect_same_bits(lambda x, low, high: lax.polynomial(x, [low, high, low]), dtype, 3)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("function", [lax.add, lax.mul, lax.sub], ids=lambda f: f.__name__)
def test_denormals_count_as_they_do_in_xla(function, dtype):
    least = np.finfo(dtype).smallest_subnormal
    values = np.array([least, -least, least * 1000, 1, 0.5], dtype=dtype)
    left, right = (item.ravel() for item in np.meshgrid(values, values))
    expect_same(function, left, right)


@pytest.mark.parametrize("dtype", [jnp.int4, jnp.uint4], ids=name_of)
@pytest.mark.parametrize(
    "function",
    [
        lax.add, lax.sub, lax.mul, lax.div, lax.rem, lax.max, lax.min, lax.bitwise_and,
        lax.bitwise_xor, lax.shift_left, lax.shift_right_arithmetic, lax.lt, lax.eq,
    ],
    ids=lambda function: function.__name__,
)  # fmt: skip
def test_arithmetic_of_four_bits_wraps(function, dtype):
    first = 0 if dtype == jnp.uint4 else -8
    numbers = np.arange(first, first + 16, dtype=np.int32)
    left, right = (item.ravel() for item in np.meshgrid(numbers, numbers))

    def narrow(left, right):
        result = function(
            lax.convert_element_type(left, dtype), lax.convert_element_type(right, dtype)
        )
        return lax.convert_element_type(result, jnp.int32)

    expect_same(narrow, left, right)
    expect_same(narrow, left[40:56], right[40:56])


def test_identities_hand_on_their_operand():
    values = np.arange(300, dtype=np.float32)

    def identities(x):
        x = lax.optimization_barrier(lax.copy_p.bind(x))
        return _jax.tie_p.bind(x + 1, _jax.add_jaxvals_p.bind(x, x))

    [result] = run(identities, values)
    np.testing.assert_array_equal(result, 2 * values)


# A Packed value, one that is a loop over two dimensions, and one over bytes.
PAIRS = {"float32": (np.float32, (4, 33)), "int32": (np.int32, (70,)), "uint8": (np.uint8, (20,))}


@pytest.mark.parametrize("name", PAIRS)
@hypothesis.given(data=strategies.data())
@hypothesis.settings(max_examples=20)
def test_chains_of_operations_give_the_bits_of_xla(name, data):
    dtype, shape = PAIRS[name]
    # Whole numbers, because XLA may make one rounding of a product and a sum.
    elements = strategies.integers(-(2**20), 2**20).map(float) if dtype == np.float32 else None
    arrays = hypothesis_numpy.arrays(dtype, shape, elements=elements)
    left, right = data.draw(arrays), data.draw(arrays)

    def chain(x, y):
        smaller = jnp.where(x < y, x, y)
        clipped = jnp.clip(smaller - y, 1, 100)
        return clipped, (jnp.maximum(x, y) + jnp.sign(x)) * 3, jnp.abs(x) % clipped, -x

    expect_same(chain, left, right)


@hypothesis.given(
    values=hypothesis_numpy.arrays(
        np.int64, (3, 40), elements=strategies.integers(-(2**63), 2**63 - 1)
    ),
    divisors=hypothesis_numpy.arrays(np.int64, (3, 40), elements=strategies.integers(-4, 4)),
)
@hypothesis.settings(max_examples=20)
def test_quotient_and_remainder_make_up_the_dividend(values, divisors):
    quotient, rest = run(lambda x, y: (lax.div(x, y), lax.rem(x, y)), values, divisors)
    with np.errstate(over="ignore"):
        whole = quotient * divisors + rest
    np.testing.assert_array_equal(whole, values)


@pytest.mark.parametrize("dtype", UNSIGNED, ids=name_of)
def test_counts_of_bits_add_up(dtype):
    def both(x):
        return lax.population_count(x) + lax.population_count(~x)

    values = np.arange(200).astype(dtype)
    [result] = run(both, values)
    assert set(result.tolist()) == {8 * np.dtype(dtype).itemsize}
