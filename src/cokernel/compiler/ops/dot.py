"""dot_general: in registers for small operands, by panels or by BLAS for large ones, else by
loops."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from llvmlite import ir

from cokernel import _jax
from cokernel.compiler import blas, dtypes, matrix_product, nests, views
from cokernel.compiler.access import is_same_place, write
from cokernel.compiler.context import Context
from cokernel.compiler.function import ElementBuilder, FunctionBuilder
from cokernel.compiler.ops.apply import convert, emit_elementwise
from cokernel.compiler.ops.combine import Combiner, Fold, working_dtype
from cokernel.compiler.ops.reduce import in_function, reduce_value
from cokernel.compiler.ops.registry import Operation, rule
from cokernel.compiler.probes import Access, probe
from cokernel.compiler.transforms import resolve
from cokernel.compiler.values import Buffer, Value, is_small, make_packed, shuffle

# A product of fewer multiplications is not worth a call of BLAS.
BLAS_MULTIPLICATIONS = 8 * 8 * 8
# A product in registers takes at most so many steps.
REGISTER_STEPS = 64


@rule(lax.dot_general_p)
def dot_general(context: Context, eqn: Any, left: Value, right: Value) -> Value:
    """Sums of products over the contracted dimensions. Narrow floats are summed in float32 and
    rounded once; integers wrap in the result's dtype."""
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    aval = eqn.outvars[0].aval
    result_dtype = np.dtype(aval.dtype)
    if 0 in aval.shape:
        return views.empty(aval.shape, result_dtype)
    dtype, rounded = _dtypes(left.dtype, right.dtype, result_dtype)
    form = None
    if left.dtype == right.dtype and dtype == np.float32:
        form = matrix_product.form_of(left.dtype)
    # Both operands with their dimensions in the order batch, left, sum, right, each without what it
    # lacks.
    left_free = _others(left.shape, [*left_sum, *left_batch])
    right_free = _others(right.shape, [*right_sum, *right_batch])
    batch = [left.shape[dimension] for dimension in left_batch]
    rows = [left.shape[dimension] for dimension in left_free]
    summed = [left.shape[dimension] for dimension in left_sum]
    columns = [right.shape[dimension] for dimension in right_free]
    if 0 in summed:
        nothing = Combiner(Fold.ADD, dtype).identity()
        zeros = views.broadcast_scalar(context, nothing, aval.shape, dtype)
        return convert(context, zeros, result_dtype)
    left = views.take_view(
        context, left, views.transposed(left.shape, [*left_batch, *left_free, *left_sum])
    )
    right = views.take_view(
        context, right, views.transposed(right.shape, [*right_batch, *right_sum, *right_free])
    )
    sizes = tuple(math.prod(extents) for extents in (batch, rows, summed, columns))
    if form is not None and matrix_product.is_worthwhile(*sizes[1:]):
        product = _by_panels(context, form, left, right, sizes)
    else:
        left, right = (_prepared(context, item, result_dtype, dtype) for item in (left, right))
        product = _product(context, dtype, left, right, sizes)
    product = views.reshape(context, product, [*batch, *rows, *columns])
    return convert(context, convert(context, product, rounded), result_dtype)


