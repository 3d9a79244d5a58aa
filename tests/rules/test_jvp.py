"""Forward mode: tangents of kernels equal those of the same mathematics."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import primitive
from cokernel.primitive import all_equations

CORES = cokernel.CoreMesh(core=2)
ONE_CORE = cokernel.CoreMesh(core=1)
F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)


def half():
    return pl.ds(2 * lax.axis_index("core"), 2)


def product_body(x_ref, y_ref, o_ref):
    o_ref[half()] = x_ref[half()] * x_ref[half()] * y_ref[half()]


product = cokernel.kernel(product_body, VECTOR4, mesh=CORES)


def expected_product(x, y):
    return x * x * y


def numbers(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), F32)


def assert_same_derivatives(fn, reference, *args):
    """Compares first and second derivatives in forward mode, eagerly and in jit."""
    tangents = tuple(numbers(*x.shape, seed=i + 5) for i, x in enumerate(args))

    def first(fn, *args):
        return jax.jvp(fn, args, tangents)

    def second(fn, *args):
        return jax.jvp(functools.partial(first, fn), args, tangents)

    def linear(fn, *args):
        out, pushforward = jax.linearize(fn, *args)
        return out, pushforward(*tangents)

    for derivative in (first, second, linear):
        wanted = jax.tree.leaves(derivative(reference, *args))
        for transform in (lambda f: f, jax.jit):
            got = jax.tree.leaves(transform(functools.partial(derivative, fn))(*args))
            for one, other in zip(got, wanted, strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


class TestKernels:
    def test_arithmetic(self):
        assert_same_derivatives(product, expected_product, numbers(4), numbers(4, seed=1))

    def test_an_argument_without_a_tangent(self):
        x, y = numbers(4), numbers(4, seed=1)
        assert_same_derivatives(lambda x: product(x, y), lambda x: expected_product(x, y), x)

    def test_the_second_eager_call_compiles_nothing(self):
        x, y = numbers(4), numbers(4, seed=1)
        jax.jvp(product, (x, y), (y, x))
        with jax.no_tracing():
            out, _ = jax.jvp(product, (x, y), (y, x))
        np.testing.assert_allclose(out, expected_product(x, y), rtol=1e-6)

    def test_no_tangents_at_all_launch_the_kernel_itself(self):
        jaxpr = jax.make_jaxpr(lambda x: jax.jvp(lambda z: product(x, x) + z, (x,), (x,)))(
            numbers(4)
        )
        [eqn] = [e for e in all_equations(jaxpr.jaxpr) if e.primitive is primitive.mpmd_map_p]
        assert eqn.params["name"] == "product_body"

    def test_copies_loops_and_scoped_memory(self):
        def body(x_ref, o_ref, buffer, sem):
            pltpu.async_copy(x_ref.at[half()], buffer, sem).wait()

            def inner(cubes):
                @pl.loop(0, 2)
                def _(j):
                    cubes[j] = buffer[j] * buffer[j] * buffer[j]

                pltpu.sync_copy(cubes, o_ref.at[half()])

            pl.run_scoped(inner, cokernel.private((2,), F32))

        kernel = cokernel.kernel(
            body,
            VECTOR4,
            mesh=CORES,
            scratch_types=[cokernel.private((2,), F32), pltpu.SemaphoreType.DMA],
        )
        assert_same_derivatives(kernel, lambda x: x * x * x, numbers(4))

    def test_integers_and_semaphores_carry_no_tangents(self):
        def producer(x_ref, index_ref, o_ref, ready, index):
            pltpu.sync_copy(index_ref, index)
            o_ref[...] = x_ref[...] * x_ref[index[0]]
            pl.semaphore_signal(ready, 1, device_id={"lane": 0})

        def consumer(x_ref, index_ref, o_ref, ready, index):
            pl.semaphore_wait(ready, 1)
            o_ref[0] = o_ref[0] * o_ref[1]

        lane = cokernel.CoreMesh(lane=1)
        kernel = cokernel.mpmd_map(
            [(ONE_CORE, producer), (lane, consumer)],
            VECTOR4,
            scratch_types=[
                pltpu.SemaphoreType.REGULAR @ lane,
                pltpu.SMEM((1,), jnp.int32) @ ONE_CORE,
            ],
        )

        def reference(x):
            out = x * x[2]
            return out.at[0].set(out[0] * out[1])

        index = jnp.array([2], jnp.int32)
        assert_same_derivatives(lambda x: kernel(x, index), reference, numbers(4))

    def test_conditions(self):
        def body(x_ref, o_ref):
            @pl.when(lax.axis_index("core") == 0)
            def _():
                o_ref[half()] = x_ref[half()] * x_ref[half()]

            @pl.when(lax.axis_index("core") == 1)
            def _():
                o_ref[half()] = 3.0 * x_ref[half()]

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)

        def reference(x):
            return jnp.concatenate([x[:2] * x[:2], 3.0 * x[2:]])

        assert_same_derivatives(kernel, reference, numbers(4))

    def test_accumulation_across_programs_and_int_outputs(self):
        def body(x_ref, o_ref, count_ref):
            o_ref[...] = x_ref[...]
            o_ref[...] += x_ref[...] * x_ref[...]
            count_ref[0] = 7

        kernel = cokernel.kernel(
            body, [VECTOR4, jax.ShapeDtypeStruct((1,), jnp.int32)], mesh=ONE_CORE
        )
        assert_same_derivatives(lambda x: kernel(x)[0], lambda x: x + x * x, numbers(4))
        _, (tangent, no_tangent) = jax.jvp(kernel, (numbers(4),), (numbers(4),))
        assert tangent.dtype == F32
        assert no_tangent.dtype == jax.dtypes.float0

    def test_vector_subcores(self):
        with cokernel.target("v6e"):
            mesh = plsc.VectorSubcoreMesh(
                core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=2
            )

            def body(x_ref, o_ref, buffer):
                window = pl.ds(8 * lax.axis_index("subcore"), 8)
                pltpu.sync_copy(x_ref.at[window], buffer)
                buffer[...] = buffer[...] * buffer[...]
                pltpu.sync_copy(buffer, o_ref.at[window])

            kernel = cokernel.kernel(
                body,
                jax.ShapeDtypeStruct((16,), F32),
                mesh=mesh,
                scratch_types=[pltpu.VMEM((8,), F32)],
            )
        assert_same_derivatives(kernel, lambda x: x * x, numbers(16))


class TestClosedOver:
    def test_scalars_carry_tangents(self):
        def fn(x, factor):
            def body(x_ref, o_ref):
                o_ref[...] = x_ref[...] * factor

            return cokernel.kernel(body, VECTOR4, mesh=ONE_CORE)(x)

        assert_same_derivatives(fn, lambda x, factor: x * factor, numbers(4), numbers())


class TestRefs:
    @staticmethod
    def in_place(x):
        def body(r_ref, s_ref):
            r_ref[...] = r_ref[...] * s_ref[...]

        ref = jax.new_ref(x)
        cokernel.kernel(body, mesh=ONE_CORE)(ref, 2.0 * x)
        return ref[...]

    def test_written_refs(self):
        assert_same_derivatives(self.in_place, lambda x: 2.0 * x * x, numbers(4))

    def test_a_ref_without_tangents_may_be_read(self):
        ref = jax.new_ref(numbers(4, seed=3))
        assert_same_derivatives(
            lambda x: product(x, ref), lambda x: expected_product(x, ref[...]), numbers(4)
        )

    def test_a_ref_without_tangents_cannot_be_written(self):
        def body(x_ref, total_ref):
            total_ref[...] = x_ref[...]

        kernel = cokernel.kernel(body, mesh=ONE_CORE)
        ref = jax.new_ref(jnp.zeros(4))
        with pytest.raises(ValueError, match=r"writes to the Ref 'total_ref', which has no place"):
            jax.jvp(lambda x: kernel(x, ref), (jnp.ones(4),), (jnp.ones(4),))


class TestJacobians:
    def test_forward_jacobian(self):
        x, y = numbers(4), numbers(4, seed=1)
        got = jax.jacfwd(product, argnums=(0, 1))(x, y)
        wanted = jax.jacfwd(expected_product, argnums=(0, 1))(x, y)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)

    def test_batches_of_derivatives(self):
        x = numbers(3, 4)

        def derivative(fn):
            return jax.vmap(lambda x: jax.jvp(lambda z: fn(z, z), (x,), (x,)))

        for one, other in zip(derivative(product)(x), derivative(expected_product)(x), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "policy",
    [jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable],
)
def test_linearisation_under_checkpoint(policy):
    def make(fn):
        return jax.checkpoint(lambda x, y: fn(fn(x, y), y) * x, policy=policy)

    x, y = numbers(4), numbers(4, seed=1)
    assert_same_derivatives(make(product), make(expected_product), x, y)


class TestRefsUnderCheckpoint:
    @pytest.mark.parametrize(
        "policy",
        [jax.checkpoint_policies.everything_saveable, jax.checkpoint_policies.nothing_saveable],
    )
    def test_refs_filled_from_the_inputs(self, policy):
        def make(multiply):
            return jax.checkpoint(lambda x, y: multiply(x, y) * x, policy=policy)

        def multiply_in_place(x, y):
            def body(r_ref, y_ref):
                r_ref[...] = r_ref[...] * y_ref[...]

            ref = jax.new_ref(x)
            cokernel.kernel(body, mesh=ONE_CORE)(ref, y)
            return ref[...]

        x, y = numbers(4), numbers(4, seed=1)
        assert_same_derivatives(make(multiply_in_place), make(lambda x, y: x * y), x, y)

    def test_refs_that_were_empty_are_refused_by_name(self):
        def fn(x):
            ref = jax.new_ref(jnp.zeros(4))
            cokernel.kernel(lambda x_ref, r_ref: r_ref.set(x_ref[...]), mesh=ONE_CORE)(x, ref)
            return ref[...]

        with pytest.raises(NotImplementedError, match="writes to 'tangent of r_ref', a Ref whose"):
            jax.linearize(jax.checkpoint(fn), jnp.ones(4))


class TestReverseMode:
    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit, jax.checkpoint])
    def test_gradients_are_refused_with_advice(self, transform):
        def loss(x):
            return jnp.sum(product(x, x))

        with pytest.raises(
            NotImplementedError, match=r"'product_body' has no reverse mode.*custom"
        ):
            jax.grad(transform(loss))(jnp.ones(4))

    def test_gradients_through_a_custom_rule(self):
        @jax.custom_vjp
        def fn(x, y):
            return product(x, y)

        def backward(saved, g):
            x, y = saved
            return 2.0 * product(jnp.ones_like(x), x * y * g), product(x, g)

        fn.defvjp(lambda x, y: (product(x, y), (x, y)), backward)
        x, y = numbers(4), numbers(4, seed=1)
        got = jax.grad(lambda x, y: jnp.sum(fn(x, y) ** 2), argnums=(0, 1))(x, y)
        wanted = jax.grad(lambda x, y: jnp.sum(expected_product(x, y) ** 2), argnums=(0, 1))(x, y)
        for one, other in zip(got, wanted, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


class TestTensorCoreOperations:
    def test_rolling(self):
        def body(x_ref, o_ref):
            o_ref[...] = pltpu.roll(x_ref[...] * x_ref[...], 1, 0)

        kernel = cokernel.kernel(body, VECTOR4, mesh=ONE_CORE)
        assert_same_derivatives(kernel, lambda x: jnp.roll(x * x, 1), numbers(4))

    def test_reciprocals(self):
        def body(x_ref, o_ref):
            o_ref[...] = pltpu.reciprocal(x_ref[...] * x_ref[...] + 1.0)

        kernel = cokernel.kernel(body, VECTOR4, mesh=ONE_CORE)
        assert_same_derivatives(kernel, lambda x: 1.0 / (x * x + 1.0), numbers(4))


class TestErrors:
    @staticmethod
    def refused_at(body, out_type=VECTOR4):
        """Differentiates a kernel and returns the line of its body that the refusal names."""
        kernel = cokernel.kernel(body, out_type, mesh=ONE_CORE)
        x = jnp.ones(out_type.shape)
        with pytest.raises(NotImplementedError) as caught:
            jax.jvp(kernel, (x,), (x,))
        message = str(caught.value)
        assert message.startswith("program body at ")
        assert "cannot be differentiated: " in message
        [line] = re.findall(r"\(at .*test_jvp.py:(\d+)", message)
        return int(line) - body.__code__.co_firstlineno, message

    def test_what_has_no_derivative_is_named_with_its_line(self):
        def body(x_ref, o_ref):
            o_ref[...] = lax.reduce_precision(x_ref[...], 8, 7)
            bits = pltpu.bitcast(x_ref[...], jnp.int32, dim=-1)
            o_ref[...] = bits.astype(F32)

        line, message = self.refused_at(body)
        assert line == 2
        assert "bitcast" in message

    def test_callbacks_are_refused_with_their_line(self):
        def body(x_ref, o_ref):
            o_ref[...] = jax.pure_callback(lambda x: x, VECTOR4, x_ref[...])

        line, message = self.refused_at(body)
        assert line == 1
        assert "callbacks do not support JVP" in message

    def test_functions_with_a_derivative_for_reverse_mode_only_are_refused_with_their_line(self):
        @jax.custom_vjp
        def square(x):
            return x * x

        square.defvjp(lambda x: (x * x, x), lambda x, g: (2.0 * x * g,))

        def body(x_ref, o_ref):
            @pl.when(lax.axis_index("core") == 0)
            def _():
                o_ref[...] = square(x_ref[...])

        line, message = self.refused_at(body)
        assert line == 3
        assert "jax.custom_vjp, which serves reverse mode only" in message

    def test_floats_read_as_integers_are_refused(self):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref.bitcast(jnp.int32)[...].astype(F32)

        line, message = self.refused_at(body, jax.ShapeDtypeStruct((8, 128), F32))
        assert line == 1
        assert "seen as another type" in message

    def test_floats_written_as_integers_are_refused(self):
        def body(x_ref, o_ref):
            o_ref.bitcast(jnp.int32)[...] = x_ref[...].astype(jnp.int32)

        line, message = self.refused_at(body, jax.ShapeDtypeStruct((8, 128), F32))
        assert line == 1
        assert "seen as another type" in message

    def test_floats_copied_as_integers_are_refused(self):
        def body(x_ref, o_ref, buffer):
            pltpu.sync_copy(x_ref.bitcast(jnp.int32), buffer)

        kernel = cokernel.kernel(
            body, VECTOR4, mesh=ONE_CORE, scratch_types=[cokernel.private((4,), jnp.int32)]
        )
        with pytest.raises(NotImplementedError, match="seen as another type has no derivative"):
            jax.jvp(kernel, (jnp.ones(4),), (jnp.ones(4),))
