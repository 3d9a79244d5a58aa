"""The runtime module driven from Python, with programs written in LLVM IR by hand."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
import weakref
from pathlib import Path

import jax
import jax.numpy as jnp
import llvmlite.binding as llvm
import numpy as np
import pytest

from cokernel import _runtime

WORKERS = [1, 2, 4]
OFFSETS = _runtime.abi_offsets()

DECLARATIONS = f"""
declare token @llvm.coro.id(i32, ptr, ptr, ptr)
declare i64 @llvm.coro.size.i64()
declare ptr @llvm.coro.begin(token, ptr)
declare token @llvm.coro.save(ptr)
declare i8 @llvm.coro.suspend(token, i1)
declare void @llvm.coro.end(ptr, i1, token)
declare i32 @cokernel_semaphore_wait(ptr, ptr, i64, i32, i32)
declare void @cokernel_semaphore_signal(ptr, ptr, i64, i32)
declare i32 @cokernel_barrier_wait(ptr, i32)
declare ptr @cokernel_frame(ptr, i64)
declare void @cokernel_finish(ptr)
declare void @cokernel_fail(ptr, i32, i32, i64)
declare void @cokernel_fail_index(ptr, i32, i32, i64, i64, i64)
declare i32 @cokernel_callback(ptr, i32, ptr, ptr, i32)

define ptr @memory_of(ptr %core) alwaysinline {{
  %field = getelementptr i8, ptr %core, i64 {OFFSETS["Core.memory"]}
  %memory = load ptr, ptr %field
  ret ptr %memory
}}
define ptr @other_core(ptr %core, i32 %index) alwaysinline {{
  %launch = load ptr, ptr %core
  %field = getelementptr i8, ptr %launch, i64 {OFFSETS["Launch.cores"]}
  %cores = load ptr, ptr %field
  %wide = sext i32 %index to i64
  %offset = mul i64 %wide, {OFFSETS["sizeof.Core"]}
  %other = getelementptr i8, ptr %cores, i64 %offset
  ret ptr %other
}}
define i32 @index_of(ptr %core) alwaysinline {{
  %field = getelementptr i8, ptr %core, i64 {OFFSETS["Core.index"]}
  %index = load i32, ptr %field
  ret i32 %index
}}
define ptr @buffer_of(ptr %core, i64 %number) alwaysinline {{
  %field = getelementptr i8, ptr %core, i64 {OFFSETS["Core.buffers"]}
  %buffers = load ptr, ptr %field
  %slot = getelementptr ptr, ptr %buffers, i64 %number
  %buffer = load ptr, ptr %slot
  ret ptr %buffer
}}
define i1 @stopped(ptr %core) alwaysinline {{
  %launch = load ptr, ptr %core
  %field = getelementptr i8, ptr %launch, i64 {OFFSETS["Launch.stop"]}
  %stop = load atomic i32, ptr %field monotonic, align 4
  %result = icmp ne i32 %stop, 0
  ret i1 %result
}}
"""

BEGIN = f"""
  %id = call token @llvm.coro.id(i32 64, ptr null, ptr null, ptr null)
  %size = call i64 @llvm.coro.size.i64()
  %frame = call ptr @cokernel_frame(ptr %core, i64 %size)
  %handle = call ptr @llvm.coro.begin(token %id, ptr %frame)
  %handle_field = getelementptr i8, ptr %core, i64 {OFFSETS["Core.handle"]}
  store ptr %handle, ptr %handle_field
"""

END = """
done:
  call void @cokernel_finish(ptr %core)
  br label %suspend
suspend:
  call void @llvm.coro.end(ptr %handle, i1 false, token none)
  ret ptr %handle
"""


def wait(number, semaphore, value=1, site=7, then="then"):
    """A wait that goes on at block `then<number>`; the code after it belongs to that block."""
    return f"""
  %save{number} = call token @llvm.coro.save(ptr %handle)
  %taken{number} = call i32 @cokernel_semaphore_wait(ptr %core, ptr {semaphore}, i64 {value},
                                                     i32 1, i32 {site})
  %now{number} = icmp ne i32 %taken{number}, 0
  br i1 %now{number}, label %{then}{number}, label %stop{number}
