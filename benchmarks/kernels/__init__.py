"""The kernels that are measured, in the plain language of Pallas.

Each function builds one kernel with `make`, which is `cokernel.kernel`, or `pl.kernel` to run the
same kernel under JAX's interpret modes. They are meant for a chip whose two SparseCores have
sixteen vector subcores each, with sixteen lanes, so call them inside `cokernel.target(CHIP)`.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax.experimental.pallas import tpu_sc as plsc

CHIP = "7x"
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
