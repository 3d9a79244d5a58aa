"""Sparse times dense matrix: for each nonzero, a scaled row of one matrix is added to another.

The nonzeros, given by row, column and value, are divided among all vector subcores. A subcore
gathers the dense rows that its columns name, scales them, and adds them to the rows of the product.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc


@jax.jit(static_argnames="num_rows")
def run(rows, columns, values, dense, num_rows=256):
    """Returns the product, float32[num_rows, 128].

    rows, columns and values are int32[N], int32[N] and float32[N], in any order, with N a multiple
    of 128 times the number of subcores: pad with zeros for values. dense is float32[C, 128].
    num_rows is a multiple of 8 times the subcores of a SparseCore.
    """
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lanes = plsc.get_sparse_core_info().num_lanes
    window = 128
    width = dense.shape[1]
    share = values.size // mesh.size
    part = num_rows // mesh.num_subcores

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((mesh.num_cores, num_rows, width), jnp.float32),
        mesh=mesh,
        compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
        scratch_types=[
            pltpu.VMEM((window,), jnp.int32),
            pltpu.VMEM((window,), jnp.int32),
            pltpu.VMEM((window,), jnp.float32),
            pltpu.VMEM((window, width), jnp.float32),
            pltpu.VMEM_SHARED((num_rows, width), jnp.float32),
        ],
    )
    def multiply(rows_ref, columns_ref, values_ref, dense_ref, out_ref, *scratch):
        row_numbers, column_numbers, factors, scaled, product = scratch
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        mine = pl.ds(subcore * part, part)

        @pl.loop(0, part)
        def _(row):
            @pl.loop(0, width, step=lanes)
            def _(column):
                scaled[row, pl.ds(column, lanes)] = jnp.zeros((lanes,), jnp.float32)

        pltpu.sync_copy(scaled.at[pl.ds(0, part)], product.at[mine])
        plsc.subcore_barrier()

        first = (core * mesh.num_subcores + subcore) * share

        @pl.loop(0, share, step=window)
        def _(offset):
            here = pl.ds(first + offset, window)
            pltpu.sync_copy(rows_ref.at[here], row_numbers)
            pltpu.sync_copy(columns_ref.at[here], column_numbers)
            pltpu.sync_copy(values_ref.at[here], factors)
            pltpu.sync_copy(dense_ref.at[column_numbers], scaled)

            @pl.loop(0, window)
            def _(i):
                # Vector memory is read by vectors: the same element for every lane.
                factor = plsc.load_gather(factors, [jnp.full((lanes,), i, jnp.int32)])
                for column in range(0, width, lanes):
                    strip = pl.ds(column, lanes)
                    scaled[i, strip] = scaled[i, strip] * factor

            pltpu.sync_copy(scaled, product.at[row_numbers], add=True)

        plsc.subcore_barrier()
        pltpu.sync_copy(product.at[mine], out_ref.at[core, mine])

    return multiply(rows, columns, values, dense).sum(axis=0)


def inputs(random, size):
    """Random arguments for `run`: 8192 nonzeros for each unit of `size`."""
    count = 8192 * size
    return (
        random.integers(0, 256, count, np.int32),
        random.integers(0, 1000, count, np.int32),
        random.standard_normal(count, np.float32),
        random.standard_normal((1000, 128), np.float32),
    )


def expected(rows, columns, values, dense):
    """What `run` returns, by NumPy."""
    product = np.zeros((256, dense.shape[1]))
    np.add.at(product, rows, values[:, None] * dense[columns])
    return product


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    np.testing.assert_allclose(run(*arguments), expected(*arguments), rtol=1e-4, atol=1e-4)
    print("the product is right")
