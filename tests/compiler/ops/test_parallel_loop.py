"""`parallel_loop` runs its body once for each index of the range."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from tests.compiler.harness import MESH, run
from tests.compiler.ops.sparsecore_harness import run_on_subcore


@settings(max_examples=20)
@given(start=st.integers(-5, 5), stop=st.integers(-5, 30), step=st.integers(1, 7))
def test_bounds_and_step_may_be_dynamic(start, stop, step):
    def function(start, stop, step):
        @plsc.parallel_loop(start, stop, step, carry=(jnp.int32(0), jnp.int32(0)))
        def loop(i, carry):
            return carry[0] + i, carry[1] + 1

        return loop

    total, count = run(function, np.int32(start), np.int32(stop), np.int32(step))
    assert (total, count) == (sum(range(start, stop, step)), len(range(start, stop, step)))


@pytest.mark.parametrize("step", [1, 3])
@pytest.mark.parametrize("stop", [4100, 8192, 30000])
def test_long_loops_run_every_iteration_whether_their_bounds_are_known_or_not(stop, step):
    def function(dynamic):
        @plsc.parallel_loop(0, stop, step, carry=jnp.int32(0))
        def known(i, total):
            return total * 3 + i

        @plsc.parallel_loop(0, dynamic, step, carry=jnp.int32(0))
        def unknown(i, total):
            return total * 3 + i

        return known, unknown

    expected = np.int32(0)
    with np.errstate(over="ignore"):
        for i in range(0, stop, step):
            expected = expected * np.int32(3) + np.int32(i)
    assert run(function, np.int32(stop)) == [expected, expected]


@pytest.mark.parametrize("shape", [(), (8,), (20, 30)])
@pytest.mark.parametrize("unroll", [1, 4])
def test_every_form_of_value_is_carried(shape, unroll):
    def function(x, y):
        @plsc.parallel_loop(0, 5, unroll=unroll, carry={"a": x, "b": x})
        def loop(i, carry):
            return {"a": carry["b"] + y, "b": carry["a"] * 2 + i}

        return loop["a"], loop["b"]

    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    a = b = x
    for i in range(5):
        a, b = b + x * 3, a * 2 + i
    got = run(function, x, x * 3)
    np.testing.assert_array_equal(got[0], a)
    np.testing.assert_array_equal(got[1], b)


@pytest.mark.parametrize("chip", ["v6e", "tpu7x"])
def test_iterations_write_through_refs_they_close_over(chip):
    lanes = {"v6e": 8, "tpu7x": 16}[chip]

    def body(x_ref, o_ref):
        scale = x_ref[pl.ds(0, lanes)] * 0 + 3

        @plsc.parallel_loop(0, 8 * lanes, step=lanes, unroll=2)
        def _loop(i):
            at = pl.ds(i, lanes)

            @pl.when(i != lanes)
            def _write():
                o_ref[at] = x_ref[at] * scale

            @pl.when(i == lanes)
            def _inner():
                @plsc.parallel_loop(0, 1)
                def _once(j):
                    o_ref[at] = x_ref[at] + j

    x = np.arange(8 * lanes, dtype=np.int32)
    [got] = run_on_subcore(chip, body, [x], x)
    expected = x * 3
    expected[lanes : 2 * lanes] = x[lanes : 2 * lanes]
    np.testing.assert_array_equal(got, expected)


def test_a_step_that_is_not_positive_is_an_error():
    def body(s_ref, o_ref):
        @plsc.parallel_loop(0, 4, s_ref[0])
        def _loop(i):
            o_ref[0] = i

    kernel = cokernel.mpmd_map([(MESH, body)], jax.ShapeDtypeStruct((1,), jnp.int32))
    np.testing.assert_array_equal(kernel(jnp.asarray([2], jnp.int32)), [2])
    with pytest.raises(Exception, match="step of a parallel_loop must be positive, but is 0"):
        jax.block_until_ready(kernel(jnp.asarray([0], jnp.int32)))
