"""The BLAS library that SciPy brings along: its addresses for compiled code, and calls that keep it
to one thread.

Compiled kernels have workers of their own, so a product inside of one must not start BLAS's threads
as well. The number of threads is a setting of the whole library, though, and belongs to the user:
compiled code sets it to one while at least one of its products runs, and puts back what it found.
"""

import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import re
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite import ir

from cokernel.compiler.dtypes import i8, i32, void
from cokernel.compiler.function import FunctionBuilder

# Every symbol that compiled code takes from here begins with this.
PREFIX = "cokernel_blas_"

_ROUTINES = {np.dtype(np.float32): "sgemm", np.dtype(np.float64): "dgemm"}

# How OpenBLAS builds name the functions that set and get the number of threads.
_THREAD_CONTROLS = (
    ("scipy_openblas_set_num_threads", "scipy_openblas_get_num_threads"),
    ("openblas_set_num_threads", "openblas_get_num_threads"),
)

# Shared by all compiled code: a spin lock, how many products run, and the number of threads to put
# back.
_STATE = {name: ctypes.c_int32() for name in ("lock", "users", "saved")}


@functools.cache
def symbols() -> dict[str, int]:
    """Names and addresses of everything that compiled products refer to. Imports SciPy.

    Raises NotImplementedError if SciPy's BLAS takes integers of another width than 32 bits.
    """
    cython_blas = _cython_blas()
    capsules: dict[str, Any] = cython_blas.__pyx_capi__
    found = {f"{PREFIX}{name}": _address(capsules[name]) for name in _ROUTINES.values()}
    found |= {f"{PREFIX}{name}": ctypes.addressof(field) for name, field in _STATE.items()}
    # A handle of the extension module finds what the libraries it was linked with export.
    library = ctypes.CDLL(cython_blas.__file__)
    for setter, getter in _THREAD_CONTROLS:
        if hasattr(library, setter) and hasattr(library, getter):
            for name, function in (
                ("set", getattr(library, setter)),
                ("get", getattr(library, getter)),
            ):
                address = ctypes.cast(function, ctypes.c_void_p).value
                assert address is not None
                found[f"{PREFIX}{name}_threads"] = address
            break
    return found


def _cython_blas() -> Any:
    """SciPy's extension module of BLAS, without the rest of `scipy.linalg`, whose import takes ten
    times as long."""
    if "scipy.linalg.cython_blas" not in sys.modules:
        package = importlib.util.find_spec("scipy")
        for folder in (package and package.submodule_search_locations) or ():
            paths = [os.path.join(folder, "linalg")]
            spec = importlib.machinery.PathFinder.find_spec("cython_blas", paths)
            if spec is not None and spec.loader is not None:
                module = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(module)
                return module
    return importlib.import_module("scipy.linalg.cython_blas")


def _address(capsule: Any) -> int:
    api = ctypes.pythonapi
    api.PyCapsule_GetName.restype = ctypes.c_char_p
    api.PyCapsule_GetName.argtypes = [ctypes.py_object]
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    signature = api.PyCapsule_GetName(capsule)
    if b"(char *, char *, int *, int *, int *," not in signature:
        raise NotImplementedError(
            f"SciPy's BLAS has the signature {signature.decode()!r}; the CPU compiler calls it "
            "with 32-bit integers. Install a SciPy that was built with the LP64 interface."
        )
    return api.PyCapsule_GetPointer(capsule, signature)


def offers_all(ir: str) -> bool:
    """Whether all that a module takes from here exists in this process."""
    if PREFIX not in ir:
        return True
    taken = rf'^(?:declare .*)?@"?({PREFIX}\w+)"?(?:\(| = external)'
    return set(re.findall(taken, ir, re.MULTILINE)) <= symbols().keys()


def is_supported(dtype: Any) -> bool:
    """Whether BLAS multiplies matrices of this dtype."""
    return np.dtype(dtype) in _ROUTINES