def store_product(
    context: Context,
    dot: Any,
    factors: Sequence[Value],
    other: Value | None,
    store: Any,
    ref: Any,
    indices: Sequence[Any],
    adds_if: ir.Value | None = None,
) -> bool:
    """Computes a product of two matrices where it is stored to: `ref[...] = dot`, `+= dot`, or
    `= other + dot`. Returns whether it could; if not, nothing has been emitted that matters.
    `adds_if`, an i1, says whether a product is really added that is added to what is there.
    """
    (left_sum, right_sum), (left_batch, _) = dot.params["dimension_numbers"]
    left, right = factors
    ranks = len(left.shape), len(right.shape), len(left_sum), len(left_batch)
    form = matrix_product.form_of(left.dtype) if left.dtype == right.dtype else None
    result = dot.outvars[0].aval
    if ranks != (2, 2, 1, 0) or form is None or result.dtype != np.float32:
        return False
    m, n = result.shape
    if not matrix_product.is_worthwhile(m, left.shape[left_sum[0]], n):
        return False
    if other is not None and (other.shape, other.dtype) != ((m, n), result.dtype):
        return False
    transforms = jax.tree.unflatten(store.params["tree"], indices)
    view = resolve(context, ref, transforms, "write", access=Access.NONE)
    if (
        view.overhang is not None
        or view.indices is not None
        or view.ref.memory in left.roots() | right.roots()
    ):
        return False
    target = view.buffer()
    if target.shape != (m, n) or target.dtype != np.float32 or target.strides[1] != 1:
        return False
    is_sum = store.primitive is _jax.addupdate_p
    is_there = other is None or is_same_place(other, target)
    if adds_if is not None and not is_there:
        return False
    adds = adds_if if adds_if is not None else other is not None or is_sum
    probe(context, view, Access.UPDATE if is_sum else Access.WRITE, "write")
    if other is not None and not is_there:
        write(context, view, other)
    left = views.take_view(
        context, left, views.transposed(left.shape, [1 - left_sum[0], *left_sum])
    )
    right = views.take_view(
        context, right, views.transposed(right.shape, [*right_sum, 1 - right_sum[0]])
    )
    one = _readable(context, left, (1, m, left.shape[1]))
    two = _readable(context, right, (1, right.shape[0], n))
    whole = target.view((1, m, n), (0, *target.strides))
    matrix_product.multiply(context, form, whole, one, two, add=adds)
    return True


def _readable(context: Context, operand: Value, shape: tuple[int, int, int]) -> Buffer:
    """A stack of matrices in memory whose rows or columns have no gaps inside."""
    matrices = views.reshape(context, context.materialise(operand), shape)
    assert isinstance(matrices, Buffer)
    return matrices if matrix_product.is_readable(matrices) else context.copy(matrices)


def _others(shape: Sequence[int], taken: Sequence[int]) -> list[int]:
    return [dimension for dimension in range(len(shape)) if dimension not in taken]


def _dtypes(left: np.dtype, right: np.dtype, result: np.dtype) -> tuple[np.dtype, np.dtype]:
    """The dtype to multiply and sum in, and one to round to before the result is converted to its
    own."""
    if left == right and dtypes.is_float(left):
        if not dtypes.is_float(result):
            return working_dtype(left), left
        return max(working_dtype(left), working_dtype(result), key=lambda d: d.itemsize), result
    return working_dtype(result), result


def _prepared(context: Context, operand: Value, result: np.dtype, dtype: np.dtype) -> Value:
    if dtypes.is_float(operand.dtype) and dtypes.is_float(dtype):
        return convert(context, operand, dtype)
    # Operands of different kinds meet in the result's dtype.
    return convert(context, convert(context, operand, result), dtype)


def _product(
    context: Context, dtype: np.dtype, left: Value, right: Value, sizes: Sequence[int]
) -> Value:
    """The product of left (batch, m, k) and right (batch, k, n), whose dimensions are still those
    of the operands; the result has the shape (batch, m, n)."""
    batch, m, k, n = sizes
    multiplications = m * k * n
    fits = all(
        is_small((extent,), dtype) for extent in (batch * m * k, batch * k * n, batch * m * n)
    )
    if fits and 1 < k <= REGISTER_STEPS and batch * multiplications > 64:
        return _in_registers(context, dtype, left, right, sizes)
    if blas.is_supported(dtype) and min(m, k, n) > 1 and multiplications >= BLAS_MULTIPLICATIONS:
        return _by_blas(context, dtype, left, right, sizes)
    left = views.reshape(context, left, (batch, m, k))
    right = views.reshape(context, right, (batch, k, n))
    return _by_loops(context, dtype, left, right)


def _in_registers(
    context: Context, dtype: np.dtype, left: Value, right: Value, sizes: Sequence[int]
) -> Value:
    """One multiplication and addition of whole results for each summed element."""
    batch, m, k, n = sizes
    function = context.function
    shape = (batch, m, n)
    left_lanes = np.arange(batch * m * k).reshape(batch, m, k)
    right_lanes = np.arange(batch * k * n).reshape(batch, k, n)
    left_register, right_register = context.pack(left), context.pack(right)
    builder = ElementBuilder(function, math.prod(shape))
    add, multiply = Combiner(Fold.ADD, dtype), Combiner(Fold.MULTIPLY, dtype)
    total = builder.splat(add.identity())
    for step in range(k):
        column = np.broadcast_to(left_lanes[:, :, step, None], shape).ravel().tolist()
        row = np.broadcast_to(right_lanes[:, step, None, :], shape).ravel().tolist()
        one = shuffle(function, left_register, column)
        other = shuffle(function, right_register, row)
        total = add(builder, total, multiply(builder, one, other))
    return make_packed(shape, dtype, total)


