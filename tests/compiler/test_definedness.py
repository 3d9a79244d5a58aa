"""Undefined values are followed through programs: masks equal a naive oracle's, and whoever uses an
undefined value is told where it was read.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _jax
from cokernel.checking.launches import collected_reports
from cokernel.compiler.definedness import Origins, Scope, bools, report_undefined_p
from cokernel.compiler.definedness_rules import load

# Masks as a function of arrays.


def evaluate(jaxpr: Any, arguments: Any) -> list[Any]:
    """The results of a jaxpr that the pass has rewritten: JAX runs all but its control flow, whose
    parameters only our own rules understand.
    """
    env = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.invars, arguments, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, _jax.Literal) else env[atom]

    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        results = _run(eqn, operands)
        env.update(zip(eqn.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _run(eqn: Any, operands: list[Any]) -> list[Any]:
    params = eqn.params
    if eqn.primitive in (_jax.jit_p, _jax.closed_call_p):
        return evaluate(params.get("jaxpr", params.get("call_jaxpr")), operands)
    if eqn.primitive is _jax.cond_p:
        return evaluate(params["branches"][int(operands[0])], operands[1:])
    if eqn.primitive is _jax.scan_p:
        constants, carry, sequences = params["ft_in"].update(operands).unpack()
        rows = []
        for number in range(params["length"]):
            slices = [sequence[number] for sequence in sequences]
            results = evaluate(params["jaxpr"], [*constants, *carry, *slices])
            carry = results[: len(carry)]
            rows.append(results[len(carry) :])
        return [*carry, *(np.stack(column) for column in zip(*rows, strict=True))]
    if eqn.primitive is _jax.while_p:
        first = params["cond_nconsts"]
        second = first + params["body_nconsts"]
        carry = operands[second:]
        while evaluate(params["cond_jaxpr"], [*operands[:first], *carry])[0]:
            carry = evaluate(params["body_jaxpr"], [*operands[first:second], *carry])
        return carry
    if eqn.primitive is report_undefined_p:
        return []
    results = eqn.primitive.bind(*operands, **eqn.primitive.get_bind_params(params))
    return results if eqn.primitive.multiple_results else [results]


def masks_of(function: Callable[..., Any], *arrays: Any, masks: Any) -> list[np.ndarray]:
    """The masks of a function's results, for arguments with these masks (None: defined)."""
    load()
    jaxpr = jax.make_jaxpr(function)(*arrays)
    given_masks = {
        variable: _jax.Var(bools(variable.aval.shape))
        for variable, mask in zip(jaxpr.invars, masks, strict=True)
        if mask is not None
    }
    scope = Scope(dict(given_masks), set(), Origins())
    results = scope.rewrite(jaxpr)
    outvars = [
        scope.nothing(atom.aval.shape) if mask is None else mask
        for atom, mask in zip(jaxpr.outvars, results, strict=True)
    ]
    rewritten = jaxpr.replace(
        invars=[*jaxpr.invars, *given_masks.values()], outvars=outvars, eqns=scope.eqns
    )
    values = [*arrays, *(mask for mask in masks if mask is not None)]
    return [np.asarray(mask) for mask in evaluate(rewritten, values)]


A = np.arange(12, dtype=np.float32).reshape(3, 4)
M = np.zeros((3, 4), bool)
M[0, 1] = M[2, 3] = True
V = np.arange(4, dtype=np.float32)
W = np.array([False, True, False, False])


@dataclasses.dataclass(frozen=True)
class Case:
    """A function of one array, and what it does to a mask."""

    function: Callable[..., Any]
    oracle: Callable[[np.ndarray], np.ndarray]


