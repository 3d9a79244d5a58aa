"""Dead code elimination drops exactly the kernels that nobody would miss."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel import _jax, primitive

CORES = cokernel.CoreMesh(core=1)
F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)


def kernels_left(fn, *args):
    """Returns how many kernels of `fn` survive if all its outputs are unused."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    assert any(eqn.primitive is primitive.mpmd_map_p for eqn in jaxpr.eqns)
    new, _ = _jax.partial_eval.dce_jaxpr(jaxpr, [False] * len(jaxpr.outvars))
    return sum(eqn.primitive is primitive.mpmd_map_p for eqn in new.eqns)


def copy_body(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def test_a_pure_kernel_whose_outputs_are_unused_is_dropped():
    kernel = cokernel.kernel(copy_body, VECTOR4, mesh=CORES)
    assert kernels_left(kernel, jnp.ones(4)) == 0


def test_one_used_output_keeps_it():
    def body(x_ref, o_ref, p_ref):
        o_ref[...] = x_ref[...]

    kernel = cokernel.kernel(body, [VECTOR4, VECTOR4], mesh=CORES)
    jaxpr = jax.make_jaxpr(kernel)(jnp.ones(4))
    new, used_inputs = _jax.partial_eval.dce_jaxpr(jaxpr, [False, True])
    assert len(new.eqns) == 1
    assert used_inputs == [True]


def test_a_kernel_that_only_reads_a_ref_is_dropped():
    kernel = cokernel.kernel(copy_body, VECTOR4, mesh=CORES)
    assert kernels_left(lambda ref: kernel(ref), jax.new_ref(jnp.ones(4))) == 0


def test_a_kernel_that_writes_to_a_ref_is_kept():
    def body(r_ref, o_ref):
        r_ref[0] = 1.0

    kernel = cokernel.kernel(body, VECTOR4, mesh=CORES)
    assert kernels_left(lambda ref: kernel(ref), jax.new_ref(jnp.ones(4))) == 1


def test_a_kernel_that_prints_is_kept():
    def body(x_ref, o_ref):
        pl.debug_print("hello")

    assert kernels_left(cokernel.kernel(body, VECTOR4, mesh=CORES), jnp.ones(4)) == 1


@pytest.mark.parametrize("params", [cokernel.CompilerParams, pltpu.CompilerParams])
def test_a_kernel_declared_to_have_side_effects_is_kept(params):
    kernel = cokernel.kernel(
        copy_body, VECTOR4, mesh=CORES, compiler_params=params(has_side_effects=True)
    )
    assert kernels_left(kernel, jnp.ones(4)) == 1
