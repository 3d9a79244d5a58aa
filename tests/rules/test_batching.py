"""Under `jax.vmap` a kernel does for each element of a batch what it does for one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import primitive
from cokernel.primitive import all_equations

CORES = cokernel.CoreMesh(core=2)
F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)


def affine_body(x_ref, y_ref, o_ref):
    half = pl.ds(2 * lax.axis_index("core"), 2)
    o_ref[half] = 2.0 * x_ref[half] + y_ref[half]


affine = cokernel.kernel(affine_body, VECTOR4, mesh=CORES)


def expected(x, y):
    return 2.0 * x + y


def kernels_in(fn, *args):
    jaxpr = jax.make_jaxpr(fn)(*args)
    return [e for e in all_equations(jaxpr.jaxpr) if e.primitive is primitive.mpmd_map_p]


def numbers(*shape):
    return jnp.asarray(np.random.default_rng(len(shape)).normal(size=shape), F32)


class TestArrays:
    @pytest.mark.parametrize("size", [1, 2, 5])
    @pytest.mark.parametrize("in_axes", [(0, 0), (0, None), (None, 0), (1, 0), (-1, 1)])
    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
    def test_equals_the_same_mathematics(self, size, in_axes, transform):
        def argument(axis):
            return numbers(4) if axis is None else jnp.moveaxis(numbers(size, 4), 0, axis)

        args = [argument(axis) for axis in in_axes]
        result = transform(jax.vmap(affine, in_axes=in_axes))(*args)
        np.testing.assert_allclose(result, jax.vmap(expected, in_axes=in_axes)(*args), rtol=1e-6)

    @settings(max_examples=20)
    @given(st.data())
    def test_any_nesting_of_axes(self, data):
        depth = data.draw(st.integers(1, 3))
        fn, reference = affine, expected
        shapes = [[4], [4]]
        for _ in range(depth):
            size = data.draw(st.integers(1, 3))
            axes = [data.draw(st.none() | st.integers(0, len(shape))) for shape in shapes]
            if axes == [None, None]:
                axes[0] = 0
            out_axis = data.draw(st.integers(0, 1))
            fn = jax.vmap(fn, in_axes=tuple(axes), out_axes=out_axis)
            reference = jax.vmap(reference, in_axes=tuple(axes), out_axes=out_axis)
            for shape, axis in zip(shapes, axes, strict=True):
                if axis is not None:
                    shape.insert(axis, size)
        args = [numbers(*shape) for shape in shapes]
        np.testing.assert_allclose(jax.jit(fn)(*args), reference(*args), rtol=1e-6)

    def test_the_second_eager_call_compiles_nothing(self):
        x = numbers(3, 4)
        jax.vmap(affine)(x, x)
        with jax.no_tracing():
            result = jax.vmap(affine)(x, x)
        np.testing.assert_allclose(result, 3.0 * x, rtol=1e-6)

    def test_what_is_not_batched_is_launched_once(self):
        def fn(x, y):
            return x + affine(y, y)

        [eqn] = kernels_in(jax.vmap(fn, in_axes=(0, None)), numbers(3, 4), numbers(4))
        assert eqn.outvars[0].aval.shape == (4,)

    def test_an_empty_batch_launches_nothing(self):
        batched = jax.vmap(affine)
        assert kernels_in(batched, jnp.ones((0, 4)), jnp.ones((0, 4))) == []
        assert batched(jnp.ones((0, 4)), jnp.ones((0, 4))).shape == (0, 4)

    def test_a_batch_of_one_needs_no_loop(self):
        jaxpr = jax.make_jaxpr(jax.vmap(affine))(jnp.ones((1, 4)), jnp.ones((1, 4)))
        assert len(kernels_in(jax.vmap(affine), jnp.ones((1, 4)), jnp.ones((1, 4)))) == 1
        assert not any(eqn.primitive.name in ("scan", "while") for eqn in jaxpr.eqns)

    def test_indices_that_are_batched(self):
        def body(index_ref, table_ref, o_ref, buffer, index, sem):
            pltpu.sync_copy(index_ref, index)
            pltpu.async_copy(table_ref.at[pl.ds(index[0], 4)], buffer, sem).wait()
            pltpu.sync_copy(buffer, o_ref)

        kernel = cokernel.kernel(
            body,
            VECTOR4,
            mesh=cokernel.CoreMesh(core=1),
            scratch_types=[
                cokernel.private((4,), F32),
                pltpu.SMEM((1,), jnp.int32),
                pltpu.SemaphoreType.DMA,
            ],
        )
        table, starts = numbers(16), jnp.array([[3], [0], [12]], jnp.int32)
        result = jax.vmap(kernel, in_axes=(0, None))(starts, table)
        np.testing.assert_array_equal(result, [table[s : s + 4] for s in (3, 0, 12)])

    def test_gradients_through_a_custom_rule(self):
        @jax.custom_vjp
        def double(x):
            return affine(x, jnp.zeros_like(x))

        double.defvjp(lambda x: (double(x), None), lambda _, g: (double(g),))

        def loss(x):
            return jnp.sum(jnp.sin(double(x)))

        x = numbers(3, 4)
        np.testing.assert_allclose(
            jax.vmap(jax.grad(loss))(x), 2.0 * jnp.cos(2.0 * x), rtol=1e-5, atol=1e-6
        )

    def test_a_named_spmd_axis(self):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        x = numbers(4, 4)
        spec = jax.sharding.PartitionSpec("x")
        sharded = jax.device_put(x, jax.sharding.NamedSharding(mesh, spec))
        result = jax.jit(jax.vmap(affine, spmd_axis_name="x"))(sharded, sharded)
        np.testing.assert_allclose(result, 3.0 * x, rtol=1e-6)


class TestClosedOver:
    def test_batched_scalars(self):
        @jax.jit
        @jax.vmap
        def fn(x, factor):
            def body(x_ref, o_ref):
                o_ref[...] = x_ref[...] * factor

            return cokernel.kernel(body, VECTOR4, mesh=cokernel.CoreMesh(core=1))(x)

        x, factors = numbers(3, 4), numbers(3)
        np.testing.assert_allclose(fn(x, factors), x * factors[:, None], rtol=1e-6)

    def test_the_place_in_the_batch_is_refused_with_advice(self):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] + lax.axis_index("batch").astype(F32)

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        with pytest.raises(NotImplementedError, match=r"program body .* uses the axis 'batch'"):
            jax.vmap(kernel, axis_name="batch")(jnp.ones((2, 4)))

    def test_the_place_in_the_batch_can_be_passed(self):
        def fn(x):
            place = lax.axis_index("batch").astype(F32)
            return affine(x, jnp.full((4,), place))

        result = jax.vmap(fn, axis_name="batch")(jnp.zeros((3, 4)))
        np.testing.assert_array_equal(result, np.repeat(np.arange(3.0)[:, None], 4, 1))


class TestRefs:
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize("axis", [0, 1])
    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
    def test_batched_refs_are_written_back(self, size, axis, transform):
        def body(x_ref, r_ref):
            half = pl.ds(2 * lax.axis_index("core"), 2)
            r_ref[half] = r_ref[half] + x_ref[half]

        add = cokernel.kernel(body, mesh=CORES)

        @transform
        @functools.partial(jax.vmap, in_axes=(0, axis), out_axes=axis)
        def fn(x, initial):
            ref = jax.new_ref(initial)
            add(x, ref)
            add(x, ref)
            return ref[...]

        x, initial = numbers(size, 4), jnp.moveaxis(numbers(size, 4), 0, axis)
        wanted = initial + jnp.moveaxis(2.0 * x, 0, axis)
        np.testing.assert_allclose(fn(x, initial), wanted, rtol=1e-6)

    def test_a_ref_that_is_only_read_may_be_common(self):
        ref = jax.new_ref(numbers(4))
        x = numbers(3, 4)
        result = jax.jit(jax.vmap(lambda x: affine(x, ref)))(x)
        np.testing.assert_allclose(result, 2.0 * x + numbers(4), rtol=1e-6)

    def test_a_common_ref_that_is_written_is_refused_by_name(self):
        def body(x_ref, total_ref):
            total_ref[...] = x_ref[...]

        kernel = cokernel.kernel(body, mesh=CORES)
        ref = jax.new_ref(jnp.zeros(4))
        with pytest.raises(ValueError, match="writes to the Ref 'total_ref', which is the same"):
            jax.vmap(lambda x: kernel(x, ref))(jnp.ones((3, 4)))
