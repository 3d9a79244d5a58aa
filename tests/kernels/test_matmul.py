"""Matrix products in blocks, the next blocks on their way while the present ones are multiplied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

BLOCK = 128


@pytest.fixture
def operands() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    # Integers small enough that every partial sum is exact in float32.
    left = random.integers(-4, 4, (2 * BLOCK, 3 * BLOCK)).astype(np.float32)
    right = random.integers(-4, 4, (3 * BLOCK, 2 * BLOCK)).astype(np.float32)
    return left, right


@pytest.mark.parametrize("num_cores", [1, 2])
def test_double_buffered_by_hand(num_cores, operands, compiler_params):
    left, right = operands
    rows, depth = left.shape
    columns = right.shape[1]
    steps = depth // BLOCK
    rows_per_core = rows // num_cores

    def multiply(left_ref, right_ref, out_ref, left_block, right_block, total, loaded, stored):
        first_row = lax.axis_index("core") * rows_per_core
        blocks = (rows_per_core // BLOCK) * (columns // BLOCK)

        def place(block):
            row = first_row + block // (columns // BLOCK) * BLOCK
            return pl.ds(row, BLOCK), pl.ds(block % (columns // BLOCK) * BLOCK, BLOCK)

        def loads(number):
            # Step `number` of all blocks in a row, so that a block's last step loads for the next.
            block, step, slot = number // steps, number % steps, number % 2
            row, column = place(block)
            inner = pl.ds(step * BLOCK, BLOCK)
            return (
                pltpu.make_async_copy(
                    left_ref.at[row, inner], left_block.at[slot], loaded.at[slot, 0]
                ),
                pltpu.make_async_copy(
                    right_ref.at[inner, column], right_block.at[slot], loaded.at[slot, 1]
                ),
            )

        for load in loads(0):
            load.start()

        @pl.loop(0, blocks * steps)
        def _step(number):
            @pl.when(number + 1 < blocks * steps)
            def _prefetch():
                for load in loads(number + 1):
                    load.start()

            for load in loads(number):
                load.wait()
            slot = number % 2

            @pl.when(number % steps == 0)
            def _clear():
                total[...] = jnp.zeros_like(total)

            total[...] += jnp.dot(
                left_block[slot], right_block[slot], preferred_element_type=jnp.float32
            )

            @pl.when(number % steps == steps - 1)
            def _store():
                store = pltpu.make_async_copy(total, out_ref.at[place(number // steps)], stored)
                store.start()
                store.wait()

    kernel = cokernel.kernel(
        multiply,
        jax.ShapeDtypeStruct((rows, columns), jnp.float32),
        mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=num_cores),
        scratch_types=[
            pltpu.VMEM((2, BLOCK, BLOCK), jnp.float32),
            pltpu.VMEM((2, BLOCK, BLOCK), jnp.float32),
            pltpu.VMEM((BLOCK, BLOCK), jnp.float32),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=compiler_params,
    )
    np.testing.assert_array_equal(kernel(left, right), left @ right)


def test_pipelined_by_emit_pipeline(operands, v6e, compiler_params):
    left, right = operands
    grid = (left.shape[0] // BLOCK, right.shape[1] // BLOCK, left.shape[1] // BLOCK)

    def multiply(left_ref, right_ref, out_ref):
        def step(left_block, right_block, out_block):
            @pl.when(pl.program_id(2) == 0)
            def _clear():
                out_block[...] = jnp.zeros_like(out_block)

            out_block[...] += jnp.dot(
                left_block[...], right_block[...], preferred_element_type=jnp.float32
            )

        pltpu.emit_pipeline(
            step,
            grid=grid,
            in_specs=[
                pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, k)),
                pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((BLOCK, BLOCK), lambda i, j, k: (i, j))],
        )(left_ref, right_ref, out_ref)

    kernel = cokernel.kernel(
        multiply,
        jax.ShapeDtypeStruct((left.shape[0], right.shape[1]), jnp.float32),
        mesh=pltpu.TensorCoreMesh(axis_name="core", num_cores=1),
        compiler_params=compiler_params,
    )
    np.testing.assert_array_equal(kernel(left, right), left @ right)
