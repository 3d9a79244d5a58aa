"""What orders accesses, and what does not."""

import ctypes

import numpy as np
import pytest

from tests.runtime_checked.harness import (
    _I32,
    ATOMIC,
    CALL,
    OFFSETS,
    READ,
    STRATEGIES,
    _pointer,
    kinds,
    schedule,
)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_producer_and_a_consumer_in_order_have_no_finding(kernel, strategy):
    def body(core):
        cell = core.buffer(0)
        for _ in range(10):
            if core.index == 0:
                core.write(cell, 64, site=1)
                yield from core.signal(core.semaphore(0, core=1))
                yield from core.wait(core.semaphore(0))
            else:
                yield from core.wait(core.semaphore(0))
                core.read(cell, 64, site=2)
                yield from core.signal(core.semaphore(0, core=0))

    made = kernel(body, 2)
    for seed in range(20):
        with schedule(strategy=strategy, seed=seed):
            record = made.launch(np.zeros(64, np.int32))
        assert kinds(record) == []
        assert record["failure"] is None
        assert record["counts"] == {
            "accesses": 20,
            "signals": 20,
            "waits": 20,
            "barriers": 0,
            "dmas": 0,
            "cores": 2,
        }


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_unordered_accesses_are_a_race_under_every_schedule(kernel, strategy):
    def body(core):
        yield from core.step()
        if core.index == 0:
            core.write(core.buffer(0) + 16, 8, site=11)
        else:
            core.read(core.buffer(0) + 20, 64, site=22)

    made = kernel(body, 2)
    for seed in range(20):
        with schedule(strategy=strategy, seed=seed):
            (finding,) = made.launch(np.zeros(64, np.int32))["findings"]
        assert finding["kind"] == "Race"
        parties = sorted(
            (p["site"], p["index"], p["access"]) for p in (finding["first"], finding["second"])
        )
        assert parties == [(11, 0, "write"), (22, 1, "read")]
        memory = finding["memory"]
        assert (memory["owner"], memory["index"]) == ("buffer", 0)
        assert (memory["parts"], finding["count"]) == ([(20, 4)], 1)


def test_a_copy_may_take_effect_at_any_moment_until_it_is_waited_for(kernel):
    seen = set()

    def body(core):
        target, source = core.buffer(0), core.buffer(1)
        yield from core.copy(target, source, 4, core.semaphore())
        yield from core.step()
        seen.add(_I32.from_address(target).value)
        yield from core.wait(core.semaphore(), 4, is_dma=True)
        assert _I32.from_address(target).value == 7

    made = kernel(body)
    for seed in range(20):
        with schedule(seed=seed):
            made.launch(np.zeros(1, np.int32), np.full(1, 7, np.int32))
    assert seen == {0, 7}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("is_source", [False, True])
def test_touching_either_side_of_a_copy_before_its_wait_is_a_race(kernel, strategy, is_source):
    def body(core):
        target, source = core.buffer(0), core.buffer(1)
        yield from core.copy(target, source, 64, core.semaphore(), site=5)
        if is_source:
            core.write(source + 8, 4, site=6)
        else:
            core.read(target + 8, 4, site=6)
        yield from core.wait(core.semaphore(), 64, is_dma=True)
        core.write(source, 64, site=7)
        core.read(target, 64, site=8)

    made = kernel(body)
    for seed in range(10):
        with schedule(strategy=strategy, seed=seed):
            (finding,) = made.launch(np.zeros(16, np.int32), np.zeros(16, np.int32))["findings"]
        assert finding["kind"] == "Race"
        parties = sorted([finding["first"], finding["second"]], key=lambda party: party["is_dma"])
        assert [party["site"] for party in parties] == [6, 5]
        assert parties[1]["dma_site"] == 5
        assert parties[1]["access"] == ("copy reads" if is_source else "copy writes")
        assert finding["memory"]["parts"] == [(8, 4)]


def test_the_source_may_change_once_it_has_left_but_the_target_is_not_there_yet(kernel):
    def body(core):
        target, source = core.buffer(0), core.buffer(1)
        yield from core.copy(target, source, 64, core.semaphore(0), core.semaphore(1), site=1)
        yield from core.wait(core.semaphore(1), 64, is_dma=True)
        core.write(source, 64, site=2)
        core.read(target, 64, site=3)
        yield from core.wait(core.semaphore(0), 64, is_dma=True)

    (finding,) = kernel(body).launch(*np.zeros((2, 16), np.int32))["findings"]
    assert sorted((finding["first"]["site"], finding["second"]["site"])) == [1, 3]


