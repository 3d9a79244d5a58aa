"""Primitives that move, fold, order or multiply elements give XLA's results for every dtype that
they take.
"""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from cokernel import _jax
from tests.compiler.ops.every_dtype import (
    ANY,
    FLOATING,
    NUMBERS,
    Case,
    bits,
    expect_like_xla,
    expect_refused,
    plainer,
)
from tests.compiler.ops.forms import INTEGERS, name_of

TPU = _jax.tpu_primitives
Mode = lax.GatherScatterMode
MODES = (Mode.CLIP, Mode.FILL_OR_DROP)


@jax.custom_jvp
def reversed_by_custom_jvp(a):
    return a[::-1]


@jax.custom_vjp
def reversed_by_custom_vjp(a):
    return a[::-1]


reversed_by_custom_jvp.defjvp(lambda a, tangents: (a, tangents))
reversed_by_custom_vjp.defvjp(lambda a: (a, None), lambda residual, cotangent: (cotangent,))


def ordinary(x):
    """No denormals, which a processor may take for zeros while it orders them; and one NaN only, of
    the many that top_k puts in order."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    x = jnp.where(jnp.isnan(x), jnp.full_like(x, jnp.nan), x)
    if x.dtype.itemsize == 1:
        return x
    return jnp.where(lax.abs(x) < jnp.finfo(x.dtype).tiny, x * 0, x)


def large(x):
    """Numbers of which no sum of exponentials has a logarithm near zero, where ulps are small."""
    return lax.max(lax.abs(ordinary(x)), jnp.ones_like(x))


def logarithms(x):
    """In float32 at least, since XLA rounds each of the sums."""
    wide = jnp.promote_types(x.a.dtype, jnp.float32)
    return lax.cumlogsumexp(large(x.a).astype(wide), 1).astype(x.a.dtype)


def whole(x):
    """Numbers whose sums and products do not depend on their order: floats become -1, 0, 1, or what
    is not finite, and so few of them that even narrow ones hold their sums."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return lax.select(lax.is_finite(x), lax.sign(x), x)[:6]


def scattered(function, prepare=lambda x: x, modes=MODES):
    def both(x):
        operand, updates = prepare(x.a), prepare(x.b)
        numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
        rows = (x.places[0] + jnp.arange(updates.shape[0]))[:, None]
        return [function(operand, rows, updates, numbers, mode=mode) for mode in modes]

    return both


def windows(function):
    return lambda x: function(whole(x.a), (2, 3), (1, 2), "SAME")


def extremes_of_two(x):
    return lax.reduce(
        (ordinary(x.a), ordinary(x.b)),
        (ordinary(x.a)[0, 0], ordinary(x.b)[0, 0]),
        lambda left, right: (lax.max(left[0], right[0]), lax.min(left[1], right[1])),
        (1,),
    )


def folded_by_a_function(x):
    return lax.reduce_window(
        x.a,
        x.b[0, 0],
        lambda left, right: lax.max(left, lax.min(right, right)),
        (2, 3),
        (2, 1),
        "VALID",
    )


def products(x):
    a, b = whole(x.a), whole(x.b)
    return [
        lax.dot_general(a[:, :6], b[:, :6], (((1,), (1,)), ((), ()))),
        lax.dot_general(a[:3], b[:3], (((0,), (0,)), ((), ()))),
    ]


def convolution(x):
    left, right = whole(x.a)[None, :3, :20], whole(x.b)[:3, 1:4].reshape(3, 3, 1)
    return lax.conv_general_dilated(
        left, right.transpose(2, 0, 1), (2,), ((1, 1),), dimension_numbers=("NCW", "OIW", "NCW")
    )


def ragged(x):
    sizes = jnp.stack([x.places[0] % 3, x.places[2] % 3])
    return lax.ragged_dot(whole(x.a)[:, :3], whole(x.b)[:2, :12].reshape(2, 3, 4), sizes)


