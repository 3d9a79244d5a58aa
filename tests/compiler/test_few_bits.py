"""Refs under dtypes of less than a byte, and such Refs under wider ones, show the bits that JAX's
own interpreter shows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel.compiler import dtypes
from cokernel.compiler.few_bits import bitcast_rows
from tests.compiler.ops.forms import as_bits, name_of

MESH = cokernel.CoreMesh(core=1)
PAIRS = [
    (jnp.int8, jnp.int4),
    (jnp.int4, jnp.int8),
    (jnp.uint32, jnp.uint4),
    (jnp.float32, jnp.int2),
    (jnp.int2, jnp.int16),
    (jnp.uint4, jnp.int2),
    (jnp.int2, jnp.int4),
]
pairs = pytest.mark.parametrize(("source", "target"), PAIRS, ids=name_of)


def bits_of(shape, dtype, seed=0):
    """Random bits under a dtype."""
    dtype = jnp.dtype(dtype)
    generator = np.random.default_rng(seed)
    if dtype in (jnp.int4, jnp.uint4, jnp.int2):
        return jnp.asarray(generator.integers(0, 16, shape)).astype(dtype)
    return jnp.asarray(generator.integers(-(2**7), 2**7, (*shape, dtype.itemsize), np.int8)).view(
        dtype
    )[..., 0]


def expect_as_interpreted(body, out, *arguments):
    """Runs a body on this backend and in JAX's interpreter, and compares the bits of the result."""
    ours = cokernel.kernel(body, out, mesh=MESH)(*arguments)
    theirs = pl.pallas_call(body, out_shape=out, interpret=True)(*arguments)
    width = f"uint{8 * jnp.dtype(out.dtype).itemsize}"
    np.testing.assert_array_equal(np.asarray(ours).view(width), np.asarray(theirs).view(width))
    return ours


def under(shape, source, target):
    """The shape of an array under another dtype, whose rows are divided or joined."""
    rows = shape[-2] * dtypes.bit_width(source) // dtypes.bit_width(target)
    return (*shape[:-2], rows, shape[-1])


@pairs
@pytest.mark.parametrize("shape", [(16, 5), (2, 16, 128)])
def test_a_ref_is_read_under_another_dtype(source, target, shape):
    def body(x_ref, out_ref):
        out_ref[...] = x_ref.bitcast(target)[...]

    out = jax.ShapeDtypeStruct(under(shape, source, target), target)
    expect_as_interpreted(body, out, bits_of(shape, source))


@pairs
def test_a_ref_is_written_under_another_dtype(source, target):
    shape = under((16, 5), source, target)

    def body(x_ref, out_ref):
        out_ref.bitcast(target)[...] = x_ref[...]

    expect_as_interpreted(body, jax.ShapeDtypeStruct((16, 5), source), bits_of(shape, target))


@pairs
def test_what_is_not_written_keeps_its_bits(source, target):
    rows, _ = shape = under((16, 5), source, target)

    def body(x_ref, new_ref, out_ref):
        out_ref[...] = x_ref[...]
        out_ref.bitcast(target).at[pl.ds(rows // 2 - 1, 1), 1:3][...] = new_ref[:1, 1:3]

    x, new = bits_of((16, 5), source), bits_of(shape, target, 1)
    ours = expect_as_interpreted(body, jax.ShapeDtypeStruct((16, 5), source), x, new)
    assert np.asarray(ours).tobytes() != np.asarray(x).tobytes()


@pairs
def test_other_transforms_come_before_and_after(source, target):
    def body(x_ref, start_ref, out_ref):
        part = x_ref.at[start_ref[0], pl.ds(8, 16)].bitcast(target)
        out_ref[...] = part[pl.ds(start_ref[1], 1), 2]

    out = jax.ShapeDtypeStruct((1,), target)
    x, starts = bits_of((3, 32, 5), source), jnp.array([2, 1])
    ours = cokernel.kernel(body, out, mesh=MESH)(x, starts)
    part = bitcast_rows(x[2, 8:24], target)[1:2, 2]
    np.testing.assert_array_equal(as_bits(np.asarray(ours)), as_bits(np.asarray(part)))


def test_two_such_dtypes_may_follow_each_other():
    def body(x_ref, out_ref):
        x_ref = x_ref.bitcast(jnp.int4).at[2:6]
        out_ref[...] = x_ref.bitcast(jnp.int2)[1:3]

    out = jax.ShapeDtypeStruct((2, 5), jnp.int2)
    expect_as_interpreted(body, out, bits_of((4, 5), jnp.int8))


def test_a_swap_gives_what_was_there():
    def body(x_ref, new_ref, old_ref, out_ref):
        out_ref[...] = x_ref[...]
        part = out_ref.bitcast(jnp.int4).at[2:4]
        old_ref[...] = jax.ref.swap(part, ..., new_ref[...])

    out = [jax.ShapeDtypeStruct((2, 5), jnp.int4), jax.ShapeDtypeStruct((4, 5), jnp.int8)]
    x, new = bits_of((4, 5), jnp.int8), bits_of((2, 5), jnp.int4, 1)
    old, result = cokernel.kernel(body, out, mesh=MESH)(x, new)
    before = bitcast_rows(x, jnp.int4)
    np.testing.assert_array_equal(np.asarray(old), np.asarray(before[2:4]))
    expected = bitcast_rows(before.at[2:4].set(new), jnp.int8)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def test_sums_go_to_a_part_under_another_dtype():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]
        jax.ref.addupdate(out_ref.bitcast(jnp.int4), (slice(1, 3),), jnp.ones((2, 5), jnp.int4))

    x = jnp.zeros((4, 5), jnp.int8)
    result = cokernel.kernel(body, jax.ShapeDtypeStruct((4, 5), jnp.int8), mesh=MESH)(x)
    np.testing.assert_array_equal(np.asarray(result)[:, 0], [16, 1, 0, 0])


def test_a_loop_reads_rows_of_weights_of_four_bits():
    def body(w_ref, x_ref, out_ref):
        def step(row, total):
            return total + w_ref.bitcast(jnp.int4)[row].astype(jnp.int32) * x_ref[row]

        out_ref[...] = jax.lax.fori_loop(0, 16, step, jnp.zeros((128,), jnp.int32))

    w = bits_of((8, 128), jnp.int8)
    x = jnp.arange(16, dtype=jnp.int32)
    result = cokernel.kernel(body, jax.ShapeDtypeStruct((128,), jnp.int32), mesh=MESH)(w, x)
    expected = x @ bitcast_rows(w, jnp.int4).astype(jnp.int32)
    np.testing.assert_array_equal(np.asarray(result), np.asarray(expected))


def test_an_index_out_of_range_is_told_by_the_name_of_the_ref():
    def body(x_ref, start_ref, out_ref):
        out_ref[...] = x_ref.bitcast(jnp.int4)[pl.ds(start_ref[0], 4)]

    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((4, 5), jnp.int4), mesh=MESH)
    x = bits_of((8, 5), jnp.int8)
    kernel(x, jnp.array([12]))
    with pytest.raises(Exception, match=r"'?x_ref'?\[13:17\]|x_ref.*13"):
        jax.block_until_ready(kernel(x, jnp.array([13])))