def test_a_wait_for_part_of_a_copy_has_not_waited_for_it(kernel):
    def body(core):
        target, source = core.buffer(0), core.buffer(1)
        yield from core.copy(target, source, 64, core.semaphore(), site=1)
        yield from core.wait(core.semaphore(), 32, is_dma=True, site=2)
        core.read(target, 32, site=3)

    record = kernel(body).launch(*np.zeros((2, 16), np.int32))
    assert kinds(record) == ["Race", "UnwaitedCopy"]
    unwaited = next(f for f in record["findings"] if f["kind"] == "UnwaitedCopy")
    assert (unwaited["moved"], unwaited["left"], unwaited["value"]) == (64, 32, 32)
    assert unwaited["second"]["site"] == 2


def test_copies_that_end_in_any_order_are_waited_for_together(kernel):
    def body(core):
        target, source = core.buffer(0), core.buffer(1)
        yield from core.copy(target, source, 32, core.semaphore())
        yield from core.copy(target + 32, source, 16, core.semaphore())
        yield from core.wait(core.semaphore(), 32, is_dma=True)
        yield from core.wait(core.semaphore(), 16, is_dma=True)
        core.read(target, 48)

    made = kernel(body)
    for seed in range(20):
        with schedule(seed=seed):
            assert kinds(made.launch(*np.zeros((2, 16), np.int32))) == []


def test_the_first_of_several_copies_on_one_semaphore_need_not_be_the_one_that_came(kernel):
    def body(core):
        target, source = core.buffer(0), core.buffer(1)
        yield from core.copy(target, source, 16, core.semaphore(), site=1)
        yield from core.copy(target + 16, source, 16, core.semaphore(), site=2)
        yield from core.wait(core.semaphore(), 16, is_dma=True)
        core.read(target, 16, site=3)
        yield from core.wait(core.semaphore(), 16, is_dma=True)

    made = kernel(body)
    found = set()
    for seed in range(20):
        with schedule(seed=seed):
            found.add(tuple(kinds(made.launch(*np.zeros((2, 16), np.int32)))))
    assert found == {(), ("Race",)}


def test_atomic_sums_race_with_plain_accesses_only(kernel):
    def body(core):
        kind = [ATOMIC, ATOMIC, READ][core.index]
        core.access(kind, core.buffer(0), 4, site=core.index)
        yield

    def only_atomics(core):
        core.access(ATOMIC, core.buffer(0), 4)
        yield

    findings = kernel(body, 3).launch(np.zeros(1, np.int32))["findings"]
    pairs = {tuple(sorted((f["first"]["site"], f["second"]["site"]))) for f in findings}
    assert pairs == {(0, 2), (1, 2)}
    assert kinds(kernel(only_atomics, 3).launch(np.zeros(1, np.int32))) == []


def test_an_atomic_does_not_stand_for_the_read_before_it(kernel):
    def body(core):
        if core.index == 0:
            core.access(READ, core.buffer(0), 4, site=1)
            core.access(ATOMIC, core.buffer(0), 4, site=2)
        else:
            core.access(ATOMIC, core.buffer(0), 4, site=3)
        return
        yield

    made = kernel(body, 2)
    for seed in range(4):
        with schedule(seed=seed):
            (finding,) = made.launch(np.zeros(1, np.int32))["findings"]
        assert {finding["first"]["site"], finding["second"]["site"]} == {1, 3}


def test_a_ticket_orders_what_comes_before_it(kernel):
    def body(core):
        core.write(core.buffer(1) + 4 * core.index, 4)
        ticket = yield from core.fetch_and_add(core.buffer(0))
        if ticket == 2:
            core.read(core.buffer(1), 12)

    for seed in range(10):
        with schedule(seed=seed):
            record = kernel(body, 3).launch(np.zeros(1, np.int32), np.zeros(3, np.int32))
        assert kinds(record) == []


