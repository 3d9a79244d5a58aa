"""Embedding lookup with pooling: each bag of row numbers becomes the sum of those table rows.

This is the first layer of a recommendation model. The bags are divided among all vector subcores.
A subcore gathers the rows of one bag while it adds up the rows of the bag before: two buffers, used
in turns.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc


@jax.jit
def run(table, bags):
    """Returns the pooled rows, float32[B, W], of table, float32[R, W], and bags, int32[B, N].

    W is a multiple of 128. N is a multiple of 8, because slices of memory start at every eighth
    word, and at most 128, which is how many row numbers one gather takes. B is a multiple of 8
    times the number of subcores: rows of a tiled array are written eight at a time.
    """
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lanes = plsc.get_sparse_core_info().num_lanes
    num_bags, per_bag = bags.shape
    width = table.shape[1]
    share = num_bags // mesh.size

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((num_bags, width), table.dtype),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((share * per_bag,), jnp.int32),
            pltpu.VMEM((2, per_bag, width), table.dtype),
            pltpu.VMEM((share, width), table.dtype),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )
    def pool(table_ref, bags_ref, out_ref, indices, rows, sums, gathered):
        subcore = lax.axis_index("core") * mesh.num_subcores + lax.axis_index("subcore")
        pltpu.sync_copy(bags_ref.at[pl.ds(subcore * share * per_bag, share * per_bag)], indices)

        def gather(bag):
            # A Ref as an index: the DMA engine reads from it which rows to fetch.
            chosen = table_ref.at[indices.at[pl.ds(bag * per_bag, per_bag)]]
            return pltpu.make_async_copy(chosen, rows.at[bag % 2], gathered.at[bag % 2])

        gather(0).start()

        @pl.loop(0, share)
        def _(bag):
            @pl.when(bag + 1 < share)
            def _():
                gather(bag + 1).start()

            gather(bag).wait()

            # Registers hold one vector of `lanes` elements, so the columns go by in such strips.
            @pl.loop(0, width, step=lanes)
            def _(column):
                strip = pl.ds(column, lanes)
                total = jnp.zeros((lanes,), table.dtype)
                for row in range(per_bag):
                    total += rows[bag % 2, row, strip]
                sums[bag, strip] = total

        pltpu.sync_copy(sums, out_ref.at[pl.ds(subcore * share, share)])

    return pool(table, bags.reshape(-1))


def inputs(random, size):
    """Random arguments for `run`: 512 bags, of 8 rows for each unit of `size`."""
    table = random.standard_normal((1000, 128), np.float32)
    return table, random.integers(0, 1000, (512, 8 * size), np.int32)


def expected(table, bags):
    """What `run` returns, by NumPy."""
    return table[bags].sum(axis=1)


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    np.testing.assert_allclose(run(*arguments), expected(*arguments), rtol=1e-5, atol=1e-5)
    print("every bag has its sum")