@pytest.mark.parametrize("written", [2, 4])
def test_undefined_bits_are_followed_by_the_row(written):
    def body(x_ref, out_ref, scratch):
        scratch[:written] = x_ref[:written]
        out_ref[...] = scratch.bitcast(jnp.int4)[:5]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((5, 5), jnp.int4),
        mesh=MESH,
        scratch_types=[pltpu.VMEM((4, 5), jnp.int8)],
        interpret=cokernel.Checked(),
    )
    x = bits_of((4, 5), jnp.int8)
    if written == 4:
        result = np.asarray(kernel(x))
        np.testing.assert_array_equal(result, np.asarray(bitcast_rows(x, jnp.int4)[:5]))
        return
    with pytest.raises(Exception, match=r"UninitialisedRead: .* reads scratch\[2, 0:5\]"):
        jax.block_until_ready(kernel(x))


@pytest.mark.parametrize("rows_at_once", [1, 2, 4, 16])
def test_rows_that_are_written_one_after_the_other_are_defined_afterwards(rows_at_once):
    def body(x_ref, out_ref, scratch):
        view = scratch.bitcast(jnp.int4)
        for row in range(0, 16, rows_at_once):
            view[row : row + rows_at_once] = x_ref[row : row + rows_at_once]
            out_ref[row : row + rows_at_once] = view[row : row + rows_at_once]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((16, 5), jnp.int4),
        mesh=MESH,
        scratch_types=[pltpu.VMEM((2, 5), jnp.int32)],
        interpret=cokernel.Checked(),
    )
    x = bits_of((16, 5), jnp.int4)
    np.testing.assert_array_equal(np.asarray(kernel(x)), np.asarray(x))


def test_a_narrow_element_stays_defined_when_its_neighbour_is_written_as_part_of_a_wider_one():
    def body(x_ref, out_ref, scratch):
        scratch[0] = x_ref[0]
        scratch.bitcast(jnp.int8)[1] = jnp.ones((5,), jnp.int8)
        out_ref[0] = scratch[0]
        out_ref[1] = scratch[2]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 5), jnp.int4),
        mesh=MESH,
        scratch_types=[pltpu.VMEM((4, 5), jnp.int4)],
        interpret=cokernel.Checked(),
    )
    x = bits_of((4, 5), jnp.int4)
    expected = [np.asarray(x[0]), np.ones(5, jnp.int4)]
    np.testing.assert_array_equal(np.asarray(kernel(x)), expected)


def test_words_of_which_no_part_is_written_stay_undefined():
    def body(x_ref, out_ref, scratch):
        view = scratch.bitcast(jnp.int4)
        for row in range(8):
            view[row] = x_ref[row]
        out_ref[...] = view[...]

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((16, 5), jnp.int4),
        mesh=MESH,
        scratch_types=[pltpu.VMEM((2, 5), jnp.int32)],
        interpret=cokernel.Checked(),
    )
    with pytest.raises(Exception, match=r"UninitialisedRead: .* reads scratch\[.*in an output"):
        jax.block_until_ready(kernel(bits_of((16, 5), jnp.int4)))


def explored(body, out, dtype=jnp.int4):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(out, dtype),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[pltpu.VMEM((2, 5), jnp.int32)],
    )
    return cokernel.explore(kernel, bits_of((16, 5), jnp.int4), schedules=1)


def test_words_that_are_written_back_as_they_were_are_read_where_the_program_reads_them():
    def body(x_ref, out_ref, scratch):
        view = scratch.bitcast(jnp.int4)
        for row in range(8):
            view[row] = x_ref[row]
        out_ref[...] = view[...]

    report = explored(body, (16, 5))
    [finding] = report.findings
    assert (finding.kind, finding.name, finding.indices) == (
        "UninitialisedRead",
        "scratch",
        "[1, 0:5]",
    )
    assert finding.parties[0].code == "out_ref[...] = view[...]", str(report)


def test_words_of_an_output_that_are_written_back_as_they_were_were_never_written():
    def body(x_ref, out_ref, scratch):
        view = out_ref.bitcast(jnp.int4)
        for row in range(8):
            view[row] = x_ref[row]

    [finding] = explored(body, (2, 5), jnp.int32).findings
    assert (finding.kind, finding.indices) == ("NeverWritten", "[1, 0:5]")