@pytest.mark.parametrize("resets", [False, True])
def test_a_polled_flag_orders_what_was_written_before_it(kernel, resets):
    def body(core):
        flag, data = core.buffer(0), core.buffer(1)
        if core.index == 0:
            core.write(data, 64)
            yield from core.step()
            core.write(flag, 4)
            core.write(data + 32, 4, site=9)
        else:
            while True:
                core.access(5, flag, 4, site=1)
                if _I32.from_address(flag).value:
                    break
                CALL["yield"](core.address, 1)
                yield
            core.read(data, 32)
            if resets:
                core.write(flag, 4, value=0)

    made = kernel(body, 2)
    for seed in range(10):
        with schedule(seed=seed):
            assert kinds(made.launch(np.zeros(1, np.int32), np.zeros(16, np.int32))) == []


def test_a_barrier_orders_all_with_all(kernel):
    def body(core):
        mine, next_one = core.index, (core.index + 1) % 3
        for _ in range(3):
            core.write(core.buffer(0) + 4 * mine)
            yield from core.barrier()
            core.read(core.buffer(0) + 4 * next_one)
            yield from core.barrier()

    def forgetful(core):
        core.write(core.buffer(0) + 4 * core.index)
        if core.index < 3:
            yield from core.barrier()
        core.read(core.buffer(0) + 4 * ((core.index + 1) % 3))

    made, faulty = kernel(body, 3), kernel(forgetful, 3)
    for seed in range(10):
        with schedule(seed=seed):
            assert kinds(made.launch(np.zeros(3, np.int32))) == []
            assert kinds(faulty.launch(np.zeros(3, np.int32))) == []


def test_a_deadlock_is_the_failure_of_the_launch(kernel):
    def body(core):
        yield from core.wait(core.semaphore(), 2, site=4)

    made = kernel(body, 2)
    record = made.launch()
    assert made.error == "failed"
    assert record["failure"]["kind"] == "Deadlock"
    assert [core["state"] for core in record["failure"]["cores"]] == ["semaphore"] * 2
    assert record["failure"]["schedule"]["strategy"] == "random"
    assert kinds(record) == []
    assert made.launch()["failure"]["kind"] == "Deadlock"


def test_a_wait_for_more_than_a_copy_moves_is_told_apart(kernel):
    def body(core):
        yield from core.copy(core.buffer(0), core.buffer(1), 32, core.semaphore(), site=1)
        yield from core.wait(core.semaphore(), 64, is_dma=True, site=2)

    record = kernel(body).launch(*np.zeros((2, 16), np.int32))
    (finding,) = record["findings"]
    assert finding["kind"] == "WaitTooLarge"
    assert (finding["first"]["site"], finding["second"]["site"]) == (2, 1)
    assert (finding["wanted"], finding["left"], finding["copies"]) == (64, 32, 1)
    assert record["failure"]["kind"] == "Deadlock"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_polling_in_vain_is_a_livelock_and_not_a_hang(kernel, strategy):
    def body(core):
        if core.index == 2:
            return
        while (yield from core.poll(core.semaphore(), site=3)) == 0:
            pass
        yield from core.signal(core.semaphore(core=1 - core.index))

    made = kernel(body, 3)
    with schedule(strategy=strategy):
        record = made.launch()
    (finding,) = record["findings"]
    assert finding["kind"] == "Livelock"
    assert (finding["first"]["site"], finding["second"]["site"]) == (3, 3)
    assert sorted(look["semaphore"]["index"] for look in finding["polled"]) == [0, 1]
    assert not record["is_complete"]
    assert finding["pollers"] == 2
    assert "has ended kernel 'kernel'" in made.error


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_polling_for_a_signal_or_a_copy_that_comes_ends(kernel, strategy):
    def body(core):
        if core.index == 0:
            while (yield from core.poll(core.semaphore())) < 64:
                pass
            yield from core.wait(core.semaphore(), 64)
            core.read(core.buffer(0), 64)
        else:
            for _ in range(100):
                yield from core.step()
            yield from core.copy(core.buffer(0), core.buffer(1), 64, core.semaphore(core=0))

    made = kernel(body, 2)
    for seed in range(5):
        with schedule(strategy=strategy, seed=seed):
            record = made.launch(*np.zeros((2, 16), np.int32))
        assert kinds(record) == []
        assert made.error == ""


def test_counting_polls_is_no_livelock(kernel):
    def body(core):
        frame = _pointer(core.address + OFFSETS["Core.handle"])
        for count in range(1000):
            ctypes.c_int64.from_address(frame + 16).value = count
            yield from core.poll(core.semaphore())

    record = kernel(body, 2).launch()
    assert kinds(record) == []