EXACT = {
    "sum with itself": Case(lambda x: x * 2 + x, lambda m: m),
    "conversion": Case(lambda x: x.astype(jnp.int32), lambda m: m),
    "comparison": Case(lambda x: x > 3, lambda m: m),
    "transpose": Case(lambda x: x.T, lambda m: m.T),
    "reshape": Case(lambda x: x.reshape(2, 6), lambda m: m.reshape(2, 6)),
    "broadcast": Case(lambda x: jnp.broadcast_to(x, (2, 3, 4)), lambda m: np.stack([m, m])),
    "slice": Case(lambda x: x[1:, ::2], lambda m: m[1:, ::2]),
    "reverse": Case(lambda x: x[::-1], lambda m: m[::-1]),
    "concatenate": Case(
        lambda x: jnp.concatenate([x, jnp.ones((1, 4))]),
        lambda m: np.concatenate([m, np.zeros((1, 4), bool)]),
    ),
    "stack": Case(
        lambda x: jnp.stack([x, jnp.ones((3, 4))], axis=1),
        lambda m: np.stack([m, np.zeros((3, 4), bool)], axis=1),
    ),
    "unstack": Case(lambda x: jnp.unstack(x, axis=1)[2], lambda m: m[:, 2]),
    "tile": Case(lambda x: jnp.tile(x, (2, 3)), lambda m: np.tile(m, (2, 3))),
    "pad": Case(lambda x: jnp.pad(x, 1), lambda m: np.pad(m, 1)),
    "take": Case(lambda x: x[jnp.array([2, 0])], lambda m: m[[2, 0]]),
    "update": Case(
        lambda x: x.at[0].set(1.0), lambda m: np.where(np.arange(3)[:, None] == 0, False, m)
    ),
    "sum in place": Case(
        lambda x: jnp.ones((3, 4)).at[0].add(x[0]),
        lambda m: np.where(np.arange(3)[:, None] == 0, m, False),
    ),
    "dynamic slice": Case(lambda x: lax.dynamic_slice(x, (1, 1), (2, 2)), lambda m: m[1:3, 1:3]),
    "select": Case(lambda x: jnp.where(np.arange(4) < 2, x, 0.0), lambda m: m & (np.arange(4) < 2)),
    "sum": Case(lambda x: x.sum(axis=1), lambda m: m.any(axis=1)),
    "maximum": Case(lambda x: x.max(), lambda m: m.any()),
    "argmax": Case(lambda x: jnp.argmax(x, axis=0), lambda m: m.any(axis=0)),
    "cumulative sum": Case(
        lambda x: jnp.cumsum(x, axis=1), lambda m: np.logical_or.accumulate(m, axis=1)
    ),
    "sort": Case(
        lambda x: jnp.sort(x, axis=1), lambda m: np.repeat(m.any(axis=1, keepdims=True), 4, 1)
    ),
    "product": Case(
        lambda x: x @ jnp.ones((4, 2)), lambda m: np.repeat(m.any(axis=1, keepdims=True), 2, 1)
    ),
    "product on the right": Case(
        lambda x: jnp.ones((2, 3)) @ x, lambda m: np.repeat(m.any(axis=0, keepdims=True), 2, 0)
    ),
    "split": Case(lambda x: jnp.split(x, 2, axis=1)[1], lambda m: m[:, 2:]),
    "function": Case(jax.jit(lambda x: jnp.exp(x) + 1), lambda m: m),
    "bits": Case(lambda x: lax.bitcast_convert_type(x, jnp.int32), lambda m: m),
    "narrower bits": Case(
        lambda x: lax.bitcast_convert_type(x, jnp.int16), lambda m: np.stack([m, m], axis=-1)
    ),
    "loop": Case(
        lambda x: lax.fori_loop(0, 3, lambda i, y: jnp.roll(y, 1, 0) + y, x),
        lambda m: np.repeat(m.any(axis=0, keepdims=True), 3, 0),
    ),
    "scan": Case(
        lambda x: lax.scan(lambda c, row: (c + row, c), jnp.zeros(4), x)[1],
        lambda m: np.logical_or.accumulate(np.concatenate([np.zeros((1, 4), bool), m[:-1]])),
    ),
    "something without a rule": Case(
        lambda x: lax.linalg.cholesky(x[:, :3], symmetrize_input=False),
        lambda m: np.tril(np.full((3, 3), m[:, :3].any())),
    ),
}


