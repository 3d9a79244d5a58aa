"""Of each element of a mask it is known which elements of a read it comes from: exactly those that,
undefined alone, make it undefined.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from cokernel import _jax
from cokernel.compiler.definedness import Origins, Scope, bools
from cokernel.compiler.definedness_rules import load
from cokernel.compiler.definedness_sources import Source, of_read, words
from cokernel.compiler.few_bits import bitcast_rows
from tests.compiler.test_definedness import evaluate

SHAPE = (4, 6)

# What moves elements, or computes each from few: for these it is known from which.
KNOWN = {
    "itself": lambda x: x * 2,
    "transpose": lambda x: x.T,
    "row": lambda x: x[2],
    "column": lambda x: x[:, 3],
    "part": lambda x: x[1:3, 2:5],
    "steps": lambda x: x[::2, 1::3],
    "back": lambda x: x[::-1, ::-1],
    "flat": lambda x: x.reshape(24),
    "deeper": lambda x: x.reshape(2, 2, 3, 2),
    "joined rows": lambda x: x.reshape(2, 12),
    "transposed deeper": lambda x: x.T.reshape(2, 3, 4),
    "expanded": lambda x: x[:, None, :],
    "broadcast": lambda x: jnp.broadcast_to(x[:, None, :], (4, 5, 6)),
    "rows stretched": lambda x: jnp.zeros((4, 6)) + x[:, :1],
    "sum": lambda x: jnp.sum(x),
    "row sums": lambda x: jnp.sum(x, axis=1),
    "column sums": lambda x: jnp.max(x, axis=0),
    "sums of a part": lambda x: jnp.sum(x[1:, 2:4], axis=1),
    "sums of a transpose": lambda x: jnp.sum(x.T.reshape(3, 2, 4), axis=1),
    "sums, spread": lambda x: jnp.broadcast_to(jnp.sum(x, axis=1)[:, None], (4, 3)),
    "product": lambda x: x @ jnp.ones((6, 3)),
    "product from the left": lambda x: jnp.ones((3, 4)) @ x,
    "batch of products": lambda x: lax.dot_general(
        x.reshape(2, 2, 6), jnp.ones((2, 5, 6)), (((2,), (2,)), ((0,), (0,)))
    ),
    "flat transpose": lambda x: x.T.reshape(24),
    "transpose, flat and back": lambda x: x.T.reshape(24).reshape(6, 4)[2:],
    "rows of parts": lambda x: bitcast_rows(x, jnp.int8),
    "halves": lambda x: lax.split(x, (2, 4), axis=1)[1],
    "bits": lambda x: lax.bitcast_convert_type(x, jnp.int16),
}
# For these it is not, and nothing is claimed.
UNKNOWN = {
    "two places by one": lambda x: x + x[1, 2],
    "two places": lambda x: x + x[::-1],
    "prefix": lambda x: jnp.cumsum(x, axis=1),
    "chosen": lambda x: lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(2)), (2, 3)),
    "row of a flat transpose": lambda x: x.T.reshape(4, 6)[1],
    "beside": lambda x: jnp.concatenate([x, jnp.ones((4, 6))]),
    "padded": lambda x: jnp.pad(x, 1),
    "sorted": lambda x: jnp.sort(x, axis=1),
}


def mask_and_source(function: Any) -> tuple[Any, tuple[int, ...], Source]:
    """A function's mask as a jaxpr, its shape, and where it comes from."""
    load()
    jaxpr = jax.make_jaxpr(function)(np.zeros(SHAPE, np.float32))
    given = _jax.Var(bools(SHAPE))
    origins = Origins()
    origins.add(given, {7: of_read(SHAPE)})
    scope = Scope({jaxpr.invars[0]: given}, set(), origins)
    [mask] = scope.rewrite(jaxpr)
    [(number, source)] = scope.reads(mask)
    assert number == 7
    body = jaxpr.replace(invars=[*jaxpr.invars, given], outvars=[mask], eqns=scope.eqns)
    return body, tuple(mask.aval.shape), source


def sources_of(source: Source, shape: tuple[int, ...]) -> dict[tuple[int, ...], set[int]]:
    """The elements that each comes from, as the runtime reads what it is told."""
    count, number, flags, base, rank, *rest = words([(7, source)], shape, shape)
    assert (count, number, flags & 1) == (1, 7, 1)
    dimensions = list(itertools.batched(rest[: 2 * rank], 2))
    free = list(itertools.batched(rest[2 * rank + 1 :], 2))
    assert len(free) == rest[2 * rank]
    found = {}
    for position, index in enumerate(np.ndindex(*shape)):
        first = base
        for extent, stride in reversed(dimensions):
            position, at = divmod(position, extent)
            first += at * stride
        steps = [[i * stride for i in range(extent)] for extent, stride in free]
        found[index] = {first + sum(some) for some in itertools.product(*steps)}
    return found


def undefined_by(body: Any) -> dict[tuple[int, ...], set[int]]:
    """The elements that, undefined alone, make each element of the result undefined."""
    found: dict[tuple[int, ...], set[int]] = {}
    for number in range(int(np.prod(SHAPE))):
        mask = np.zeros(SHAPE, bool)
        mask.flat[number] = True
        [result] = evaluate(body, [np.zeros(SHAPE, np.float32), mask])
        for index, is_bad in np.ndenumerate(np.asarray(result)):
            found.setdefault(index, set()).update([number] if is_bad else [])
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_elements_come_from_those_that_make_them_undefined(name):
    body, shape, source = mask_and_source(KNOWN[name])
    assert source.is_sure
    assert sources_of(source, shape) == undefined_by(body)


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_it_is_not_known_nothing_is_claimed(name):
    _, _, source = mask_and_source(UNKNOWN[name])
    assert not source.is_known
    assert not source.is_sure
