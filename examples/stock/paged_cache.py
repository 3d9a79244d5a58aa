"""Paged key-value cache: the pages of each sequence, scattered in a pool, become contiguous.

This is what a server for language models does before attention. Each vector subcore looks after
some sequences. It gathers eight pages at a time, and gathers the next eight while it writes these.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc


@jax.jit
def run(pool, page_table, lengths):
    """Returns the sequences' tokens, float32[S, P * page_size, D], zero behind their lengths.

    pool is float32[num_pages, page_size, D] and page_table int32[S, P], the page numbers of each
    sequence; those that it does not need are -1. lengths is int32[S], in tokens. P is a multiple of
    8, page_size too, D a multiple of 128, and S one of the number of subcores.
    """
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    num_sequences, num_pages = page_table.shape
    page = pool.shape[1:]
    share = num_sequences * num_pages // mesh.size
    window = 8

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((num_sequences * num_pages, *page), pool.dtype),
        mesh=mesh,
        scratch_types=[
            pltpu.VMEM((share,), jnp.int32),
            pltpu.VMEM((2, window, *page), pool.dtype),
            pltpu.SemaphoreType.DMA((2,)),
            pltpu.SemaphoreType.DMA((2,)),
        ],
    )
    def gather_pages(pool_ref, table_ref, out_ref, numbers, pages, gathered, written):
        subcore = lax.axis_index("core") * mesh.num_subcores + lax.axis_index("subcore")
        pltpu.sync_copy(table_ref.at[pl.ds(subcore * share, share)], numbers)

        def gather(step):
            # Pages that no sequence needs are left out: their place in the buffer stays as it was.
            chosen = plsc.Indices(numbers.at[pl.ds(step * window, window)], ignored_value=-1)
            return pltpu.make_async_copy(
                pool_ref.at[chosen], pages.at[step % 2], gathered.at[step % 2]
            )

        def write(step):
            target = out_ref.at[pl.ds(subcore * share + step * window, window)]
            return pltpu.make_async_copy(pages.at[step % 2], target, written.at[step % 2])

        steps = share // window
        gather(0).start()

        @pl.loop(0, steps)
        def _(step):
            gather(step).wait()
            write(step).start()

            @pl.when(step >= 1)
            def _():
                write(step - 1).wait()  # It reads the buffer that the next gather fills.

            @pl.when(step + 1 < steps)
            def _():
                gather(step + 1).start()

        write(steps - 1).wait()

    tokens = gather_pages(pool, page_table.reshape(-1))
    tokens = tokens.reshape(num_sequences, num_pages * page[0], page[1])
    is_token = jnp.arange(tokens.shape[1]) < lengths[:, None]
    return jnp.where(is_token[:, :, None], tokens, 0)


def inputs(random, size):
    """Random arguments for `run`: 64 sequences of up to 8 pages for each unit of `size`."""
    page_table = random.permutation(np.arange(64 * 8 * size, dtype=np.int32)).reshape(64, 8 * size)
    lengths = random.integers(1, 8 * 8 * size, 64, np.int32, endpoint=True)
    page_table[np.arange(8 * size) * 8 >= lengths[:, None]] = -1
    return random.standard_normal((64 * 8 * size, 8, 128), np.float32), page_table, lengths


def expected(pool, page_table, lengths):
    """What `run` returns, by NumPy."""
    result = pool[page_table].reshape(len(lengths), -1, pool.shape[2])
    return np.where(np.arange(result.shape[1])[:, None] < lengths[:, None, None], result, 0)


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    np.testing.assert_array_equal(run(*arguments), expected(*arguments))
    print("every sequence is in one piece")
