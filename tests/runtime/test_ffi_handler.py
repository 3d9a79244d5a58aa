"""Launches that XLA starts, on its own buffers."""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cokernel import _runtime
from tests.runtime.harness import WORKERS, launch, program


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
