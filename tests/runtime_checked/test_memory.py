"""Semaphores that are left over, and memory that nobody wrote."""

import contextlib
import ctypes

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime_checked.harness import CALL, READ, WRITE, Kernel, _table, kinds, schedule


def test_what_is_left_in_a_semaphore_is_told_with_its_signaller(kernel):
    def body(core):
        if core.index == 0:
            yield from core.signal(core.semaphore(1, core=1), 3, site=7)
            yield from core.copy(core.buffer(0), core.buffer(1), 32, core.semaphore(2), site=8)
        else:
            yield from core.wait(core.semaphore(1), 2, site=9)

    record = kernel(body, 2).launch(*np.zeros((2, 16), np.int32))
    assert kinds(record) == ["LeftoverSemaphore", "UnwaitedCopy"]
    left, copy = sorted(record["findings"], key=lambda finding: finding["kind"])
    assert (left["first"]["site"], left["second"]["site"], left["value"]) == (7, 9, 1)
    assert left["semaphore"] == {
        "owner": "private",
        "program": 0,
        "index": 1,
        "offset": 16,
        "count": 1,
    }
    assert (copy["first"]["dma_site"], copy["first"]["is_dma"], copy["moved"]) == (8, True, 32)


def test_semaphores_that_go_below_zero_or_beyond_32_bits_are_told(kernel):
    def body(core):
        yield from core.signal(core.semaphore(1), 2**31 - 1)
        yield from core.signal(core.semaphore(1), 1, site=1)
        yield from core.wait(core.semaphore(1), 2**31)
        # This ends the launch.
        yield from core.signal(core.semaphore(0), -2, site=2)
        yield from core.wait(core.semaphore(0), 1)

    record = kernel(body).launch()
    assert kinds(record) == ["SemaphoreOverflow", "SemaphoreUnderflow"]
    assert [finding["first"]["site"] for finding in record["findings"]] == [1, 2]


def test_scratch_and_outputs_start_undefined_and_hold_what_was_asked_for(kernel):
    def body(core):
        values.append(ctypes.string_at(core.scratch, 8))
        values.append(ctypes.string_at(core.buffer(1), 8))
        assert core.undefined(core.scratch, 2, site=1) == [1, 1]
        assert core.undefined(core.buffer(0), 2) is None
        core.write(core.scratch + 4)
        assert core.undefined(core.scratch, 3) == [1, 0, 1]
        core.write(core.buffer(1), 8)
        return
        yield

    expected = {"nan": b"\xff" * 16, "zeros": b"\0" * 16, 7: b"\7" * 16, "keep": b"\0" * 16}
    for fill, content in expected.items():
        values = []
        made = kernel(body, fill=fill, outputs=[(1, 4)])
        assert kinds(made.launch(*np.zeros((2, 2), np.int32))) == []
        if fill != "keep":
            assert b"".join(values) == content
    values = []
    made = kernel(body, fill="random", outputs=[(1, 4)])
    for _ in range(2):
        with schedule(seed=3):
            made.launch(*np.zeros((2, 2), np.int32))
    assert values[:2] == values[2:]
    assert len(set(b"".join(values[:2]))) > 8


@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["write", "read", "mark"]),
            st.integers(0, 700),
            st.sampled_from([1, 2, 3, 4, 16, 64, 256, 300]),
        ),
        min_size=1,
        max_size=40,
    )
)
@settings(max_examples=40, deadline=None)
def test_each_read_says_whether_anything_there_is_undefined(steps):
    """Elements of four bytes, in ranges of all sizes and alignments over several pages."""

    def body(core):
        undefined = np.ones(1024, bool)
        for number, (what, start, count) in enumerate(steps):
            address, part = core.scratch + 4 * start, slice(start, start + count)
            if what == "write":
                core.write(address, 4 * count, site=number % 3)
                undefined[part] = False
            elif what == "mark":
                core.mark_undefined(address, [1] * count)
                undefined[part] = True
            assert core.read(address, 4 * count, site=3) == undefined[part].any()
            expected = undefined[part].astype(int).tolist() if undefined[part].any() else None
            assert core.undefined(address, count, site=4) == expected
        return
        yield

    made = Kernel(body)
    with contextlib.closing(made):
        made.launch()


