"""Kernels that go wrong say what, where and who, and leave everything usable."""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc

import cokernel
from cokernel import _runtime

CORES = 4
MESH = cokernel.CoreMesh(core=CORES)
ROW = jax.ShapeDtypeStruct((CORES,), jnp.int32)


def failure_of(run, *args) -> str:
    """Runs what must fail, and returns the text of the error."""
    # JAX raises ValueError where a compiled call takes its fast path and fails at once.
    with pytest.raises((jax.errors.JaxRuntimeError, ValueError)) as caught:
        jax.block_until_ready(run(*args))
    return str(caught.value)


def add_one(compiler_params):
    """A kernel without a fault, of cores that wait for each other."""

    def add(x_ref, out_ref, arrived):
        core = lax.axis_index("core")
        pl.semaphore_signal(arrived, 1, device_id={"core": (core + 1) % CORES})
        pl.semaphore_wait(arrived, 1)
        out_ref[core] = x_ref[core] + 1

    return cokernel.kernel(
        add,
        ROW,
        mesh=MESH,
        scratch_types=[pltpu.SemaphoreType.REGULAR],
        compiler_params=compiler_params,
    )


def forgetful(compiler_params):
    """A ring in which core 2 does not pass on what it was given."""

    def pass_on(x_ref, out_ref, token):
        core = lax.axis_index("core")

        @pl.when(core != 0)
        def _receive():
            pl.semaphore_wait(token, 3)  # the wait of the ring

        @pl.when(core != 2)
        def _send():
            pl.semaphore_signal(token, 3, device_id={"core": (core + 1) % CORES})

        @pl.when(core == 0)
        def _end():
            pl.semaphore_wait(token, 3)  # the wait of the first

    kernel = cokernel.kernel(
        pass_on,
        ROW,
        mesh=MESH,
        scratch_types=[pltpu.SemaphoreType.REGULAR],
        compiler_params=compiler_params,
    )
    return kernel, pass_on


def reaching_out(compiler_params):
    """A kernel that writes outside its output where the argument says so."""

    def write(where_ref, canvas_ref):
        core = lax.axis_index("core")
        canvas_ref[where_ref[core], core] = 7  # the write

    kernel = cokernel.kernel(
        write,
        jax.ShapeDtypeStruct((5, CORES), jnp.int32),
        mesh=MESH,
        compiler_params=compiler_params,
    )
    return kernel, write


def test_a_deadlock_names_everyone_who_waits_and_for_what(compiler_params, line_of):
    kernel, pass_on = forgetful(compiler_params)
    text = failure_of(kernel, np.zeros(CORES, np.int32))
    assert "deadlock" in text.lower()
    assert "pass_on" in text
    assert "'token'" in text
    assert line_of(pass_on, "the wait of the ring") in text
    assert line_of(pass_on, "the wait of the first") in text
    assert "core=0" in text
    assert "core=3" in text


def test_a_deadlock_of_two_programs_names_both_and_the_semaphores_of_each(
    v6e, compiler_params, line_of
):
    scalar_mesh = plsc.ScalarSubcoreMesh(axis_name="core", num_cores=2)
    tensor_mesh = pltpu.TensorCoreMesh(axis_name="tensor", num_cores=1)

    def ask(out_ref, request, answer):
        @pl.when(lax.axis_index("core") == 1)
        def _one_of_them():
            pl.semaphore_signal(request.at[1], 1, device_id={"tensor": 0})
            pl.semaphore_wait(answer, 1)  # the asker's wait

    def reply(out_ref, request, answer):
        pl.semaphore_wait(request.at[1], 2)  # one more than is asked
        pl.semaphore_signal(answer, 1, device_id={"core": 1})

    kernel = cokernel.mpmd_map(
        [(scalar_mesh, ask), (tensor_mesh, reply)],
        ROW,
        scratch_types=[
            pltpu.SemaphoreType.REGULAR((2,)) @ tensor_mesh,
            pltpu.SemaphoreType.REGULAR @ scalar_mesh,
        ],
        compiler_params=compiler_params,
    )
    text = failure_of(kernel)
    for part in ("ask", "reply", "request", "answer", "core=1", "tensor=0"):
        assert part in text
    assert line_of(ask, "the asker's wait") in text
    assert line_of(reply, "one more than is asked") in text


def test_a_core_that_misses_the_barrier_is_a_deadlock(v6e, compiler_params, line_of):
    mesh = plsc.VectorSubcoreMesh(core_axis_name="core", subcore_axis_name="subcore")

    def meet(out_ref):
        @pl.when(lax.axis_index("subcore") != 5)
        def _most():
            plsc.subcore_barrier()  # fifteen arrive

    kernel = cokernel.kernel(meet, ROW, mesh=mesh, compiler_params=compiler_params)
    text = failure_of(kernel)
    assert "deadlock" in text.lower()
    assert "barrier" in text
    assert "15" in text
    assert "16" in text
    assert line_of(meet, "fifteen arrive") in text


