"""Findings that are told as one, because they are on one line, tell of all calls and elements."""

import io
import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from rich.console import Console

import cokernel
from cokernel import Finding
from cokernel.checking.report import combined

SIZE, PART = 128, 16
X = jnp.arange(SIZE, dtype=jnp.int32)
BOARD = cokernel.shared((SIZE,), jnp.int32)
OWN = cokernel.private((SIZE,), jnp.int32)


def explored(body, scratch, *, cores=2, schedules=1, **options):
    kernel = cokernel.kernel(
        body,
        jax.ShapeDtypeStruct(X.shape, X.dtype),
        mesh=cokernel.CoreMesh(core=cores),
        scratch_types=[scratch],
    )
    return cokernel.explore(lambda: kernel(X), schedules=schedules, **options)


def put(x_ref, board, first):
    board[pl.ds(first, PART)] = x_ref[pl.ds(first, PART)]


def racing(*calls):
    """A body in which the first core makes some calls, and the last races with each."""

    def body(x_ref, out_ref, board):
        for core, call in enumerate(calls):
            pl.when(lax.axis_index("core") == core)(lambda call=call: call(x_ref, board))

        @pl.when(lax.axis_index("core") == len(calls))
        def _last():
            board[...] = x_ref[...]
            out_ref[...] = x_ref[...]

    return body


def both(x_ref, board):
    put(x_ref, board, 0)  # First.
    put(x_ref, board, 64)  # Second.


def first(x_ref, board):
    put(x_ref, board, 0)


def second(x_ref, board):
    put(x_ref, board, 64)


def in_a_loop(x_ref, board):
    for start in (0, 64):
        put(x_ref, board, start)


def through_others(x_ref, board):
    first(x_ref, board)
    second(x_ref, board)


def called(party):
    """The code of the calls on each way, without that of `racing` itself."""
    return [
        [caller["code"] for caller in way if not caller["function"].startswith("racing")]
        for way in party.ways
    ]


def party_of(finding, action, function):
    [found] = [
        party
        for party in finding.parties
        if party.action == action and party.function.endswith(function)
    ]
    return found


@pytest.mark.parametrize("schedules", [1, 20])
def test_a_race_of_two_calls_of_one_function_tells_of_both(schedules):
    [finding] = explored(racing(both), BOARD, schedules=schedules).findings
    assert finding.kind == "Race"
    assert finding.indices == "[0:16] and [64:80]"
    assert " board[0:16] and [64:80]" in finding.sentence
    assert finding.memory.runs == ((0, 16), (64, 80))
    assert called(party_of(finding, "writes", "put")) == [
        ["put(x_ref, board, 0)  # First."],
        ["put(x_ref, board, 64)  # Second."],
    ]
    lines = [line.strip() for line in finding.text().splitlines()]
    line = both.__code__.co_firstlineno + 1
    assert f"called at {__file__}:{line} in both" in lines
    assert f"and at {__file__}:{line + 1} in both" in lines


@pytest.mark.parametrize("schedules", [1, 20])
def test_an_undefined_read_of_two_calls_tells_of_both(schedules):
    def body(x_ref, out_ref, own):
        put(own, out_ref, 0)  # First.
        put(own, out_ref, 64)  # Second.

    report = explored(body, OWN, cores=1, schedules=schedules)
    [finding] = report.of_kind("UninitialisedRead")
    assert finding.memory.runs == ((0, 16), (64, 80))
    assert " reads own[0:16] and [64:80], which nobody has written" in finding.sentence
    for action in ("reads", "writes"):
        assert called(party_of(finding, action, "put")) == [
            ["put(own, out_ref, 0)  # First."],
            ["put(own, out_ref, 64)  # Second."],
        ]


def test_the_rounds_of_a_loop_that_is_written_out_are_told_with_all_elements():
    [finding] = explored(racing(in_a_loop), BOARD).findings
    assert finding.indices == "[0:16] and [64:80]"
    assert called(party_of(finding, "writes", "put")) == [["put(x_ref, board, start)"]]


def test_each_way_through_other_functions_is_told():
    [finding] = explored(racing(through_others), BOARD).findings
    assert finding.indices == "[0:16] and [64:80]"
    assert called(party_of(finding, "writes", "put")) == [
        ["put(x_ref, board, 0)", "first(x_ref, board)"],
        ["put(x_ref, board, 64)", "second(x_ref, board)"],
    ]


@pytest.mark.parametrize("schedules", [1, 20])
def test_what_another_core_did_by_another_call_is_told_of_that_core(schedules):
    [finding] = explored(racing(first, second), BOARD, cores=3, schedules=schedules).findings
    ranges = {"core=0": "[0:16]", "core=1": "[64:80]"}
    writer = party_of(finding, "writes", "put")
    assert finding.indices == ranges.pop(writer.core), "the parties have touched these alone"
    [(other, index)] = ranges.items()
    [told] = finding.other_calls
    cores, _, what = told.partition(": ")
    assert set(cores.split(" and ")) == {other, "core=2"}
    assert what == f"board{index}"
    assert f"  by other calls, {told}" in finding.text()
    assert len(writer.ways) == 2


def test_cores_that_make_the_same_calls_are_told_of_with_their_own_elements():
    def body(x_ref, out_ref, board):
        both(x_ref, board)
        out_ref[...] = x_ref[...]

    finding = explored(body, BOARD, cores=4).of_kind("Race")
    board = [one for one in finding if one.name == "board"]
    [one] = board
    assert one.indices == "[0:16] and [64:80]"
    assert one.other_calls == ()


@pytest.mark.parametrize(
    ("body", "cores"), [(racing(both), 2), (racing(first, second), 3), (racing(through_others), 2)]
)
def test_all_that_is_told_is_read_back_from_json(body, cores):
    [finding] = explored(body, BOARD, cores=cores).findings
    plain = json.loads(json.dumps(finding.to_dict()))
    again = Finding.from_dict(plain)
    assert again.to_dict() == finding.to_dict()
    assert again.text() == finding.text()
    assert [party.ways for party in again.parties] == [party.ways for party in finding.parties]
    assert again.other_calls == finding.other_calls
    earlier = {**plain, "parties": [dict(party) for party in plain["parties"]]}
    del earlier["other_calls"]
    for party in earlier["parties"]:
        del party["other_callers"]
    assert Finding.from_dict(earlier).sentence == finding.sentence


def test_the_same_report_is_made_again():
    texts = {str(explored(racing(first, second), BOARD, cores=3, schedules=10)) for _ in range(3)}
    assert len(texts) == 1


def test_launches_of_which_each_makes_one_of_the_calls_are_told_together():
    reports = [explored(racing(call), BOARD) for call in (first, second)]
    [once] = combined(reports[:1]).findings
    [finding] = combined(reports).findings
    assert once.indices == "[0:16]"
    assert finding.indices == "[0:16] and [64:80]"
    # What is told is told once, however often it is met.
    [again] = combined([*reports, *reports]).findings
    assert again.parties == finding.parties
    assert again.memory == finding.memory
    for order in itertools.permutations(reports):
        [other] = combined(order).findings
        assert other.memory == finding.memory
        assert sorted(called(party_of(other, "writes", "put"))) == sorted(
            called(party_of(finding, "writes", "put"))
        )


def test_a_terminal_shows_every_call():
    report = explored(racing(both), BOARD)
    screen = io.StringIO()
    Console(file=screen, width=200).print(report)
    assert "called at" in screen.getvalue()
    assert "and at" in screen.getvalue()
    assert "# Second." in screen.getvalue()