def test_outputs_that_nobody_wrote_are_told_but_operands_are_not(kernel):
    def body(core):
        core.write(core.buffer(1) + 8, 8)
        return
        yield

    made = kernel(body, outputs=[(1, 4), (2, 4)])
    shared = np.zeros(4, np.int32)
    (finding,) = made.launch(shared, np.zeros(6, np.int32), shared)["findings"]
    assert finding["kind"] == "NeverWritten"
    assert finding["first"] is finding["second"] is None
    assert (finding["memory"]["owner"], finding["memory"]["index"]) == ("buffer", 1)
    assert finding["memory"]["parts"] == [(0, 8), (16, 8)]
    assert finding["count"] == 4


def test_an_undefined_value_is_followed_to_the_output(kernel):
    def body(core):
        # Read from scratch, stored in scratch, copied to the output.
        mask = core.undefined(core.scratch, 2, site=1)
        core.write(core.scratch + 64, 8, site=2)
        core.mark_undefined(core.scratch + 64, mask)
        yield from core.copy(core.buffer(0), core.scratch + 64, 8, core.semaphore(), site=3)
        yield from core.wait(core.semaphore(), 8)

    (finding,) = kernel(body, outputs=[(0, 4)]).launch(np.zeros(2, np.int32))["findings"]
    assert (finding["kind"], finding["use"]) == ("UninitialisedRead", "output")
    assert (finding["first"]["site"], finding["second"]["site"]) == (1, 3)
    assert finding["second"]["is_dma"]
    assert finding["memory"]["owner"] == "private"
    assert finding["memory"]["parts"] == [(64, 8)]


def test_an_undefined_value_that_decides_is_told_with_its_read(kernel):
    def body(core):
        assert core.undefined(core.scratch + 8, 1, site=1) == [1]
        core.report_undefined(site=2)
        return
        yield

    (finding,) = kernel(body).launch()["findings"]
    assert (finding["kind"], finding["use"]) == ("UninitialisedRead", "branch")
    assert (finding["first"]["site"], finding["second"]["site"]) == (1, 2)
    assert finding["memory"]["offset"] == 64 + 8


def test_memory_of_a_scope_becomes_undefined_again(kernel):
    def body(core):
        for _ in range(2):
            CALL["allocate"](core.address, 1, core.scratch, 64, 4, 0)
            assert core.undefined(core.scratch, 1) == [1]
            core.write(core.scratch, 64)
            assert core.undefined(core.scratch, 1) is None
            CALL["release"](core.address, 2, core.scratch, 64, 0)
        return
        yield

    assert kinds(kernel(body).launch()) == []


def test_a_copy_that_outlives_the_scope_of_its_memory_is_told(kernel):
    def body(core):
        semaphore = core.semaphore()
        for _ in range(2):
            CALL["allocate"](core.address, 1, core.scratch, 64, 4, 0)
            yield from core.copy(core.scratch, core.buffer(0), 64, semaphore, site=2)
            CALL["release"](core.address, 3, core.scratch, 64, 0)
            yield from core.wait(semaphore, 64)

    made = kernel(body)
    for seed in range(10):
        with schedule(seed=seed):
            (finding,) = made.launch(np.zeros(16, np.int32))["findings"]
        assert finding["kind"] == "CopyInFlight"
        assert (finding["first"]["dma_site"], finding["second"]["site"]) == (2, 3)


def test_what_is_left_in_a_semaphore_at_the_end_of_its_scope_is_told_there(kernel):
    def body(core):
        semaphore = core.semaphore(3)
        for _ in range(2):
            ctypes.memset(semaphore, 0, 16)
            CALL["allocate"](core.address, 1, semaphore, 16, 16, 1)
            yield from core.signal(semaphore, 1, site=2)
            CALL["release"](core.address, 3, semaphore, 16, 1)
        ctypes.memset(semaphore, 0, 16)
        CALL["allocate"](core.address, 4, semaphore, 16, 16, 1)
        yield from core.copy(core.buffer(0), core.buffer(1), 32, semaphore, site=5)
        CALL["release"](core.address, 6, semaphore, 16, 1)

    with schedule(strategy="delay_dma"):
        record = kernel(body).launch(*np.zeros((2, 16), np.int32))
    assert kinds(record) == ["CopyInFlight", "LeftoverSemaphore", "UnwaitedCopy"]
    left = next(f for f in record["findings"] if f["kind"] == "LeftoverSemaphore")
    assert (left["first"]["site"], left["occurrences"]) == (2, 2)


