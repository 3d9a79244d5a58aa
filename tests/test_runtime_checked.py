"""Checked mode of the runtime, driven by cores written as Python generators.

A generator stands for a coroutine: it yields where compiled code would suspend.
"""

import contextlib
import ctypes
import itertools

import numpy as np
import pytest

from cokernel import _runtime

OFFSETS = _runtime.abi_offsets()
READ, WRITE, ATOMIC, UPDATE, FETCH_AND_ADD = range(5)
STRATEGIES = ["random", "pct", "round_robin", "delay_dma", "run_to_block"]

_I32, _I64, _P = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p
_RUN = ctypes.CFUNCTYPE(None, _P, _P)
_SIGNATURES = {
    "cokernel_frame": (_P, _P, _I64),
    "cokernel_finish": (None, _P),
    "cokernel_fail_index": (None, _P, _I32, _I32, _I64, _I64, _I64),
    "cokernel_checked_step": (_I32, _P, _I32),
    "cokernel_checked_yield": (None, _P, _I32),
    "cokernel_checked_wait": (_I32, _P, _P, _I64, _I32, _I32, _I32),
    "cokernel_checked_barrier": (_I32, _P, _I32),
    "cokernel_checked_signal": (None, _P, _P, _I64, _I32),
    "cokernel_checked_read": (_I32, _P, _P, _I32),
    "cokernel_checked_access": (None, _P, _I32, _I32, _P, _I64, _I64),
    "cokernel_checked_access_strided": (None, _P, _I32, _I32, _P, _I64, _I64, _P, _P),
    "cokernel_checked_access_picked": (None, _P, _I32, _I32, _P, _I64, _I64, _I64, _P),
    "cokernel_checked_dma": (None, _P, _I32, _P, _P, _I64, _P, _I64, _P, _I64),
    "cokernel_checked_copy_undefined": (None, _P, _P, _P, _I64, _I64, _P, _P, _P),
    "cokernel_checked_allocate": (None, _P, _I32, _P, _I64, _I64, _I32),
    "cokernel_checked_release": (None, _P, _I32, _P, _I64, _I32),
    "cokernel_checked_undefined": (_I32, _P, _P, _I64, _I64, _P, _P, _P),
    "cokernel_checked_mark_undefined": (None, _P, _P, _I64, _I64, _P, _P, _P),
    "cokernel_checked_report_undefined": (None, _P, _I32, _I32),
}
ADDRESSES = _runtime.function_addresses()
CALL = {
    name.removeprefix("cokernel_").removeprefix("checked_"): ctypes.CFUNCTYPE(*signature)(
        ADDRESSES[name]
    )
    for name, signature in _SIGNATURES.items()
}


def _pointer(address):
    return ctypes.c_void_p.from_address(address).value


def _table(values):
    return np.array(values, np.int64)


class Core:
    """A core as its generator sees it."""

    def __init__(self, kernel, address):
        self.kernel = kernel
        self.address = address
        self.index = _I32.from_address(address + OFFSETS["Core.index"]).value
        self.memory = _pointer(address + OFFSETS["Core.memory"])
        self.scratch = self.memory + 16 * kernel.semaphores
        self._buffers = _pointer(address + OFFSETS["Core.buffers"])

    def buffer(self, number):
        return _pointer(self._buffers + 8 * number)

    def semaphore(self, number=0, core=None):
        launch = _pointer(self.address)
        cores = _pointer(launch + OFFSETS["Launch.cores"])
        index = self.index if core is None else core
        other = cores + index * OFFSETS["sizeof.Core"]
        return _pointer(other + OFFSETS["Core.memory"]) + 16 * number

    # What may suspend.

    def step(self, site=0):
        if not CALL["step"](self.address, site):
            yield

    def poll(self, semaphore, site=0):
        CALL["yield"](self.address, site)
        yield
        return CALL["read"](self.address, semaphore, site)

    def wait(self, semaphore, value=1, *, decrement=True, is_dma=False, site=0):
        if not CALL["wait"](self.address, semaphore, value, decrement, is_dma, site):
            yield

    def barrier(self, site=0):
        if not CALL["barrier"](self.address, site):
            yield

    def signal(self, semaphore, value=1, site=0):
        yield from self.step(site)
        CALL["signal"](self.address, semaphore, value, site)

    def fetch_and_add(self, address, site=0):
        yield from self.step(site)
        CALL["access"](self.address, site, FETCH_AND_ADD, address, 4, 4)
        cell = _I32.from_address(address)
        cell.value += 1
        return cell.value - 1

    def copy(self, target, source, size, arrival=None, departure=None, site=0, element=4):
        """Starts a DMA."""
        yield from self.step(site)
        packed = _table([target, source, size, element, site])
        CALL["dma"](
            self.address,
            site,
            ctypes.cast(_COPY, _P),
            packed.ctypes.data,
            packed.nbytes,
            arrival,
            size,
            departure,
            size,
        )

    # What does not.

    def access(self, kind, address, size=4, site=0, element=4):
        CALL["access"](self.address, site, kind, address, size, element)

    def read(self, address, size=4, site=0, element=4):
        self.access(READ, address, size, site, element)

    def write(self, address, size=4, site=0, element=4, value=1):
        ctypes.memset(address, value, size)
        self.access(WRITE, address, size, site, element)

    def undefined(self, address, count=1, site=0, element=4):
        """Reads elements; returns which of them are undefined, or None."""
        self.read(address, count * element, site, element)
        mask = np.zeros(count, np.uint8)
        extents, strides = _table([count]), _table([element])
        found = CALL["undefined"](
            self.address,
            address,
            element,
            1,
            extents.ctypes.data,
            strides.ctypes.data,
            mask.ctypes.data,
        )
        return mask.tolist() if found else None

    def mark_undefined(self, address, mask, element=4):
        mask = np.array(mask, np.uint8)
        extents, strides = _table([len(mask)]), _table([element])
        CALL["mark_undefined"](
            self.address,
            address,
            element,
            1,
            extents.ctypes.data,
            strides.ctypes.data,
            mask.ctypes.data,
        )


