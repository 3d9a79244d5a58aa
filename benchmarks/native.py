"""Builds the peers written by hand in C++ for this very machine, to be called through ctypes."""

import ctypes
import os
import pathlib
import shutil
import subprocess
import tempfile
from typing import Any

import numpy as np

_SOURCES = ["limits.cc", "movement.cc", "arithmetic.cc"]
POINTER, COUNT, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_float
# As many as Cokernel has workers when it is not told otherwise.
THREADS = os.cpu_count() or 1


def build(signatures: dict[str, list[Any]]) -> ctypes.CDLL:
    """Compiles the C++ files with -O3 for the processor at hand and loads them.

    `signatures` has the types of the arguments of each function; all return seconds as a double.
    Raises RuntimeError, with what the compiler said, where no C++17 compiler does it.
    """
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    compilers = [name for name in names if name and shutil.which(name)]
    if not compilers:
        raise RuntimeError("The benchmarks need a C++17 compiler; none was found. Install g++.")
    with tempfile.TemporaryDirectory() as folder:
        library = pathlib.Path(folder) / "limits.so"
        command = [compilers[0], "-std=c++17", "-O3", "-march=native", "-shared", "-fPIC"]
        command += [str(pathlib.Path(__file__).with_name(source)) for source in _SOURCES]
        command += ["-pthread", "-o", str(library)]
        built = subprocess.run(command, capture_output=True, text=True)
        if built.returncode != 0:
            raise RuntimeError(f"{' '.join(command)} failed:\n{built.stderr}")
        # A loaded library stays in memory when its file is removed.
        limits = ctypes.CDLL(str(library))
    for name, arguments in signatures.items():
        function = getattr(limits, name)
        function.argtypes, function.restype = arguments, ctypes.c_double
    return limits


def address(array: np.ndarray | None) -> int | None:
    """Returns where the contiguous `array` lies, or a null pointer for None."""
    return None if array is None else array.ctypes.data
