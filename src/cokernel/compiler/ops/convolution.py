"""Convolutions as products: the windows of the padded operand are a view of it, and what is left is
a `dot_general` over the features and the window.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from cokernel.compiler import views
from cokernel.compiler.context import Context
from cokernel.compiler.ops.apply import apply
from cokernel.compiler.ops.registry import rule
from cokernel.compiler.ops.windows import padded, sliding
from cokernel.compiler.values import Scalar, Value, constant


@rule(lax.conv_general_dilated_p)
def conv_general_dilated(context: Context, eqn: Any, left: Value, right: Value) -> Value:
    """A convolution of any rank, strided, dilated on either side, in groups of features or of the
    batch."""
    params = eqn.params
    numbers = params["dimension_numbers"]
    aval = eqn.outvars[0].aval
    features, batches = params["feature_group_count"], params["batch_group_count"]
    # Batch and features in front, as (batch, features, *space) and (outputs, inputs, *window).
    left = _transposed(context, left, numbers.lhs_spec)
    right = _transposed(context, right, numbers.rhs_spec)
    rank = len(left.shape) - 2
    nothing = ((0, 0),) * 2
    zero = Scalar((), left.dtype, constant(0, left.dtype).register)
    left = padded(
        context, left, zero, (*nothing, *params["padding"]), (1, 1, *params["lhs_dilation"])
    )
    window = right.shape[2:]
    # (batch, features, *places, 1, 1, *window)
    patches = sliding(
        context,
        left,
        (1, 1, *window),
        (1, 1, *params["window_strides"]),
        (1, 1, *params["rhs_dilation"]),
    )
    batch, inputs = left.shape[:2]
    places = patches.shape[2 : 2 + rank]
    groups = features * batches
    patches = views.reshape(
        context,
        patches,
        (batches, batch // batches, features, inputs // features, *places, *window),
    )
    # (groups, batch, inputs, *places, *window); one of the two kinds of groups has one member.
    patches = _transposed(context, patches, (0, 2, 1, 3, *range(4, 4 + 2 * rank)))
    patches = views.reshape(
        context,
        patches,
        (groups, batch // batches, inputs // features, *places, *window),
    )
    outputs = right.shape[0]
    right = views.reshape(context, right, (groups, outputs // groups, *right.shape[1:]))
    summed_left = (2, *range(3 + rank, 3 + 2 * rank))
    summed_right = (2, *range(3, 3 + rank))
    product = _dot(
        context,
        patches,
        right,
        (summed_left, summed_right),
        (groups, batch // batches, *places, outputs // groups),
        aval.dtype,
    )
    # From (groups, batch, *places, outputs) to (batch, groups * outputs, *places).
    product = _transposed(context, product, (1, 0, 2 + rank, *range(2, 2 + rank)))
    product = views.reshape(context, product, (batch // batches, outputs, *places))
    back = np.argsort(numbers.out_spec).tolist()
    return _transposed(context, product, back)


def _transposed(context: Context, operand: Value, permutation: Sequence[int]) -> Value:
    if tuple(permutation) == tuple(range(len(operand.shape))):
        return operand
    return views.take_view(context, operand, views.transposed(operand.shape, permutation))


def _dot(
    context: Context,
    left: Value,
    right: Value,
    summed: tuple[Sequence[int], Sequence[int]],
    shape: Sequence[int],
    dtype: Any,
) -> Value:
    return apply(
        context,
        lax.dot_general_p,
        shape,
        dtype,
        left,
        right,
        dimension_numbers=(summed, ((0,), (0,))),
        preferred_element_type=np.dtype(dtype),
    )
