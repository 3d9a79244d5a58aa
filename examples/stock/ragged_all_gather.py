"""Ragged all-gather: every subcore receives the rows of all, of which each brings another number.

The vector subcores of a SparseCore announce how many rows they bring, wait for each other, and put
their rows behind those of the subcores before them, without gaps. Then each takes all of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc


@jax.jit
def run(rows, counts):
    """Returns what each subcore received, float32[cores, subcores, subcores * M, 128].

    rows is float32[cores, subcores, M, 128], for the SparseCores and their subcores of the chip,
    and counts int32[cores, subcores], between 0 and M. M is a multiple of 8. Rows of the result
    that nobody brought are zero.
    """
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lanes = plsc.get_sparse_core_info().num_lanes
    subcores = mesh.num_subcores
    most, width = rows.shape[2:]

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((*rows.shape[:2], subcores * most, width), rows.dtype),
        mesh=mesh,
        compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
        scratch_types=[
            pltpu.VMEM((lanes,), jnp.int32),
            pltpu.VMEM((subcores * lanes,), jnp.int32),
            pltpu.VMEM((most, width), rows.dtype),
            pltpu.VMEM_SHARED((subcores * lanes,), jnp.int32),
            pltpu.VMEM_SHARED((subcores * most, width), rows.dtype),
        ],
    )
    def gather(rows_ref, counts_ref, out_ref, my_count, counts, my_rows, all_counts, all_rows):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")

        @pl.loop(0, most)
        def _(row):
            @pl.loop(0, width, step=lanes)
            def _(column):
                my_rows[row, pl.ds(column, lanes)] = jnp.zeros((lanes,), rows.dtype)

        pltpu.sync_copy(my_rows, all_rows.at[pl.ds(subcore * most, most)])

        # A count takes a whole vector, with itself in every lane.
        here = pl.ds((core * subcores + subcore) * lanes, lanes)
        pltpu.sync_copy(counts_ref.at[here], my_count)
        pltpu.sync_copy(my_count, all_counts.at[pl.ds(subcore * lanes, lanes)])
        plsc.subcore_barrier()
        pltpu.sync_copy(all_counts, counts)

        def add_if_before_me(other, total):
            return total + jnp.where(other < subcore, counts[pl.ds(other * lanes, lanes)], 0)

        first = lax.fori_loop(0, subcores, add_if_before_me, jnp.zeros((lanes,), jnp.int32))
        first = jnp.max(first)
        pltpu.sync_copy(rows_ref.at[core, subcore], my_rows)

        # The length of a copy is known when the kernel is compiled, so rows go one by one.
        @pl.loop(0, jnp.max(my_count[...]))
        def _(row):
            pltpu.sync_copy(my_rows.at[pl.ds(row, 1)], all_rows.at[pl.ds(first + row, 1)])

        plsc.subcore_barrier()
        pltpu.sync_copy(all_rows, out_ref.at[core, subcore])

    return gather(rows, jnp.repeat(counts.reshape(-1), lanes))


def inputs(random, size):
    """Random arguments for `run`: up to 8 rows from each subcore for each unit of `size`."""
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    shape = mesh.num_cores, mesh.num_subcores
    counts = random.integers(0, 8 * size, shape, np.int32, endpoint=True)
    return random.standard_normal((*shape, 8 * size, 128), np.float32), counts


def expected(rows, counts):
    """What `run` returns, by NumPy."""
    cores, subcores, most, width = rows.shape
    result = np.zeros((cores, subcores, subcores * most, width), np.float32)
    for core in range(cores):
        joined = np.concatenate([rows[core, i, : counts[core, i]] for i in range(subcores)])
        result[core, :, : len(joined)] = joined
    return result


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    np.testing.assert_array_equal(run(*arguments), expected(*arguments))
    print("every subcore has the rows of all")
