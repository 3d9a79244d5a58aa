"""TensorCore primitives give what their JAX definitions give."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax
from tests.compiler import tolerance
from tests.compiler.harness import MESH, run
from tests.compiler.ops.every_dtype import NUMBERS, bits_of, operands_of, without
from tests.compiler.ops.forms import FLOAT8, NARROW_INTEGERS, name_of

TPU = _jax.tpu_primitives


@settings(max_examples=30)
@given(
    data=st.data(),
    shape=st.sampled_from([(5,), (3, 7), (8, 16), (3, 40, 30), (2, 3, 4)]),
    dynamic=st.booleans(),
)
def test_roll_moves_each_slice_by_its_own_distance(data, shape, dynamic):
    axis = data.draw(st.integers(0, len(shape) - 1))
    others = [number for number in range(len(shape)) if number != axis]
    stride_axis = data.draw(st.sampled_from([None, *others]))
    stride = None if stride_axis is None else data.draw(st.integers(0, 50))
    shift = data.draw(st.integers(-60 if dynamic else 0, 100))
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)

    def function(x, shift):
        by = shift if dynamic else int(shift0)
        return pltpu.roll(x, by, axis, stride=stride, stride_axis=stride_axis)

    shift0 = shift
    [got] = run(function, x, np.int32(shift))
    expected = x.copy()
    for position in range(1 if stride is None else shape[stride_axis]):
        at = [slice(None)] * len(shape)
        if stride is not None:
            at[stride_axis] = slice(position, position + 1)
        expected[tuple(at)] = np.roll(x[tuple(at)], shift + position * (stride or 0), axis)
    np.testing.assert_array_equal(got, expected)


CASTS = [
    ((8, 16), jnp.int32, jnp.int16),
    ((8, 16), jnp.int32, jnp.int8),
    ((8, 32), jnp.float32, jnp.bfloat16),
    ((64, 24), jnp.bfloat16, jnp.uint32),
    ((4, 8), jnp.int8, jnp.float32),
    ((8, 8), jnp.float32, jnp.int32),
    ((64, 128), jnp.float32, jnp.uint32),
    ((4, 12, 20), jnp.float32, jnp.uint8),
    ((8, 4), jnp.uint8, jnp.uint16),
]


# JAX has no bitcast of a bool, and those of a few bits are packed.
WHOLE_BYTES = without(
    NUMBERS, *NARROW_INTEGERS, jnp.float4_e2m1fn, jnp.int64, jnp.uint64, jnp.float64
)


@pytest.mark.parametrize("dim", [-2, -1])
@pytest.mark.parametrize(("shape", "source", "target"), CASTS)
def test_bitcast_scales_a_dimension(shape, source, target, dim):
    bits = np.random.default_rng(0).integers(0, 256, np.prod(shape) * jnp.dtype(source).itemsize)
    x = bits.astype(np.uint8).view(source).reshape(shape)
    [got] = run(lambda x: pltpu.bitcast(x, target, dim), x)
    moved = np.ascontiguousarray(np.moveaxis(x, dim, -1))
    expected = np.moveaxis(moved.view(target), -1, dim)
    assert got.dtype == expected.dtype
    unsigned = f"u{got.dtype.itemsize}"
    np.testing.assert_array_equal(got.view(unsigned), np.ascontiguousarray(expected).view(unsigned))
    tolerance.note(TPU.bitcast_p, source, 0.0)


@pytest.mark.parametrize("dtype", WHOLE_BYTES, ids=name_of)
def test_bitcast_of_every_dtype_to_words_of_every_width(dtype):
    x = operands_of(dtype, 0).a.reshape(-1)[:256].reshape(16, 16)
    words = [np.uint8, np.uint16, np.uint32]
    got = run(lambda x: [pltpu.bitcast(x, word, -2) for word in words], x)
    columns = np.ascontiguousarray(np.asarray(x).T)
    for ours, word in zip(got, words, strict=True):
        np.testing.assert_array_equal(ours, columns.view(word).T)
    tolerance.note(TPU.bitcast_p, dtype, 0.0)


@pytest.mark.parametrize("dtype", [*NARROW_INTEGERS, jnp.float4_e2m1fn], ids=name_of)
def test_bitcast_of_a_few_bits_splits_bytes_and_joins_them(dtype):
    width = 2 if dtype in (jnp.int2, jnp.uint2) else 4
    x = np.random.default_rng(0).integers(0, 256, (16, 16)).astype(np.uint8)
    [parts] = run(lambda x: pltpu.bitcast(x, dtype, -2), x)
    mask = (1 << width) - 1
    expected = np.stack([(x >> (width * k)) & mask for k in range(8 // width)], 1)
    np.testing.assert_array_equal(bits_of(parts) & mask, expected.reshape(-1, 16))
    for word in (np.uint8, np.uint32):
        [joined] = run(lambda x, word=word: pltpu.bitcast(x, word, -2), parts)
        np.testing.assert_array_equal(joined, np.ascontiguousarray(x.T).view(word).T)
    tolerance.note(TPU.bitcast_p, dtype, 0.0)


@pytest.mark.parametrize("shape", [(8,), (8, 16), (40, 50)])
@pytest.mark.parametrize(
    ("wide", "narrow"),
    [
        (jnp.float32, jnp.bfloat16),
        (jnp.int32, jnp.int16),
        (jnp.int32, jnp.int8),
        (jnp.uint32, jnp.uint8),
        (jnp.int16, jnp.int8),
        (jnp.int8, jnp.int4),
        (jnp.int32, jnp.uint4),
    ],
)
def test_packed_elements_come_out_again(shape, wide, narrow):
    width = {jnp.int4: 4, jnp.uint4: 4}.get(narrow, 8 * jnp.dtype(narrow).itemsize)
    count = 8 * jnp.dtype(wide).itemsize // width
    random = np.random.default_rng(0)
    xs = [(random.normal(size=shape) * 100).astype(wide) for _ in range(count)]

    def function(*xs):
        packed = pltpu.pack_elementwise(xs, packed_dtype=narrow)
        return packed, *(
            pltpu.unpack_elementwise(packed, index=i, packed_dtype=narrow, unpacked_dtype=wide)
            for i in range(count)
        )

    packed, *got = run(function, *xs)
    word = packed.dtype
    assert word == f"uint{8 * jnp.dtype(wide).itemsize}"
    expected = np.zeros(shape, word)
    for number, (x, ours) in enumerate(zip(xs, got, strict=True)):
        small = np.asarray(jnp.asarray(x).astype(narrow))
        np.testing.assert_array_equal(ours, small.astype(wide))
        bits = small.view("u2").astype(word) if narrow == jnp.bfloat16 else x.astype(word)
        expected |= (bits & word.type((1 << width) - 1)) << word.type(number * width)
    np.testing.assert_array_equal(packed, expected)
    tolerance.note(TPU.pack_elementwise_p, wide, 0.0)
    tolerance.note(TPU.unpack_elementwise_p, word, 0.0)


TARGETS = [jnp.bfloat16, jnp.float16, *FLOAT8]


@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=10)
@given(seed=st.integers(0, 1000), exponent=st.integers(-20, 7))
def test_stochastic_rounding_gives_one_of_the_two_neighbours(target, seed, exponent):
    random = np.random.default_rng(seed)
    largest = float(jnp.finfo(target).max)
    x = np.clip(random.normal(size=300) * 2.0**exponent, -largest, largest).astype(np.float32)
    bits = random.integers(0, 1 << 32, 300, dtype=np.uint32)
    [got] = run(lambda x, b: pltpu.stochastic_round(x, b, target_dtype=target), x, bits)
    assert got.dtype == target
    every = np.arange(1 << (8 * jnp.dtype(target).itemsize), dtype=np.uint32)
    with np.errstate(invalid="ignore"):
        values = every.astype(f"u{jnp.dtype(target).itemsize}").view(target).astype(np.float64)
    values = np.unique(values[np.isfinite(values)])
    below = values[np.searchsorted(values, x, "right") - 1]
    above = values[np.minimum(np.searchsorted(values, x, "left"), values.size - 1)]
    number = got.astype(np.float64)
    assert np.all((number == below) | (number == above))
    tolerance.note(TPU.stochastic_round_p, np.float32, 1.0)


def test_stochastic_rounding_rounds_up_as_often_as_the_rest_is_large():
    count = 1 << 14
    x = np.full(count, 1 + 0.25 * 2.0**-7, np.float32)
    bits = np.random.default_rng(0).integers(0, 1 << 32, count, dtype=np.uint32)
    [got] = run(lambda x, b: pltpu.stochastic_round(x, b, target_dtype=jnp.bfloat16), x, bits)
    share = np.mean(got.astype(np.float32) > 1)
    # Five standard deviations of a binomial distribution.
    assert abs(share - 0.25) < 5 * np.sqrt(0.25 * 0.75 / count)


@pytest.mark.parametrize("target", [jnp.bfloat16, jnp.float16, jnp.float8_e5m2])
def test_stochastic_rounding_keeps_what_is_exact_or_not_a_number(target):
    x = np.asarray([0.0, -0.0, 1, -2, 0.5, np.inf, -np.inf, np.nan], np.float32)
    bits = np.full(8, 0xFFFFFFFF, np.uint32)
    [got] = run(lambda x, b: pltpu.stochastic_round(x, b, target_dtype=target), x, bits)
    np.testing.assert_array_equal(got.astype(np.float32), x)
    np.testing.assert_array_equal(np.signbit(got[:2]), [False, True])


@pytest.mark.parametrize("shape", [(), (16,), (30, 40)])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("approx", [False, True])
def test_reciprocal_is_one_divided_by_x(shape, dtype, approx):
    x = np.random.default_rng(0).normal(size=shape).astype(dtype)
    [got] = run(lambda x: pltpu.reciprocal(x, approx=approx), x)
    np.testing.assert_array_equal(got, np.asarray(jax.jit(lambda x: 1 / x)(x)))


CONVOLUTIONS = [
    {"window_strides": (2, 1), "padding": ((1, 0), (2, 1))},
    {"padding": "SAME", "window_reversal": (True, False)},
    {"padding": ((0, 1), (2, 0)), "lhs_dilation": (2, 1), "rhs_dilation": (1, 2)},
    {"padding": "SAME", "feature_group_count": 2},
]


@pytest.mark.filterwarnings("ignore:.*conv_general_dilated")
@pytest.mark.parametrize("options", CONVOLUTIONS)
@pytest.mark.parametrize("accumulates", [False, True])
def test_conv_is_a_convolution_added_to_an_accumulator(options, accumulates):
    random = np.random.default_rng(0)
    groups = options.get("feature_group_count", 1)
    x = random.integers(-4, 5, (2, 9, 8, 4)).astype(np.float32)
    w = random.integers(-4, 5, (3, 2, 4 // groups, 6)).astype(np.float32)
    names = ("NHWC", "HWIO", "NHWC")

    def reference(x, w):
        rest = {k: v for k, v in options.items() if k != "window_reversal"}
        flips = options.get("window_reversal", (False, False))
        w = jnp.flip(w, [axis for axis, flip in enumerate(flips) if flip])
        rest.setdefault("window_strides", (1, 1))
        return lax.conv_general_dilated(x, w, dimension_numbers=names, **rest)

    expected = np.asarray(reference(x, w))
    if accumulates:
        start = random.integers(-9, 9, expected.shape).astype(np.float32)
        [got] = run(
            lambda x, w, a: pltpu.conv(x, w, a, dimension_numbers=names, **options), x, w, start
        )
        expected = expected + start
    else:
        [got] = run(lambda x, w: pltpu.conv(x, w, dimension_numbers=names, **options), x, w)
    np.testing.assert_array_equal(got, expected)
    tolerance.note(TPU.conv_p, np.float32, 0.0)


def test_a_ref_in_any_space_is_in_hbm():
    def body(x_ref, o_ref):
        for position, space in enumerate((pltpu.HBM, pltpu.VMEM)):
            answer = _jax.tpu_primitives.has_memory_space_p.bind(x_ref, memory_space=space)
            o_ref[position] = answer.astype(jnp.int32)

    kernel = cokernel.mpmd_map([(MESH, body)], jax.ShapeDtypeStruct((2,), jnp.int32))
    assert list(np.asarray(kernel(jnp.zeros(4)))) == [1, 0]


def test_scratch_in_vmem_is_not_in_hbm():
    def body(o_ref, scratch):
        for position, space in enumerate((pltpu.HBM, pltpu.VMEM)):
            answer = _jax.tpu_primitives.has_memory_space_p.bind(scratch, memory_space=space)
            o_ref[position] = answer.astype(jnp.int32)

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2,), jnp.int32),
        mesh=MESH,
        scratch_types=[pltpu.VMEM((8,), jnp.float32)],
    )
    assert list(np.asarray(kernel())) == [0, 1]


def test_touch_and_trace_value_change_nothing():
    def body(x_ref, o_ref):
        pltpu.touch(x_ref)
        pltpu.trace_value("sum", jnp.sum(x_ref[...]))
        o_ref[...] = x_ref[...] + 1

    x = np.arange(8, dtype=np.int32)
    kernel = cokernel.mpmd_map([(MESH, body)], jax.ShapeDtypeStruct((8,), jnp.int32))
    np.testing.assert_array_equal(kernel(x), x + 1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int8, jnp.int4])
def test_einshape_splits_transposes_and_merges_dimensions(dtype):
    def function(x):
        return (
            pltpu.einshape("ab->ba", x),
            pltpu.einshape("m(ab)->amb", x, a=2),
            pltpu.einshape("(ab)c->b(ac)", x, a=4),
        )

    x = jnp.arange(8 * 6).reshape(8, 6).astype(dtype)
    with warnings.catch_warnings():
        # What XLA compiles for a kernel is told by a warning.
        warnings.simplefilter("error")
        got = run(function, x)
    expected = (
        x.T,
        x.reshape(8, 2, 3).transpose(1, 0, 2),
        x.reshape(4, 2, 6).transpose(1, 0, 2).reshape(2, 24),
    )
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_array_equal(one.astype(np.float32), other.astype(np.float32))
