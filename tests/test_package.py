"""What `import cokernel` gives, in a process that has imported nothing else."""

import subprocess
import sys

import pytest

import cokernel


def in_new_process(program: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return run.stdout.strip()


@pytest.mark.parametrize("name", cokernel.__all__)
def test_every_public_name_is_there(name):
    assert getattr(cokernel, name) is not None


def test_stock_kernels_and_ahead_of_time_need_no_import_of_their_own():
    program = (
        "import cokernel\n"
        "with cokernel.pallas.enabled():\n"
        "    print(cokernel.aot.TARGETS['v6e'].name)"
    )
    assert in_new_process(program) == "v6e"


def test_ahead_of_time_is_imported_only_when_it_is_asked_for():
    program = (
        "import sys, cokernel\n"
        "print('cokernel.aot' in sys.modules, cokernel.aot.__name__, 'cokernel.aot' in sys.modules)"
    )
    assert in_new_process(program) == "False cokernel.aot True"


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'cokernel' has no attribute 'mpmd'"):
        _ = cokernel.mpmd
