"""Discharge: what a kernel writes to its Ref arguments comes out as further outputs."""

import jax
import jax.numpy as jnp
import pytest
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
