"""Options of checked mode, from every place they can come from."""

import dataclasses

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

import cokernel
from cokernel.checking import options, state
from cokernel.checking.options import Checked


@pytest.mark.parametrize(
    ("fields", "error", "words"),
    [
        ({"races": 1}, TypeError, "races"),
        ({"seed": True}, TypeError, "seed"),
        ({"seed": -1}, ValueError, "seed"),
        ({"schedules": 0}, ValueError, "schedules"),
        ({"strategy": "clever"}, ValueError, "run_to_block"),
        ({"fill": 256}, ValueError, "0 to 255"),
        ({"fill": "ones"}, ValueError, "zeros"),
        ({"chip_limits": "maybe"}, ValueError, "warn"),
        ({"on_finding": "ignore"}, ValueError, "raise"),
        ({"replay": "xyz"}, ValueError, "ck1:random"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"seed": 1.5}, TypeError, "seed"),
        ({"schedules": 2**31}, ValueError, "schedules"),
        ({"schedules": "3"}, TypeError, "schedules"),
        ({"depth": 0}, ValueError, "depth"),
        ({"depth": 2**40}, ValueError, "depth"),
        ({"max_findings": 0}, ValueError, "max_findings"),
        ({"max_findings": 2**70}, ValueError, "max_findings"),
        ({"strategy": None}, TypeError, "strategy"),
        ({"strategy": 3}, TypeError, "round_robin"),
        ({"fill": None}, TypeError, "byte"),
        ({"fill": 0.5}, TypeError, "byte"),
        ({"fill": True}, TypeError, "byte"),
        ({"fill": ["nan"]}, TypeError, "byte"),
        ({"on_finding": True}, TypeError, "raise"),
        ({"chip_limits": False}, TypeError, "warn"),
        ({"replay": 17}, TypeError, "Replay:"),
        ({"replay": b"ck1:random:0:1"}, TypeError, "Replay:"),
    ],
)
def test_a_meaningless_option_is_refused_by_name(fields, error, words):
    with pytest.raises(error, match=words):
        Checked(**fields)


@pytest.mark.parametrize("text", ["1", " 1 ", "on", "True", "yes"])
def test_the_environment_variable_turns_the_defaults_on(text):
    assert options.from_environment({options.VARIABLE: text}) == Checked()


@pytest.mark.parametrize("text", ["", "0", "off", "False", "no"])
def test_an_empty_environment_variable_means_native(text):
    assert options.from_environment({options.VARIABLE: text}) is None
    assert options.from_environment({}) is None


def test_integers_of_every_type_are_taken():
    taken = Checked(seed=np.int32(3), schedules=np.array(2), fill=np.uint8(7))
    assert taken == Checked(seed=3, schedules=2, fill=7)
    assert {type(taken.seed), type(taken.schedules), type(taken.fill)} == {int}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("xyz", "1 of the four parts"),
        ("ck1:random:0", "3 of the four parts"),
        ("ck1:random:0:x", "its seed is 'x'"),
        ("ck1:random:a:1", "its launch is 'a'"),
        ("ck1:choices:0:eJw", "copy the whole string"),
        ("ck1:choices:0:*", "copy the whole string"),
        ("ck1:lucky:0:1", "no strategy 'lucky'"),
    ],
)
def test_a_bad_replay_string_is_told_what_one_looks_like(text, words):
    with pytest.raises(ValueError, match=words) as raised:
        Checked(replay=text)
    assert "ck1:strategy:launch:seed, as in 'ck1:random:0:17'" in str(raised.value)
    assert "unpack" not in str(raised.value)


def test_options_are_written_as_pairs():
    text = "seed=3, schedules=20, races=off, fill=7, strategy=pct"
    expected = Checked(seed=3, schedules=20, races=False, fill=7, strategy="pct")
    assert options.from_text(text) == expected


@pytest.mark.parametrize("text", ["sed=3", "races", "seed=x", "races=perhaps", "seed=1,seed=2"])
def test_a_part_that_is_not_understood_is_named(text):
    with pytest.raises(ValueError, match=text.partition("=")[0]):
        options.from_text(text)


def test_every_field_of_jax_s_parameters_has_its_meaning():
    params = pltpu.InterpretParams(
        detect_races=True,
        on_race="warn",
        uninitialized_memory="zero",
        random_seed=9,
        dma_execution_mode="eager",
        buffer_bounds="padded",
    )
    assert options.from_interpret(params) == Checked(
        races=True,
        on_finding="warn",
        fill="zeros",
        seed=9,
        strategy="run_to_block",
        padded_tiles=True,
    )
    defaults = options.from_interpret(pltpu.InterpretParams())
    assert defaults == Checked(races=False, strategy="delay_dma")


@pytest.mark.parametrize(
    "fields", [{"out_of_bounds_reads": "uninitialized"}, {"skip_floating_point_ops": True}]
)
def test_parameters_of_jax_that_ask_for_wrong_answers_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        options.from_interpret(pltpu.InterpretParams(**fields))


def test_booleans_mean_native():
    assert options.from_interpret(False) is options.from_interpret(True) is None


@pytest.mark.parametrize("interpret", ["checked", 3, Checked])
def test_anything_else_is_refused(interpret):
    with pytest.raises(TypeError, match="interpret"):
        options.from_interpret(interpret)


def test_a_block_asks_for_checked_mode_and_a_kernel_s_own_wish_goes_first():
    assert state.effective(False) is None
    with cokernel.checked(seed=1):
        assert state.effective(False) == Checked(seed=1)
        assert state.effective(Checked(seed=2)) == Checked(seed=2)
        with cokernel.checked(Checked(seed=3), races=False):
            assert state.current() == Checked(seed=3, races=False)
        assert state.current() == Checked(seed=1)
    assert state.current() is None


def test_a_decorated_function_runs_in_checked_mode():
    @cokernel.checked(seed=4)
    def function():
        return state.current()

    assert function() == Checked(seed=4)
    assert state.current() is None


def test_the_runtime_is_handed_plain_data():
    handed = Checked(seed=5, strategy="pct", depth=2).for_runtime()
    assert handed["schedule"]["seed"] == 5
    assert handed["schedule"]["depth"] == 2
    assert set(handed) <= {field.name for field in dataclasses.fields(Checked)} | {"schedule"}


def test_a_schedule_is_taken_again_once():
    again = cokernel.Checked(replay="ck1:random:0:3", schedules=8)
    assert again.for_runtime()["schedules"] == 1


@pytest.mark.parametrize("text", ["2", "seed=x", "schedules=0", "fill=red", "replay=abc"])
def test_an_environment_variable_that_means_nothing_is_named(text):
    with pytest.raises(ValueError, match=f"{options.VARIABLE} is '{text}'"):
        options.from_environment({options.VARIABLE: text})
