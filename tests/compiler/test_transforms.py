"""Chains of Ref transforms reach the bytes that they reach in a model made of numpy alone, where a
view is an array of byte addresses.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.compiler.harness import MESH

SHAPE = (4, 8, 12)
DTYPES = [np.int8, np.uint16, np.int16, np.int32, np.float32]


class Model:
    """The byte addresses of the elements of a view, with the bytes of one element along the last
    axis."""

    def __init__(self, addresses, dtype):
        self.addresses, self.dtype = addresses, np.dtype(dtype)

    @property
    def shape(self):
        return self.addresses.shape[:-1]

    def bitcast(self, dtype):
        dtype = np.dtype(dtype)
        dimension = max(len(self.shape) - 2, 0)
        # The parts of a wide element lie under each other in the dimension, lowest first.
        grid = np.moveaxis(self.addresses, dimension, -2)
        extent = grid.shape[-2] * grid.shape[-1] // dtype.itemsize
        grid = grid.reshape(*grid.shape[:-2], extent, dtype.itemsize)
        return Model(np.moveaxis(grid, -2, dimension), dtype)

    def read(self, memory):
        raw = np.ascontiguousarray(memory.reshape(-1).view(np.uint8)[self.addresses])
        return raw.view(self.dtype)[..., 0]

    def write(self, memory, value):
        flat = memory.reshape(-1).view(np.uint8)
        flat[self.addresses] = np.ascontiguousarray(value)[..., None].view(np.uint8)


def whole(shape, dtype):
    itemsize = np.dtype(dtype).itemsize
    size = int(np.prod(shape)) * itemsize
    return Model(np.arange(size).reshape(*shape, itemsize), dtype)


@st.composite
def steps(draw, with_arrays=True):
    """A chain of transforms, and the model of what is left after them."""
    model = whole(SHAPE, np.int32)
    chain = []
    for _ in range(draw(st.integers(1, 4))):
        shape = model.shape
        kinds = ["index", "transpose", "reshape", "bitcast"] + ["array"] * with_arrays
        kind = draw(st.sampled_from(kinds))
        if kind == "index" and shape:
            index = []
            for extent in shape:
                start = draw(st.integers(0, extent - 1))
                step = draw(st.integers(1, 2))
                size = draw(st.integers(1, (extent - 1 - start) // step + 1))
                is_number = draw(st.booleans()) and len(shape) > 1
                index.append(start if is_number else (start, size, step))
            chain.append((kind, tuple(index)))
            numpy_index = tuple(
                item
                if isinstance(item, int)
                else slice(item[0], item[0] + item[1] * item[2])
                if item[2] == 1
                else slice(item[0], item[0] + (item[1] - 1) * item[2] + 1, item[2])
                for item in index
            )
            model = Model(model.addresses[numpy_index], model.dtype)
        elif kind == "array" and shape:
            count = draw(st.integers(1, 5))
            dimension = draw(st.integers(0, len(shape) - 1))
            chosen = draw(
                st.lists(
                    st.integers(0, shape[dimension] - 1),
                    min_size=count,
                    max_size=count,
                    unique=False,
                )
            )
            chain.append((kind, (dimension, tuple(chosen))))
            model = Model(np.take(model.addresses, chosen, axis=dimension), model.dtype)
        elif kind == "transpose" and len(shape) > 1:
            order = draw(st.permutations(range(len(shape))))
            chain.append((kind, tuple(order)))
            model = Model(model.addresses.transpose(*order, len(shape)), model.dtype)
        elif kind == "reshape" and shape:
            size = int(np.prod(shape))
            first = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            target = draw(st.sampled_from([(size,), (first, size // first)]))
            chain.append((kind, target))
            model = Model(model.addresses.reshape(*target, -1), model.dtype)
        elif kind == "bitcast" and shape:
            dtype = draw(st.sampled_from(DTYPES))
            if len(shape) < 2:
                # JAX refuses this.
                continue
            extent = shape[max(len(shape) - 2, 0)]
            if extent * model.dtype.itemsize % np.dtype(dtype).itemsize:
                continue
            chain.append((kind, dtype))
            model = model.bitcast(dtype)
    return tuple(chain), model


def transformed(ref, chain, index_refs):
    indices = iter(index_refs)
    for kind, argument in chain:
        if kind == "index":
            index = tuple(item if isinstance(item, int) else pl.ds(*item) for item in argument)
            ref = ref.at[index]
        elif kind == "array":
            dimension, _ = argument
            before = (slice(None),) * dimension
            ref = ref.at[(*before, next(indices)[...])]
        elif kind == "transpose":
            ref = ref.transpose(argument)
        elif kind == "reshape":
            ref = ref.reshape(argument)
        else:
            ref = ref.bitcast(argument)
    return ref


def launch(body, out, chain, *arrays):
    """Runs `body(index_refs, *refs)`, where the first Refs hold the arrays of indices of a chain.
    A chain that is refused is no case of the test.
    """
    indices = [np.asarray(argument[1], np.int32) for kind, argument in chain if kind == "array"]

    def whole_body(*refs):
        body(refs[: len(indices)], *refs[len(indices) :])

    kernel = cokernel.kernel(whole_body, jax.ShapeDtypeStruct(out.shape, out.dtype), mesh=MESH)
    try:
        return np.asarray(kernel(*indices, *arrays))
    except NotImplementedError as error:
        # Wide elements made of wide elements, or of parts that an array has picked.
        if "bitcast of" not in str(error):
            raise
        reject()


def memory():
    return np.random.default_rng(0).integers(0, 1 << 30, SHAPE).astype(np.int32)


def bits(array):
    return np.asarray(array).view(f"u{array.itemsize}")


@settings(max_examples=30)
@given(steps())
def test_a_read_through_a_chain_of_transforms_sees_the_bytes_of_the_model(case):
    chain, model = case
    x = memory()
    expected = model.read(x)

    def body(indices, x_ref, o_ref):
        o_ref[...] = transformed(x_ref, chain, indices)[...]

    np.testing.assert_array_equal(bits(launch(body, expected, chain, x)), bits(expected))


@settings(max_examples=25)
@given(steps(with_arrays=False))
def test_a_write_through_a_chain_of_transforms_changes_the_bytes_of_the_model(case):
    chain, model = case
    x = memory()
    value = np.random.default_rng(1).integers(0, 100, model.shape).astype(model.dtype)
    expected = x.copy()
    model.write(expected, value)

    def body(indices, x_ref, v_ref, o_ref):
        o_ref[...] = x_ref[...]
        view = transformed(o_ref, chain, indices)
        view[...] = v_ref[...]

    np.testing.assert_array_equal(launch(body, x, chain, x, value), expected)


@settings(max_examples=25)
@given(steps())
def test_a_dma_from_a_chain_of_transforms_moves_the_bytes_of_the_model(case):
    chain, model = case
    x = memory()
    expected = model.read(x)

    def body(indices, x_ref, o_ref):
        pltpu.sync_copy(transformed(x_ref, chain, indices), o_ref)

    np.testing.assert_array_equal(bits(launch(body, expected, chain, x)), bits(expected))


@settings(max_examples=25)
@given(steps(with_arrays=False))
def test_a_dma_to_a_chain_of_transforms_changes_the_bytes_of_the_model(case):
    chain, model = case
    x = memory()
    value = np.random.default_rng(1).integers(0, 100, model.shape).astype(model.dtype)
    expected = x.copy()
    model.write(expected, value)

    def body(indices, x_ref, v_ref, o_ref):
        pltpu.sync_copy(x_ref, o_ref)
        pltpu.sync_copy(v_ref, transformed(o_ref, chain, indices))

    np.testing.assert_array_equal(launch(body, x, chain, x, value), expected)


@pytest.mark.parametrize("bad", [-1, 4])
def test_an_index_into_picked_rows_is_checked(bad):
    x = memory()

    def body(rows_ref, i_ref, x_ref, o_ref):
        o_ref[...] = x_ref.at[rows_ref[...]].at[i_ref[0]][...]

    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((8, 12), np.int32), mesh=MESH)
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="x_ref"):
        kernel(jnp.asarray([3, 0, 1, 2]), jnp.asarray([bad]), x)


def test_a_slice_of_rows_that_a_dma_may_skip_skips_the_same_rows():
    x = memory()

    def body(rows_ref, x_ref, o_ref):
        o_ref[...] = jnp.zeros((2, 8, 12), jnp.int32)
        picked = plsc.Indices(rows_ref, ignored_value=-1)
        pltpu.sync_copy(x_ref.at[picked].at[pl.ds(1, 2)], o_ref)

    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((2, 8, 12), np.int32), mesh=MESH)
    got = np.asarray(kernel(jnp.asarray([3, -1, 2]), x))
    np.testing.assert_array_equal(got, np.stack([np.zeros_like(x[0]), x[2]]))