def _multiply_element(
    builder: ElementBuilder, operation: Operation, left: ir.Value, right: ir.Value
) -> ir.Value:
    return Combiner(Fold.MULTIPLY, operation.result_dtype)(builder, left, right)


def _by_loops(context: Context, dtype: np.dtype, left: Value, right: Value) -> Value:
    """The sum over an array of all products, which is never stored. Its last dimension is the one
    along which the right operand lies in memory, because the innermost loop runs along it."""
    batch, m, k = left.shape
    n = right.shape[2]
    if k == 1:
        # Nothing to sum: the product of two numbers, whose zero may be negative.
        shape = (batch, m, n)
        one, other = (
            views.take_view(context, item, views.broadcast(item.shape, shape, (0, 1, 2)))
            for item in (left, right)
        )
        return emit_elementwise(context, _multiply_element, shape, dtype, one, other)
    is_row_major = not (isinstance(right, Buffer) and abs(right.strides[1]) < abs(right.strides[2]))
    if n > 1 and is_row_major:
        whole, axis = (batch, m, k, n), 2
        left_dimensions, right_dimensions = (0, 1, 2), (0, 2, 3)
    else:
        whole, axis = (batch, m, n, k), 3
        left_dimensions, right_dimensions = (0, 1, 3), (0, 3, 2)
    one = views.take_view(context, left, views.broadcast(left.shape, whole, left_dimensions))
    other = views.take_view(context, right, views.broadcast(right.shape, whole, right_dimensions))
    products = emit_elementwise(context, _multiply_element, whole, dtype, one, other)
    return reduce_value(context, Fold.ADD, products, [axis])


def _by_blas(
    context: Context, dtype: np.dtype, left: Value, right: Value, sizes: Sequence[int]
) -> Value:
    batch, m, k, n = sizes
    one = _as_matrices(context, left, (batch, m, k))
    other = _as_matrices(context, right, (batch, k, n))
    target = nests.dense_buffer(context, (batch, m, n), dtype)

    def build(
        function: FunctionBuilder, out: Buffer | None, values: list[Value]
    ) -> Sequence[ir.Value]:
        assert out is not None
        with function.nest([batch]) as index:
            operands = [
                (matrix.element_address(function, [*index, 0, 0]), *_leading(matrix))
                for matrix in values
                if isinstance(matrix, Buffer)
            ]
            place = out.element_address(function, [*index, 0, 0])
            blas.matrix_product(function, dtype, (m, k, n), operands[0], operands[1], place)
        return []

    in_function(context, "product", target, [one, other], [], build)
    return target


def _by_panels(
    context: Context, form: matrix_product.Form, left: Value, right: Value, sizes: Sequence[int]
) -> Value:
    batch, m, k, n = sizes
    one = _readable(context, left, (batch, m, k))
    other = _readable(context, right, (batch, k, n))
    target = nests.dense_buffer(context, (batch, m, n), np.dtype(np.float32))
    matrix_product.multiply(context, form, target, one, other, add=False)
    return target


def _as_matrices(context: Context, operand: Value, shape: tuple[int, int, int]) -> Buffer:
    """A stack of matrices that BLAS can read: rows or columns without gaps inside."""
    matrices = views.reshape(context, context.materialise(operand), shape)
    assert isinstance(matrices, Buffer)
    _, rows, columns = matrices.strides
    row_extent, column_extent = shape[1:]
    by_rows = (columns == 1 or column_extent == 1) and rows >= column_extent
    by_columns = (rows == 1 or row_extent == 1) and columns >= row_extent
    if not by_rows and not by_columns:
        return context.copy(matrices)
    return matrices


def _leading(matrices: Buffer) -> tuple[int, bool]:
    """The distance between rows, or between columns of a matrix that lies transposed; and which of
    them."""
    column_extent = matrices.shape[2]
    _, rows, columns = matrices.strides
    if (columns == 1 or column_extent == 1) and rows >= column_extent:
        return rows, False
    return columns, True