def test_a_dma_that_nobody_started_is_a_deadlock(compiler_params, line_of):
    def wait(x_ref, out_ref, buffer, done):
        pltpu.make_async_copy(x_ref, buffer, done).wait()  # never started

    kernel = cokernel.kernel(
        wait,
        ROW,
        mesh=MESH,
        scratch_types=[cokernel.private((CORES,), jnp.int32), pltpu.SemaphoreType.DMA],
        compiler_params=compiler_params,
    )
    text = failure_of(kernel, np.zeros(CORES, np.int32))
    assert "deadlock" in text.lower()
    assert "'done'" in text
    assert line_of(wait, "never started") in text


@pytest.mark.parametrize("index", [5, -1, 2**31 - 1])
def test_an_index_out_of_range_names_ref_shape_index_core_and_line(index, compiler_params, line_of):
    kernel, write = reaching_out(compiler_params)
    text = failure_of(kernel, np.array([0, 4, index, 0], np.int32))
    assert "canvas_ref" in text
    assert "5" in text
    assert str(index) in text
    assert "core=2" in text
    assert "write" in text
    assert line_of(write, "# the write") in text


def test_a_window_of_a_dma_out_of_range_names_ref_window_core_and_line(compiler_params, line_of):
    def load(start_ref, x_ref, out_ref, buffer):
        core = lax.axis_index("core")
        pltpu.sync_copy(x_ref.at[pl.ds(start_ref[core], 3)], buffer)  # the copy
        out_ref[core] = buffer[0]

    kernel = cokernel.kernel(
        load,
        ROW,
        mesh=MESH,
        scratch_types=[cokernel.private((3,), jnp.int32)],
        compiler_params=compiler_params,
    )
    x = np.arange(10, dtype=np.int32) * 10
    np.testing.assert_array_equal(kernel(np.array([0, 7, 2, 1], np.int32), x), [0, 70, 20, 10])
    text = failure_of(kernel, np.array([0, 8, 2, 1], np.int32), x)
    assert "x_ref" in text
    assert "8" in text
    assert "11" in text or "3" in text
    assert "core=1" in text
    assert line_of(load, "# the copy") in text


def test_a_row_index_of_a_gather_out_of_range_is_refused(compiler_params, line_of):
    def gather(table_ref, rows_ref, out_ref, rows, buffer, done):
        pltpu.sync_copy(rows_ref, rows)
        pltpu.async_copy(table_ref.at[rows], buffer, done).wait()  # the gather
        out_ref[...] = buffer[...]

    kernel = cokernel.kernel(
        gather,
        jax.ShapeDtypeStruct((4, 2), jnp.int32),
        mesh=cokernel.CoreMesh(core=1),
        scratch_types=[
            cokernel.private((4,), jnp.int32),
            cokernel.private((4, 2), jnp.int32),
            pltpu.SemaphoreType.DMA,
        ],
        compiler_params=compiler_params,
    )
    table = np.arange(12, dtype=np.int32).reshape(6, 2)
    rows = np.array([5, 0, 3, 3], np.int32)
    np.testing.assert_array_equal(kernel(table, rows), table[rows])
    text = failure_of(kernel, table, np.array([5, 0, 6, 3], np.int32))
    assert "table_ref" in text
    assert "6" in text
    assert line_of(gather, "# the gather") in text


@pytest.mark.parametrize("row", [-1, 5, 8, -3])
def test_nothing_outside_the_ref_is_written(row, compiler_params):
    kernel, _ = reaching_out(compiler_params)
    where = np.array([0, 1, row, 4], np.int32)
    lowered = jax.jit(kernel).lower(where).as_text()
    key = int(re.search(r"key = (-?\d+) : i64", lowered)[1]) % 2**64
    # The kernel is launched on memory of ours, with the canvas in the middle of it.
    memory = np.full((20, CORES), 5, np.int32)
    canvas = memory[10:15]
    with pytest.raises(RuntimeError):
        _runtime.launch(key, [where.ctypes.data, canvas.ctypes.data])
    np.testing.assert_array_equal(memory[:10], 5)
    np.testing.assert_array_equal(memory[15:], 5)
    _runtime.launch(key, [np.arange(4, dtype=np.int32).ctypes.data, canvas.ctypes.data])
    np.testing.assert_array_equal(np.diag(canvas), 7)


def test_an_exception_in_a_callback_comes_through(compiler_params):
    def complain(value):
        raise LookupError(f"no entry for {int(value)}")

    def call(x_ref, out_ref):
        core = lax.axis_index("core")

        @pl.when(core == 3)
        def _one():
            jax.debug.callback(complain, x_ref[core])

        out_ref[core] = x_ref[core]

    kernel = cokernel.kernel(call, ROW, mesh=MESH, compiler_params=compiler_params)
    text = failure_of(kernel, np.array([0, 0, 0, 41], np.int32))
    assert "LookupError" in text
    assert "no entry for 41" in text


