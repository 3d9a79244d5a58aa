"""Top-k: the greatest values of each row and where they are, by merging sorted vectors.

A vector subcore sorts one vector in one instruction. It keeps the best so far in descending order.
The greater of them and of the next vector in ascending order, lane by lane, are the best of both.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc


@jax.jit(static_argnames="k")
def run(scores, k=8):
    """Returns the greatest k of each row, descending, and their columns.

    They are float32[R, k] and int32[R, k]. scores is float32[R, C], with R a multiple of 8 times
    the number of subcores, and C of 128. k is at most the number of lanes, which is 8 or 16.
    """
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    lanes = plsc.get_sparse_core_info().num_lanes
    num_rows, num_columns = scores.shape
    share = num_rows // mesh.size

    @pl.kernel(
        out_type=[
            jax.ShapeDtypeStruct((num_rows * lanes,), jnp.float32),
            jax.ShapeDtypeStruct((num_rows * lanes,), jnp.int32),
        ],
        mesh=mesh,
        compiler_params=pltpu.CompilerParams(needs_layout_passes=False),
        scratch_types=[
            pltpu.VMEM((share, num_columns), jnp.float32),
            pltpu.VMEM((share * lanes,), jnp.float32),
            pltpu.VMEM((share * lanes,), jnp.int32),
        ],
    )
    def select(scores_ref, values_ref, columns_ref, rows, values, columns):
        subcore = lax.axis_index("core") * mesh.num_subcores + lax.axis_index("subcore")
        pltpu.sync_copy(scores_ref.at[pl.ds(subcore * share, share)], rows)
        lane = lax.iota(jnp.int32, lanes)

        @pl.loop(0, share)
        def _(row):
            nothing = jnp.full((lanes,), -jnp.inf, jnp.float32), jnp.zeros((lanes,), jnp.int32)

            def merge(strip, best):
                best_values, best_columns = best
                column = strip * lanes
                # Ascending, while the best so far are descending.
                new_values, new_columns = plsc.sort_key_val(
                    rows[row, pl.ds(column, lanes)], column + lane
                )
                is_new = new_values > best_values
                return tuple(
                    plsc.sort_key_val(
                        jnp.where(is_new, new_values, best_values),
                        jnp.where(is_new, new_columns, best_columns),
                        descending=True,
                    )
                )

            best_values, best_columns = lax.fori_loop(0, num_columns // lanes, merge, nothing)
            values[pl.ds(row * lanes, lanes)] = best_values
            columns[pl.ds(row * lanes, lanes)] = best_columns

        part = pl.ds(subcore * share * lanes, share * lanes)
        pltpu.sync_copy(values, values_ref.at[part])
        pltpu.sync_copy(columns, columns_ref.at[part])

    return tuple(out.reshape(num_rows, lanes)[:, :k] for out in select(scores))


def inputs(random, size):
    """Random arguments for `run`: rows of different numbers in no order."""
    return (random.permuted(np.tile(np.arange(128.0 * size, dtype=np.float32), (512, 1)), axis=1),)


def expected(scores, k=8):
    """What `run` returns, by NumPy."""
    columns = np.argsort(-scores, axis=1)[:, :k]
    return np.take_along_axis(scores, columns, axis=1), columns


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    for ours, right in zip(run(*arguments), expected(*arguments), strict=True):
        np.testing.assert_array_equal(ours, right)
    print("every row has its greatest values")