def pooled_backward(x):
    return lax.select_and_scatter_add_p.bind(
        whole(x.b)[:3, :25],
        ordinary(x.a)[:6],
        select_prim=lax.ge_p,
        window_dimensions=(2, 2),
        window_strides=(2, 2),
        padding=((0, 0), (0, 0)),
    )


def window(primitive, prepare, **size):
    params = {"window_strides": (1, 2), "padding": ((1, 0), (0, 1))}
    none = {"base_dilation": (1, 1), "window_dilation": (1, 1)}
    return lambda x: primitive.bind(prepare(x.a), **params, **none, **size)


def reduction(primitive, prepare=ordinary, axes=(0, 1), **params):
    return lambda x: [primitive.bind(prepare(x.a), axes=(axis,), **params) for axis in axes]


# What moves elements, which for XLA are their bits.
MOVES = (
    Case(lax.broadcast_in_dim_p, lambda x: lax.broadcast_in_dim(x.a, (6, 2, 50), (0, 2))),
    Case(lax.reshape_p, lambda x: lax.reshape(x.a, (3, 100))),
    Case(lax.transpose_p, lambda x: lax.transpose(x.a, (1, 0))),
    Case(lax.rev_p, lambda x: lax.rev(x.a, (0, 1))),
    Case(lax.slice_p, lambda x: lax.slice(x.a, (1, 3), (6, 50), (2, 5))),
    Case(lax.squeeze_p, lambda x: lax.squeeze(x.a[:1], (0,))),
    Case(lax.concatenate_p, lambda x: lax.concatenate([x.a, x.b[:, :7]], 1)),
    Case(lax.pad_p, lambda x: lax.pad(x.a, x.b[0, 0], ((-1, 2, 1), (3, -4, 0)))),
    Case(lax.split_p, lambda x: lax.split(x.a, (20, 30), axis=1)),
    Case(lax.stack_p, lambda x: lax.stack([x.a, x.b], axis=1)),
    Case(lax.unstack_p, lambda x: lax.unstack(x.a, axis=0)),
    Case(lax.tile_p, lambda x: lax.tile(x.a, (2, 3))),
    Case(
        lax.dynamic_slice_p, lambda x: lax.dynamic_slice(x.a, (x.places[0], x.places[1]), (3, 20))
    ),
    Case(
        lax.dynamic_update_slice_p,
        lambda x: lax.dynamic_update_slice(x.a, x.b[:3, :20], (x.places[0], x.places[1])),
    ),
    Case(lax.scatter_p, scattered(lax.scatter)),
    Case(_jax.jit_p, lambda x: jax.jit(lambda a: a[::-1])(x.a)),
    Case(_jax.remat_p, lambda x: jax.checkpoint(lambda a: a[::-1])(x.a)),
    Case(_jax.custom_jvp_call_p, lambda x: reversed_by_custom_jvp(x.a)),
    Case(_jax.custom_vjp_call_p, lambda x: reversed_by_custom_vjp(x.a)),
    Case(lax.scan_p, lambda x: lax.scan(lambda carry, row: (row, carry), x.b[0], x.a)),
    Case(
        lax.while_p,
        lambda x: lax.fori_loop(0, x.places[0] % 5, lambda i, rows: rows[::-1], (x.a, x.b)),
    ),
    Case(lax.cond_p, lambda x: lax.cond(x.places[0] > 2, lambda: x.a, lambda: x.b)),
    Case(TPU.roll_p, lambda x: pltpu.roll(x.a, 3, 1), reference=lambda x: jnp.roll(x.a, 3, 1)),
)

