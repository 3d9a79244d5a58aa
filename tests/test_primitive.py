"""The primitive: its type, its effects, and which platforms it can be lowered for."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax, primitive

CORES = cokernel.CoreMesh(core=4)
F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)


def copy_body(x_ref, o_ref):
    o_ref[...] = x_ref[...]


copy = cokernel.kernel(copy_body, VECTOR4, mesh=CORES)


def equation(fn, *args):
    jaxpr = jax.make_jaxpr(lambda *args: fn(*args))(*args)
    [eqn] = [eqn for eqn in jaxpr.eqns if eqn.primitive is primitive.mpmd_map_p]
    return eqn


class TestTypes:
    def test_outputs_have_the_declared_types(self):
        aval = equation(copy, jnp.ones(4)).outvars[0].aval
        assert (aval.shape, aval.dtype) == ((4,), F32)

    def test_no_kernel_memory_space_is_visible_outside(self):
        kernel = cokernel.kernel(copy_body, pltpu.HBM((4,), F32), mesh=CORES)
        eqn = equation(kernel, jnp.ones(4))
        assert eqn.params["out_avals"][0].memory_space == pltpu.HBM
        assert eqn.outvars[0].aval.memory_space == jax.memory.Space.Device

    def test_an_aliased_output_takes_the_type_of_the_input(self):
        kernel = cokernel.kernel(
            copy_body, pltpu.HBM((4,), F32), mesh=CORES, input_output_aliases={0: 0}
        )
        eqn = equation(kernel, jnp.ones(4))
        assert eqn.outvars[0].aval == eqn.invars[0].aval

    def test_the_type_check_agrees(self):
        ref = jax.new_ref(jnp.ones(4))

        def body(x_ref, r_ref, o_ref):
            r_ref[...] = x_ref[...]

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        jaxpr = jax.make_jaxpr(lambda x, r: kernel(x, r))(jnp.ones(4), ref)
        _jax.check_jaxpr(jaxpr.jaxpr)
        [eqn] = jaxpr.eqns
        wrong = eqn.replace(outvars=[_jax.Var(jax.typeof(jnp.ones(4, jnp.int32)))])
        with pytest.raises(
            Exception, match=r"inconsistently typed as f32\[4\] .*\n\n(.*\n)*.*test_primitive"
        ):
            _jax.check_jaxpr(jaxpr.jaxpr.replace(eqns=[wrong], outvars=wrong.outvars))


class TestEffects:
    def test_axes_of_the_kernel_and_its_communication_stay_inside(self):
        other = cokernel.CoreMesh(other=2)

        def signal(x_ref, o_ref, sem):
            pl.semaphore_signal(sem, device_id={"other": lax.axis_index("core") % 2})

        def wait(x_ref, o_ref, sem):
            pl.semaphore_wait(sem, 2)

        kernel = cokernel.mpmd_map(
            [(CORES, signal), (other, wait)],
            VECTOR4,
            scratch_types=[pltpu.SemaphoreType.REGULAR @ other],
        )
        assert equation(kernel, jnp.ones(4)).effects == set()

    def test_axes_of_the_surroundings_come_out(self):
        def body(x_ref, o_ref):
            o_ref[...] = x_ref[...] + lax.axis_index("batch").astype(F32)

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("batch")
        sharded = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec)
        [eqn] = jax.make_jaxpr(sharded)(jnp.ones(16)).eqns
        [inner] = eqn.params["jaxpr"].eqns
        assert inner.effects == {_jax.NamedAxisEffect("batch")}
        assert inner.outvars[0].aval.manual_axis_type.varying == {"batch"}

    def test_communication_with_other_devices_comes_out(self):
        def body(x_ref, o_ref, sem):
            pl.semaphore_signal(sem, device_id={"batch": 0})

        kernel = cokernel.kernel(
            body, VECTOR4, mesh=CORES, scratch_types=[pltpu.SemaphoreType.REGULAR]
        )
        mesh = jax.make_mesh((4,), ("batch",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("batch")
        sharded = jax.shard_map(kernel, mesh=mesh, in_specs=spec, out_specs=spec)
        [eqn] = jax.make_jaxpr(sharded)(jnp.ones(16)).eqns
        [inner] = eqn.params["jaxpr"].eqns
        assert _jax.comms_effect in inner.effects

    def test_debug_effects_come_out(self):
        def body(x_ref, o_ref):
            pl.debug_print("hello")

        eqn = equation(cokernel.kernel(body, VECTOR4, mesh=CORES), jnp.ones(4))
        assert "Debug" in str(eqn.effects)

    def test_writes_to_outputs_and_scratch_do_not(self):
        def body(x_ref, o_ref, scratch_ref):
            scratch_ref[...] = x_ref[...]
            o_ref[...] = scratch_ref[...]

        kernel = cokernel.kernel(
            body, VECTOR4, mesh=CORES, scratch_types=[cokernel.private((4,), F32)]
        )
        assert equation(kernel, jnp.ones(4)).effects == set()


class TestSharding:
    refusal = r"argument 0 \('x_ref'\) is sharded .*Explicit.*jax\.shard_map"

    def test_a_sharded_argument_is_refused_with_the_axis_types(self):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
        spec = jax.sharding.PartitionSpec("x")
        x = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=self.refusal):
            copy(x)

    def test_an_argument_sharded_where_the_body_cuts_it_is_refused_the_same_way(self):
        def body(x_ref, o_ref):
            o_ref[pl.ds(0, 2)] = x_ref[pl.ds(lax.axis_index("core"), 2)]

        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
        spec = jax.sharding.PartitionSpec("x")
        x = jax.device_put(jnp.ones(4), jax.sharding.NamedSharding(mesh, spec))
        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        for transform in (lambda f: f, jax.jit):
            with pytest.raises(ValueError, match=self.refusal):
                transform(kernel)(x)

    def test_a_sharded_batch_is_refused_the_same_way(self):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
        spec = jax.sharding.PartitionSpec("x")
        x = jax.device_put(jnp.ones((4, 4)), jax.sharding.NamedSharding(mesh, spec))
        with pytest.raises(ValueError, match=self.refusal):
            jax.vmap(copy)(x)

    def test_a_ref_that_varies_over_manual_axes_is_refused_by_name(self):
        mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
        spec = jax.sharding.PartitionSpec("x")

        @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
        def sharded(x):
            return copy(jax.new_ref(x))

        with pytest.raises(ValueError, match=r"argument 0 \('x_ref'\) of type .* varies over x"):
            jax.eval_shape(sharded, jnp.ones(16))


class TestLowering:
    def test_several_platforms_at_once_are_refused(self):
        lowered = jax.jit(copy).trace(jnp.ones(4))
        with pytest.raises(NotImplementedError, match="several platforms at once"):
            lowered.lower(lowering_platforms=("cpu", "tpu"))

    def test_platforms_without_a_lowering_are_named(self):
        lowered = jax.jit(copy).trace(jnp.ones(4))
        with pytest.raises(NotImplementedError, match="'copy_body' cannot run on METAL"):
            lowered.lower(lowering_platforms=("METAL",))

    def test_symbolic_shapes_are_refused_by_name(self):
        def body(x_ref, o_ref):
            o_ref[...] = jnp.sum(x_ref[...]) + jnp.zeros(4)

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
        (size,) = jax.export.symbolic_shape("n")
        with pytest.raises(NotImplementedError, match=r"'x_ref' has the symbolic shape float32\[n"):
            jax.export.export(jax.jit(kernel))(jax.ShapeDtypeStruct((size,), F32))

    def test_name_metadata_and_cost_reach_the_compiled_module(self):
        kernel = cokernel.kernel(
            copy_body,
            VECTOR4,
            mesh=CORES,
            name="copy it",
            metadata={"purpose": "testing"},
            cost_estimate=pl.CostEstimate(flops=123, transcendentals=4, bytes_accessed=32),
        )
        lowered = jax.jit(kernel).lower(jnp.ones(4))
        for text in (lowered.as_text(), lowered.compile().as_text()):
            assert "copy it" in text
            assert "purpose" in text
            assert "123" in text

    def test_debug_prints_llvm_when_asked(self, capsys):
        kernel = cokernel.kernel(
            copy_body,
            VECTOR4,
            mesh=CORES,
            debug=True,
            compiler_params=cokernel.CompilerParams(dump_llvm=True),
        )
        jax.jit(kernel).lower(jnp.ones(4))
        printed = capsys.readouterr().out
        assert "program copy_body at" in printed
        assert "define" in printed
