"""An UninitialisedRead names the Ref and the elements whose values have reached the use: not what
else the same line has read, nor what was overwritten or left out. Where that is not known it says
so.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

import cokernel

N = 64
X = jnp.arange(N, dtype=jnp.float32)
REF = pltpu.VMEM((N,), jnp.float32)


def explored(body: Callable[..., None], scratch: int = 2, schedules: int = 1) -> Any:
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct((N,), jnp.float32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[REF] * scratch,
    )
    return cokernel.explore(kernel, X, schedules=schedules)


def put(target, i, source, j, count=16):
    target[pl.ds(i, count)] = source[pl.ds(j, count)]


def loops(function, step=16, stop=N):
    pl.loop(0, stop, step=step)(function)


# Several reads, and which of them matter.


def overwritten_by_another_ref(x, o, a, b):
    o[...] = x[...]
    put(o, 0, a, 0)
    put(o, 0, b, 16)


def overwritten_in_part(x, o, a, b):
    o[...] = x[...]
    put(o, 0, a, 0)
    put(o, 8, b, 24)


def loops_of_one_line(x, o, a, b):
    def copy(source):
        loops(lambda i: put(o, i, source, i))

    copy(a)
    copy(b)


def one_function_for_two(x, o, a, b):
    o[...] = x[...]
    shift = jax.jit(lambda v: v + 1)
    one, other = shift(a[pl.ds(0, 16)]), shift(b[pl.ds(32, 16)])
    a[pl.ds(0, 16)] = one
    o[pl.ds(0, 16)] = other


def reads_in_one_function(x, o, a, b):
    o[...] = x[...]
    first = jax.jit(lambda ref: ref[0])
    other = first(b)
    b[1] = first(a)

    @pl.when(other == 3)
    def _():
        o[0] = 1.0


def overwritten_by_the_input(x, o, a, b):
    a[...] = b[...] + 1
    a[pl.ds(0, 48)] = x[pl.ds(0, 48)]
    o[...] = a[...]


def one_of_those_a_loop_has_changed(x, o, a, b):
    def change(i):
        a[pl.ds(i, 16)] = a[pl.ds(i, 16)] + 1

    loops(change)
    o[...] = x[...]
    total = jnp.sum(a[pl.ds(32, 16)])

    @pl.when(total == 12345)
    def _():
        o[0] = 1.0


def one_of_those_a_loop_has_moved(x, o, a, b):
    loops(lambda i: put(b, 48 - i, a, i))
    o[...] = x[...]
    put(o, 0, b, 0)


def elements_by_themselves(x, o, a, b):
    @pl.loop(0, N)
    def _(i):
        b[i] = a[i]

    o[...] = x[...]
    put(o, 0, b, 20, 8)


def a_sum_of_each_row(x, o, a, b):
    rows = jnp.sum(a[...].reshape(4, 16), axis=1)
    b[pl.ds(0, 4)] = rows
    o[...] = x[...]
    o[0] = b[2]


def all_that_a_loop_has_added(x, o, a, b):
    a[pl.ds(0, 16)] = x[pl.ds(0, 16)]
    total = lax.fori_loop(
        0, 3, lambda i, v: v + a[pl.ds(pl.multiple_of(16 * i, 16), 16)], x[pl.ds(0, 16)]
    )
    o[...] = x[...]
    o[pl.ds(0, 16)] = total


def through_a_copy(x, o, a, b):
    pltpu.sync_copy(a, b)
    o[...] = x[...]
    put(o, 0, b, 8)


def a_column(x, o, a, b):
    o[...] = x[...]
    o[pl.ds(0, 4)] = a[...].reshape(4, 16)[:, 3]


def an_array_filled_in_part(x, o, a, b):
    rest = lax.dynamic_update_slice(lax.empty((N,), jnp.float32), x[pl.ds(0, 48)], (0,))
    o[...] = rest


def what_is_not_masked_out(x, o, a, b):
    o[...] = jnp.where(jnp.arange(N) < 60, x[...], a[...])


@dataclasses.dataclass(frozen=True)
class Case:
    body: Callable[..., None]
    name: str
    parts: tuple[str, ...]

    def __str__(self) -> str:
        return self.body.__name__


CASES = [
    Case(overwritten_by_another_ref, "b", ("[16:32]",)),
    Case(loops_of_one_line, "b", ("[0:64]",)),
    Case(one_function_for_two, "b", ("[32:48]",)),
    Case(reads_in_one_function, "b", ("[0]",)),
    Case(overwritten_by_the_input, "b", ("[48:64]",)),
    Case(one_of_those_a_loop_has_changed, "a", ("[32:48]",)),
    Case(one_of_those_a_loop_has_moved, "a", ("[48:64]",)),
    Case(elements_by_themselves, "a", ("[20:28]",)),
    Case(a_sum_of_each_row, "a", ("[32:48]",)),
    Case(all_that_a_loop_has_added, "a", ("[16:48]",)),
    Case(through_a_copy, "a", ("[8:24]",)),
    Case(a_column, "a", ("[3]", "[19]", "[35]", "[51]")),
    Case(an_array_filled_in_part, "lax.empty", ("[48:64]",)),
    Case(what_is_not_masked_out, "a", ("[60:64]",)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_only_what_has_reached_the_use_is_named(case):
    report = explored(case.body)
    [finding] = report.findings
    assert (finding.kind, finding.name) == ("UninitialisedRead", case.name), str(report)
    assert tuple(finding.memory.parts) == case.parts
    assert finding.is_exact
    assert "some of" not in finding.sentence


def test_two_refs_whose_values_are_left_are_two_findings_on_one_line():
    report = explored(overwritten_in_part)
    assert {(one.name, one.indices) for one in report.findings} == {
        ("a", "[0:8]"),
        ("b", "[24:40]"),
    }


def test_each_read_whose_value_is_left_counts():
    def body(x, o, a, b):
        o[...] = x[...]
        loops(lambda i: put(b, i, a, i))
        put(o, 0, b, 16)
        put(o, 16, b, 40, 16)

    [finding] = explored(body).findings
    assert finding.indices == "[16:32] and [40:56]"
    assert finding.occurrences == 3


# What is not known exactly.


def picked(x, o, a, b):
    o[...] = x[...]
    o[0] = jnp.take(a[...], x[3].astype(jnp.int32))


def summed_in_an_inner_loop(x, o, a, b):
    o[...] = x[...]

    @pl.loop(0, 2)
    def _(k):
        total = lax.fori_loop(0, 2, lambda i, v: v + a[32 * k + i], 0.0)
        o[k] = jnp.where(k == 0, 0.0, total)


@pytest.mark.parametrize("body", [picked, summed_in_an_inner_loop])
def test_where_it_is_not_known_no_more_is_said(body):
    [finding] = explored(body).findings
    assert not finding.is_exact
    assert "reads some of a[" in finding.sentence
    assert "some of a[" in finding.text()
    assert cokernel.Finding.from_dict(finding.to_dict()) == finding


def test_values_that_were_written_make_no_finding():
    def body(x, o, a, b):
        for source in (a, b):
            loops(lambda i, source=source: put(source, i, x, i))
        loops(lambda i: put(o, i, a, i))
        o[...] = o[...] + jnp.repeat(jnp.sum(b[...].reshape(4, 16), axis=1), 16)

    report = explored(body, schedules=3)
    assert report.is_clean, str(report)