# What folds, orders and multiplies them.
FOLDS = (
    # Without clipping, which would change one row twice, and floats would be rounded twice.
    Case(lax.scatter_add_p, scattered(lax.scatter_add, whole, MODES[1:]), NUMBERS),
    Case(lax.scatter_sub_p, scattered(lax.scatter_sub, whole, MODES[1:]), NUMBERS),
    Case(lax.scatter_mul_p, scattered(lax.scatter_mul, whole, MODES[1:]), NUMBERS),
    Case(lax.scatter_min_p, scattered(lax.scatter_min, ordinary)),
    Case(lax.scatter_max_p, scattered(lax.scatter_max, ordinary)),
    Case(lax.reduce_max_p, reduction(lax.reduce_max_p, out_sharding=None)),
    Case(lax.reduce_min_p, reduction(lax.reduce_min_p, out_sharding=None)),
    Case(lax.reduce_sum_p, reduction(lax.reduce_sum_p, whole, (0,), out_sharding=None), NUMBERS),
    Case(lax.reduce_prod_p, reduction(lax.reduce_prod_p, whole, (0,), out_sharding=None), NUMBERS),
    Case(lax.reduce_and_p, reduction(lax.reduce_and_p), (jnp.bool_, *INTEGERS)),
    Case(lax.reduce_or_p, reduction(lax.reduce_or_p), (jnp.bool_, *INTEGERS)),
    Case(lax.reduce_xor_p, reduction(lax.reduce_xor_p), (jnp.bool_, *INTEGERS)),
    Case(lax.reduce_p, extremes_of_two),
    Case(lax.argmax_p, lambda x: [lax.argmax(ordinary(x.a), k, jnp.int32) for k in (0, 1)]),
    Case(lax.argmin_p, lambda x: [lax.argmin(ordinary(x.a), k, jnp.int32) for k in (0, 1)]),
    Case(lax.cummax_p, lambda x: lax.cummax(ordinary(x.a), 1), NUMBERS),
    Case(lax.cummin_p, lambda x: lax.cummin(ordinary(x.a), 0, reverse=True), NUMBERS),
    Case(lax.cumsum_p, lambda x: lax.cumsum(whole(x.a), 0), NUMBERS),
    Case(lax.cumprod_p, lambda x: lax.cumprod(whole(x.a), 0), NUMBERS),
    Case(
        lax.cumlogsumexp_p,
        lambda x: lax.cumlogsumexp(large(x.a), 1),
        FLOATING,
        ulps={name_of(dtype): 1.0 for dtype in FLOATING} | {"float32": 2.0, "float64": 2.0},
        reference=logarithms,
    ),
    Case(
        lax.reduce_window_sum_p,
        window(lax.reduce_window_sum_p, whole, window_dimensions=(2, 1)),
        NUMBERS,
    ),
    Case(
        lax.reduce_window_max_p,
        window(lax.reduce_window_max_p, ordinary, window_dimensions=(2, 3)),
    ),
    Case(
        lax.reduce_window_min_p,
        window(lax.reduce_window_min_p, ordinary, window_dimensions=(2, 3)),
    ),
    Case(lax.reduce_window_p, folded_by_a_function),
    Case(lax.sort_p, lambda x: [lax.sort(ordinary(x.a), dimension=k) for k in (0, 1)]),
    Case(lax.sort_p, lambda x: lax.sort((ordinary(x.a), ordinary(x.b)), dimension=1, num_keys=1)),
    Case(lax.top_k_p, lambda x: lax.top_k(ordinary(x.a), 5)),
    Case(lax.dot_general_p, products),
    Case(lax.conv_general_dilated_p, convolution),
    Case(_jax.ragged_dot_general_p, ragged),
    Case(lax.select_and_scatter_add_p, pooled_backward),
)


@pytest.fixture(autouse=True, scope="module")
def wide_types():
    with jax.enable_x64(True):
        yield


each_dtype = pytest.mark.parametrize("dtype", ANY, ids=name_of)


@each_dtype
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_moves_elements_moves_their_bits_as_xla_does(dtype, seed):
    expect_like_xla(MOVES, dtype, seed, bits)


@each_dtype
@settings(max_examples=4)
@given(seed=st.integers(0, 2**32 - 1))
def test_what_combines_elements_gives_the_results_of_xla(dtype, seed):
    expect_like_xla(FOLDS, dtype, seed, plainer)


@each_dtype
def test_what_no_case_compares_is_refused(dtype):
    takers = {case.primitive for case in FOLDS if dtype in case.dtypes}
    for case in FOLDS:
        if case.primitive not in takers:
            expect_refused(case, dtype)
