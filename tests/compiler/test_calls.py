"""What calls a function by another name, or only marks a value, is compiled like the function."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.xla_metadata import set_xla_metadata, xla_metadata_call

import cokernel
from tests.compiler.harness import MESH, expect_same, run


def tripled(x):
    return x * 3 + 1


def through_custom_vmap(x):
    function = jax.custom_batching.custom_vmap(tripled)
    function.def_vmap(lambda size, batched, x: (tripled(x), batched[0]))
    return function(x)


def through_marks(x):
    x = checkpoint_name(x, "x")
    x = jax.device_put(x)
    x = set_xla_metadata(x, kind="x")
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return lax.with_sharding_constraint(x, sharding) * 3


def through_run_state(x):
    y = x * 2

    def add(ref):
        ref[...] += y

    return pl.run_state(add)(x)


def under_metadata(x):
    return xla_metadata_call(tripled, kind="tripled")(x)


FUNCTIONS = {
    "custom_vmap": through_custom_vmap,
    "composite": lax.composite(tripled, "tests.tripled"),
    "metadata": under_metadata,
    "run_state": through_run_state,
    "marks": through_marks,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("shape", [(), (5,), (3, 70)])
def test_it_is_compiled_in_the_kernel(name, shape):
    with warnings.catch_warnings():
        # What XLA compiles for a kernel is told by a warning.
        warnings.simplefilter("error")
        expect_same(FUNCTIONS[name], np.arange(np.prod(shape), dtype=np.int32).reshape(shape))


def test_a_function_called_in_a_loop_may_hold_a_pipeline_of_such_calls():
    def function(x):
        return lax.fori_loop(0, 3, lambda _, x: through_run_state(through_custom_vmap(x)), x)

    expect_same(function, np.arange(8, dtype=np.int32))


def test_run_state_may_change_refs_of_the_program():
    def body(x_ref, o_ref):
        def move(ref):
            o_ref[...] = ref[...] + x_ref[...]
            ref[...] = x_ref[...] * 10

        left = pl.run_state(move)(x_ref[...] + 1)
        o_ref[...] += left

    x = np.arange(6, dtype=np.int32)
    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct(x.shape, x.dtype), mesh=MESH)
    np.testing.assert_array_equal(kernel(jnp.asarray(x)), x * 12 + 1)


def test_checked_mode_follows_undefined_values_through_it():
    def body(x_ref, o_ref, scratch):
        scratch[0] = x_ref[0]
        o_ref[...] = through_run_state(through_custom_vmap(scratch[...]))

    out = jax.ShapeDtypeStruct((4,), jnp.int32)
    kernel = cokernel.kernel(
        body, out, mesh=MESH, scratch_types=[cokernel.private((4,), jnp.int32)],
        interpret=cokernel.Checked(),
    )  # fmt: skip
    with pytest.raises(Exception, match="scratch"):
        jax.block_until_ready(kernel(jnp.arange(4, dtype=jnp.int32)))
    assert run(through_run_state, np.arange(4, dtype=np.int32))[0][3] == 9
