"""Conversions between dtypes and reduced precision give XLA's results, bit by bit."""

import hypothesis
import hypothesis.extra.numpy as hypothesis_numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax import lax

from tests.compiler.harness import expect_same, run
from tests.compiler.ops.forms import (
    FLOAT8,
    FLOATS,
    INTEGERS,
    NARROW_INTEGERS,
    as_bits,
    expect_same_bits,
    name_of,
)

TYPES = (jnp.bool_, *INTEGERS, *FLOATS, *FLOAT8)


@pytest.fixture(autouse=True, scope="module")
def wide_types():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    # One of each width and kind: test_every_dtype.py has all others, in one form.
    "source",
    [jnp.bool_, jnp.int8, jnp.uint16, jnp.int32, jnp.uint64, *FLOATS, jnp.float8_e4m3fn],
    ids=name_of,
)
def test_conversions_give_the_bits_of_xla(source):
    def to_all(x):
        return [lax.convert_element_type(x, target) for target in TYPES]

    expect_same_bits(to_all, source, 1)


@pytest.mark.parametrize("target", [*FLOAT8, jnp.float32], ids=name_of)
def test_every_float16_converts_as_in_xla(target):
    values = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    convert = lambda x: lax.convert_element_type(x, target)  # noqa: E731
    [ours] = run(convert, values)
    np.testing.assert_array_equal(as_bits(ours), as_bits(jax.jit(convert)(values)))


@pytest.mark.parametrize("source", [*FLOAT8, jnp.bfloat16], ids=name_of)
def test_every_narrow_float_widens_to_its_value(source):
    width = 8 * np.dtype(source).itemsize
    values = np.arange(1 << width, dtype=f"u{width // 8}").view(source)
    [ours] = run(lambda x: lax.convert_element_type(x, jnp.float32), values)
    expected = values.astype(np.float32)
    # A bfloat16 may be a denormal of float32, whose treatment is a setting of the processor.
    keep = ~((np.abs(expected) < np.finfo(np.float32).tiny) & (expected != 0))
    np.testing.assert_array_equal(as_bits(ours[keep]), as_bits(expected[keep]))


@hypothesis.given(
    bits=hypothesis_numpy.arrays(np.uint32, (300,), elements=strategies.integers(0, 2**32 - 1))
)
@hypothesis.settings(max_examples=20)
def test_any_float32_converts_as_in_xla(bits):
    values = bits.view(np.float32)

    def convert(x):
        return [
            lax.convert_element_type(x, target)
            for target in (jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8, jnp.float8_e4m3fn)
        ]

    for ours, theirs in zip(run(convert, values), jax.jit(convert)(values), strict=True):
        np.testing.assert_array_equal(as_bits(ours), as_bits(theirs))


@pytest.mark.parametrize("source", [jnp.int32, jnp.uint8, *FLOATS], ids=name_of)
def test_conversions_to_few_bits_wrap_integers_and_saturate_floats(source):
    def there_and_back(x):
        narrow = [lax.convert_element_type(x, target) for target in NARROW_INTEGERS]
        return [lax.convert_element_type(item, jnp.int32) for item in narrow]

    expect_same_bits(there_and_back, source, 1)


@pytest.mark.parametrize("source", NARROW_INTEGERS, ids=name_of)
def test_conversions_from_few_bits_keep_the_value(source):
    def by_way_of(x):
        narrow = lax.convert_element_type(x, source)
        targets = (jnp.int8, jnp.float32, jnp.bfloat16, jnp.bool_)
        return [lax.convert_element_type(narrow, target) for target in targets]

    expect_same(by_way_of, np.arange(-20, 20, dtype=np.int32))
    expect_same(by_way_of, np.arange(-60, 60, dtype=np.int32))


@pytest.mark.parametrize("dtype", FLOATS, ids=name_of)
def test_reduced_precision_gives_the_bits_of_xla(dtype):
    def reduce(x):
        precisions = [(8, 7), (5, 10), (4, 3), (3, 1), (11, 20)]
        return [lax.reduce_precision(x, exponent, mantissa) for exponent, mantissa in precisions]

    expect_same_bits(reduce, dtype, 1)
    generator = np.random.default_rng(2)
    size = np.exp2(generator.uniform(-12, 12, 400))
    expect_same(reduce, (generator.standard_normal(400) * size).astype(dtype))