def matrix_product(
    function: FunctionBuilder,
    dtype: Any,
    sizes: tuple[int, int, int],
    left: tuple[ir.Value, int, bool],
    right: tuple[ir.Value, int, bool],
    target: ir.Value,
) -> None:
    """Emits target = left @ right for row-major matrices of (m, k), (k, n) and (m, n) elements.

    `sizes` is (m, k, n). `left` and `right` are an address, the distance in elements between rows,
    and whether it is the transposed matrix that lies in memory like that. The target is dense.
    """
    m, k, n = sizes
    scalar = ir.FloatType() if np.dtype(dtype) == np.float32 else ir.DoubleType()

    def by_address(kind: ir.Type, value: int | float) -> ir.Value:
        return function.constant_data(kind, [value])

    def letter(is_transposed: bool) -> ir.Value:
        return by_address(i8, ord("T" if is_transposed else "N"))

    def number(value: int) -> ir.Value:
        return by_address(i32, value)

    # BLAS is column-major: to it, each of our matrices is the transposed one, and so is the
    # product.
    arguments = [
        letter(right[2]),
        letter(left[2]),
        number(n),
        number(m),
        number(k),
        by_address(scalar, 1.0),
        right[0],
        number(right[1]),
        left[0],
        number(left[1]),
        by_address(scalar, 0.0),
        target,
        number(n),
    ]
    _call_helper(function, "enter")
    function.call_external(f"{PREFIX}{_ROUTINES[np.dtype(dtype)]}", void, arguments)
    _call_helper(function, "leave")


def _call_helper(function: FunctionBuilder, name: str) -> None:
    if f"{PREFIX}set_threads" not in symbols():
        return
    helper = function.module.globals.get(f"{PREFIX}{name}")
    if helper is None:
        helper = _define_helper(function.module, name)
    function.builder.call(helper, [])


def _define_helper(module: ir.Module, name: str) -> ir.Function:
    """Defines what runs before or after a product: the first to enter sets the number of threads to
    one, the last to leave puts back what it was."""
    helper = ir.Function(module, ir.FunctionType(void, []), f"{PREFIX}{name}")
    helper.linkage = "internal"
    helper.attributes.add("noinline")
    builder = ir.IRBuilder(helper.append_basic_block("entry"))
    spin = helper.append_basic_block("spin")
    builder.branch(spin)
    builder.position_at_end(spin)

    lock, users, saved = (_state_variable(module, field) for field in _STATE)
    locked = helper.append_basic_block("locked")
    before = builder.atomic_rmw("xchg", lock, ir.Constant(i32, 1), "acquire")
    builder.cbranch(builder.icmp_signed("==", before, ir.Constant(i32, 0)), locked, spin)
    builder.position_at_end(locked)
    count = builder.load(users, typ=i32)
    if name == "enter":
        with builder.if_then(builder.icmp_signed("==", count, ir.Constant(i32, 0))):
            threads = builder.call(_control(module, "get", i32, []), [])
            builder.store(threads, saved)
            _set_threads_unless_one(module, builder, threads, ir.Constant(i32, 1))
        builder.store(builder.add(count, ir.Constant(i32, 1)), users)
    else:
        builder.store(builder.sub(count, ir.Constant(i32, 1)), users)
        with builder.if_then(builder.icmp_signed("==", count, ir.Constant(i32, 1))):
            threads = builder.load(saved, typ=i32)
            _set_threads_unless_one(module, builder, threads, threads)
    builder.store_atomic(ir.Constant(i32, 0), lock, "release", 4)
    builder.ret_void()
    return helper


def _state_variable(module: ir.Module, name: str) -> ir.GlobalVariable:
    existing = module.globals.get(f"{PREFIX}{name}")
    return existing or ir.GlobalVariable(module, i32, f"{PREFIX}{name}")


def _set_threads_unless_one(
    module: ir.Module, builder: ir.IRBuilder, found: ir.Value, value: ir.Value
) -> None:
    """Sets the number of threads to `value`, if the number found was more than one."""
    with builder.if_then(builder.icmp_signed("!=", found, ir.Constant(i32, 1))):
        builder.call(_control(module, "set", void, [i32]), [value])


def _control(
    module: ir.Module, name: str, result: ir.Type, parameters: Sequence[ir.Type]
) -> ir.Function:
    existing = module.globals.get(f"{PREFIX}{name}_threads")
    if existing is not None:
        return existing
    return ir.Function(module, ir.FunctionType(result, list(parameters)), f"{PREFIX}{name}_threads")


def register() -> None:
    """Makes the symbols known to LLVM, for code that is about to be loaded."""
    from llvmlite import binding

    for name, address in symbols().items():
        binding.add_symbol(name, address)