stop{number}:
  %woken{number} = call i8 @llvm.coro.suspend(token %save{number}, i1 false)
  switch i8 %woken{number}, label %suspend [
    i8 0, label %{then}{number}
    i8 1, label %suspend
  ]
{then}{number}:
"""


# Two cores take turns; buffer 0 holds the number of rounds, buffer 1 counts the turns. What lives
# across the suspensions, the round and the total it has seen, lies in the frame.
PING_PONG = f"""
define ptr @ping_pong(ptr %core) presplitcoroutine {{
entry:
  {BEGIN}
  %rounds_at = call ptr @buffer_of(ptr %core, i64 0)
  %rounds = load i64, ptr %rounds_at
  %turns = call ptr @buffer_of(ptr %core, i64 1)
  %index = call i32 @index_of(ptr %core)
  %partner_index = sub i32 1, %index
  %partner = call ptr @other_core(ptr %core, i32 %partner_index)
  %theirs = call ptr @memory_of(ptr %partner)
  %mine = call ptr @memory_of(ptr %core)
  %first = icmp eq i32 %index, 0
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %again ]
  %more = icmp slt i64 %i, %rounds
  br i1 %more, label %turn, label %done
turn:
  br i1 %first, label %play, label %listen
listen:
  {wait(1, "%mine")}
  br label %play
play:
  %count = load i64, ptr %turns
  %counted = add i64 %count, 1
  store i64 %counted, ptr %turns
  call void @cokernel_semaphore_signal(ptr %core, ptr %theirs, i64 1, i32 8)
  br i1 %first, label %hear, label %again
hear:
  {wait(2, "%mine")}
  br label %again
again:
  %next = add i64 %i, 1
  br label %loop
  {END}
}}
"""

# Each core waits for as many signals as it has places before it, and nobody signals.
STUCK = f"""
define ptr @stuck(ptr %core) presplitcoroutine {{
entry:
  {BEGIN}
  %mine = call ptr @memory_of(ptr %core)
  %second = getelementptr i8, ptr %mine, i64 {OFFSETS["sizeof.Semaphore"]}
  %index = call i32 @index_of(ptr %core)
  %value = sext i32 %index to i64
  {wait(1, "%second", value="%value", site=31)}
  br label %done
  {END}
}}
"""

FUNCTIONS = """
define void @nothing(ptr %core) {
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @add_one(ptr %core) {
  %index = call i32 @index_of(ptr %core)
  %wide = sext i32 %index to i64
  %from = call ptr @buffer_of(ptr %core, i64 0)
  %to = call ptr @buffer_of(ptr %core, i64 1)
  %source = getelementptr float, ptr %from, i64 %wide
  %target = getelementptr float, ptr %to, i64 %wide
  %old = load float, ptr %source
  %new = fadd float %old, 1.0
  store float %new, ptr %target
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @bad_index(ptr %core) {
  call void @cokernel_fail_index(ptr %core, i32 12, i32 1, i64 90, i64 20, i64 100)
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @bad_check(ptr %core) {
  call void @cokernel_fail(ptr %core, i32 13, i32 3, i64 -4)
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @runaway(ptr %core) {
entry:
  br label %loop
loop:
  %stop = call i1 @stopped(ptr %core)
  br i1 %stop, label %done, label %loop
done:
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @call_back(ptr %core) {
  %operands = alloca ptr
  %results = alloca ptr
  %operand = call ptr @buffer_of(ptr %core, i64 0)
  %result = call ptr @buffer_of(ptr %core, i64 1)
  store ptr %operand, ptr %operands
  store ptr %result, ptr %results
  %failed = call i32 @cokernel_callback(ptr %core, i32 0, ptr %operands, ptr %results, i32 14)
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @count_instance(ptr %core) {
  %index = call i32 @index_of(ptr %core)
  %wide = sext i32 %index to i64
  %counts = call ptr @buffer_of(ptr %core, i64 0)
  %mine = getelementptr i64, ptr %counts, i64 %wide
  %old = load i64, ptr %mine
  %new = add i64 %old, 1
  store i64 %new, ptr %mine
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @read_instance(ptr %core) {
  %index = call i32 @index_of(ptr %core)
  %wide = sext i32 %index to i64
  %counts = call ptr @buffer_of(ptr %core, i64 0)
  %results = call ptr @buffer_of(ptr %core, i64 1)
  %from = getelementptr i64, ptr %counts, i64 %wide
  %to = getelementptr i64, ptr %results, i64 %wide
  %value = load i64, ptr %from
  store i64 %value, ptr %to
  call void @cokernel_finish(ptr %core)
  ret void
}
"""


def compile_programs():
    """Compiles the programs above. Returns a function from a name to its address."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, address in _runtime.function_addresses().items():
        llvm.add_symbol(name, address)
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, jit=True)
    module = llvm.parse_assembly(DECLARATIONS + PING_PONG + STUCK + FUNCTIONS)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()

    def address_of(name):
        return engine.get_function_address(name)

    address_of.engine = engine
    address_of.ir = str(module)
    return address_of


@pytest.fixture(scope="module")
def code():
    return compile_programs()


def program(name, entry, shape=(1,), *, is_coroutine=False, semaphores=0):
    """The description of a program as register_executable wants it."""
    return {
        "name": name,
        "entry": entry,
        "is_coroutine": is_coroutine,
        "shape": shape,
        "group_axis": -1,
        "private_bytes": semaphores * OFFSETS["sizeof.Semaphore"],
        "semaphore_bytes": semaphores * OFFSETS["sizeof.Semaphore"],
        "uses_barrier": False,
    }


_keys = iter(range(1 << 40, 1 << 41))


@pytest.fixture
def register(code):
    """Registers an executable of one program and returns its key; forgets it after the test."""
    keys = []

    def register(name, shape=(1,), *, is_coroutine=False, semaphores=0, change=None, **spec):
        key = next(_keys)
        described = program(
            name, code(name), shape, is_coroutine=is_coroutine, semaphores=semaphores
        )
        _runtime.register_executable(
            key,
            {"name": "kernel", "programs": [described | (change or {})], "keep_alive": code.engine}
            | spec,
        )
        keys.append(key)
        return key

    yield register
    for key in keys:
        _runtime.unregister_executable(key)


def launch(key, *arrays):
    """Launches on NumPy arrays, which live until the launch is over."""
    _runtime.launch(key, [(array.ctypes.data, array.nbytes) for array in arrays])


class Reports:
    """A `report` that keeps what it was given."""

    def __init__(self):
        self.failures = []

    def __call__(self, failure):
        self.failures.append(failure)
        return f"told: {failure['kind']}"


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


def test_an_executable_keeps_its_objects_until_it_is_forgotten(register):
    class Code:
        pass

    kept = Code()
    reference = weakref.ref(kept)
    key = register("nothing", keep_alive=kept)
    del kept
    gc.collect()
    assert reference() is not None
    assert _runtime.executable_is_registered(key)
    _runtime.unregister_executable(key)
    gc.collect()
    assert reference() is None
    assert not _runtime.executable_is_registered(key)


@pytest.fixture
def set_loader():
    """Sets a loader for the test; the package's own comes back after it."""
    before = _runtime.set_loader(None)
    yield _runtime.set_loader
    _runtime.set_loader(before)


def test_an_unknown_key_is_reported(set_loader):
    with pytest.raises(RuntimeError, match="no kernel with key 0000000000000005"):
        _runtime.launch(5, [])


def test_an_unknown_key_is_loaded_once(code, set_loader):
    calls = []

    def load(key, text):
        calls.append((key, text))
        spec = {"programs": [program("nothing", code("nothing"))], "keep_alive": code.engine}
        _runtime.register_executable(key, spec)

    assert set_loader(load) is None
    _runtime.launch(5, [])
    _runtime.launch(5, [])
    assert calls == [(5, "")]
    assert set_loader(None) is load
    _runtime.unregister_executable(5)


def test_a_loader_that_fails_is_reported(set_loader):
    def load(key, text):
        if key == 6:
            raise ValueError("cannot be compiled")

    set_loader(load)
    with pytest.raises(RuntimeError, match=r"(?s)cannot load.*ValueError: cannot be compiled"):
        _runtime.launch(6, [])
    with pytest.raises(RuntimeError, match=r"did not register the kernel with key 0{15}7"):
        _runtime.launch(7, [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": (0,)}, "every axis of the mesh must have a core"),
        ({"shape": (1,) * 5}, "at most four axes"),
        ({"group_axis": 1}, "group_axis is not an axis"),
        ({"semaphore_bytes": 16}, "zeroed prefix"),
        ({"unknown": 1}, "unknown field 'unknown'"),
    ],
)
def test_a_wrong_program_is_refused(register, change, message):
    with pytest.raises(ValueError, match=message):
        register("nothing", change=change)


def test_a_wrong_type_is_refused(register):
    with pytest.raises(TypeError, match="'num_workers' has the wrong type"):
        register("nothing", num_workers="two")
    with pytest.raises(ValueError, match="lacks 'programs'"):
        _runtime.register_executable(3, {})


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


@pytest.fixture(scope="module")
def ffi():
    """Calls an executable through XLA."""
    jax.ffi.register_ffi_target("cokernel_launch_test", _runtime.ffi_handler(), platform="cpu")

    def call(key, result, *operands, module="", aliases=None):
        return jax.ffi.ffi_call("cokernel_launch_test", result, input_output_aliases=aliases)(
            *operands, key=np.int64(key), module=module
        )

    return call


def test_xla_launches_an_executable_on_its_buffers(register, ffi):
    key = register("add_one", (16,))
    x = jnp.arange(16, dtype=jnp.float32)

    @jax.jit
    def f(x):
        return ffi(key, x, ffi(key, x, x))

    np.testing.assert_array_equal(f(x), np.arange(16) + 2)


@pytest.mark.parametrize("workers", WORKERS)
def test_callbacks_run_on_helper_threads_while_xla_runs_the_kernel(register, ffi, workers):
    seen = []

    def note(core, operands, results):
        seen.append(core["index"])
        time.sleep(0.001)

    key = register(
        "call_back",
        (16,),
        callbacks=[{"function": note, "operands": 1, "results": 1}],
        num_workers=workers,
        help="always",
    )
    x = jnp.zeros(4)
    jax.block_until_ready(jax.jit(lambda x: ffi(key, x, x))(x))
    assert sorted(seen) == list(range(16))


def test_a_failed_launch_is_an_error_of_jax_and_the_next_one_runs(register, ffi):
    bad = register("bad_check", report=lambda failure: "the text of the report")
    good = register("add_one", (16,))
    x = jnp.arange(16, dtype=jnp.float32)
    for _ in range(100):
        with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: the text of the report"):
            jax.block_until_ready(jax.jit(lambda x: ffi(bad, x, x))(x))
    np.testing.assert_array_equal(jax.jit(lambda x: ffi(good, x, x))(x), np.arange(16) + 1)


def test_a_key_with_the_highest_bit_set_survives_the_signed_attribute(code, ffi):
    key = (1 << 63) + 5
    _runtime.register_executable(key, {"programs": [program("p", code("add_one"), (16,))]})
    x = jnp.arange(16, dtype=jnp.float32)
    signed = np.uint64(key).astype(np.int64)
    np.testing.assert_array_equal(jax.jit(lambda x: ffi(signed, x, x))(x), np.arange(16) + 1)
    _runtime.unregister_executable(key)


def test_the_loader_gets_the_module_of_the_custom_call(ffi, set_loader):
    calls = []
    set_loader(lambda key, text: calls.append((key, text)))
    with pytest.raises(jax.errors.JaxRuntimeError, match="did not register"):
        jax.block_until_ready(ffi(99, jnp.zeros(1), module="some text"))
    assert calls == [(99, "some text")]


def test_every_device_of_a_shard_map_has_a_launch_of_its_own(register, ffi):
    key = register("add_one", (16,))
    mesh = jax.make_mesh((4,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.P("devices")

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    def f(x):
        return ffi(key, x, x)

    _runtime.reset_statistics()
    x = jnp.arange(64, dtype=jnp.float32)
    for _ in range(50):
        np.testing.assert_array_equal(f(x), np.arange(64) + 1)
    assert _runtime.statistics(key)[0]["launches"] == 200


def test_per_core_storage_goes_from_one_kernel_to_the_next(register, ffi):
    output = {"buffer": 0, "is_output": True, "bytes": 8, "count": 4}
    inout = [
        {"buffer": 0, "is_output": False, "bytes": 8, "count": 4},
        {"buffer": 1, "is_output": True, "bytes": 8, "count": 4},
    ]
    make = register("count_instance", (4,), instance_operands=[output])
    again = register("count_instance", (4,), instance_operands=inout)
    read = register("read_instance", (4,), instance_operands=inout[:1])
    handle = jax.ShapeDtypeStruct((4,), jnp.int32)

    @jax.jit
    def f():
        semaphores = ffi(make, handle)
        semaphores = ffi(again, handle, semaphores, aliases={0: 0})
        return semaphores, ffi(read, jax.ShapeDtypeStruct((8,), jnp.int32), semaphores)

    handles = set()
    for _ in range(3):
        semaphores, counts = f()
        np.testing.assert_array_equal(np.asarray(counts).view(np.int64), [2, 2, 2, 2])
        handles.add(int(semaphores[0]))
    assert len(handles) == 3
    assert _runtime.instance_table()["handles"] >= 3


def test_handles_of_another_process_are_refused(register):
    operand = {"buffer": 0, "is_output": False, "bytes": 8, "count": 4}
    key = register("count_instance", (4,), instance_operands=[operand])
    with pytest.raises(RuntimeError, match="belongs to a kernel whose results are gone"):
        launch(key, np.array([0x7FFFFFFF], np.int32))


def test_ctrl_c_ends_a_runaway_kernel():
    """In a process of its own, whose main thread waits inside the launch."""
    source = f"""
import sys
sys.path[:0] = {sys.path!r}
sys.path.insert(0, {str(Path(__file__).parent)!r})
import test_runtime
from cokernel import _runtime
code = test_runtime.compile_programs()
spec = test_runtime.program("runaway", code("runaway"), (2,))
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
