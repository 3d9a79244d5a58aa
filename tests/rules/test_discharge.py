"""Discharge: what a kernel writes to its Ref arguments comes out as further outputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax, primitive

CORES = cokernel.CoreMesh(core=1)
F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)


def discharged(fn, *args):
    """Returns the kernel equations of `fn` after its internal Refs are discharged."""
    jaxpr = _jax.discharge_state(jax.make_jaxpr(fn)(*args))
    assert not any(isinstance(effect, _jax.JaxprInputEffect) for effect in jaxpr.effects)
    return [eqn for eqn in jaxpr.eqns if eqn.primitive is primitive.mpmd_map_p]


def test_only_written_refs_become_outputs():
    def body(x_ref, read_ref, written_ref, added_ref, o_ref):
        written_ref[...] = x_ref[...] + read_ref[...]
        added_ref[0] += 1.0
        o_ref[...] = x_ref[...]

    kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)

    def fn(x):
        refs = [jax.new_ref(x * i) for i in range(3)]
        out = kernel(x, *refs)
        return out, [ref[...] for ref in refs]

    [eqn] = discharged(fn, jnp.ones(4))
    assert eqn.params["input_output_aliases"] == ((2, 1), (3, 2))
    assert len(eqn.outvars) == 3
    [jaxpr] = eqn.params["jaxprs"]
    names = ("x_ref", "read_ref", "written_ref", "added_ref", "o_ref", "written_ref", "added_ref")
    assert jaxpr.debug_info.arg_names == names
    assert eqn.effects == set()


def test_scratch_stays_last():
    def body(x_ref, o_ref, scratch_ref):
        scratch_ref[...] = o_ref[...]
        x_ref[...] = scratch_ref[...]

    kernel = cokernel.kernel(body, VECTOR4, mesh=CORES, scratch_types=[cokernel.private((4,), F32)])
    [eqn] = discharged(lambda x: kernel(jax.new_ref(x)), jnp.ones(4))
    [jaxpr] = eqn.params["jaxprs"]
    assert jaxpr.debug_info.arg_names == ("x_ref", "o_ref", "x_ref", "scratch_ref")
    assert jaxpr.invars[-1].aval.memory_space == pltpu.VMEM


def test_a_write_by_any_program_counts():
    lanes = cokernel.CoreMesh(lane=1)

    def one(x_ref, y_ref):
        x_ref[...] = y_ref[...]

    def two(x_ref, y_ref):
        y_ref[...] = x_ref[...]

    kernel = cokernel.mpmd_map([(CORES, one), (lanes, two)])
    [eqn] = discharged(lambda x, y: kernel(jax.new_ref(x), jax.new_ref(y)), *[jnp.ones(4)] * 2)
    assert eqn.params["input_output_aliases"] == ((0, 0), (1, 1))
    assert [len(jaxpr.invars) for jaxpr in eqn.params["jaxprs"]] == [4, 4]


def test_memory_spaces_are_kept():
    def body(x_ref):
        x_ref[...] += 1.0

    def fn(x):
        ref = jax.new_ref(x, memory_space=pltpu.SMEM)
        cokernel.kernel(body, mesh=CORES)(ref)
        return jax.freeze(ref)

    [eqn] = discharged(fn, jnp.ones(4))
    assert eqn.invars[0].aval.memory_space == pltpu.SMEM
    assert eqn.params["out_avals"][0].memory_space == pltpu.SMEM


def test_the_callers_own_aliases_are_kept():
    def body(x_ref, y_ref, o_ref):
        y_ref[...] = x_ref[...]
        o_ref[...] = x_ref[...]

    kernel = cokernel.kernel(body, VECTOR4, mesh=CORES, input_output_aliases={0: 0})

    def fn(x):
        ref = jax.new_ref(x)
        return kernel(x, ref), ref[...]

    [eqn] = discharged(fn, jnp.ones(4))
    assert eqn.params["input_output_aliases"] == ((0, 0), (1, 1))


def test_a_ref_cannot_be_aliased_by_the_caller():
    kernel = cokernel.kernel(
        lambda x_ref, o_ref: None, VECTOR4, mesh=CORES, input_output_aliases={0: 0}
    )
    with pytest.raises(ValueError, match="input 0 of kernel '<lambda>' is a Ref"):
        kernel(jax.new_ref(jnp.ones(4)))


def test_refs_that_are_not_to_be_discharged_stay():
    def body(x_ref, y_ref):
        x_ref[...] = y_ref[...]
        y_ref[...] = x_ref[...]

    kernel = cokernel.kernel(body, mesh=CORES)
    refs = [jax.new_ref(jnp.ones(4)), jax.new_ref(jnp.ones(4))]
    jaxpr = jax.make_jaxpr(lambda x, y: kernel(x, y))(*refs)
    [eqn] = _jax.discharge_state(jaxpr, should_discharge=[True, False]).eqns
    assert eqn.params["input_output_aliases"] == ((0, 0),)
    assert isinstance(eqn.invars[1].aval, _jax.AbstractRef)


def accumulate_body(x_ref, total_ref):
    total_ref[...] += x_ref[...]


accumulate = cokernel.kernel(accumulate_body, mesh=CORES)


class TestExecution:
    def test_eagerly_and_in_jit(self):
        ref = jax.new_ref(jnp.zeros(4))
        accumulate(jnp.arange(4.0), ref)
        jax.jit(accumulate)(jnp.arange(4.0), ref)
        jax.jit(lambda x: accumulate(x, ref))(jnp.arange(4.0))
        np.testing.assert_array_equal(ref[...], 3.0 * np.arange(4.0))

    @pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
    def test_in_scan(self, transform):
        def fn(xs):
            ref = jax.new_ref(jnp.zeros(4))

            def step(carry, x):
                accumulate(x, ref)
                return carry + 1, ref[0]

            count, firsts = lax.scan(step, 0, xs)
            return count, firsts, ref[...]

        xs = jnp.arange(12.0).reshape(3, 4)
        count, firsts, total = transform(fn)(xs)
        assert count == 3
        np.testing.assert_array_equal(firsts, np.cumsum(xs[:, 0]))
        np.testing.assert_array_equal(total, xs.sum(0))

    @pytest.mark.parametrize("condition", [True, False])
    def test_in_cond(self, condition):
        @jax.jit
        def fn(condition, x):
            ref = jax.new_ref(x)
            lax.cond(condition, lambda: accumulate(x, ref), lambda: ())
            return ref[...]

        np.testing.assert_array_equal(
            fn(condition, jnp.arange(4.0)), np.arange(4.0) * (1 + condition)
        )

    def test_in_run_state(self):
        @jax.jit
        def fn(x):
            def stateful(refs):
                x_ref, total_ref = refs
                accumulate(x_ref, total_ref)
                accumulate(x_ref[...] * 2.0, total_ref)

            return _jax.run_state(stateful)((x, jnp.ones(4)))

        x, total = fn(jnp.arange(4.0))
        np.testing.assert_array_equal(x, np.arange(4.0))
        np.testing.assert_array_equal(total, 1.0 + 3.0 * np.arange(4.0))

    def test_with_the_callers_own_aliases(self):
        def body(x_ref, y_ref, o_ref):
            y_ref[...] = x_ref[...] + 1.0
            o_ref[...] = x_ref[...] * 2.0

        kernel = cokernel.kernel(body, VECTOR4, mesh=CORES, input_output_aliases={0: 0})

        @jax.jit
        def fn(x):
            ref = jax.new_ref(x)
            return kernel(x, ref), ref[...], x

        out, value, x = fn(jnp.arange(4.0))
        np.testing.assert_array_equal(out, 2.0 * np.arange(4.0))
        np.testing.assert_array_equal(value, 1.0 + np.arange(4.0))
        np.testing.assert_array_equal(x, np.arange(4.0))

    def test_a_ref_that_is_only_partly_written_keeps_the_rest(self):
        def body(total_ref):
            total_ref[1] = 7.0

        ref = jax.new_ref(jnp.arange(4.0))
        cokernel.kernel(body, mesh=CORES)(ref)
        np.testing.assert_array_equal(ref[...], [0, 7, 2, 3])
