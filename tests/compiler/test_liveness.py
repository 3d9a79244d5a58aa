"""Arrays that nobody needs any more are updated in place, and no others."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from tests.compiler.harness import expect_same, run

SIZE = 120
ARRAYS = 3
OPERATIONS = [
    "update", "scatter", "add", "share", "reverse", "reshape", "lazy", "call", "loop", "while",
    "scan", "branch", "swap",
]  # fmt: skip


def step(arrays, operation, which, other, place, scalar):
    """One step of a random program: `arrays[which]` becomes something new."""
    x, y = arrays[which], arrays[other]
    at = (place + scalar) % SIZE

    def poke(x, value=7):
        return lax.dynamic_update_slice(x, jnp.full(3, value, jnp.int32), (at,))

    match operation:
        case "update":
            x = poke(x)
        case "scatter":
            x = x.at[lax.iota(jnp.int32, 3) % 2 * 4 + at].add(y[:3], mode="drop")
        case "add":
            x = x + y
        case "share":
            x = y
        case "reverse":
            x = y[::-1]
        case "reshape":
            x = y.reshape(2, -1).T.reshape(-1)
        case "lazy":
            x = poke(y * 2 + x)
        case "call":
            x = jax.jit(lambda x, y: poke(x) + poke(y, 8) + x)(x, y)
        case "loop":
            x, y = lax.fori_loop(0, 3, lambda i, c: (poke(c[0], i), c[1] + c[0]), (x, y))
        case "while":
            x = lax.while_loop(lambda c: c[at] < 5, lambda c: poke(c, 9) + 1, x % 50)
        case "scan":
            x, rows = lax.scan(lambda c, i: (poke(c, i), c[i]), x, jnp.arange(4))
            x = poke(x, jnp.sum(rows))
        case "branch":
            x = lax.cond(scalar > 1, lambda x, y: poke(x) + y, lambda x, y: y, x, y)
        case "swap":
            x, y = lax.fori_loop(0, 3, lambda i, c: (poke(c[1], i), poke(c[0], 2)), (x, y))
            arrays = [*arrays[:other], y, *arrays[other + 1 :]]
    return [*arrays[:which], x, *arrays[which + 1 :]]


steps = st.tuples(
    st.sampled_from(OPERATIONS),
    st.integers(0, ARRAYS - 1),
    st.integers(0, ARRAYS - 1),
    st.integers(0, SIZE - 1),
)


@settings(max_examples=10, deadline=None)
@given(st.lists(steps, min_size=2, max_size=7))
def test_random_programs_of_updates_compute_what_xla_computes(program):
    def function(arrays, scalar):
        arrays = list(arrays)
        for operation, which, other, place in program:
            arrays = step(arrays, operation, which, other, place, scalar)
        return jnp.stack(arrays)

    x = np.random.default_rng(len(program)).integers(-9, 9, (ARRAYS, SIZE)).astype(np.int32)
    expect_same(function, x, np.int32(2))


def copies(capsys, function, *arrays):
    """How many times whole arrays are copied by the code of a function."""
    capsys.readouterr()
    run(function, *arrays, dump_llvm=True)
    code = capsys.readouterr().out
    return len(re.findall(r"call .*@\"(?:llvm\.memcpy|store)", code))


X = np.arange(SIZE, dtype=np.int32)


def test_a_carry_is_updated_in_place(capsys):
    def fill(x):
        return lax.fori_loop(0, 50, lambda i, c: c.at[i].set(c[i] * 2), x)

    # What comes from a Ref is copied once, and so is what goes to one.
    assert copies(capsys, fill, X) == 2
    expect_same(fill, X)


@pytest.mark.parametrize("updates", [1, 4])
def test_a_chain_of_updates_copies_once(capsys, updates):
    def chain(x):
        for number in range(updates):
            x = x.at[x[number]].add(1)
        return x

    assert copies(capsys, chain, X) == 2
    expect_same(chain, X)


def test_an_array_that_is_needed_later_is_copied(capsys):
    def both(x):
        once = x.at[x[0]].set(5)
        twice = once.at[x[1]].set(6)
        return once, twice

    assert copies(capsys, both, X) == 4
    expect_same(both, X)


def test_an_array_that_a_lazy_value_reads_is_copied():
    def lazy(x):
        base = x.at[x[0]].set(5)
        doubled = base * 2
        return base.at[x[3]].set(9) + doubled

    expect_same(lazy, X)


def test_a_view_keeps_what_it_shows():
    def viewed(x):
        base = x.at[x[0]].set(5)
        mirrored = base[::-1]
        return base.at[x[3]].set(9), mirrored

    expect_same(viewed, X)


def test_scanned_updates_and_rows():
    def table(x):
        def body(carry, row):
            carry = carry.at[row[0] % SIZE].add(row[1])
            return carry, carry[:70] * 2

        return lax.scan(body, x, jnp.stack([x, x + 1], 1)[:20])

    expect_same(table, X)
