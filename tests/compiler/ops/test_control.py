"""Control flow inside a kernel gives what it gives under jit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel
from tests.compiler.harness import MESH, expect_close, expect_same, run

SHAPES = [(), (5,), (16,), (3, 70)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("length", [0, 1, 5])
def test_fori_loop_carries_every_form_of_value(shape, length):
    def function(x):
        return lax.fori_loop(0, length, lambda i, c: (c[0] * 2 + i, c[1] + c[0]), (x, x))

    expect_same(function, np.arange(np.prod(shape), dtype=np.int32).reshape(shape))


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_scan_slices_its_inputs_and_stacks_its_outputs(shape, reverse):
    def function(init, xs):
        return lax.scan(lambda c, x: (c + x, c * x), init, xs, reverse=reverse)

    xs = np.arange(4 * np.prod(shape), dtype=np.int32).reshape((4, *shape))
    expect_same(function, xs[0], xs)


def test_a_loop_may_exchange_the_large_arrays_it_carries():
    def function(a, b):
        return lax.fori_loop(0, 3, lambda i, c: (c[1], c[0] + 1), (a, b))

    a = np.arange(300, dtype=np.int32).reshape(3, 100)
    expect_same(function, a, -a)


def test_a_large_carry_may_pass_through_unchanged():
    def function(a, b):
        return lax.fori_loop(0, 3, lambda i, c: (c[0], c[1] + c[0]), (a, b))

    a = np.arange(300, dtype=np.int32).reshape(3, 100)
    expect_same(function, a, -a)


@given(limit=st.integers(-3, 20), start=st.integers(-5, 5))
def test_while_stops_where_its_condition_does(limit, start):
    def function(n, x):
        return lax.while_loop(lambda c: c[0] < n, lambda c: (c[0] + 3, c[1] * 2), (x, x))

    expect_same(function, np.int32(limit), np.int32(start))


@pytest.mark.parametrize("shape", SHAPES)
def test_while_carries_arrays_and_closes_over_them(shape):
    def function(x):
        return lax.while_loop(
            lambda c: jnp.sum(c[1]) < 1000, lambda c: (c[0] + 1, c[1] + x + 1), (0, x)
        )

    expect_same(function, np.ones(shape, np.int32))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("which", [-1, 0, 1, 2, 7])
def test_switch_runs_one_branch_and_clamps_its_index(shape, which):
    def function(i, x):
        branches = [lambda x: (x, x + 1), lambda x: (x * 2, x), lambda x: (-x, x * x)]
        return lax.switch(i, branches, x)

    expect_same(function, np.int32(which), np.arange(np.prod(shape), dtype=np.int32).reshape(shape))


@pytest.mark.parametrize("flag", [False, True])
def test_cond_takes_a_bool(flag):
    expect_same(lambda p, x: lax.cond(p, lambda x: x + 1, lambda x: x - 1, x), flag, np.float32(2))


def test_nested_loops_and_branches():
    def function(x):
        def outer(i, c):
            def inner(j, d):
                return lax.cond((i + j) % 2 == 0, lambda: d + i * j, lambda: d - j)

            return lax.fori_loop(0, 4, inner, c)

        return lax.fori_loop(0, 5, outer, x)

    for shape in SHAPES:
        expect_same(function, np.zeros(shape, np.int32))


def test_many_loops_in_one_body():
    def function(x):
        for _ in range(12):
            x = lax.fori_loop(0, 3, lambda i, c: c + i, x)
        return x

    expect_same(function, np.int32(1))


def test_calls_are_inlined():
    @jax.custom_jvp
    def double(x):
        return x * 2

    double.defjvp(lambda primals, tangents: (double(*primals), tangents[0] * 2))

    @jax.custom_vjp
    def triple(x):
        return x * 3

    triple.defvjp(lambda x: (triple(x), None), lambda _, g: (g * 3,))

    def function(x):
        return jax.jit(lambda x: jax.checkpoint(lambda x: triple(double(x)))(x))(x)

    expect_same(function, np.arange(20, dtype=np.float32))


def test_platform_dependent_takes_the_branch_for_the_cpu():
    def function(x):
        return lax.platform_dependent(x, cpu=lambda x: x + 1, default=lambda x: x - 1)

    expect_same(function, np.float32(1))


def test_a_dynamic_trip_count():
    def function(n, x):
        return lax.fori_loop(0, n, lambda i, c: c + i, x)

    for n in (0, 1, 9):
        expect_same(function, np.int32(n), np.ones((2, 90), np.int32))


def test_values_read_before_a_write_keep_their_contents():
    def body(x_ref, o_ref, buf):
        buf[...] = x_ref[...]
        before = buf[...] + 1
        buf[...] = jnp.zeros_like(before)
        o_ref[...] = before + buf[...]

    x = jnp.arange(200, dtype=jnp.int32)
    kernel = cokernel.mpmd_map(
        [(MESH, body)],
        jax.ShapeDtypeStruct((200,), jnp.int32),
        scratch_types=[cokernel.private((200,), jnp.int32)],
    )
    np.testing.assert_array_equal(kernel(x), x + 1)


@pytest.mark.filterwarnings("error")
def test_softmax_in_a_kernel():
    def function(x):
        return jax.nn.softmax(x, axis=-1)

    x = np.random.default_rng(0).normal(size=(8, 300)).astype(np.float32)
    expect_close(function, x, ulps=32)


def test_results_of_a_kernel_without_inputs():
    [result] = run(lambda: jnp.arange(5) * 2)
    np.testing.assert_array_equal(result, [0, 2, 4, 6, 8])


def test_program_id_counts_along_the_axes_of_the_mesh():
    def body(out_ref):
        first, second = pl.program_id(0), pl.program_id(1)
        out_ref[first, second] = 100 * first + 10 * second + pl.num_programs(1)

    kernel = cokernel.kernel(
        body, jax.ShapeDtypeStruct((2, 3), jnp.int32), mesh=cokernel.CoreMesh(row=2, column=3)
    )
    np.testing.assert_array_equal(kernel(), [[3, 13, 23], [103, 113, 123]])


GRID = cokernel.CoreMesh(row=2, column=3)


@pytest.mark.parametrize("axes", ["row", ("column",), ("row", "column")])
@pytest.mark.parametrize("space", [pltpu.VMEM, pltpu.HBM])
def test_cores_that_differ_along_collective_axes_share_a_scoped_ref(axes, space):
    def body(out_ref, arrived):
        row, column = lax.axis_index("row"), lax.axis_index("column")

        def scope(buffer):
            buffer[row, column] = 10 * row + column
            for other in range(6):
                there = {"row": other // 3, "column": other % 3}
                pl.semaphore_signal(arrived, 1, device_id=there)
            pl.semaphore_wait(arrived, 6)
            shared_row = (row + 1) % 2 if "row" in axes else row
            shared_column = (column + 1) % 3 if "column" in axes else column
            out_ref[row, column] = buffer[shared_row, shared_column]

        pl.run_scoped(scope, space((2, 3), jnp.int32), collective_axes=axes)

    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((2, 3), jnp.int32),
        mesh=GRID,
        scratch_types=[pltpu.SemaphoreType.REGULAR],
    )
    expected = np.array([[0, 1, 2], [10, 11, 12]])
    for dimension, axis in enumerate(["row", "column"]):
        if axis in axes:
            expected = np.roll(expected, -1, dimension)
    np.testing.assert_array_equal(kernel(), expected)


@pytest.mark.parametrize(
    ("axes", "scoped", "error"),
    [
        ("diagonal", pltpu.VMEM((2,), jnp.int32), ValueError),
        ("row", pltpu.SemaphoreType.REGULAR, NotImplementedError),
    ],
)
def test_collective_axes_that_make_no_sense_are_refused(axes, scoped, error):
    def body(out_ref):
        pl.run_scoped(lambda ref: None, scoped, collective_axes=axes)

    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((1,), jnp.int32), mesh=GRID)
    with pytest.raises(error, match=r"collective_axes|device_id"):
        kernel()


@pytest.mark.parametrize("shape", [(), (3, 70)])
@pytest.mark.parametrize("length", [4095, 4096, 4099, 9216])
def test_a_long_loop_that_looks_now_and_then_runs_every_iteration(shape, length):
    def function(x):
        return lax.fori_loop(0, length, lambda i, c: (c[0] * 3 + i, c[1] + 1), (x, x))

    expect_same(function, np.arange(np.prod(shape), dtype=np.int32).reshape(shape))