@pytest.mark.parametrize("name", EXACT)
def test_a_mask_says_exactly_what_depends_on_undefined_elements(name):
    case = EXACT[name]
    [found] = masks_of(case.function, A, masks=[M])
    np.testing.assert_array_equal(found, case.oracle(M))


def test_what_does_not_depend_on_an_undefined_argument_has_no_mask():
    found = masks_of(lambda x, y: (y * 2, x + y), A, V, masks=[M, None])
    np.testing.assert_array_equal(found[0], False)
    np.testing.assert_array_equal(found[1], M)


def test_a_branch_gives_the_masks_of_what_it_chooses():
    def function(flag, x, y):
        return lax.cond(flag, lambda x, y: x, lambda x, y: y, x, y)

    for flag, expected in ((True, W), (False, np.zeros(4, bool))):
        [found] = masks_of(function, flag, V, V, masks=[None, W, None])
        np.testing.assert_array_equal(found, expected)


def test_a_loop_spreads_masks_through_what_it_carries():
    def function(x):
        return lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, s[2], s[1] * 2), (0, x, V))

    _, second, third = masks_of(function, V, masks=[W])
    np.testing.assert_array_equal(second, W)
    np.testing.assert_array_equal(third, False)


STEPS: list[Case] = [
    Case(lambda x: x + 1, lambda m: m),
    Case(lambda x: x * x[::-1], lambda m: m | m[::-1]),
    Case(lambda x: jnp.roll(x, 2), lambda m: np.roll(m, 2)),
    Case(lambda x: jnp.where(np.arange(8) % 2 == 0, x, 0.0), lambda m: m & (np.arange(8) % 2 == 0)),
    Case(lambda x: x + x[3], lambda m: m | m[3]),
    Case(
        lambda x: jnp.concatenate([x[4:], jnp.ones(4)]),
        lambda m: np.concatenate([m[4:], [False] * 4]),
    ),
    Case(
        lambda x: jnp.stack([x[:4], x[4:]], axis=1).reshape(8), lambda m: m.reshape(2, 4).T.ravel()
    ),
    Case(lambda x: jnp.tile(x[:2], 4), lambda m: np.tile(m[:2], 4)),
    Case(
        lambda x: jnp.concatenate(jnp.unstack(x.reshape(2, 4))[::-1]),
        lambda m: np.concatenate([m[4:], m[:4]]),
    ),
    Case(lambda x: jnp.cumsum(x), np.logical_or.accumulate),
    Case(lambda x: x.reshape(2, 4).sum(axis=0).repeat(2), lambda m: (m[:4] | m[4:]).repeat(2)),
    Case(lambda x: x.at[1].set(0.0), lambda m: np.where(np.arange(8) == 1, False, m)),
    Case(lambda x: lax.fori_loop(0, 2, lambda i, y: y + i, x), lambda m: m),
]


@given(
    mask=st.lists(st.booleans(), min_size=8, max_size=8),
    numbers=st.lists(st.integers(0, len(STEPS) - 1), max_size=5),
)
@settings(max_examples=25)
def test_masks_of_random_programs_equal_the_oracle(mask, numbers):
    def function(x):
        for number in numbers:
            x = STEPS[number].function(x)
        return x + 0

    expected = np.array(mask)
    for number in numbers:
        expected = STEPS[number].oracle(expected)
    [found] = masks_of(function, np.arange(8, dtype=np.float32), masks=[np.array(mask)])
    np.testing.assert_array_equal(found, expected)


# Whole kernels.

X = jnp.arange(16, dtype=jnp.int32)
VMEM = pltpu.VMEM((16,), jnp.int32)
MESH = cokernel.CoreMesh(core=1)


def findings(body: Callable[..., None], *scratch: Any, mesh: Any = MESH) -> list[dict[str, Any]]:
    """What checked mode finds while a kernel runs: body(x_ref, o_ref, *scratch)."""
    kernel = cokernel.kernel(
        body, X, mesh=mesh, scratch_types=list(scratch), interpret=cokernel.Checked(fill="random")
    )
    with collected_reports() as reports:
        try:
            jax.block_until_ready(kernel(X))
        except (jax.errors.JaxRuntimeError, ValueError):
            assert reports[0][0].findings
    [(_, record)] = reports
    return record["findings"]


