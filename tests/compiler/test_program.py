"""What is fused, materialised, kept and freed never shows in the results: random programs equal
jitted XLA.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

import cokernel
from cokernel.compiler.memory import Arena
from tests.compiler.harness import MESH, expect_same

SHAPES = [(), (1,), (6,), (16,), (4, 5), (130,), (9, 40), (3, 5, 20), (1, 200)]

# Each takes a pool of values and some random numbers and makes one more. Integers, so that the
# order of sums does not matter.


def add(pool, a, b):
    x, y = pool[a], pool[b]
    return x + y if x.shape == y.shape else x + jnp.sum(y)


def multiply_by_its_reverse(pool, a, b):
    x = pool[a]
    return x * jnp.flip(x) if x.ndim else x * 3


def transpose(pool, a, b):
    return pool[a].T


def sum_an_axis(pool, a, b):
    x = pool[a]
    return jnp.sum(x, axis=b % x.ndim, keepdims=True) - x if x.ndim else x


def cumulate(pool, a, b):
    x = pool[a]
    return jnp.cumsum(x, axis=b % x.ndim) if x.ndim else x + 1


def flatten(pool, a, b):
    return pool[a].reshape(-1)


def join(pool, a, b):
    return jnp.concatenate([pool[a].reshape(-1), pool[b].reshape(-1)])[:300]


def cut(pool, a, b):
    x = pool[a].reshape(-1)
    return lax.dynamic_slice(x, (jnp.max(pool[b]) % 7,), (x.shape[0] // 2 + 1,))


def branch(pool, a, b):
    x = pool[a]
    return lax.cond(jnp.sum(pool[b]) % 2 == 0, lambda x: x * 2, lambda x: jnp.flip(x) - 1, x)


def repeat(pool, a, b):
    x, y = pool[a], jnp.max(pool[b])
    return lax.fori_loop(0, b % 4, lambda i, c: c * 3 + i + y - x, x)


def scan(pool, a, b):
    x = pool[a]
    if not x.ndim:
        return x
    carry, stacked = lax.scan(lambda c, row: (c + row, c * row), jnp.zeros_like(x[0]), x)
    return stacked + carry


def choose(pool, a, b):
    x = pool[a]
    return jnp.where(x % 3 == 0, x, -x)


STEPS = [
    add,
    multiply_by_its_reverse,
    transpose,
    sum_an_axis,
    cumulate,
    flatten,
    join,
    cut,
    branch,
    repeat,
    scan,
    choose,
]

programs = st.lists(
    st.tuples(st.sampled_from(STEPS), st.integers(0, 40), st.integers(0, 40)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60)
@given(
    program=programs,
    shapes=st.lists(st.sampled_from(SHAPES), min_size=1, max_size=3),
    results=st.integers(1, 4),
)
def test_a_random_program_equals_xla(program, shapes, results):
    def function(*arrays):
        pool = list(arrays)
        for step, a, b in program:
            pool.append(step(pool, a % len(pool), b % len(pool)))
        return pool[-results:]

    arrays = [np.arange(np.prod(shape), dtype=np.int32).reshape(shape) % 11 - 4 for shape in shapes]
    expect_same(function, *arrays)


@settings(max_examples=30)
@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 3)), max_size=12)
)
def test_reads_and_writes_of_refs_keep_their_order(steps):
    """Values read from large Refs stay lazy; whatever is written in between must not reach them."""

    def perform(read, write):
        for source, target, kind in steps:
            x = read(source)
            value = [x + 1, x * 2 - source, jnp.flip(x), x + read(target)][kind]
            write(target, value)
            if kind == 3:
                write(source, x)

    def body(x_ref, o_ref, *buffers):
        for i in range(3):
            buffers[i][...] = x_ref[...] + i

        def write(i, value):
            buffers[i][...] = value

        perform(lambda i: buffers[i][...], write)
        for i in range(3):
            o_ref[i] = buffers[i][...]

    x = np.arange(150, dtype=np.int32)
    expected = [x + i for i in range(3)]
    perform(lambda i: expected[i], lambda i, value: expected.__setitem__(i, np.asarray(value)))
    kernel = cokernel.mpmd_map(
        [(MESH, body)],
        jnp.zeros((3, 150), jnp.int32),
        scratch_types=[cokernel.private((150,), jnp.int32)] * 3,
    )
    np.testing.assert_array_equal(kernel(x), np.stack(expected))


@given(sizes=st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=60))
def test_live_allocations_never_overlap(sizes):
    arena, live = Arena(), []
    for size, release in sizes:
        if release and live:
            live.pop(len(live) // 2)
        live.append(arena.allocate(size))
        spans = sorted((item.offset, item.offset + item.size) for item in live)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        assert spans[-1][1] <= arena.size


def test_an_arena_uses_memory_again():
    arena = Arena()
    for _ in range(10):
        first, second = arena.allocate(64), arena.allocate(640)
        del first, second
    assert arena.size == 704


def test_a_complex_value_is_refused_with_its_program_and_line():
    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...] + 1

    kernel = cokernel.kernel(body, jax.ShapeDtypeStruct((4,), jnp.complex64), mesh=MESH)
    with pytest.raises(
        NotImplementedError, match=r"program 'body' at .*test_program.py:\d+.* complex64"
    ):
        kernel(np.ones(4, np.complex64))


def test_a_store_does_not_read_what_nobody_wants_back(capsys):
    def body(x_ref, o_ref):
        o_ref[...] = x_ref[...] + 1

    x = jnp.arange(1000, dtype=jnp.int32)
    kernel = cokernel.mpmd_map(
        [(MESH, body)], x, compiler_params=cokernel.CompilerParams(dump_llvm=True)
    )
    np.testing.assert_array_equal(kernel(x), np.arange(1000) + 1)
    code = capsys.readouterr().out
    assert "llvm.memcpy" not in code
