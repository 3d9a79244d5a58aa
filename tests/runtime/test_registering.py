"""Executables by their keys: who keeps them, who loads them, what is refused."""

import gc
import weakref

import pytest

from cokernel import _runtime
from tests.runtime.harness import program


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
