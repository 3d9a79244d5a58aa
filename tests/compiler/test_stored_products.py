"""Products added to what is cleared first: the zeros are left out where nobody sees them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

import cokernel
from cokernel.compiler import matrix_product
from tests.compiler.harness import MESH

M, K, N = 24, 48, 32


@pytest.fixture(autouse=True)
def panels(monkeypatch, tmp_path):
    """Lets products be computed by panels whatever the processor has."""
    monkeypatch.setenv("COKERNEL_CACHE", str(tmp_path))
    monkeypatch.setattr(matrix_product, "lanes_of", lambda _: 8)
    form = matrix_product.Form.FLOAT32
    monkeypatch.setattr(
        matrix_product, "form_of", lambda dtype: form if dtype == np.float32 else None
    )


def launch(body, *arrays, shape=(M, N), dtype=jnp.float32, **params):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(shape, dtype),
        mesh=MESH,
        scratch_types=[cokernel.private(shape, dtype)],
        compiler_params=cokernel.CompilerParams(**params),
    )
    return np.asarray(kernel(*map(jnp.asarray, arrays)))


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def steps_of(step):
    """A body of four steps, `step` of which is given the number of each; in the memory of its sum
    lies what must not show."""

    def body(x_ref, y_ref, o_ref, total_ref):
        is_float = jnp.issubdtype(total_ref.dtype, jnp.floating)
        total_ref[...] = jnp.full_like(total_ref, jnp.nan if is_float else 100)

        @pl.loop(0, 4)
        def _step(number):
            step(number, x_ref, y_ref, o_ref, total_ref)

        o_ref[...] = total_ref[...]

    return body


def clear(ref):
    ref[...] = jnp.zeros_like(ref)


def added_in_place(number, x_ref, y_ref, o_ref, total_ref):
    pl.when(number == 0)(lambda: clear(total_ref))
    total_ref[...] += jnp.dot(x_ref[...], y_ref[...])


def added_to_the_right(number, x_ref, y_ref, o_ref, total_ref):
    pl.when(number == 0)(lambda: clear(total_ref))
    left, right = x_ref[...], y_ref[...]
    total_ref[...] = jnp.dot(left, right) + total_ref[...]


def cleared_when_false(number, x_ref, y_ref, o_ref, total_ref):
    jax.lax.cond(number > 0, lambda: None, lambda: clear(total_ref))
    total_ref[...] += jnp.dot(x_ref[...], y_ref[...])


def cleared_twice(number, x_ref, y_ref, o_ref, total_ref):
    pl.when(number % 2 == 0)(lambda: clear(total_ref))
    total_ref[...] += jnp.dot(x_ref[...], y_ref[...])


def _start_at_ones(ref):
    ref[...] = jnp.ones_like(ref)


def started_at_ones(number, x_ref, y_ref, o_ref, total_ref):
    pl.when(number == 0)(lambda: _start_at_ones(total_ref))
    total_ref[...] += jnp.dot(x_ref[...], y_ref[...])


def other_branch_doubles(number, x_ref, y_ref, o_ref, total_ref):
    def double():
        total_ref[...] = 2 * total_ref[...]

    jax.lax.cond(number == 0, lambda: clear(total_ref), double)
    total_ref[...] += jnp.dot(x_ref[...], y_ref[...])


def cleared_in_part(number, x_ref, y_ref, o_ref, total_ref):
    pl.when(number == 0)(lambda: _start_at_ones(total_ref))

    @pl.when(number == 0)
    def _clear():
        total_ref[: M // 2] = jnp.zeros((M // 2, N), jnp.float32)

    total_ref[...] += jnp.dot(x_ref[...], y_ref[...])


def zeros_read_by_another(number, x_ref, y_ref, o_ref, total_ref):
    pl.when(number == 0)(lambda: clear(total_ref))
    o_ref[...] = total_ref[...] + 1
    total_ref[...] += jnp.dot(x_ref[...], y_ref[...])
    total_ref[...] += o_ref[...]


def read_before_it_was_cleared(number, x_ref, y_ref, o_ref, total_ref):
    pl.when(number == 0)(lambda: _start_at_ones(total_ref))
    before = total_ref[...]
    pl.when(number % 2 == 0)(lambda: clear(total_ref))
    total_ref[...] = before + jnp.dot(x_ref[...], y_ref[...])


def cleared_is_another(number, x_ref, y_ref, o_ref, total_ref):
    pl.when(number == 0)(lambda: _start_at_ones(total_ref))
    pl.when(number == 3)(lambda: clear(o_ref))
    total_ref[...] += jnp.dot(x_ref[...], y_ref[...])


EXPECTED = {
    added_in_place: lambda p: 4 * p,
    added_to_the_right: lambda p: 4 * p,
    cleared_when_false: lambda p: 4 * p,
    cleared_twice: lambda p: 2 * p,
    started_at_ones: lambda p: 1 + 4 * p,
    other_branch_doubles: lambda p: 15 * p,
    cleared_in_part: lambda p: np.where(np.arange(M)[:, None] < M // 2, 0, 1) + 4 * p,
    zeros_read_by_another: lambda p: 15 * (p + 1),
    read_before_it_was_cleared: lambda p: 1 + 4 * p,
    cleared_is_another: lambda p: 1 + 4 * p,
}


@pytest.mark.parametrize("step", EXPECTED, ids=lambda step: step.__name__)
def test_products_added_to_what_may_be_cleared(step):
    left, right = integers(0, M, K), integers(1, K, N)
    got = launch(steps_of(step), left, right)
    np.testing.assert_array_equal(got, EXPECTED[step](left @ right))


def test_products_whose_operand_is_cleared_with_what_they_are_added_to():
    def body(x_ref, y_ref, o_ref, total_ref):
        total_ref[...] = x_ref[...]
        pl.when(y_ref[0, 0] != 0)(lambda: clear(total_ref))
        total_ref[...] += jnp.dot(total_ref[...], y_ref[...])
        o_ref[...] = total_ref[...]

    left, right = integers(0, M, N), integers(1, N, N)
    for first in (0, 1):
        right[0, 0] = first
        expected = np.zeros_like(left) if first else left + left @ right
        np.testing.assert_array_equal(launch(body, left, right), expected)


def test_small_products_are_added_to_zeros():
    # Without panels there is nothing that could store a product instead of adding it.
    def body(x_ref, y_ref, o_ref, total_ref):
        total_ref[...] = jnp.full_like(total_ref, jnp.nan)

        @pl.loop(0, 3)
        def _step(number):
            pl.when(number == 0)(lambda: clear(total_ref))
            total_ref[...] += jnp.dot(x_ref[...], y_ref[...])

        o_ref[...] = total_ref[...]

    left, right = integers(0, M, 5), integers(1, 5, N)
    np.testing.assert_array_equal(launch(body, left, right), 3 * (left @ right))


ADDED = [added_in_place, added_to_the_right, cleared_when_false]


@pytest.mark.parametrize("step", ADDED, ids=lambda step: step.__name__)
@pytest.mark.parametrize("dtype", [np.float32, np.int32])
@pytest.mark.parametrize(
    ("left", "right"),
    [
        ((2, 4), (4, 4)),
        ((1, 16), (16, 64)),
        ((8, 3), (3, 8)),
        ((8, 3), (3, 9)),
        ((5, 7), (7, 3)),
        ((16, 16), (16, 16)),
        ((32, 48), (48,)),
        ((48,), (48, 8)),
    ],
)
def test_sums_of_every_size_begin_at_zero(step, dtype, left, right):
    x, y = integers(0, *left).astype(dtype), integers(1, *right).astype(dtype)
    got = launch(steps_of(step), x, y, shape=(x @ y).shape, dtype=dtype)
    np.testing.assert_array_equal(got, 4 * (x @ y))


def test_zeros_that_nobody_sees_are_not_stored(capsys):
    def body(x_ref, y_ref, o_ref, total_ref):
        @pl.loop(0, 4)
        def _step(number):
            added_in_place(number, x_ref, y_ref, o_ref, total_ref)

        o_ref[...] = total_ref[...]

    left, right = integers(0, M, K), integers(1, K, N)
    got = launch(body, left, right, dump_llvm=True)
    np.testing.assert_array_equal(got, 4 * (left @ right))
    # What is stored is the sum, in the end.
    assert len(re.findall(r'^define .*@"store', capsys.readouterr().out, re.MULTILINE)) == 1
