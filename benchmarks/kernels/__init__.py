"""The kernels that are measured, in the plain language of Pallas.

Each function builds one kernel with `make`, which is `cokernel.kernel`, or `pl.kernel` to run the
same kernel under JAX's interpret modes. Kernels for a SparseCore are meant for a chip with two of
them, of sixteen vector subcores each, so call them inside `cokernel.target("v6e")`.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax.experimental.pallas import tpu_sc as plsc

SUBCORES = 32
LANES = 16
Make = Callable[..., Callable]


def vector_mesh() -> plsc.VectorSubcoreMesh:
    """Returns the mesh of all vector subcores of the chip."""
    return plsc.VectorSubcoreMesh(
        core_axis_name="core", subcore_axis_name="subcore", num_cores=2, num_subcores=16
    )


def subcore() -> jax.Array:
    """Returns the number of the calling vector subcore among all of them."""
    return lax.axis_index("core") * 16 + lax.axis_index("subcore")
