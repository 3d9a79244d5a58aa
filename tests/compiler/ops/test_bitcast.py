"""bitcast_convert_type gives XLA's bits, between all widths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cokernel.compiler import dtypes
from tests.compiler.harness import expect_same
from tests.compiler.ops.forms import expect_same_bits, name_of


@pytest.fixture(autouse=True, scope="module")
def wide_types():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (jnp.float32, jnp.int32), (jnp.uint32, jnp.float32), (jnp.float64, jnp.uint64),
        (jnp.bfloat16, jnp.int16), (jnp.float16, jnp.bfloat16), (jnp.int8, jnp.float8_e5m2),
        (jnp.int16, jnp.uint16), (jnp.float32, jnp.float32),
    ],
    ids=name_of,
)  # fmt: skip
def test_bits_are_kept_between_dtypes_of_one_width(source, target):
    expect_same_bits(lambda x: lax.bitcast_convert_type(x, target), source, 1)


@pytest.mark.parametrize("shape", [(), (6,), (3, 130), (0, 4)])
@pytest.mark.parametrize(
    ("source", "target"),
    [(np.uint32, jnp.uint8), (np.float32, jnp.bfloat16), (np.float64, jnp.int16)],
)
def test_bits_are_split_into_parts_and_joined_again(source, target, shape):
    values = np.random.default_rng(1).standard_normal(shape).astype(source)
    expect_same(lambda x: lax.bitcast_convert_type(x, target), values)
    parts = jax.jit(lambda x: lax.bitcast_convert_type(x, target))(values)
    expect_same(lambda x: lax.bitcast_convert_type(x, source), parts)


# Pairs of a wider dtype and one narrower than a byte.
FEW_BITS = [
    (wide, narrow)
    for wide in (jnp.int4, jnp.uint4, jnp.int8, jnp.uint16, jnp.float32, jnp.float8_e5m2, np.int64)
    for narrow in (jnp.int2, jnp.uint2, jnp.int4, jnp.uint4, jnp.float4_e2m1fn)
    if dtypes.bit_width(wide) > dtypes.bit_width(narrow)
]


@pytest.mark.parametrize("shape", [(), (6,), (3, 130), (0, 4)])
@pytest.mark.parametrize(("wide", "narrow"), FEW_BITS, ids=name_of)
def test_bits_are_split_into_parts_of_less_than_a_byte_and_joined_again(wide, narrow, shape):
    generator = np.random.default_rng(3)
    bits = generator.integers(0, 256, (*shape, jnp.dtype(wide).itemsize), np.uint8)
    values = bits.view(f"uint{8 * jnp.dtype(wide).itemsize}")[..., 0]
    if dtypes.bit_width(wide) == 4:
        values = (values & 15).astype(wide)
    else:
        values = values.view(wide)
    expect_same(lambda x: lax.bitcast_convert_type(x, narrow), values)
    parts = jax.jit(lambda x: lax.bitcast_convert_type(x, narrow))(values)
    expect_same(lambda x: lax.bitcast_convert_type(x, wide), parts)
