"""Loop nests: long ones can be stopped, and compute the same as short ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import cokernel
from cokernel.compiler import codegen, function
from tests.compiler.harness import MESH, expect_same, run

SHAPES = [(1 << 20,), ((1 << 20) + 37,), (1027, 1025), (3, 70000, 5), (1100, 7, 3, 50)]


def stop_checks(capsys, computation, *arrays):
    """How many places of the code look whether the launch has been told to stop."""
    capsys.readouterr()
    run(computation, *arrays, dump_llvm=True)
    return capsys.readouterr().out.count("load atomic")


@pytest.mark.parametrize("shape", SHAPES)
def test_a_long_nest_covers_every_element_once(shape):
    x = np.arange(np.prod(shape), dtype=np.int32).reshape(shape)
    expect_same(lambda x: x * 3 + lax.rev(x, [len(shape) - 1]), x)


@pytest.mark.parametrize("axis", [0, 1])
def test_long_reductions(axis):
    x = np.arange(1 << 21, dtype=np.int32).reshape(1 << 9, -1)
    expect_same(lambda x: jnp.sum(x * 2, axis=axis), x)


def test_only_long_nests_look_whether_they_are_to_stop(capsys):
    short, long = np.zeros(1000, np.int32), np.zeros(1 << 20, np.int32)
    assert stop_checks(capsys, lambda x: x * 2 + 1, short) == 0
    assert stop_checks(capsys, lambda x: x * 2 + 1, long) == 1


@pytest.mark.parametrize(
    ("shape", "work", "dimension"),
    [
        ((1000,), 1, None),
        ((1 << 20,), 1, 0),
        ((1 << 10, 1 << 10), 1, 0),
        ((2, 1 << 20), 1, 1),
        ((2, 1 << 12), 1 << 8, 1),
        ((4, 4), 1 << 20, 1),
    ],
)
def test_the_innermost_dimension_that_fills_a_block_is_watched(shape, work, dimension):
    assert function._watched_dimension(shape, work) == dimension


def stores_at_once(capsys, computation, x):
    """How many vectors a round of the innermost loop stores, of each loop of the computation."""
    capsys.readouterr()
    run(computation, x, dump_llvm=True)
    blocks = re.split(r"^\S+:.*$", codegen.optimise(capsys.readouterr().out), flags=re.MULTILINE)
    counts = (len(re.findall(r"store <\d+ x (?:float|i32)>", block)) for block in blocks)
    return [count for count in counts if count]


def test_a_loop_with_a_long_chain_of_arithmetic_takes_two_vectors_at_once(capsys):
    x = np.linspace(-3, 3, 1 << 12, dtype=np.float32)
    for computation in (jnp.exp, jnp.tanh, lax.erf):
        assert stores_at_once(capsys, computation, x) == [2]


def test_what_a_loop_takes_at_once_leaves_no_element_out():
    for size in (1000, 1001, 1023, 1040):
        x = np.linspace(0, 1, size, dtype=np.float32)
        [ours] = run(jnp.tanh, x)
        np.testing.assert_allclose(ours, np.tanh(x), rtol=1e-6)


def test_a_launch_in_a_long_nest_is_stopped_at_its_time_limit():
    def body(out_ref):
        x = lax.broadcasted_iota(jnp.float32, (1 << 16, 1 << 16), 1)
        out_ref[...] = jnp.sum(jnp.sin(x), axis=1)

    kernel = cokernel.mpmd_map(
        [(MESH, body)],
        jax.ShapeDtypeStruct((1 << 16,), jnp.float32),
        compiler_params=cokernel.CompilerParams(time_limit_s=0.1),
    )
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError), match=r"time_limit_s is 0\.1"):
        jax.block_until_ready(kernel())
