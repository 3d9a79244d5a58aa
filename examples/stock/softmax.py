"""Softmax of long rows, in one pass over memory for the sums and a second for the results.

The first pass keeps, for each row, the greatest element so far and the sum of exponentials relative
to it; when a greater one comes, the sum is scaled. So rows need not fit into the core's memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@jax.jit(static_argnames=("rows", "columns"))
def run(x, rows=8, columns=256):
    """Returns the softmax of each row of x, float32[R, C].

    R and C are multiples of `rows` and `columns`, the block that a step works on, and those of 8
    and 128.
    """
    mesh = pltpu.TensorCoreMesh(axis_name="core")
    grid = x.shape[0] // rows, x.shape[1] // columns
    # One column would do, but the core computes on tiles of 8 by 128 in any case.
    statistic = pltpu.VMEM((rows, 128), jnp.float32)

    @pl.kernel(out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), mesh=mesh)
    def softmax(x_ref, out_ref):
        def block_row(i, greatest, total):
            def measure(x_block):
                @pl.when(pl.program_id(0) == 0)
                def _():
                    greatest[...] = jnp.full_like(greatest, -jnp.inf)
                    total[...] = jnp.zeros_like(total)

                old, values = greatest[...], x_block[...]
                new = jnp.maximum(old, jnp.max(values, axis=1, keepdims=True))
                greatest[...] = new
                exponentials = jnp.exp(values - new[:, :1])
                sums = jnp.sum(exponentials, axis=1, keepdims=True)
                total[...] = total[...] * jnp.exp(old - new) + sums

            def divide(x_block, out_block):
                out_block[...] = jnp.exp(x_block[...] - greatest[:, :1]) / total[:, :1]

            here = pl.BlockSpec((rows, columns), lambda j: (i, j))
            pltpu.emit_pipeline(measure, grid=grid[1:], in_specs=[here])(x_ref)
            pltpu.emit_pipeline(divide, grid=grid[1:], in_specs=[here], out_specs=[here])(
                x_ref, out_ref
            )

        core, cores = jax.lax.axis_index("core"), mesh.num_cores

        @pl.loop(core, grid[0], step=cores)
        def _(i):
            pl.run_scoped(lambda *scratch: block_row(i, *scratch), statistic, statistic)

    return softmax(x)


def inputs(random, size):
    """Random arguments for `run`: 32 rows with 512 columns for each unit of `size`."""
    return (10 * random.standard_normal((32, 512 * size), np.float32),)


def expected(x):
    """What `run` returns, by NumPy."""
    exponentials = np.exp(x - x.max(axis=1, keepdims=True))
    return exponentials / exponentials.sum(axis=1, keepdims=True)


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    np.testing.assert_allclose(run(*arguments), expected(*arguments), rtol=1e-5, atol=1e-8)
    print("every row adds up to one")
