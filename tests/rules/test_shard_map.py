"""Inside `jax.shard_map` each device launches the kernel on its own part."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

F32 = jnp.float32
DEVICES = 8
CORES = cokernel.CoreMesh(core=2)
LANE = cokernel.CoreMesh(lane=1)


def first(x_ref, o_ref, ready):
    half = pl.ds(4 * lax.axis_index("core"), 4)
    o_ref[half] = 2.0 * x_ref[half]
    pl.semaphore_signal(ready, 1, device_id={"lane": 0})


def second(x_ref, o_ref, ready):
    pl.semaphore_wait(ready, 2)
    o_ref[0] = o_ref[7]


kernel = cokernel.mpmd_map(
    [(CORES, first), (LANE, second)],
    jax.ShapeDtypeStruct((8,), F32),
    scratch_types=[pltpu.SemaphoreType.REGULAR @ LANE],
)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_each_device_has_its_own_launch(check_vma, transform):
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")

    @transform
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma)
    def fn(x):
        return kernel(x) + lax.axis_index("x").astype(F32)

    one = np.concatenate([[14.0], 2.0 * np.arange(1.0, 8.0)])
    wanted = np.concatenate([one + device for device in range(DEVICES)])
    np.testing.assert_array_equal(fn(jnp.tile(jnp.arange(8.0), DEVICES)), wanted)


def test_refs_inside_shard_map():
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")

    def body(x_ref, total_ref):
        total_ref[...] += x_ref[...]

    add = cokernel.kernel(body, mesh=cokernel.CoreMesh(core=1))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def fn(x):
        ref = jax.new_ref(x)
        add(x, ref)
        return ref[...]

    np.testing.assert_array_equal(fn(jnp.arange(16.0)), 2.0 * np.arange(16.0))


@pytest.mark.parametrize("check_vma", [True, False])
def test_batches_inside_and_outside(check_vma):
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    shard = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    x = jnp.arange(64.0).reshape(8, 8)
    one = jnp.stack([kernel(row) for row in x])
    inside = jax.jit(shard(jax.vmap(kernel)))(x)
    np.testing.assert_array_equal(inside, one)

    wide = jnp.tile(x[:, None, :], (1, DEVICES, 1)).reshape(8, 8 * DEVICES)
    outside = jax.jit(jax.vmap(shard(kernel)))(wide)
    np.testing.assert_array_equal(
        outside, jnp.tile(one[:, None, :], (1, DEVICES, 1)).reshape(8, 8 * DEVICES)
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_forward_mode(check_vma):
    mesh = jax.make_mesh((DEVICES,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("x")
    shard = functools.partial(
        jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma
    )
    x = jnp.arange(8.0 * DEVICES)
    out, tangent = jax.jit(lambda x, t: jax.jvp(shard(kernel), (x,), (t,)))(x, 3.0 * x)
    np.testing.assert_array_equal(tangent, 3.0 * out)
