"""Matrix product in blocks: bfloat16 in, accumulated in float32, with copies behind the work.

The pipeline copies the blocks that the next step needs while the matrix unit multiplies those of
this one. The TensorCores of a chip, where it has several, divide the blocks of the product.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@jax.jit(static_argnames="block")
def run(a, b, block=128):
    """Returns a @ b, bfloat16[M, N], for bfloat16[M, K] and bfloat16[K, N].

    M, N and K are multiples of `block`, and that one of 128.
    """
    mesh = pltpu.TensorCoreMesh(axis_name="core")
    (rows, inner), columns = a.shape, b.shape[1]
    grid = rows // block, columns // block, inner // block

    @pl.kernel(
        out_type=jax.ShapeDtypeStruct((rows, columns), a.dtype),
        mesh=mesh,
        scratch_types=[pltpu.VMEM((block, block), jnp.float32)],
    )
    def multiply(a_ref, b_ref, out_ref, sums):
        def step(a_block, b_block, out_block):
            @pl.when(pl.program_id(2) == 0)
            def _():
                sums[...] = jnp.zeros_like(sums)

            # The sum over the inner blocks keeps its precision in a buffer of its own.
            sums[...] += jnp.dot(a_block[...], b_block[...], preferred_element_type=jnp.float32)

            @pl.when(pl.program_id(2) == grid[2] - 1)
            def _():
                out_block[...] = sums[...].astype(out_block.dtype)

        pipeline = pltpu.emit_pipeline(
            step,
            grid=grid,
            in_specs=[
                pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
                pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((block, block), lambda i, j, k: (i, j))],
            core_axis_name="core",
            dimension_semantics=(pltpu.PARALLEL, pltpu.PARALLEL, pltpu.ARBITRARY),
        )
        pipeline(a_ref, b_ref, out_ref)

    return multiply(a, b)


def inputs(random, size):
    """Random arguments for `run`, with 256 columns and inner elements for each unit of `size`."""
    a = random.standard_normal((256, 256 * size), np.float32)
    b = random.standard_normal((256 * size, 256 * size), np.float32)
    return a.astype(jnp.bfloat16), b.astype(jnp.bfloat16)


def expected(a, b):
    """What `run` returns, by NumPy in float32."""
    return a.astype(np.float32) @ b.astype(np.float32)


if __name__ == "__main__":
    if jax.default_backend() != "tpu":
        import cokernel.pallas

        cokernel.set_target("tpu7x")
        cokernel.pallas.enable()
    arguments = inputs(np.random.default_rng(0), size=1)
    product = run(*arguments).astype(np.float32)
    np.testing.assert_allclose(product, expected(*arguments), rtol=1e-2, atol=1e-2)
    print("the product is right")
