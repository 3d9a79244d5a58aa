"""`ragged_dot_general`: products of groups of rows with a matrix for each group."""

import functools
from typing import Any

import jax
import numpy as np

from cokernel import _jax
from cokernel.compiler.ops import floats
from cokernel.compiler.ops.traced import traced


@traced(_jax.ragged_dot_general_p)
def ragged_dot_general(left: jax.Array, right: jax.Array, sizes: jax.Array, **params: Any) -> Any:
    """One product over the groups and what is contracted, of operands in which the rows of other
    groups are zero."""
    if floats.POWERS_OF_TWO in (left.dtype, right.dtype):
        # Zero is no number of that dtype.
        multiply = functools.partial(_jax.ragged_dot_general_p.bind, **params)
        dtype = jax.eval_shape(multiply, left, right, sizes).dtype
        wide = {**params, "preferred_element_type": np.float32}
        left, right = left.astype(np.float32), right.astype(np.float32)
        return _jax.ragged_dot_general_impl(left, right, sizes, **wide).astype(dtype)
    return _jax.ragged_dot_general_impl(left, right, sizes, **params)