def runaway(time_limit_s):
    def spin(x_ref, out_ref, started):
        core = lax.axis_index("core")
        # It ends when x is below zero, which it never is.
        lax.while_loop(lambda n: x_ref[0] >= 0, lambda n: n + 1, core)  # the loop
        out_ref[core] = 0

    return cokernel.kernel(
        spin,
        ROW,
        mesh=MESH,
        scratch_types=[pltpu.SemaphoreType.REGULAR],
        compiler_params=cokernel.CompilerParams(num_workers=2, time_limit_s=time_limit_s),
    )


def test_a_loop_without_end_is_stopped_at_the_time_limit():
    text = failure_of(runaway(0.2), np.zeros(1, np.int32))
    # Checked mode need not wait so long: it sees that nobody is left to change what is polled.
    assert ("Livelock" if cokernel.checking.state.current() else "0.2") in text
    assert "spin" in text


def test_a_computation_without_end_is_stopped_at_the_time_limit():
    def iterate(x_ref, out_ref):
        core = lax.axis_index("core")
        # x -> 5 x + 1 on odd numbers stays odd or even for ever; it never becomes 0 from 1.
        start = x_ref[core]
        out_ref[core] = lax.while_loop(lambda x: x != 0, lambda x: (x | 1) * 5, start)

    kernel = cokernel.kernel(
        iterate, ROW, mesh=MESH, compiler_params=cokernel.CompilerParams(time_limit_s=0.2)
    )
    assert "iterate" in failure_of(kernel, np.array([0, 0, 1, 0], np.int32))
    np.testing.assert_array_equal(kernel(np.zeros(CORES, np.int32)), 0)


def test_a_counted_loop_that_takes_too_long_is_stopped_at_the_time_limit():
    def count(x_ref, out_ref):
        core = lax.axis_index("core")
        step = x_ref[core]
        out_ref[core] = lax.fori_loop(0, 2**31 - 1, lambda i, x: (x | step) * 5 ^ i, step)

    kernel = cokernel.kernel(
        count, ROW, mesh=MESH, compiler_params=cokernel.CompilerParams(time_limit_s=0.2)
    )
    assert "count" in failure_of(kernel, np.ones(CORES, np.int32))


def test_a_hundred_failures_of_every_kind_leave_the_next_kernel_unharmed(compiler_params):
    good = add_one(compiler_params)
    deadlocked, _ = forgetful(compiler_params)
    reaching, _ = reaching_out(compiler_params)
    x = np.arange(CORES, dtype=np.int32)
    far = np.array([0, 9, 0, 0], np.int32)
    for _ in range(100):
        assert "deadlock" in failure_of(deadlocked, x).lower()
        np.testing.assert_array_equal(good(x), x + 1)
        assert "canvas_ref" in failure_of(reaching, far)
        np.testing.assert_array_equal(good(x), x + 1)


def test_failures_inside_jit_and_scan_come_through_and_the_next_call_runs(compiler_params):
    deadlocked, _ = forgetful(compiler_params)
    good = add_one(compiler_params)
    x = np.arange(CORES, dtype=np.int32)
    scanned = jax.jit(lambda x: lax.scan(lambda x, _: (deadlocked(good(x)), None), x, length=3)[0])
    for _ in range(3):
        assert "deadlock" in failure_of(scanned, x).lower()
    np.testing.assert_array_equal(jax.jit(good)(x), x + 1)


_CTRL_C = """
    import signal
    import jax, numpy as np
    jax.config.update("jax_platforms", "cpu")
    from jax import lax
    import jax.numpy as jnp
    from jax.experimental import pallas as pl
    import cokernel

    # A process that a shell starts in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def body(x_ref, out_ref):
        lax.while_loop(lambda n: x_ref[0] >= 0, lambda n: n + 1, 0)
        out_ref[0] = 0

    def kernel(body):
        return cokernel.kernel(
            body, jax.ShapeDtypeStruct((1,), jnp.int32), mesh=cokernel.CoreMesh(core=2)
        )

    endless = jax.jit(kernel(body)).lower(np.zeros(1, np.int32)).compile()
    print("running", flush=True)
    try:
        jax.block_until_ready(endless(np.zeros(1, np.int32)))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    except jax.errors.JaxRuntimeError as error:
        print("failed", "was stopped by Ctrl-C" in str(error), flush=True)
    try:
        # Where the error came first, Python's own KeyboardInterrupt follows.
        for _ in range(1000):
            pass
    except KeyboardInterrupt:
        print("interrupted", flush=True)

    def copy(x_ref, out_ref):
        out_ref[0] = x_ref[0] + 1

    print("next", int(kernel(copy)(np.zeros(1, np.int32))[0]), flush=True)
"""


def test_ctrl_c_ends_a_kernel_without_end_and_the_next_one_runs():
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_CTRL_C)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "running\n"
        # The kernel must have been under way for a moment, or Python itself takes the signal.
        time.sleep(1)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
    *ends, last = out.splitlines()
    assert ends in (["interrupted"], ["failed True", "interrupted"])
    assert last == "next 1"
    assert process.returncode == 0
