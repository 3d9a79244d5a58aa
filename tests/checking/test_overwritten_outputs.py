"""Undefined values are found also in what a kernel leaves in memory that was its caller's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import cokernel

X = jnp.ones(16)
OUT = jax.ShapeDtypeStruct(X.shape, X.dtype)
CORES = cokernel.CoreMesh(core=1)


def add_one(o_ref, buf):
    o_ref[...] = buf[...] + 1


def write_half(o_ref, buf):
    o_ref[0:8] = buf[0:8]


def copy_half(o_ref, buf):
    pltpu.sync_copy(buf.at[0:8], o_ref.at[8:16])


def kernel(body, **options):
    scratch = [cokernel.private(X.shape, X.dtype)]
    return cokernel.kernel(body, mesh=CORES, scratch_types=scratch, **options)


def into_aliased_output(step):
    def body(x_ref, o_ref, buf):
        step(o_ref, buf)

    return kernel(body, out_type=OUT, input_output_aliases={0: 0})


def into_ref_of_the_caller(step):
    run = kernel(step, out_type=())

    def call(x):
        ref = jax.new_ref(x)
        run(ref)
        return ref[...]

    return call


def defined_first(step):
    def body(o_ref, buf):
        buf[...] = jnp.zeros(16)
        step(o_ref, buf)

    return body


@pytest.mark.parametrize("wrap", [lambda call: call, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("into", [into_aliased_output, into_ref_of_the_caller])
@pytest.mark.parametrize("step", [add_one, write_half, copy_half])
def test_an_undefined_value_in_memory_of_the_caller_is_found(step, into, wrap):
    report = cokernel.explore(wrap(into(step)), X, schedules=2)
    [finding] = report.findings
    assert (finding.kind, finding.name) == ("UninitialisedRead", "buf")


@pytest.mark.parametrize("into", [into_aliased_output, into_ref_of_the_caller])
@pytest.mark.parametrize("step", [add_one, write_half, copy_half])
def test_what_the_caller_had_there_and_defined_values_are_clean(step, into):
    function = into(defined_first(step))
    assert not cokernel.explore(function, X, schedules=2).findings
    expected = {add_one: np.ones(16), write_half: np.repeat([0.0, 1.0], 8)}
    expected[copy_half] = np.repeat([1.0, 0.0], 8)
    np.testing.assert_array_equal(function(X), expected[step])
