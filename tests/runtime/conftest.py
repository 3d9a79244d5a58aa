"""The compiled programs of the harness, registered for one test at a time."""

import jax
import numpy as np
import pytest

from cokernel import _runtime
from tests.runtime.harness import compile_programs, program

_keys = iter(range(1 << 40, 1 << 41))


@pytest.fixture(scope="session")
def code():
    return compile_programs()


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


@pytest.fixture
def set_loader():
    """Sets a loader for the test; the package's own comes back after it."""
    before = _runtime.set_loader(None)
    yield _runtime.set_loader
    _runtime.set_loader(before)


@pytest.fixture(scope="session")
def ffi():
    """Calls an executable through XLA."""
    jax.ffi.register_ffi_target("cokernel_launch_test", _runtime.ffi_handler(), platform="cpu")

    def call(key, result, *operands, module="", aliases=None):
        return jax.ffi.ffi_call("cokernel_launch_test", result, input_output_aliases=aliases)(
            *operands, key=np.int64(key), module=module
        )

    return call