def branch(x_ref, o_ref, mine):
    o_ref[...] = x_ref[...]

    @pl.when(mine[3] > 0)
    def _():
        o_ref[0] = 1


def trip_count(x_ref, o_ref, mine):
    o_ref[...] = x_ref[...]
    mine[0] = 3
    lax.fori_loop(0, mine[1] & 7, lambda i, _: None, None)


def polled(x_ref, o_ref, mine):
    o_ref[...] = x_ref[...]
    lax.while_loop(lambda n: (mine[2] & 1) + n < 3, lambda n: n + 1, 0)


def index(x_ref, o_ref, mine):
    o_ref[...] = x_ref[...]
    o_ref[mine[3] & 7] = 1


def index_array(x_ref, o_ref, mine):
    o_ref[...] = x_ref[...]
    o_ref[mine[pl.ds(0, 4)] & 7] = jnp.arange(4)


def amount(x_ref, o_ref, mine, ready):
    o_ref[...] = x_ref[...]
    count = mine[0] & 3
    pl.semaphore_signal(ready, count)
    pl.semaphore_wait(ready, count)


def output(x_ref, o_ref, mine):
    mine[pl.ds(0, 10)] = x_ref[pl.ds(0, 10)]
    o_ref[...] = mine[...] + 1


def copied_output(x_ref, o_ref, mine):
    mine[pl.ds(0, 10)] = x_ref[pl.ds(0, 10)]
    pltpu.sync_copy(mine, o_ref)


def carried_output(x_ref, o_ref, mine):
    o_ref[...] = lax.fori_loop(0, 2, lambda i, y: y + mine[...], x_ref[...])


def scoped_output(x_ref, o_ref):
    def inside(own):
        o_ref[...] = own[...]

    pl.run_scoped(inside, VMEM)


def sum_in_place(x_ref, o_ref):
    o_ref[pl.ds(0, 8)] = x_ref[pl.ds(0, 8)]
    jax.ref.addupdate(o_ref, ..., x_ref[...])


def exchanged(x_ref, o_ref, mine):
    o_ref[...] = jax.ref.swap(mine, ..., x_ref[...])


def masked_load(x_ref, o_ref, mine):
    o_ref[...] = pltpu.load(x_ref, mask=jnp.arange(16) < 10)


def masked_store(x_ref, o_ref, mine):
    o_ref[...] = x_ref[...]
    pltpu.store(o_ref, mine[...], mask=jnp.arange(16) >= 10)


@pytest.mark.parametrize(
    ("body", "scratch", "use", "text", "count"),
    [
        (branch, [VMEM], "branch", "mine[3]", 1),
        (trip_count, [VMEM], "loop", "mine[1]", 1),
        (polled, [VMEM], "loop", "mine[2]", 1),
        (index, [VMEM], "index", "mine[3]", 1),
        (index_array, [VMEM], "index", "mine[pl.ds", 4),
        (amount, [VMEM, pltpu.SemaphoreType.REGULAR], "amount", "mine[0]", 1),
        (output, [VMEM], "output", "mine[...]", 6),
        (copied_output, [VMEM], "output", "sync_copy", 6),
        (carried_output, [VMEM], "output", "mine[...]", 16),
        (scoped_output, [], "output", "own[...]", 16),
        (exchanged, [VMEM], "output", "swap", 16),
        (masked_store, [VMEM], "output", "mine[...]", 6),
    ],
)
def test_a_use_of_what_nobody_wrote_names_the_read(body, scratch, use, text, count):
    found = [item for item in findings(body, *scratch) if item["kind"] == "UninitialisedRead"]
    assert {item["use"] for item in found} == {use}
    assert max(item["count"] for item in found) == count
    report = cokernel.last_report()
    [code] = {party.code for item in report.findings for party in item.parties[:1]}
    assert text in code


