"""`ragged_dot_general`: products of groups of rows with a matrix for each group."""

from typing import Any

import jax

from cokernel import _jax
from cokernel.compiler.ops.traced import traced


@traced(_jax.ragged_dot_general_p)
def ragged_dot_general(left: jax.Array, right: jax.Array, sizes: jax.Array, **params: Any) -> Any:
    """One product over the groups and what is contracted, of operands in which the rows of other
    groups are zero."""
    return _jax.ragged_dot_general_impl(left, right, sizes, **params)
