"""Histogram: how often each bin occurs among many integers.

Every vector subcore counts its share in its own memory. Then the subcores of a SparseCore lay their
counts side by side in the memory that they share, and each adds up one part of the bins.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc


@jax.jit(static_argnames="num_bins")
def run(values, num_bins=1024):
    """Returns the counts, int32[num_bins], of values, int32[N], all from 0 to num_bins - 1.

    N is a multiple of 1024 times the number of subcores, and num_bins a multiple of the lanes times
    the subcores of one SparseCore.
    """
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lanes = plsc.get_sparse_core_info().num_lanes
    window = 1024
    share = values.size // mesh.size
    part = num_bins // mesh.num_subcores

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((mesh.num_cores * num_bins,), jnp.int32),
        mesh=mesh,
        compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
        scratch_types=[
            pltpu.VMEM((window,), jnp.int32),
            pltpu.VMEM((num_bins,), jnp.int32),
            pltpu.VMEM((mesh.num_subcores, part), jnp.int32),
            pltpu.VMEM((part,), jnp.int32),
            pltpu.VMEM_SHARED((mesh.num_subcores * num_bins,), jnp.int32),
        ],
    )
    def count(values_ref, out_ref, buffer, counts, columns, sums, everyones):
        core, subcore = lax.axis_index("core"), lax.axis_index("subcore")
        start = (core * mesh.num_subcores + subcore) * share

        @pl.loop(0, num_bins, step=lanes)
        def _(i):
            counts[pl.ds(i, lanes)] = jnp.zeros((lanes,), jnp.int32)

        @pl.loop(0, share, step=window)
        def _(offset):
            pltpu.sync_copy(values_ref.at[pl.ds(start + offset, window)], buffer)

            @pl.loop(0, window, step=lanes)
            def _(i):
                bins = buffer[pl.ds(i, lanes)]
                # A bin may occur more than once in a vector: its last lane adds them all.
                occurrence, is_last = plsc.scan_count(bins)
                plsc.addupdate_scatter(counts, [bins], occurrence, mask=is_last)

        pltpu.sync_copy(counts, everyones.at[pl.ds(subcore * num_bins, num_bins)])
        plsc.subcore_barrier()
        for other in range(mesh.num_subcores):
            theirs = everyones.at[pl.ds(other * num_bins + subcore * part, part)]
            pltpu.sync_copy(theirs, columns.at[other])

        @pl.loop(0, part, step=lanes)
        def _(i):
            strip = pl.ds(i, lanes)
            sums[strip] = sum(columns[other, strip] for other in range(mesh.num_subcores))

        pltpu.sync_copy(sums, out_ref.at[pl.ds(core * num_bins + subcore * part, part)])

    # SparseCores share no memory with each other: XLA adds up their histograms.
    return count(values).reshape(mesh.num_cores, num_bins).sum(axis=0)


def inputs(random, size):
    """Random arguments for `run`; every second value is the same, as in real data."""
    values = random.integers(0, 1024, 65536 * size, np.int32)
    values[::2] = 7
    return (values,)


def expected(values):
    """What `run` returns, by NumPy."""
    return np.bincount(values, minlength=1024)


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    np.testing.assert_array_equal(run(*arguments), expected(*arguments))
    print("every value is counted")
