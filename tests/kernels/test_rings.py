"""Producers and consumers with a ring of buffers between them, of every depth and length."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])
LENGTHS = pytest.mark.parametrize("length", [0, 1, 7])
SUBCORES = 16


def wait_until_empty(empty, depth, length, readers):
    """Takes back the slots that are still out, which leaves the semaphores at zero."""
    for item in range(max(length - depth, 0), length):
        pl.semaphore_wait(empty.at[item % depth], readers)


@DEPTHS
@LENGTHS
def test_one_core_produces_for_another(depth, length, compiler_params):
    producers, consumers = cokernel.CoreMesh(producer=1), cokernel.CoreMesh(consumer=1)

    def produce(x_ref, out_ref, ring, full, empty):
        @pl.loop(0, length)
        def _item(item):
            slot = item % depth

            @pl.when(item >= depth)
            def _wait():
                pl.semaphore_wait(empty.at[slot], 1)

            ring[slot] = x_ref[item] * 2
            pl.semaphore_signal(full.at[slot], 1, device_id={"consumer": 0})

        wait_until_empty(empty, depth, length, 1)

    def consume(x_ref, out_ref, ring, full, empty):
        @pl.loop(0, length)
        def _item(item):
            slot = item % depth
            pl.semaphore_wait(full.at[slot], 1)
            out_ref[item] = ring[slot] + 1
            pl.semaphore_signal(empty.at[slot], 1, device_id={"producer": 0})

    kernel = cokernel.mpmd_map(
        [(producers, produce), (consumers, consume)],
        jax.ShapeDtypeStruct((length, 3), jnp.float32),
        scratch_types=[
            pltpu.HBM((depth, 3), jnp.float32),
            pltpu.SemaphoreType.REGULAR((depth,)) @ consumers,
            pltpu.SemaphoreType.REGULAR((depth,)) @ producers,
        ],
        compiler_params=compiler_params,
    )
    x = np.arange(3 * length, dtype=np.float32).reshape(length, 3)
    np.testing.assert_array_equal(kernel(x), x * 2 + 1)


@DEPTHS
@LENGTHS
def test_a_scalar_subcore_produces_for_its_vector_subcores(depth, length, v6e, compiler_params):
    lanes = plsc.get_sparse_core_info().num_lanes
    scalar_mesh = plsc.ScalarSubcoreMesh(axis_name="core")
    vector_mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def stage(x_ref, out_ref, ring, full, empty, lanes_ref):
        core = lax.axis_index("core")

        @pl.loop(0, length)
        def _item(item):
            slot = item % depth

            @pl.when(item >= depth)
            def _wait():
                pl.semaphore_wait(empty.at[slot], SUBCORES)

            pltpu.sync_copy(x_ref.at[item, core], ring.at[slot])

            @pl.loop(0, SUBCORES)
            def _announce(subcore):
                there = {"core": core, "subcore": subcore}
                pl.semaphore_signal(full.at[slot], 1, device_id=there)

        wait_until_empty(empty, depth, length, SUBCORES)

    def work(x_ref, out_ref, ring, full, empty, lanes_ref):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")

        @pl.loop(0, length)
        def _item(item):
            slot = item % depth
            pl.semaphore_wait(full.at[slot], 1)
            pltpu.sync_copy(ring.at[slot, subcore], lanes_ref)
            pl.semaphore_signal(empty.at[slot], 1, device_id={"core": core})
            lanes_ref[...] = lanes_ref[...] * 3 + subcore
            pltpu.sync_copy(lanes_ref, out_ref.at[item, core, subcore])

    shape = (length, 2, SUBCORES, lanes)
    kernel = cokernel.mpmd_map(
        [(scalar_mesh, stage), (vector_mesh, work)],
        jax.ShapeDtypeStruct(shape, jnp.int32),
        scratch_types=[
            pltpu.VMEM_SHARED((depth, SUBCORES, lanes), jnp.int32),
            pltpu.SemaphoreType.REGULAR((depth,)) @ vector_mesh,
            pltpu.SemaphoreType.REGULAR((depth,)) @ scalar_mesh,
            pltpu.VMEM((lanes,), jnp.int32) @ vector_mesh,
        ],
        compiler_params=compiler_params,
    )
    x = np.random.default_rng(0).integers(-99, 99, shape, np.int32)
    np.testing.assert_array_equal(kernel(x), x * 3 + np.arange(SUBCORES, dtype=np.int32)[:, None])


@DEPTHS
@LENGTHS
def test_a_tensor_core_consumes_what_vector_subcores_produce(depth, length, v6e, compiler_params):
    width = 128
    vector_mesh = plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=8
    )
    tensor_mesh = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)

    def produce(x_ref, weights_ref, out_ref, ring, full, empty, row, block, table, result):
        subcore = lax.axis_index("subcore")

        @pl.loop(0, length)
        def _item(item):
            slot = item % depth

            @pl.when(item >= depth)
            def _wait():
                pl.semaphore_wait(empty.at[slot], 1)

            pltpu.sync_copy(x_ref.at[item, subcore], row)

            @pl.loop(0, width, step=8)
            def _step(start):
                part = pl.ds(start, 8)
                row[part] = row[part] + item

            pltpu.sync_copy(row, ring.at[slot, subcore])
            pl.semaphore_signal(full.at[slot], 1, device_id={"tensor": 0})

        wait_until_empty(empty, depth, length, 1)

    def multiply(x_ref, weights_ref, out_ref, ring, full, empty, row, block, table, result):
        pltpu.sync_copy(weights_ref, table)

        @pl.loop(0, length)
        def _item(item):
            slot = item % depth
            pl.semaphore_wait(full.at[slot], 8)
            pltpu.sync_copy(ring.at[slot], block)
            for subcore in range(8):
                there = {"core": 0, "subcore": subcore}
                pl.semaphore_signal(empty.at[slot], 1, device_id=there)
            result[...] = jnp.dot(block[...], table[...], preferred_element_type=jnp.float32)
            pltpu.sync_copy(result, out_ref.at[item])

    kernel = cokernel.mpmd_map(
        [(vector_mesh, produce), (tensor_mesh, multiply)],
        jax.ShapeDtypeStruct((length, 8, width), jnp.float32),
        scratch_types=[
            pltpu.HBM((depth, 8, width), jnp.float32),
            pltpu.SemaphoreType.REGULAR((depth,)) @ tensor_mesh,
            pltpu.SemaphoreType.REGULAR((depth,)) @ vector_mesh,
            pltpu.VMEM((width,), jnp.float32) @ vector_mesh,
            pltpu.VMEM((8, width), jnp.float32) @ tensor_mesh,
            pltpu.VMEM((width, width), jnp.float32) @ tensor_mesh,
            pltpu.VMEM((8, width), jnp.float32) @ tensor_mesh,
        ],
        compiler_params=compiler_params,
    )
    random = np.random.default_rng(0)
    # Small integers, so that the order in which products are added does not show.
    x = random.integers(-4, 4, (length, 8, width)).astype(np.float32)
    weights = random.integers(-4, 4, (width, width)).astype(np.float32)
    items = np.arange(length, dtype=np.float32)[:, None, None]
    np.testing.assert_array_equal(kernel(x, weights), (x + items) @ weights)
