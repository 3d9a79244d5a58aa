"""The incomplete gamma and beta functions and their kin, by JAX's own series and continued
fractions, as XLA has them too."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cokernel import _jax
from cokernel.compiler.ops.traced import traced


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function of operands of one shape, some of which may be scalars, with narrow floats
    computed as float32 and rounded once."""

    def wide(*operands: jax.Array) -> jax.Array:
        # An equation may take a scalar beside arrays; JAX's own code is for equal shapes only.
        operands = tuple(jnp.broadcast_arrays(*operands))
        dtype = operands[0].dtype
        narrow = np.dtype(dtype).itemsize < 4
        if not narrow:
            return function(*operands, dtype=dtype)
        result = function(*(item.astype(np.float32) for item in operands), dtype=np.float32)
        return result.astype(dtype)

    return wide


for _primitive, _function in {
    lax.igamma_p: _jax.special.igamma_impl,
    lax.igammac_p: _jax.special.igammac_impl,
    lax.igamma_grad_a_p: _jax.special.igamma_grad_a_impl,
    lax.regularized_incomplete_beta_p: _jax.special.regularized_incomplete_beta_impl,
}.items():
    traced(_primitive)(_in_float32(_function))

traced(lax.bessel_i0e_p)(_jax.special.bessel_i0e_impl)