def test_strided_and_picked_accesses_touch_only_their_elements(kernel):
    def body(core):
        base = core.buffer(0)
        if core.index == 0:
            extents, strides = _table([4, 2]), _table([64, 4])
            CALL["access_strided"](
                core.address, 1, WRITE, base, 4, 2, extents.ctypes.data, strides.ctypes.data
            )
        elif core.index == 1:
            # Between the rows.
            addresses = _table([base + 8 + 64 * row for row in range(4)])
            CALL["access_picked"](core.address, 2, WRITE, addresses.ctypes.data, 4, 8, 4, None)
        else:
            addresses = _table([base + 128, base + 132, base + 20, base])
            mask = np.array([0, 1, 1, 0], np.uint8)
            CALL["access_picked"](
                core.address, 3, READ, addresses.ctypes.data, 4, 4, 4, mask.ctypes.data
            )
        return
        yield

    (finding,) = kernel(body, 3).launch(np.zeros(64, np.int32))["findings"]
    assert sorted((finding["first"]["site"], finding["second"]["site"])) == [1, 3]
    assert finding["memory"]["parts"] == [(132, 4)]


def test_a_bad_index_is_the_failure_of_the_launch(kernel):
    def body(core):
        yield from core.step()
        if core.index == 1:
            CALL["fail_index"](core.address, 12, 1, 90, 20, 100)

    made = kernel(body, 3)
    failure = made.launch()["failure"]
    assert (failure["kind"], failure["site"], failure["index"]) == ("OutOfBounds", 12, 1)
    assert (failure["start"], failure["size"], failure["extent"]) == (90, 20, 100)


def test_outputs_that_nobody_wrote_count_once_under_many_schedules(kernel):
    def body(core):
        core.write(core.buffer(0), 8)
        return
        yield

    made = kernel(body, outputs=[(0, 4)], schedules=5)
    (finding,) = made.launch(np.zeros(6, np.int32))["findings"]
    assert finding["memory"]["parts"] == [(8, 16)]
    assert (finding["count"], finding["occurrences"]) == (4, 5)


def test_a_finding_names_only_bytes_that_its_cores_have_touched(kernel):
    def body(core):
        # Neighbours collide in one element each, and none touches what lies between.
        base = core.buffer(0)
        core.write(base + 32 * core.index, 4, site=1)
        if core.index + 1 < 4:
            core.write(base + 32 * (core.index + 1), 4, site=1)
        return
        yield

    (finding,) = kernel(body, 4).launch(np.zeros(64, np.int32))["findings"]
    ((begin, size),) = finding["memory"]["parts"]
    pair = {finding["first"]["index"], finding["second"]["index"]}
    assert (begin, size) == (32 * max(pair), 4)
    others = [{party["index"] for party in parties} for parties in finding["also"]]
    assert sorted(map(sorted, [pair, *others])) == [[0, 1], [1, 2], [2, 3]]


def test_an_undefined_value_is_told_with_its_own_read_and_elements(kernel):
    def body(core):
        core.write(core.scratch + 4, 4)
        assert core.undefined(core.scratch, 3, site=1, number=0) == [1, 0, 1]
        # Read later, and of no consequence.
        core.undefined(core.scratch + 64, 4, site=2, number=1)
        core.report_undefined(site=3, numbers=[0])
        return
        yield

    (finding,) = kernel(body).launch()["findings"]
    assert (finding["first"]["site"], finding["second"]["site"]) == (1, 3)
    assert finding["memory"]["parts"] == [(64, 4), (72, 4)]


def test_different_findings_beyond_the_limit_are_counted_once(kernel):
    def body(core):
        for site in range(4):
            for _ in range(2):
                core.undefined(core.scratch, 1, site=site, number=site)
                core.report_undefined(site=site, numbers=[site])
        return
        yield

    record = kernel(body, max_findings=1, schedules=3).launch()
    assert (len(record["findings"]), record["dropped"]) == (1, 3)


def test_what_ends_a_launch_is_told_beyond_the_limit(kernel):
    def body(core):
        core.undefined(core.scratch, 1, site=1)
        core.report_undefined(site=2)
        while (yield from core.poll(core.semaphore(), site=3)) == 0:
            pass

    record = kernel(body, max_findings=1).launch()
    assert kinds(record) == ["Livelock", "UninitialisedRead"]
    assert not record["is_complete"]
