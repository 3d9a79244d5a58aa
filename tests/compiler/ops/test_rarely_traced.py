"""Primitives that kernels seldom contain, each in a kernel of its own."""

import jax
import numpy as np
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from tests.compiler.harness import expect_same, run


def test_a_new_ref_holds_its_first_value_until_it_is_frozen():
    def function(x):
        ref = jax.new_ref(x)
        ref[0] = ref[1] * 10
        return x + 1, jax.freeze(ref)

    for shape in ((4,), (3, 100)):
        x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
        changed = x.copy()
        changed[0] = x[1] * 10
        got = run(function, x)
        np.testing.assert_array_equal(got[0], x + 1)
        np.testing.assert_array_equal(got[1], changed)


def test_an_empty_ref_is_memory_of_the_core():
    def function(x):
        ref = jax.empty_ref(jax.typeof(x), memory_space=pltpu.VMEM)
        ref[...] = x * 2
        return ref[...] + 1

    for shape in ((4,), (3, 100)):
        x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
        np.testing.assert_array_equal(run(function, x)[0], x * 2 + 1)


def test_an_empty_array_holds_what_it_holds_for_xla():
    for shape in ((), (4,), (3, 100)):
        expect_same(lambda x, shape=shape: lax.empty(shape, x.dtype), np.ones(2, np.float32))
    expect_same(lambda x: lax.empty((4,), np.int32).at[1].set(x[0]), np.ones(2, np.int32))


def test_marks_for_the_compiler_change_nothing():
    def function(x):
        lax.dce_sink(x * 3)
        return x + 1

    expect_same(function, np.arange(8, dtype=np.int32))
    expect_same(function, np.arange(800, dtype=np.float32))
