"""Indexing of Refs: every kind of index reads, writes and adds what numpy's indexing does, and
never leaves the Ref.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

import cokernel
from tests.compiler.harness import MESH

DTYPES = [jnp.float32, jnp.int8, jnp.bool_, jnp.bfloat16, jnp.int32]


@st.composite
def indexed_shapes(draw):
    """A shape and one index per dimension, as ("int", i), ("slice", start, size, step) or
    ("dynamic", start, size).
    """
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 7, 16, 40]), min_size=1, max_size=3))
    index = []
    for extent in shape:
        kind = draw(st.sampled_from(["int", "dynamic int", "slice", "dynamic"]))
        start = draw(st.integers(0, extent - 1))
        step = draw(st.integers(1, 3)) if kind == "slice" else 1
        size = draw(st.integers(1, (extent - 1 - start) // step + 1))
        index.append((kind, start, size, step))
    return tuple(shape), tuple(index)


def numpy_index(index):
    return tuple(
        start if "int" in kind else slice(start, start + (size - 1) * step + 1, step)
        for kind, start, size, step in index
    )


def kernel_index(index, starts):
    """The same index in a kernel, where dynamic starts are read from an SMEM-like Ref."""
    result = []
    for dimension, (kind, start, size, step) in enumerate(index):
        if kind == "int":
            result.append(start)
        elif kind == "dynamic int":
            result.append(starts[dimension])
        elif kind == "slice":
            result.append(pl.ds(start, size, step))
        else:
            result.append(pl.ds(starts[dimension], size))
    return tuple(result)


def example(shape, dtype):
    values = np.arange(math.prod(shape)).reshape(shape)
    return jnp.asarray(values % 2 == 0 if dtype == jnp.bool_ else values % 100).astype(dtype)


def launch(body, out, *arrays, **params):
    kernel = cokernel.mpmd_map(
        [(MESH, body)],
        jax.ShapeDtypeStruct(out.shape, out.dtype),
        compiler_params=cokernel.CompilerParams(**params),
    )
    return np.asarray(kernel(*arrays))


@settings(max_examples=60)
@given(case=indexed_shapes(), dtype=st.sampled_from(DTYPES))
def test_a_read_selects_what_numpy_selects(case, dtype):
    shape, index = case
    x = example(shape, dtype)
    starts = jnp.asarray([start for _, start, _, _ in index], jnp.int32)
    expected = np.asarray(x)[numpy_index(index)]

    def body(x_ref, starts_ref, o_ref):
        o_ref[...] = x_ref[kernel_index(index, starts_ref)]

    np.testing.assert_array_equal(launch(body, expected, x, starts), expected)


@settings(max_examples=60)
@given(case=indexed_shapes(), dtype=st.sampled_from(DTYPES))
def test_a_write_changes_what_numpy_changes(case, dtype):
    shape, index = case
    x = example(shape, dtype)
    starts = jnp.asarray([start for _, start, _, _ in index], jnp.int32)
    expected = np.asarray(x).copy()
    value = example(expected[numpy_index(index)].shape, dtype)[...]
    expected[numpy_index(index)] = np.asarray(value)

    def body(x_ref, v_ref, starts_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[kernel_index(index, starts_ref)] = v_ref[...]

    np.testing.assert_array_equal(launch(body, expected, x, value, starts), expected)


@settings(max_examples=40)
@given(case=indexed_shapes(), dtype=st.sampled_from([jnp.float32, jnp.int32, jnp.bfloat16]))
def test_addupdate_adds_where_numpy_adds(case, dtype):
    shape, index = case
    x = example(shape, dtype)
    starts = jnp.asarray([start for _, start, _, _ in index], jnp.int32)
    expected = np.asarray(x).copy()
    value = example(expected[numpy_index(index)].shape, dtype)[...]
    expected[numpy_index(index)] += np.asarray(value)

    def body(x_ref, v_ref, starts_ref, o_ref):
        o_ref[...] = x_ref[...]
        jax.ref.addupdate(o_ref, kernel_index(index, starts_ref), v_ref[...])

    np.testing.assert_array_equal(launch(body, expected, x, value, starts), expected)


@pytest.mark.parametrize("count", [1, 5, 16, 100])
@pytest.mark.parametrize("width", [1, 8, 100])
def test_an_array_of_indices_gathers_rows(count, width):
    x = example((20, width), jnp.float32)
    indices = jnp.asarray(np.random.default_rng(0).integers(0, 20, count), jnp.int32)
    expected = np.asarray(x)[np.asarray(indices)]

    def body(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[i_ref[...]]

    np.testing.assert_array_equal(launch(body, expected, x, indices), expected)


def test_arrays_of_indices_in_several_dimensions_broadcast_as_in_numpy():
    x = example((6, 5, 7), jnp.int32)
    rows, columns = jnp.asarray([[0], [3]], jnp.int32), jnp.asarray([[1, 2, 6]], jnp.int32)

    def together(x_ref, r_ref, c_ref, o_ref):
        o_ref[...] = x_ref[:, r_ref[...], c_ref[...]]

    def apart(x_ref, r_ref, c_ref, o_ref):
        o_ref[...] = x_ref[r_ref[...], :, c_ref[...]]

    numbers = np.asarray(x), np.asarray(rows), np.asarray(columns)
    expected = numbers[0][:, numbers[1], numbers[2]]
    np.testing.assert_array_equal(launch(together, expected, x, rows, columns), expected)
    expected = numbers[0][numbers[1], :, numbers[2]]
    np.testing.assert_array_equal(launch(apart, expected, x, rows, columns), expected)


def test_equal_indices_add_up_and_the_last_write_wins():
    indices = jnp.asarray([3, 1, 3, 3, 0], jnp.int32)
    values = jnp.asarray([1, 2, 3, 4, 5], jnp.int32)

    def add(i_ref, v_ref, o_ref):
        o_ref[...] = jnp.zeros((4,), jnp.int32)
        jax.ref.addupdate(o_ref, i_ref[...], v_ref[...])

    def write(i_ref, v_ref, o_ref):
        o_ref[...] = jnp.zeros((4,), jnp.int32)
        o_ref[i_ref[...]] = v_ref[...]

    out = np.zeros(4, np.int32)
    np.testing.assert_array_equal(launch(add, out, indices, values), [5, 2, 0, 8])
    np.testing.assert_array_equal(launch(write, out, indices, values), [5, 2, 0, 4])


def test_transforms_compose():
    x = example((4, 6, 8), jnp.float32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref.at[1:3].transpose((2, 0, 1)).at[:, 1].at[pl.ds(2, 4)][...]

    expected = np.asarray(x)[1:3].transpose(2, 0, 1)[:, 1][2:6]
    np.testing.assert_array_equal(launch(body, expected, x), expected)


def test_a_reshaped_ref_is_the_same_memory():
    x = example((4, 6), jnp.float32)

    def body(x_ref, o_ref):
        o_ref.reshape(24)[...] = x_ref.reshape((8, 3)).at[...].reshape(24)[...] + 1

    np.testing.assert_array_equal(launch(body, x, x), np.asarray(x) + 1)


def test_a_bitcast_ref_shows_the_bits():
    x = example((4, 16), jnp.float32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref.bitcast(jnp.int32)[...]

    expected = np.asarray(x).view(np.int32)
    np.testing.assert_array_equal(launch(body, expected, x), expected)


def test_a_write_that_reads_its_own_ref_reads_first():
    x = example((20, 20), jnp.float32)

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[...] = o_ref[...].T + o_ref[...]

    np.testing.assert_array_equal(launch(body, x, x), np.asarray(x).T + np.asarray(x))


@pytest.mark.parametrize("size", [8, 300])
def test_a_write_to_an_output_that_overwrites_an_input_comes_after_the_reads_of_it(size):
    def body(x_ref, o_ref, sums_ref):
        x, shifted = x_ref[...], x_ref[...] + 1
        o_ref[...] = jnp.flip(x) * 2
        sums_ref[...] = x + shifted
        o_ref[1:size] = x_ref[0 : size - 1] + 1

    out_type = jax.ShapeDtypeStruct((size,), jnp.float32)
    kernel = cokernel.mpmd_map([(MESH, body)], [out_type, out_type], input_output_aliases={0: 0})
    x = np.arange(size, dtype=np.float32)
    out, sums = kernel(x)
    expected = x[::-1] * 2
    expected[1:] = expected[:-1] + 1
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(sums, 2 * x + 1)


def test_swap_returns_the_old_contents():
    x = example((100,), jnp.int32)

    def body(x_ref, o_ref):
        o_ref[0] = x_ref[...]
        o_ref[1] = jax.ref.swap(o_ref, 0, x_ref[...] * 2)

    expected = np.stack([np.asarray(x) * 2, np.asarray(x)])
    np.testing.assert_array_equal(launch(body, expected, x), expected)


BAD_INDICES = {
    "an integer too large": lambda ref, i: ref[i],
    "a negative integer": lambda ref, i: ref[i - 100],
    "a slice past the end": lambda ref, i: ref[pl.ds(i - 2, 4)][0],
    "an array of indices": lambda ref, i: ref[i + jnp.zeros((3,), jnp.int32)][0],
    "a large array of indices": lambda ref, i: ref[i + jnp.zeros((300,), jnp.int32)][0],
}


@pytest.mark.parametrize("kind", BAD_INDICES)
@pytest.mark.parametrize("write", [False, True])
def test_an_index_out_of_range_is_an_error_and_touches_nothing(kind, write):
    access = BAD_INDICES[kind]

    def body(i_ref, o_ref, table_ref):
        table_ref[...] = jnp.zeros((64,), jnp.float32)
        if write:
            target = _Writer(table_ref)
            access(target, i_ref[0])
        else:
            o_ref[0] = access(table_ref, i_ref[0])

    kernel = cokernel.mpmd_map(
        [(MESH, body)],
        jax.ShapeDtypeStruct((1,), jnp.float32),
        scratch_types=[cokernel.private((64,), jnp.float32)],
    )
    with pytest.raises(Exception, match=r"(?s)OutOfBounds.*table_ref"):
        jax.block_until_ready(kernel(jnp.asarray([64], jnp.int32)))
    # The process and the kernel stay usable.
    good = {"a negative integer": 100, "a slice past the end": 2}.get(kind, 0)
    jax.block_until_ready(kernel(jnp.asarray([good], jnp.int32)))


class _Writer:
    """Turns the reads of BAD_INDICES into writes."""

    def __init__(self, ref):
        self.ref = ref

    def __getitem__(self, index):
        self.ref[index] = jnp.ones_like(self.ref[index])
        return jnp.ones((1,))


def test_without_bounds_checks_a_good_index_gives_the_same():
    x = example((20, 8), jnp.float32)

    def body(x_ref, i_ref, o_ref):
        o_ref[...] = x_ref[i_ref[0]]

    got = launch(body, np.asarray(x)[7], x, jnp.asarray([7], jnp.int32), bounds_checks=False)
    np.testing.assert_array_equal(got, np.asarray(x)[7])


def test_memory_that_the_cores_of_another_mesh_share_is_refused():
    lanes = cokernel.CoreMesh(lane=2)

    def reaches(out_ref, buffer_ref):
        out_ref[0] = buffer_ref[0]

    def owns(out_ref, buffer_ref):
        buffer_ref[0] = 1.0

    kernel = cokernel.mpmd_map(
        [(MESH, reaches), (lanes, owns)],
        jax.ShapeDtypeStruct((1,), jnp.float32),
        scratch_types=[cokernel.shared((4,), jnp.float32) @ lanes],
    )
    with pytest.raises(
        ValueError, match=r"program 'reaches' at .*'buffer_ref' .* CoreMesh\(lane=2\) share"
    ):
        kernel()
