"""Builds limits.cc for this very machine and calls it: the peers written by hand in C++."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile

import numpy as np

_SOURCE = pathlib.Path(__file__).with_name("limits.cc")
_POINTER, _COUNT = ctypes.c_void_p, ctypes.c_int64
_ARGUMENTS = {
    "round_trip_condition_variable": [_COUNT],
    "round_trip_two_threads": [_COUNT],
    "round_trip_one_thread": [_COUNT],
    "gather": [_POINTER] * 3 + [_COUNT] * 3 + [ctypes.c_int, _COUNT],
    "affine": [_POINTER] * 2 + [_COUNT] * 2 + [ctypes.c_int, _COUNT],
    "iterate": [_POINTER] * 2 + [_COUNT] + [ctypes.c_int, _COUNT],
}


def build() -> ctypes.CDLL:
    """Compiles limits.cc with -O3 for the processor at hand and loads it.

    Raises RuntimeError, with what the compiler said, where no C++17 compiler does it.
    """
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    compilers = [name for name in names if name and shutil.which(name)]
    if not compilers:
        raise RuntimeError("The benchmarks need a C++17 compiler; none was found. Install g++.")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "limits.so"
        command = [compilers[0], "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
        command += ["-pthread", str(_SOURCE), "-o", str(library)]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{built.stderr}")
        # A loaded library stays in memory when its file is removed.
        limits = ctypes.CDLL(str(library))
    for name, arguments in _ARGUMENTS.items():
        function = getattr(limits, name)
        function.argtypes, function.restype = arguments, ctypes.c_double
    return limits


def address(array: np.ndarray | None) -> int | None:
    """Returns where the contiguous `array` lies, or a null pointer for None."""
    return None if array is None else array.ctypes.data
