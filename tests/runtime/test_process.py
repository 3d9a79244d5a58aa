"""The runtime and the process around it: memory, threads, forks, Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from cokernel import _runtime
from tests.runtime.harness import launch


def resident_bytes():
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_a_hundred_thousand_launches_keep_memory_flat(register):
    key = register("ping_pong", (2,), is_coroutine=True, semaphores=1)
    failing = register("stuck", (4,), is_coroutine=True, semaphores=2, report=lambda failure: "x")
    rounds, turns = np.array([1]), np.zeros(1, np.int64)

    def launch_many(count):
        for i in range(count):
            launch(key, rounds, turns)
            if i % 100 == 0:
                with pytest.raises(RuntimeError):
                    _runtime.launch(failing, [])

    launch_many(5_000)
    before = resident_bytes()
    launch_many(100_000)
    assert resident_bytes() - before < 2 << 20


def helper_threads():
    """The identifiers of the pool's threads."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text() == "cokernel\n"]


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="there is no second processor, or no telling which one a thread may use",
)
def test_helpers_are_kept_off_the_processor_of_the_thread_that_launches(register):
    """They would be left to take turns with it while another processor idles."""
    key = register("ping_pong", (2,), is_coroutine=True, semaphores=1, num_workers=2, help="always")
    launch(key, np.array([1]), np.zeros(1, np.int64))
    allowed = os.sched_getaffinity(0)
    helpers = helper_threads()
    assert helpers
    for helper in helpers:
        may_use = os.sched_getaffinity(helper)
        assert may_use < allowed
        assert len(allowed - may_use) == 1


def test_ctrl_c_ends_a_runaway_kernel():
    """In a process of its own, whose main thread waits inside the launch."""
    source = f"""
import signal
import sys
sys.path[:0] = {sys.path!r}
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
# A process that a shell starts in the background ignores it.
signal.signal(signal.SIGINT, signal.default_int_handler)
from cokernel import _runtime
from tests.runtime import harness
code = harness.compile_programs()
spec = harness.program("runaway", code("runaway"), (2,))
_runtime.register_executable(1, dict(programs=[spec], report=lambda failure: failure["kind"]))
print("launching", flush=True)
try:
    try:
        _runtime.launch(1, [])
    except RuntimeError as error:
        print("RuntimeError", error, flush=True)
except KeyboardInterrupt:
    print("KeyboardInterrupt", flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", source], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout.readline().strip() == "launching"
        deadline = time.monotonic() + 60
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
        assert process.poll() is not None
        output = process.stdout.read()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    # The error of the launch may come first; the interrupt itself follows in any case.
    assert "KeyboardInterrupt" in output


def thread_names(process="self"):
    return [path.read_text().strip() for path in Path(f"/proc/{process}/task").glob("*/comm")]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads /proc")
def test_threads_are_started_by_the_first_launch_and_not_by_the_import(register):
    source = """
import cokernel._runtime, pathlib
for comm in pathlib.Path("/proc/self/task").glob("*/comm"):
    print(comm.read_text().strip())
"""
    imported = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True
    ).stdout
    assert imported != ""
    assert "cokernel" not in imported
    _runtime.launch(register("nothing", (2,), num_workers=2, help="always"), [])
    assert {"cokernel", "cokernel-watch"} <= set(thread_names())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_forked_child_can_launch(register):
    key = register("ping_pong", (2,), is_coroutine=True, semaphores=1, num_workers=2, help="always")
    rounds, turns = np.array([10]), np.zeros(1, np.int64)
    launch(key, rounds, turns)
    with warnings.catch_warnings():
        # JAX warns about forks, because its own threads may hold locks; this child does not use it.
        warnings.simplefilter("ignore")
        child = os.fork()
    if child == 0:
        launch(key, rounds, turns)
        os._exit(0 if turns[0] == 40 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert turns[0] == 20