@_RUN
def _COPY(core, arguments):
    target, source, size, element, site = (ctypes.c_int64 * 5).from_address(arguments)
    CALL["access"](core, site, READ, source, size, element)
    CALL["access"](core, site, WRITE, target, size, element)
    ctypes.memmove(target, source, size)
    if site in _kernels[-1].on_copy:
        _kernels[-1].on_copy[site]()
    extents, strides = _table([size // element]), _table([element])
    CALL["copy_undefined"](
        core,
        target,
        source,
        element,
        1,
        extents.ctypes.data,
        strides.ctypes.data,
        strides.ctypes.data,
    )


_keys = itertools.count(1 << 42)
_kernels = []  # The one that runs is the last.


class Kernel:
    """An executable whose cores all run one generator function."""

    def __init__(self, body, cores=1, *, semaphores=4, scratch=4096, **checked):
        self.body = body
        self.semaphores = semaphores
        self.records = []
        self.errors = []
        self.generators = {}
        self.on_copy = {}  # By the site of a DMA, what to call when it takes effect.
        _kernels.append(self)
        # Both are kept alive, because the runtime knows only their addresses.
        self.ramp = ctypes.CFUNCTYPE(_P, _P)(self._start)
        self.resume = ctypes.CFUNCTYPE(None, _P)(self._resume)
        self.key = next(_keys)
        program = {
            "name": "program",
            "entry": ctypes.cast(self.ramp, _P).value,
            "is_coroutine": True,
            "shape": (cores,),
            "group_axis": -1,
            "private_bytes": 16 * semaphores + scratch,
            "semaphore_bytes": 16 * semaphores,
            "uses_barrier": True,
        }
        spec = {
            "name": "kernel",
            "programs": [program],
            "checked": checked,
            "checked_report": self._report,
        }
        _runtime.register_executable(self.key, spec)

    def launch(self, *arrays):
        """Launches on NumPy arrays. Returns the record."""
        self.generators.clear()
        buffers = [(array.ctypes.data, array.nbytes) for array in arrays]
        self.error = ""
        try:
            _runtime.launch(self.key, buffers)
        except RuntimeError as error:
            self.error = str(error)
        if self.errors:
            raise self.errors[0]
        return self.records[-1]

    def _report(self, record):
        self.records.append(record)
        return "failed" if record["failure"] else ""

    def _start(self, address):
        frame = CALL["frame"](address, 64)
        _P.from_address(frame).value = ctypes.cast(self.resume, _P).value
        _P.from_address(frame + 8).value = address
        self.generators[address] = self.body(Core(self, address))
        self._resume(frame)
        return frame

    def _resume(self, frame):
        address = _pointer(frame + 8)
        try:
            next(self.generators[address])
        except StopIteration:
            CALL["finish"](address)
        except Exception as error:
            self.errors.append(error)
            CALL["finish"](address)

    def close(self):
        _kernels.remove(self)
        _runtime.unregister_executable(self.key)


@pytest.fixture
def kernel():
    """Makes kernels, which are forgotten after the test."""
    made = []

    def make(*arguments, **options):
        made.append(Kernel(*arguments, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@contextlib.contextmanager
def schedule(**fields):
    before = _runtime.set_schedule(fields)
    try:
        yield
    finally:
        _runtime.set_schedule(before)


def kinds(record):
    return sorted(finding["kind"] for finding in record["findings"])


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
        assert (memory["offset"], memory["bytes"], finding["count"]) == (20, 4, 1)


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
        assert (finding["memory"]["offset"], finding["memory"]["bytes"]) == (8, 4)


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
    assert (finding["wanted"], finding["moved"]) == (64, 32)
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
        yield from core.signal(core.semaphore(0), -2, site=1)
        yield from core.signal(core.semaphore(0), 2)
        yield from core.signal(core.semaphore(1), 2**31 - 1)
        yield from core.signal(core.semaphore(1), 1, site=2)
        yield from core.wait(core.semaphore(1), 2**31)

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
    assert (finding["memory"]["offset"], finding["memory"]["bytes"]) == (0, 24)
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
    assert (finding["memory"]["offset"], finding["memory"]["bytes"]) == (64, 8)


def test_an_undefined_value_that_decides_is_told_with_its_read(kernel):
    def body(core):
        assert core.undefined(core.scratch + 8, 1, site=1) == [1]
        CALL["report_undefined"](core.address, 2, 0)
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
    assert (finding["memory"]["offset"], finding["memory"]["bytes"]) == (132, 4)


def test_a_bad_index_is_the_failure_of_the_launch(kernel):
    def body(core):
        yield from core.step()
        if core.index == 1:
            CALL["fail_index"](core.address, 12, 1, 90, 20, 100)

    made = kernel(body, 3)
    failure = made.launch()["failure"]
    assert (failure["kind"], failure["site"], failure["index"]) == ("OutOfBounds", 12, 1)
    assert (failure["start"], failure["size"], failure["extent"]) == (90, 20, 100)


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
    assert (finding["memory"]["offset"], finding["memory"]["bytes"]) == (0, 20)
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
