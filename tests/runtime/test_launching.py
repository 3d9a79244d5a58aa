"""Programs that LLVM compiled are launched from Python: results, failures, callbacks."""

import ctypes
import threading

import numpy as np
import pytest

from cokernel import _runtime
from tests.runtime.harness import OFFSETS, WORKERS, Reports, launch


def test_llvm_splits_the_coroutine_and_nothing_of_it_is_left(code):
    assert "ping_pong.resume" in code.ir
    assert "call token @llvm.coro.save" not in code.ir


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("helpers", ["auto", "always", "never"])
def test_an_llvm_coroutine_suspends_and_resumes_with_its_state(register, workers, helpers):
    key = register(
        "ping_pong", (2,), is_coroutine=True, semaphores=1, num_workers=workers, help=helpers
    )
    for rounds in [0, 1, 1000]:
        turns = np.zeros(1, np.int64)
        launch(key, np.array([rounds]), turns)
        assert turns[0] == 2 * rounds
    (statistics,) = _runtime.statistics(key)
    (program,) = statistics["programs"]
    assert statistics["launches"] == 3
    assert program["cores"] == 6
    assert program["waits"] == program["signals"] == 2002
    assert program["resumes"] == program["blocked"] <= program["waits"]
    assert _runtime.last_statistics()["key"] == key
    assert _runtime.last_statistics()["programs"][0]["waits"] == 2000


def test_statistics_can_be_reset(register):
    key = register("nothing", (5,))
    _runtime.launch(key, [])
    _runtime.reset_statistics()
    _runtime.launch(key, [])
    (statistics,) = _runtime.statistics(key)
    assert statistics["launches"] == 1
    assert statistics["programs"][0]["cores"] == 5
    assert any(entry["key"] == key for entry in _runtime.statistics())
    assert _runtime.statistics(key=1) == []


@pytest.mark.parametrize("workers", WORKERS)
def test_a_deadlock_describes_every_core(register, workers):
    reports = Reports()
    key = register(
        "stuck", (2, 2), is_coroutine=True, semaphores=2, num_workers=workers, report=reports
    )
    with pytest.raises(RuntimeError, match="told: Deadlock"):
        _runtime.launch(key, [])
    (failure,) = reports.failures
    assert failure["kind"] == "Deadlock"
    assert failure["executable"] == "kernel"
    assert "program" not in failure
    first, *others = failure["cores"]
    assert first["state"] == "finished"
    for index, core in enumerate(others, start=1):
        assert core == {
            "program": 0,
            "program_name": "stuck",
            "coordinates": (index // 2, index % 2),
            "index": index,
            "group": 0,
            "state": "semaphore",
            "site": 31,
            "semaphore": {
                "owner": "private",
                "index": index,
                "program": 0,
                "offset": OFFSETS["sizeof.Semaphore"],
                "count": 0,
            },
            "value": index,
            "decrement": True,
        }


def test_a_bad_index_is_reported_with_its_numbers(register):
    reports = Reports()
    key = register("bad_index", (3,), num_workers=1, report=reports)
    with pytest.raises(RuntimeError, match="told: OutOfBounds"):
        _runtime.launch(key, [])
    assert reports.failures == [
        {
            "kind": "OutOfBounds",
            "executable": "kernel",
            "program": 0,
            "program_name": "bad_index",
            "coordinates": (0,),
            "index": 0,
            "site": 12,
            "dimension": 1,
            "start": 90,
            "size": 20,
            "extent": 100,
        }
    ]


def test_a_failed_check_is_reported_with_its_code_and_value(register):
    reports = Reports()
    key = register("bad_check", report=reports)
    with pytest.raises(RuntimeError, match="told: Check"):
        _runtime.launch(key, [])
    assert (reports.failures[0]["code"], reports.failures[0]["value"]) == (3, -4)


def test_a_report_that_raises_still_names_the_kind(register):
    def report(failure):
        raise KeyError("no such site")

    key = register("bad_check", report=report)
    with pytest.raises(RuntimeError, match=r"(?s)^Check in kernel.*KeyError: 'no such site'"):
        _runtime.launch(key, [])


def test_without_a_report_the_error_names_the_kind_and_the_kernel(register):
    with pytest.raises(RuntimeError, match="Check in kernel 'kernel'"):
        _runtime.launch(register("bad_check"), [])


@pytest.mark.parametrize("workers", WORKERS)
def test_a_time_limit_ends_a_runaway_loop(register, workers):
    reports = Reports()
    key = register("runaway", (3,), num_workers=workers, time_limit_s=0.1, report=reports)
    with pytest.raises(RuntimeError, match="told: TimeLimit"):
        _runtime.launch(key, [])
    (failure,) = reports.failures
    assert failure["limit_s"] == 0.1
    assert failure["elapsed_s"] >= 0.1
    assert "running" in [core["state"] for core in failure["cores"]]
    _runtime.launch(register("nothing"), [])


def test_a_callback_sees_its_core_and_its_arrays(register):
    seen = []

    def double(core, operands, results):
        seen.append(core)
        source = ctypes.cast(operands[0], ctypes.POINTER(ctypes.c_int64))
        ctypes.cast(results[0], ctypes.POINTER(ctypes.c_int64))[0] = 2 * source[0]

    key = register(
        "call_back", callbacks=[{"function": double, "operands": 1, "results": 1}], num_workers=1
    )
    result = np.zeros(1, np.int64)
    launch(key, np.array([21]), result)
    assert result[0] == 42
    assert seen == [
        {
            "program": 0,
            "program_name": "call_back",
            "coordinates": (0,),
            "index": 0,
            "group": 0,
            "site": 14,
        }
    ]


def test_an_exception_in_a_callback_comes_through_with_its_traceback(register):
    def fail(core, operands, results):
        raise ZeroDivisionError("in the kernel")

    reports = Reports()
    callback = {"function": fail, "operands": 1, "results": 1}
    key = register("call_back", callbacks=[callback], report=reports)
    for _ in range(100):
        with pytest.raises(RuntimeError, match="told: Callback"):
            _runtime.launch(key, [0, 0])
    assert len(reports.failures) == 100
    failure = reports.failures[0]
    assert failure["exception_type"] == "ZeroDivisionError"
    assert "in fail\n" in failure["text"]
    assert failure["text"].endswith("ZeroDivisionError: in the kernel\n")
    assert failure["site"] == 14


def test_launches_run_on_several_python_threads_at_once(register):
    key = register("ping_pong", (2,), is_coroutine=True, semaphores=1)
    failures = []

    def launch_many():
        for _ in range(50):
            turns = np.zeros(1, np.int64)
            launch(key, np.array([100]), turns)
            if turns[0] != 200:
                failures.append(turns[0])

    threads = [threading.Thread(target=launch_many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