@pytest.mark.parametrize(("body", "scratch"), [(sum_in_place, []), (masked_load, [VMEM])])
def test_an_output_that_stays_undefined_in_part_is_found(body, scratch):
    assert findings(body, *scratch)


def fully_written(x_ref, o_ref, mine):
    mine[...] = x_ref[...]
    o_ref[...] = mine[...] + 1


def unused_lanes(x_ref, o_ref, mine):
    mine[pl.ds(0, 10)] = x_ref[pl.ds(0, 10)]
    o_ref[...] = jnp.where(jnp.arange(16) < 10, mine[...], 0)


def written_in_a_loop(x_ref, o_ref, mine):
    @pl.loop(0, 16)
    def _(i):
        mine[i] = x_ref[i]

    def body(i, total):
        return total + mine[i]

    o_ref[...] = x_ref[...] + lax.fori_loop(0, 16, body, 0)


def rewritten(x_ref, o_ref, mine):
    mine[...] = mine[...] + 1
    mine[...] = x_ref[...]
    o_ref[...] = mine[...]


def masked_both(x_ref, o_ref, mine):
    mask = jnp.arange(16) < 10
    o_ref[...] = x_ref[...]
    mine[pl.ds(0, 10)] = x_ref[pl.ds(0, 10)]
    pltpu.store(o_ref, pltpu.load(mine, mask=mask), mask=mask)


def copied_through(x_ref, o_ref, mine):
    pltpu.sync_copy(x_ref, mine)
    pltpu.sync_copy(mine, o_ref)


@pytest.mark.parametrize(
    "body",
    [fully_written, unused_lanes, written_in_a_loop, rewritten, masked_both, copied_through],
)
def test_undefined_values_that_never_matter_are_no_fault(body):
    assert findings(body, VMEM) == []


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("has_addition", [False, True])
def test_a_stored_product_is_written_on_every_kind_of_processor(dtype, has_addition):
    """Which dtypes are multiplied where they are stored depends on the processor's vectors."""

    def body(x_ref, o_ref, matrix, product):
        matrix[...] = jnp.broadcast_to(x_ref[0:8].astype(dtype), (8, 8))
        added = matrix[...] if has_addition else None
        multiplied = jnp.dot(matrix[...], matrix[...], preferred_element_type=dtype)
        product[...] = multiplied if added is None else added + multiplied
        o_ref[...] = jnp.zeros(16, jnp.int32)
        o_ref[0:8] = product[0].astype(jnp.int32)

    assert findings(body, *[pltpu.VMEM((8, 8), dtype)] * 2) == []


def on_lanes(body, *scratch):
    with cokernel.target("v6e"):
        mesh = plsc.VectorSubcoreMesh(
            core_axis_name="core", subcore_axis_name="subcore", num_cores=1, num_subcores=1
        )
        return findings(body, *scratch, mesh=mesh)


def test_lanes_are_followed_through_gathers_scatters_and_compressed_accesses():
    def body(x_ref, o_ref, mine, other):
        pltpu.sync_copy(x_ref.at[pl.ds(0, 12)], mine.at[pl.ds(0, 12)])
        rows = lax.iota(jnp.int32, 8)
        # Lanes 4 to 7 read elements 12 to 15, which nobody has written.
        plsc.store_scatter(other, [rows], plsc.load_gather(mine, [rows + 8]))
        mask = rows % 2 == 0
        value = plsc.load_expanded(mine.at[pl.ds(0, 8)], mask=mask)
        plsc.store_compressed(other.at[pl.ds(8, 8)], value, mask=mask)
        plsc.store_compressed(other.at[pl.ds(12, 8)], value, mask=mask)
        pltpu.sync_copy(other.at[pl.ds(0, 16)], o_ref)

    found = on_lanes(body, VMEM, pltpu.VMEM((24,), jnp.int32))
    assert [item["kind"] for item in found] == ["UninitialisedRead"]
    [finding] = cokernel.last_report().findings
    assert finding.name == "mine"
    assert "load_gather" in finding.parties[0].code


