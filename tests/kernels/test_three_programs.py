"""A TensorCore, vector subcores and scalar subcores in one kernel, each waiting for another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel

ROWS, WIDTH = 32, 128
SUBCORES = 16


@pytest.mark.parametrize("rounds", [0, 1, 4])
def test_three_programs_hand_a_matrix_around(rounds, v6e, compiler_params):
    lanes = plsc.get_sparse_core_info().num_lanes
    scalar_mesh = plsc.ScalarSubcoreMesh(axis_name="core")
    vector_mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    tensor_mesh = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)

    # Each round: the scalar subcores copy half of the matrix each into shared memory, the vector
    # subcores double their row and add their number, the TensorCore multiplies by a table.

    def stage(x_ref, table_ref, out_ref, *, half, staged, ready, scaled, multiplied, **_):
        core = lax.axis_index("core")
        rows = pl.ds(core * SUBCORES, SUBCORES)
        pltpu.sync_copy(x_ref.at[rows], half)
        pltpu.sync_copy(half, out_ref.at[rows])

        @pl.loop(0, rounds)
        def _round(_):
            pltpu.sync_copy(out_ref.at[rows], half)
            for subcore in range(SUBCORES):
                there = {"core": core, "subcore": subcore}
                pl.semaphore_signal(staged, 1, device_id=there)
            pl.semaphore_wait(multiplied, 1)

    def scale(x_ref, table_ref, out_ref, *, half, staged, scaled, row, scaled_rows, **_):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        me = core * SUBCORES + subcore

        @pl.loop(0, rounds)
        def _round(_):
            pl.semaphore_wait(staged, 1)
            pltpu.sync_copy(half.at[subcore], row)

            @pl.loop(0, WIDTH, step=lanes)
            def _step(start):
                part = pl.ds(start, lanes)
                row[part] = row[part] * 2 + me

            pltpu.sync_copy(row, scaled_rows.at[me])
            pl.semaphore_signal(scaled, 1, device_id={"tensor": 0})

    def multiply(x_ref, table_ref, out_ref, *, scaled, multiplied, scaled_rows, block, table, **_):
        pltpu.sync_copy(table_ref, table)

        @pl.loop(0, rounds)
        def _round(_):
            pl.semaphore_wait(scaled, ROWS)
            pltpu.sync_copy(scaled_rows, block)
            block[...] = jnp.dot(block[...], table[...], preferred_element_type=jnp.float32)
            pltpu.sync_copy(block, out_ref)
            for core in range(2):
                pl.semaphore_signal(multiplied, 1, device_id={"core": core})

    kernel = cokernel.mpmd_map(
        [(scalar_mesh, stage), (vector_mesh, scale), (tensor_mesh, multiply)],
        jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32),
        scratch_types={
            "half": pltpu.VMEM_SHARED((SUBCORES, WIDTH), jnp.float32),
            "scaled_rows": pltpu.HBM((ROWS, WIDTH), jnp.float32),
            "row": pltpu.VMEM((WIDTH,), jnp.float32) @ vector_mesh,
            "block": pltpu.VMEM((ROWS, WIDTH), jnp.float32) @ tensor_mesh,
            "table": pltpu.VMEM((WIDTH, WIDTH), jnp.float32) @ tensor_mesh,
            "staged": pltpu.SemaphoreType.REGULAR @ vector_mesh,
            "ready": pltpu.SemaphoreType.REGULAR @ vector_mesh,
            "scaled": pltpu.SemaphoreType.REGULAR @ tensor_mesh,
            "multiplied": pltpu.SemaphoreType.REGULAR @ scalar_mesh,
        },
        compiler_params=compiler_params,
    )
    random = np.random.default_rng(0)
    x = random.integers(-9, 9, (ROWS, WIDTH)).astype(np.float32)
    # One to three entries in each column keep all numbers exact in float32.
    table = (random.random((WIDTH, WIDTH)) < 0.01).astype(np.float32) + np.eye(
        WIDTH, dtype=np.float32
    )
    expected = x
    for _ in range(rounds):
        scaled = expected * 2 + np.arange(ROWS, dtype=np.float32)[:, None]
        expected = scaled @ table
    np.testing.assert_array_equal(kernel(x, table), expected)
