"""Products computed by panels, and where they are stored to, give what NumPy does."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl

import cokernel
from cokernel.compiler import codegen, matrix_product
from cokernel.compiler.matrix_product import Form
from tests.compiler.harness import MESH, run

DTYPES = {
    Form.FLOAT32: np.float32,
    Form.WIDENED: ml_dtypes.bfloat16,
    Form.PAIRS: ml_dtypes.bfloat16,
}


WAYS = [
    (Form.FLOAT32, 16),
    (Form.FLOAT32, 8),
    (Form.WIDENED, 16),
    (Form.WIDENED, 8),
    (Form.PAIRS, 16),
]


@pytest.fixture(params=WAYS, ids=lambda way: f"{way[0].name.lower()}_{way[1]}")
def form(request, monkeypatch, tmp_path):
    """Lets products of the form's dtype be computed by panels of vectors of so many lanes, whatever
    the processor has."""
    chosen, lanes = request.param
    # Kernels that look alike share what they were compiled to.
    monkeypatch.setenv("COKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(matrix_product, "lanes_of", lambda _: lanes)
    monkeypatch.setattr(
        matrix_product, "form_of", lambda dtype: chosen if dtype == DTYPES[chosen] else None
    )
    return chosen


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def multiply(left_dimension, right_dimension):
    """A product in float32 that sums over a dimension of either operand."""
    dimensions = (((left_dimension,), (right_dimension,)), ((), ()))
    return lambda x, y: lax.dot_general(x, y, dimensions, preferred_element_type=jnp.float32)


@pytest.mark.parametrize("left_dimension", [0, 1])
@pytest.mark.parametrize("right_dimension", [0, 1])
@pytest.mark.parametrize(
    "sizes", [(8, 16, 16), (29, 33, 47), (260, 521, 1060), (15, 2101, 40)], ids=str
)
def test_operands_may_lie_along_or_across(form, sizes, left_dimension, right_dimension):
    m, k, n = sizes
    left, right = integers(m, m, k), integers(n, k, n)
    x = left if left_dimension == 1 else left.T
    y = right if right_dimension == 0 else right.T
    arguments = [np.ascontiguousarray(item).astype(DTYPES[form]) for item in (x, y)]
    [got] = run(multiply(left_dimension, right_dimension), *arguments)
    np.testing.assert_array_equal(got, left @ right)


def test_stacks_of_matrices_and_strided_operands(form):
    left, right = integers(0, 3, 40, 34), integers(1, 3, 34, 20)

    def function(x, y):
        whole = jnp.matmul(x, y, preferred_element_type=jnp.float32)
        part = jnp.matmul(x[0, ::2], y[0], preferred_element_type=jnp.float32)
        reversed_ = jnp.matmul(x[1, :, ::-1], y[1], preferred_element_type=jnp.float32)
        return whole, part, reversed_

    got = run(function, left.astype(DTYPES[form]), right.astype(DTYPES[form]))
    np.testing.assert_array_equal(got[0], left @ right)
    np.testing.assert_array_equal(got[1], left[0, ::2] @ right[0])
    np.testing.assert_array_equal(got[2], left[1, :, ::-1] @ right[1])


def test_what_is_not_finite_stays_in_its_row_and_column(form):
    left, right = integers(0, 20, 33), integers(1, 33, 40)
    left[3, 32], right[32, 39] = np.inf, np.nan
    [got] = run(multiply(1, 0), left.astype(DTYPES[form]), right.astype(DTYPES[form]))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, left @ right)


def test_pairs_are_multiplied_without_an_instruction_for_them(monkeypatch):
    triple, cpu, features = codegen.host()
    lacking = features.replace("+avx512bf16", "-avx512bf16")
    monkeypatch.setattr(codegen, "host", lambda: (triple, cpu, lacking))
    monkeypatch.setattr(codegen, "host_has", lambda feature: f"+{feature}" in lacking.split(","))
    monkeypatch.setattr(matrix_product, "form_of", lambda dtype: Form.PAIRS)
    # A size of its own, because kernels that look alike share their machine code.
    left, right = integers(0, 23, 51), integers(1, 51, 37)
    [got] = run(multiply(1, 0), *(item.astype(ml_dtypes.bfloat16) for item in (left, right)))
    np.testing.assert_array_equal(got, left @ right)


@settings(max_examples=5, deadline=None)
@given(st.integers(8, 60), st.integers(16, 80), st.integers(16, 70), st.integers(0, 2**31))
def test_random_numbers_are_summed_as_exactly_as_by_xla(m, k, n, seed):
    random = np.random.default_rng(seed)
    left, right = (random.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
    [got] = run(jnp.matmul, left, right)
    exact = left.astype(np.float64) @ right.astype(np.float64)
    bound = k * 2.0**-24 * (np.abs(left).astype(np.float64) @ np.abs(right))
    assert np.all(np.abs(got - exact) <= bound)


def launch(body, out, *arrays, scratch=(), **params):
    kernel = cokernel.kernel(
        body,
        out,
        mesh=MESH,
        scratch_types=scratch,
        compiler_params=cokernel.CompilerParams(**params),
    )
    return np.asarray(kernel(*map(jnp.asarray, arrays)))


M, K, N = 24, 48, 32
OUT = jax.ShapeDtypeStruct((M, N), jnp.float32)


def stored(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...])


def added(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.ones_like(o_ref)
    o_ref[...] += jnp.dot(x_ref[...], y_ref[...])
    o_ref[...] = jnp.dot(x_ref[...], y_ref[...]) + o_ref[...]


def added_to_a_multiple(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.ones_like(o_ref)
    o_ref[...] = 3 * o_ref[...] + jnp.dot(x_ref[...], y_ref[...])


def added_to_what_was_read_earlier(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.ones_like(o_ref)
    before = o_ref[...]
    o_ref[...] = before * 5
    o_ref[...] = before + jnp.dot(x_ref[...], y_ref[...])


def added_to_another_place(x_ref, y_ref, o_ref):
    o_ref[...] = jnp.broadcast_to(jnp.arange(M, dtype=jnp.float32)[:, None], (M, N))
    o_ref[...] = o_ref[...][::-1] + jnp.dot(x_ref[...], y_ref[...])


def in_two_halves(x_ref, y_ref, o_ref):
    for half in (slice(0, N // 2), slice(N // 2, N)):
        o_ref[:, half] = jnp.dot(x_ref[...], y_ref[:, half])


def the_product_is_used_twice(x_ref, y_ref, o_ref):
    product = jnp.dot(x_ref[...], y_ref[...])
    o_ref[...] = product
    o_ref[...] += product


EXPECTED = {
    stored: lambda p: p,
    added: lambda p: 1 + 2 * p,
    added_to_a_multiple: lambda p: 3 + p,
    added_to_what_was_read_earlier: lambda p: 1 + p,
    added_to_another_place: lambda p: np.arange(M, dtype=np.float32)[::-1, None] + p,
    in_two_halves: lambda p: p,
    the_product_is_used_twice: lambda p: 2 * p,
}


@pytest.mark.parametrize("body", EXPECTED, ids=lambda body: body.__name__)
def test_products_computed_where_they_are_stored(body):
    left, right = integers(0, M, K), integers(1, K, N)
    np.testing.assert_array_equal(launch(body, OUT, left, right), EXPECTED[body](left @ right))


def test_a_product_may_replace_its_own_operand():
    left, right = integers(0, M, M), integers(1, M, M)

    def body(x_ref, y_ref, o_ref):
        o_ref[...] = x_ref[...]
        o_ref[...] = jnp.dot(o_ref[...], y_ref[...])
        o_ref[...] += jnp.dot(y_ref[...], o_ref[...])

    out = jax.ShapeDtypeStruct((M, M), jnp.float32)
    product = left @ right
    expected = product + right @ product
    np.testing.assert_array_equal(launch(body, out, left, right), expected)


def test_what_a_product_was_added_to_is_not_kept(capsys):
    def body(x_ref, y_ref, o_ref):
        o_ref[...] = jnp.zeros_like(o_ref)

        @pl.loop(0, 2)
        def _add(step):
            o_ref[...] += jnp.dot(x_ref[...], y_ref[...])

            @pl.when(step == 1)
            def _double():
                o_ref[...] = 2 * o_ref[...]

    left, right = integers(0, M, K), integers(1, K, N)
    got = launch(body, OUT, left, right, dump_llvm=True)
    np.testing.assert_array_equal(got, 4 * (left @ right))
    assert "llvm.memcpy" not in capsys.readouterr().out


def test_an_operand_may_change_before_the_product_is_stored():
    left, right = integers(0, M, K), integers(1, K, N)

    def body(x_ref, y_ref, o_ref, kept_ref):
        kept_ref[...] = x_ref[...]
        product = jnp.dot(kept_ref[...], y_ref[...])
        kept_ref[...] = jnp.zeros_like(kept_ref)
        o_ref[...] = product

    scratch = [cokernel.private((M, K), jnp.float32)]
    np.testing.assert_array_equal(launch(body, OUT, left, right, scratch=scratch), left @ right)
