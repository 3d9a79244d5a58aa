"""Schedules survive being written down."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cokernel.checking.schedules import STRATEGIES, Schedule

counts = st.integers(0, 2**40)


@given(st.sampled_from(STRATEGIES), counts, counts)
def test_a_drawn_schedule_is_read_back_as_it_was(strategy, seed, launch):
    schedule = Schedule(strategy=strategy, seed=seed, launch=launch)
    assert Schedule.from_text(schedule.to_text()) == schedule


@given(st.lists(st.integers(0, 1000)), counts)
def test_a_list_of_choices_is_read_back_as_it_was(choices, launch):
    schedule = Schedule(strategy="choices", choices=tuple(choices), launch=launch)
    assert Schedule.from_text(schedule.to_text()) == schedule


def test_the_depth_of_pct_is_part_of_the_text():
    schedule = Schedule(strategy="pct", seed=5, depth=7, launch=2)
    assert schedule.to_text() == "ck1:pct:2:5:7"
    assert Schedule.from_text("ck1:pct:2:5:7") == schedule


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ck1",
        "ck1:random:0",
        "ck0:random:0:1",
        "ck1:best:0:1",
        "ck1:choices:0:abc",
        "ck1:random:0:-1",
        "ck1:random:-2:1",
        f"ck1:random:0:{2**64}",
        "ck1:random:0:1:3",
        "ck1:pct:0:1:0",
        f"ck1:pct:0:1:{2**40}",
        "ck1:random:0:1.5",
        "ck1:choices:0:\u00e9",
        Schedule(strategy="choices", choices=(2**31,)).to_text(),
    ],
)
def test_what_is_no_schedule_is_refused_with_an_example(text):
    with pytest.raises(ValueError, match=r"written ck1:strategy.*as in 'ck1:random:0:17'"):
        Schedule.from_text(text)
