"""Segment sum: rows with the same number are added up, in whatever order they come.

The vector subcores of a SparseCore share the sums. Each sends its rows there with copies that add,
which is safe however many subcores add to the same row.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc


@jax.jit(static_argnames="num_segments")
def run(rows, segments, num_segments=256):
    """Returns sums, float32[num_segments, 128], of rows, float32[N, 128], by segments, int32[N].

    N is a multiple of 128, the rows that one copy adds, times the number of subcores, and
    num_segments one of 8 times the subcores of a SparseCore.
    """
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lanes = plsc.get_sparse_core_info().num_lanes
    window = 128
    num_rows, width = rows.shape
    share = num_rows // mesh.size
    part = num_segments // mesh.num_subcores

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((mesh.num_cores, num_segments, width), rows.dtype),
        mesh=mesh,
        scratch_types={
            "numbers": pltpu.VMEM((window,), jnp.int32),
            "window_rows": pltpu.VMEM((window, width), rows.dtype),
            "my_sums": pltpu.VMEM((part, width), rows.dtype),
            "sums": pltpu.VMEM_SHARED((num_segments, width), rows.dtype),
        },
    )
    def add_up(rows_ref, segments_ref, out_ref, *, numbers, window_rows, my_sums, sums):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        mine = pl.ds(subcore * part, part)

        # Scratch memory holds anything at the start. Each subcore clears its part of the sums.
        @pl.loop(0, part)
        def _(row):
            @pl.loop(0, width, step=lanes)
            def _(column):
                my_sums[row, pl.ds(column, lanes)] = jnp.zeros((lanes,), rows.dtype)

        pltpu.sync_copy(my_sums, sums.at[mine])
        plsc.subcore_barrier()

        first = (core * mesh.num_subcores + subcore) * share

        @pl.loop(0, share, step=window)
        def _(offset):
            here = pl.ds(first + offset, window)
            pltpu.sync_copy(segments_ref.at[here], numbers)
            pltpu.sync_copy(rows_ref.at[here], window_rows)
            # A Ref as an index of the target: row i is added to row numbers[i] of the sums.
            pltpu.sync_copy(window_rows, sums.at[numbers], add=True)

        plsc.subcore_barrier()
        pltpu.sync_copy(sums.at[mine], my_sums)
        pltpu.sync_copy(my_sums, out_ref.at[core, mine])

    # SparseCores share no memory with each other: XLA adds up their sums.
    return add_up(rows, segments).sum(axis=0)


def inputs(random, size):
    """Random arguments for `run`: 8192 rows for each unit of `size`."""
    rows = random.standard_normal((8192 * size, 128), np.float32)
    return rows, random.integers(0, 256, 8192 * size, np.int32)


def expected(rows, segments):
    """What `run` returns, by NumPy."""
    sums = np.zeros((256, rows.shape[1]))
    np.add.at(sums, segments, rows)
    return sums


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    np.testing.assert_allclose(run(*arguments), expected(*arguments), rtol=1e-4, atol=1e-4)
    print("every segment has its sum")
