"""Findings of a launch, its schedules, and how they are replayed."""

import numpy as np
import pytest

from cokernel import _runtime
from tests.runtime_checked.harness import _I32, STRATEGIES, UPDATE, kinds, schedule


def racy(core):
    for position in range(5):
        yield from core.signal(core.semaphore(core=1 - core.index))
        core.write(core.buffer(0) + 4 * position, 4, site=10 * core.index + position)
    yield from core.wait(core.semaphore(), 5)


def test_equal_findings_are_one_and_no_more_are_kept_than_asked_for(kernel):
    def body(core):
        for position in range(5):
            core.write(core.buffer(0) + 4 * position, 4, site=core.index)
        return
        yield

    (finding,) = kernel(body, 2).launch(np.zeros(5, np.int32))["findings"]
    assert finding["memory"]["parts"] == [(0, 20)]
    assert (finding["occurrences"], finding["count"]) == (5, 5)
    record = kernel(racy, 2, max_findings=2).launch(np.zeros(5, np.int32))
    assert len(record["findings"]) == 2
    assert record["dropped"] > 0


def test_a_launch_can_end_at_its_first_finding(kernel):
    made = kernel(racy, 2, stop_at_first=True)
    record = made.launch(np.zeros(5, np.int32))
    assert len(record["findings"]) == 1
    assert "has ended kernel 'kernel'" in made.error


def test_checks_can_be_turned_off_one_by_one(kernel):
    def body(core):
        core.write(core.buffer(0), 4, site=core.index)
        yield from core.signal(core.semaphore(0))
        yield from core.copy(core.scratch, core.scratch + 64, 4, core.semaphore(1))

    options = {"races": "Race", "leftovers": "LeftoverSemaphore", "unwaited_copies": "UnwaitedCopy"}
    options["uninitialised"] = "NeverWritten"
    for off in options:
        made = kernel(body, 2, outputs=[(0, 4)], **{off: False})
        expected = {kind for name, kind in options.items() if name != off}
        assert set(kinds(made.launch(np.zeros(2, np.int32)))) == expected


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_seed_gives_the_same_schedule_findings_and_behaviour(kernel, strategy):
    def body(core):
        for position in range(5):
            yield from core.signal(core.semaphore(core=0), site=position)
            core.write(core.buffer(0) + 4 * position, 4, site=10 * core.index + position)
        if core.index == 0:
            yield from core.wait(core.semaphore(), 10)

    made = kernel(body, 2)
    records = []
    for seed in range(8):
        for _ in range(2):
            with schedule(strategy=strategy, seed=seed, record=True):
                records.append(made.launch(np.zeros(5, np.int32)))
    for one, other in zip(records[::2], records[1::2], strict=True):
        assert one == other
    if strategy in ("random", "pct"):
        assert len({record["behaviour"] for record in records}) > 1


def test_launches_under_one_schedule_differ_and_can_be_named(kernel):
    made = kernel(racy, 2)
    with schedule(seed=5, record=True):
        records = [made.launch(np.zeros(5, np.int32)) for _ in range(4)]
    assert [record["schedule"]["launch"] for record in records] == [0, 1, 2, 3]
    assert len({tuple(record["schedule"]["choices"]) for record in records}) > 1
    with schedule(seed=5, record=True, launch=2):
        assert made.launch(np.zeros(5, np.int32)) == records[2]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_recorded_choices_replay_a_schedule(kernel, strategy):
    def body(core):
        yield from core.copy(core.scratch, core.buffer(0), 4, core.semaphore(1))
        yield from racy(core)
        while (yield from core.poll(core.semaphore(1))) == 0:
            pass
        yield from core.wait(core.semaphore(1), 4)

    made = kernel(body, 2)
    for seed in range(5):
        with schedule(strategy=strategy, seed=seed, record=True):
            first = made.launch(np.zeros(5, np.int32))
        choices = first["schedule"]["choices"]
        with schedule(strategy="choices", choices=choices, record=True):
            again = made.launch(np.zeros(5, np.int32))
        assert again["schedule"]["candidates"] == first["schedule"]["candidates"]
        assert again["schedule"]["choices"] == choices
        assert again["behaviour"] == first["behaviour"]
        assert kinds(again) == kinds(first)


def test_several_schedules_of_one_launch_start_from_the_same_memory(kernel):
    def body(core):
        yield from core.step()
        cell = _I32.from_address(core.buffer(0))
        yield from core.signal(core.semaphore(core=1 - core.index))
        core.access(UPDATE, core.buffer(0), 4, site=core.index)
        cell.value += 1
        yield from core.wait(core.semaphore())

    made = kernel(body, 2, schedules=6)
    total = np.full(1, 10, np.int32)
    record = made.launch(total, total)
    assert total[0] == 12
    assert record["schedules"] == 6
    assert record["behaviours"] >= 1
    (finding,) = record["findings"]
    assert finding["occurrences"] == 6
    assert record["schedule"]["seed"] == 5


def test_bad_options_are_refused_by_name():
    def register(**checked):
        _runtime.register_executable(1, {"programs": [], "checked": checked})

    with pytest.raises(ValueError, match="strategy of a schedule must be one of random, pct"):
        register(schedule={"strategy": "luck"})
    with pytest.raises(ValueError, match="unknown field 'rases'"):
        register(rases=True)
    with pytest.raises(ValueError, match="fill must be"):
        register(fill="ones")
    with pytest.raises(ValueError, match="at least 1"):
        register(schedules=0)
    with pytest.raises(TypeError, match="'seed' has the wrong type or is out of range"):
        _runtime.set_schedule({"seed": -1})
