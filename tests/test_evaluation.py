"""Traced kernels are run: eagerly and under jit, with parts of Refs, on several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

F32 = jnp.float32
VECTOR4 = jax.ShapeDtypeStruct((4,), F32)
ONE_CORE = cokernel.CoreMesh(core=1)


def copy_body(x_ref, o_ref):
    o_ref[...] = x_ref[...]


def test_the_second_eager_call_traces_nothing():
    count = []

    def body(x_ref, o_ref):
        count.append(1)
        o_ref[...] = x_ref[...] + 1.0

    kernel = cokernel.kernel(body, VECTOR4, mesh=ONE_CORE)
    for start in (0.0, 1.0):
        np.testing.assert_array_equal(kernel(start + jnp.arange(4.0)), start + np.arange(1.0, 5.0))
    assert len(count) == 1
    with jax.disable_jit():
        np.testing.assert_array_equal(kernel(jnp.arange(4.0)), np.arange(1.0, 5.0))
    jax.jit(kernel)(jnp.arange(4.0))
    assert len(count) == 1


def test_the_second_eager_call_with_refs_traces_nothing():
    count = []

    def body(x_ref):
        count.append(1)
        x_ref[...] += 1.0

    kernel = cokernel.kernel(body, mesh=ONE_CORE)
    ref = jax.new_ref(jnp.arange(4.0))
    for _ in range(2):
        kernel(ref)
    with jax.disable_jit():
        kernel(ref)
    np.testing.assert_array_equal(ref[...], np.arange(3.0, 7.0))
    assert len(count) == 1


def test_parts_of_refs_with_static_dynamic_and_array_indices():
    kernel = cokernel.kernel(copy_body, jax.ShapeDtypeStruct((2,), F32), mesh=ONE_CORE)
    ref = jax.new_ref(jnp.arange(8.0))
    np.testing.assert_array_equal(kernel(ref.at[2:4]), [2, 3])
    np.testing.assert_array_equal(kernel(ref.at[pl.ds(jnp.int32(4), 2)]), [4, 5])
    traced_start = jax.jit(lambda i: kernel(ref.at[pl.ds(i, 2)]))
    np.testing.assert_array_equal(traced_start(3), [3, 4])
    np.testing.assert_array_equal(kernel(ref.at[jnp.array([7, 1])]), [7, 1])


def test_parts_of_refs_are_written():
    def body(x_ref, part_ref):
        part_ref[...] = x_ref[...]

    kernel = cokernel.kernel(body, mesh=ONE_CORE)
    ref = jax.new_ref(jnp.zeros(6))
    kernel(jnp.ones(2), ref.at[1:3])
    np.testing.assert_array_equal(ref[...], [0, 1, 1, 0, 0, 0])


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_programs_share_what_they_close_over(transform):
    first, second = jax.new_ref(jnp.zeros(4)), jax.new_ref(jnp.zeros(4))
    factor = jnp.float32(2) + 1

    def one(x_ref, o_ref, done):
        first[...] = x_ref[...] * factor
        pl.semaphore_signal(done, device_id={"lane": 0})

    def two(x_ref, o_ref, done):
        pl.semaphore_wait(done)
        second[...] = first[...] * factor
        o_ref[...] = first[...]

    lane = cokernel.CoreMesh(lane=1)
    kernel = cokernel.mpmd_map(
        [(ONE_CORE, one), (lane, two)],
        VECTOR4,
        scratch_types=[pltpu.SemaphoreType.REGULAR @ lane],
    )
    out = transform(kernel)(jnp.ones(4))
    np.testing.assert_array_equal(out, [3] * 4)
    np.testing.assert_array_equal(second[...], [9] * 4)


def test_zero_sized_arrays():
    kernel = cokernel.kernel(copy_body, jax.ShapeDtypeStruct((0, 3), F32), mesh=ONE_CORE)
    assert kernel(jnp.ones((0, 3))).shape == (0, 3)


def test_several_devices():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")

    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + lax.axis_index("x").astype(F32)

    kernel = cokernel.kernel(body, VECTOR4, mesh=ONE_CORE)
    for check_vma in (True, False):
        sharded = jax.shard_map(
            kernel, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
        )
        np.testing.assert_array_equal(jax.jit(sharded)(jnp.zeros(16)), np.repeat(np.arange(4.0), 4))


def test_a_kernel_made_for_a_chip_runs_outside_its_context():
    with cokernel.target("v6e"):
        vector = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
        scalar = plsc.ScalarSubcoreMesh(axis_name="core")
        tensor = pltpu.TensorCoreMesh(axis_name="tc")

    def vector_body(x_ref, o_ref, buffer):
        lanes = plsc.get_sparse_core_info().num_lanes
        worker = lax.axis_index("core") * 16 + lax.axis_index("subcore")
        window = pl.ds(worker * lanes, lanes)
        pltpu.sync_copy(x_ref.at[window], buffer)
        buffer[...] = buffer[...] * 2.0
        pltpu.sync_copy(buffer, o_ref.at[window])

    def nothing(x_ref, o_ref, buffer):
        pass

    out_type = jax.ShapeDtypeStruct((256,), F32)
    with cokernel.target("v6e"):
        kernel = cokernel.mpmd_map(
            [(vector, vector_body), (scalar, nothing), (tensor, nothing)],
            out_type,
            scratch_types=[pltpu.VMEM((8,), F32) @ vector],
        )
    x = jnp.arange(256.0)
    np.testing.assert_array_equal(kernel(x), 2.0 * x)
