"""`emit_pipeline` runs in both of its forms: traced into loops and copies, and as a primitive."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.compiler.harness import MESH


@pytest.fixture(autouse=True)
def chip(form):
    """Runs a test with pipelines of each form, for a chip."""
    with cokernel.target("v6e"):
        yield


def launch(body, out, *arrays, mesh=MESH, scratch=()):
    kernel = cokernel.kernel(body, out, mesh=mesh, scratch_types=scratch)
    return jax.tree.map(np.asarray, kernel(*(jnp.asarray(array) for array in arrays)))


def integers(seed, *shape):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


def test_a_product_accumulates_in_its_output_block():
    m, k, n, block = 48, 64, 32, 16
    x, y = integers(0, m, k), integers(1, k, n)

    def body(x_ref, y_ref, o_ref):
        def inner(x, y, o):
            @pl.when(pl.program_id(2) == 0)
            def _clear():
                o[...] = jnp.zeros_like(o)

            o[...] += x[...] @ y[...]

        pltpu.emit_pipeline(
            inner,
            grid=(m // block, n // block, k // block),
            in_specs=[
                pl.BlockSpec((block, block), lambda i, j, k: (i, k)),
                pl.BlockSpec((block, block), lambda i, j, k: (k, j)),
            ],
            out_specs=[pl.BlockSpec((block, block), lambda i, j, k: (i, j))],
        )(x_ref, y_ref, o_ref)

    got = launch(body, jax.ShapeDtypeStruct((m, n), jnp.float32), x, y)
    np.testing.assert_array_equal(got, x @ y)


RAGGED = [((20, 128), (8, 128)), ((13, 300), (8, 128)), ((5, 100), (8, 128)), ((1000,), (128,))]


@pytest.mark.parametrize("no_pipelining", [False, True])
@pytest.mark.parametrize(("shape", "block"), [*RAGGED, ((20, 8, 128), (8, 8, 128))])
def test_a_last_block_may_hang_over_the_end(shape, block, no_pipelining):
    # In the last two dimensions JAX rounds up to whole tiles, which are not all there.
    x = integers(0, *shape)
    guard = integers(1, *shape)

    def body(x_ref, guard_ref, o_ref, g_ref):
        pltpu.sync_copy(guard_ref, g_ref)

        def inner(x, o):
            o[...] = x[...] * 2 + 1

        spec = pl.BlockSpec(block, lambda *index: index)
        grid = tuple(map(pl.cdiv, shape, block))
        pltpu.emit_pipeline(
            inner, grid=grid, in_specs=[spec], out_specs=[spec], no_pipelining=no_pipelining
        )(x_ref, o_ref)

    got, kept = launch(body, (x, x), x, guard)
    np.testing.assert_array_equal(got, x * 2 + 1)
    np.testing.assert_array_equal(kept, guard)


@pytest.mark.parametrize("no_pipelining", [False, True])
def test_a_copy_of_the_body_that_leaves_its_ref_is_an_error_all_the_same(no_pipelining):
    x = integers(0, 24, 128)

    def body(x_ref, o_ref, n_ref):
        def inner(o):
            pltpu.sync_copy(x_ref.at[pl.ds(pl.program_id(0) * 16, 16)], o)

        spec = pl.BlockSpec((16, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(
            inner, grid=(2,), in_specs=[], out_specs=[spec], no_pipelining=no_pipelining
        )(o_ref)

    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match="x_ref"):
        launch(body, (np.zeros((32, 128), np.float32), np.zeros((1,), np.int32)), x)


def test_the_grid_may_be_dynamic_and_the_position_asked_for_in_a_loop():
    x = integers(0, 32, 128)

    def body(x_ref, n_ref, o_ref):
        def inner(x, o):
            # A loop large enough to become a function of its own.
            def step(j, _):
                row = pl.ds(j, 1)
                o[row] = x[row] + (10 * pl.program_id(0) + j).astype(jnp.float32)
                return lax.fori_loop(0, 2, lambda _, c: c, _)

            lax.fori_loop(0, 8, step, 0)

        pltpu.emit_pipeline(
            inner,
            grid=(n_ref[0],),
            in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
            out_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        )(x_ref, o_ref)

    got = launch(body, x, x, np.asarray([3], np.int32))
    row = np.arange(24)[:, None]
    np.testing.assert_array_equal(got[:24], x[:24] + 10 * (row // 8) + row % 8)


def test_the_extent_of_a_dynamic_grid_is_known():
    x = integers(0, 32, 128)

    def body(x_ref, n_ref, o_ref):
        def inner(x, o):
            o[...] = x[...] + jnp.asarray(pl.num_programs(0)).astype(jnp.float32)

        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        grid = (n_ref[0],)
        pltpu.emit_pipeline(inner, grid=grid, in_specs=[spec], out_specs=[spec])(x_ref, o_ref)

    got = launch(body, x, x, np.asarray([3], np.int32))
    np.testing.assert_array_equal(got[:24], x[:24] + 3)


def test_each_of_two_nested_pipelines_knows_its_own_extents():
    x = integers(0, 32, 256)

    def body(x_ref, n_ref, o_ref):
        def outer(x, o):
            def inner(a, b):
                b[...] = a[...] + jnp.asarray(pl.num_programs(0)).astype(jnp.float32)

            spec = pl.BlockSpec((8, 128), lambda i: (0, i))
            grid = (n_ref[1],)
            pltpu.emit_pipeline(inner, grid=grid, in_specs=[spec], out_specs=[spec])(x, o)
            o[...] += 10 * jnp.asarray(pl.num_programs(0)).astype(jnp.float32)

        spec = pl.BlockSpec((8, 256), lambda i: (i, 0))
        grid = (n_ref[0],)
        pltpu.emit_pipeline(outer, grid=grid, in_specs=[spec], out_specs=[spec])(x_ref, o_ref)

    got = launch(body, x, x, np.asarray([4, 2], np.int32))
    np.testing.assert_array_equal(got, x + 42)


def test_pipelines_nest():
    x = integers(0, 32, 256)

    def body(x_ref, o_ref):
        def outer(x, o):
            def inner(a, b):
                b[...] = a[...] + pl.program_id(0).astype(jnp.float32)

            spec = pl.BlockSpec((8, 128), lambda i: (0, i))
            pltpu.emit_pipeline(inner, grid=(2,), in_specs=[spec], out_specs=[spec])(x, o)
            o[...] += 10 * pl.program_id(0).astype(jnp.float32)

        spec = pl.BlockSpec((8, 256), lambda i: (i, 0))
        pltpu.emit_pipeline(outer, grid=(4,), in_specs=[spec], out_specs=[spec])(x_ref, o_ref)

    expected = x + np.arange(256) // 128 + 10 * (np.arange(32) // 8)[:, None]
    np.testing.assert_array_equal(launch(body, x, x), expected)


def test_a_body_closes_over_scratch_and_copies_from_its_block():
    x = integers(0, 32, 128)

    def body(x_ref, o_ref, total, copy):
        total[...] = jnp.zeros((8, 128), jnp.float32)

        def inner(x):
            pltpu.sync_copy(x, copy)
            total[...] += copy[...] * x[...]

        spec = pl.BlockSpec((8, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(inner, grid=(4,), in_specs=[spec], out_specs=[])(x_ref)
        pltpu.sync_copy(total, o_ref)

    out = jax.ShapeDtypeStruct((8, 128), jnp.float32)
    scratch = [pltpu.VMEM((8, 128), jnp.float32)] * 2
    got = launch(body, out, x, scratch=scratch)
    np.testing.assert_array_equal(got, (x**2).reshape(4, 8, 128).sum(0))


def test_subcores_share_a_pipeline():
    x = integers(0, 64, 128)

    def body(x_ref, o_ref):
        def inner(x, o):
            @pl.loop(0, 128, step=8)
            def _columns(c):
                o[0, pl.ds(c, 8)] = x[0, pl.ds(c, 8)] * 3

        spec = pl.BlockSpec((1, 128), lambda i: (i, 0))
        pltpu.emit_pipeline(
            inner,
            grid=(64,),
            in_specs=[spec],
            out_specs=[spec],
            core_axis_name=("core", "subcore"),
            dimension_semantics=(pltpu.PARALLEL,),
        )(x_ref, o_ref)

    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")
    np.testing.assert_array_equal(launch(body, x, x, mesh=mesh), x * 3)