@pytest.mark.parametrize(("size", "written"), [(16, 8), (16, 7), (32, 8), (32, 16), (64, 32)])
@pytest.mark.parametrize("reduce", [jnp.max, jnp.sum])
def test_what_a_constant_mask_leaves_out_of_a_reduction_need_not_be_defined(size, written, reduce):
    def body(x_ref, o_ref, buffer):
        buffer[pl.ds(0, written)] = x_ref[pl.ds(0, written)]
        kept = jnp.where(jnp.arange(size) < written, buffer[...], 0)
        o_ref[...] = reduce(kept)[None]

    def leaky(x_ref, o_ref, buffer):
        buffer[pl.ds(0, written)] = x_ref[pl.ds(0, written)]
        kept = jnp.where(jnp.arange(size) <= written, buffer[...], 0)
        o_ref[...] = reduce(kept)[None]

    def told(program):
        kernel = cokernel.kernel(
            program,
            jax.ShapeDtypeStruct((1,), jnp.int32),
            mesh=cokernel.CoreMesh(core=1),
            scratch_types=[cokernel.private((size,), jnp.int32)],
        )
        report = cokernel.explore(kernel, jnp.arange(size, dtype=jnp.int32), schedules=1)
        return [item.kind for item in report.findings]

    assert told(body) == []
    assert told(leaky) == ["UninitialisedRead"]


KERNEL_STEPS: list[tuple[Callable[..., None], Callable[..., None]]] = [
    # (in the kernel, on masks): both are given two buffers and a start.
    (
        lambda x, a, b, s: a.__setitem__(pl.ds(s, 4), x[pl.ds(s, 4)]),
        lambda a, b, s: a.__setitem__(slice(s, s + 4), False),
    ),
    (
        lambda x, a, b, s: b.__setitem__(..., a[...] + 1),
        lambda a, b, s: b.__setitem__(slice(None), a),
    ),
    (
        lambda x, a, b, s: b.__setitem__(pl.ds(s, 4), a[pl.ds(0, 4)]),
        lambda a, b, s: b.__setitem__(slice(s, s + 4), a[:4].copy()),
    ),
    (
        lambda x, a, b, s: pltpu.sync_copy(b.at[pl.ds(0, 8)], a.at[pl.ds(s, 8)]),
        lambda a, b, s: a.__setitem__(slice(s, s + 8), b[:8]),
    ),
    (
        lambda x, a, b, s: jax.ref.addupdate(a, (pl.ds(s, 4),), b[pl.ds(s, 4)]),
        lambda a, b, s: a.__setitem__(slice(s, s + 4), a[s : s + 4] | b[s : s + 4]),
    ),
    (
        lambda x, a, b, s: b.__setitem__(jnp.arange(2) * 2 + 3, a[jnp.arange(2) + s]),
        lambda a, b, s: b.__setitem__([3, 5], a[[s, s + 1]]),
    ),
    (
        lambda x, a, b, s: pltpu.store(a, b[...], mask=jnp.arange(16) > s),
        lambda a, b, s: a.__setitem__(slice(s + 1, 16), b[s + 1 : 16]),
    ),
]


@given(st.lists(st.tuples(st.integers(0, len(KERNEL_STEPS) - 1), st.integers(0, 8)), max_size=8))
@settings(max_examples=12)
def test_random_kernels_leave_as_many_elements_undefined_as_the_oracle_says(steps):
    def body(x_ref, o_ref, one, two):
        for number, start in steps:
            KERNEL_STEPS[number][0](x_ref, one, two, start)
        o_ref[...] = x_ref[...]

        # Each undefined element is read, and decides a branch, once.
        @pl.loop(0, 16)
        def _(i):
            @pl.when(one[i] > 0)
            def _():
                o_ref[0] = 1

    first, second = np.ones(16, bool), np.ones(16, bool)
    for number, start in steps:
        KERNEL_STEPS[number][1](first, second, start)
    found = findings(body, VMEM, VMEM)
    assert {(item["kind"], item["use"]) for item in found} <= {("UninitialisedRead", "branch")}
    assert sum(item["occurrences"] for item in found) == first.sum()
