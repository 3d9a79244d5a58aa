"""LLVM IR to machine code: the target machine, the optimisation pipeline, the cache of objects, and
loading.
"""

import functools
import hashlib
import os
import threading
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from cokernel.compiler import blas, cache
from cokernel.compiler.mask_shuffles import without_constant_lanes

# Written into every key, so that a change of how we compile never meets an object from before it.
PIPELINE_VERSION = 5

# LLVM 22's VectorCombine takes a comparison of a vector with one of its own lanes for a comparison
# of the vector with itself, if both come out of one shuffle.
OPTIONS = ("--disable-vector-combine",)

# Names features of the processor to do without: "avx512" for all whose names begin so.
WITHOUT_VARIABLE = "COKERNEL_WITHOUT"

# A function that adds to sixteen sums of float32 the products of as many pairs of bfloat16. Modules
# only declare it, since they may travel to a machine that has no such instruction.
MULTIPLY_PAIRS = "cokernel_multiply_pairs"

# llvmlite's objects share one LLVM context, which only one thread may use at a time.
_lock = threading.RLock()


@functools.cache
def host() -> tuple[str, str, str]:
    """The triple, processor and features of this machine, less those that the user's environment
    says to do without."""
    with _lock:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        for option in OPTIONS:
            llvm.set_option("cokernel", option)
        features = llvm.get_host_cpu_features()
        for prefix in filter(None, os.environ.get(WITHOUT_VARIABLE, "").split(",")):
            unwanted = [name for name in features if name.startswith(prefix)]
            if not unwanted:
                raise ValueError(
                    f"{WITHOUT_VARIABLE} is {os.environ[WITHOUT_VARIABLE]!r}, and no feature of a "
                    f"processor begins with {prefix!r}: write LLVM's names, such as avx512 or fma"
                )
            features.update(dict.fromkeys(unwanted, False))
        return llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten()


@functools.cache
def host_has(feature: str) -> bool:
    """Whether the processor of this machine has a feature, by LLVM's name for it."""
    return f"+{feature}" in host()[2].split(",")


def _target_machine() -> Any:
    triple, cpu, features = host()
    target = llvm.Target.from_triple(triple)
    # Position-independent code with small offsets: the loader places code and data together and
    # reaches the rest through stubs.
    return target.create_target_machine(
        cpu=cpu, features=features, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


def key_of(text: str) -> int:
    """A 64-bit key of a module's text: equal on every machine and in every process."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def optimise(ir: str) -> str:
    """The IR after the optimisation pipeline, as text; for people who want to read it."""
    with _lock:
        module, _ = _optimised(ir)
        return str(module)


def assembly(ir: str) -> str:
    """The machine code as assembly text; for people who want to read it."""
    with _lock:
        module, machine = _optimised(ir)
        return machine.emit_assembly(module)


def _optimised(ir: str) -> tuple[Any, Any]:
    machine = _target_machine()
    module = llvm.parse_assembly(ir)
    if MULTIPLY_PAIRS in ir:
        module.link_in(llvm.parse_assembly(_multiply_pairs()))
    module.triple = machine.triple
    module.data_layout = str(machine.target_data)
    options = llvm.create_pipeline_tuning_options(speed_level=3)
    # llvmlite leaves this one off.
    options.slp_vectorization = True
    builder = llvm.create_pass_builder(machine, options)
    # Loop nests are functions of their own and those of a kernel's layers are often equal. LLVM
    # would find that too, but only after it has optimised each.
    merging = llvm.create_new_module_pass_manager()
    merging.add_merge_functions_pass()
    merging.run(module, builder)
    builder.getModulePassManager().run(module, builder)
    if host_has("avx512f"):
        # Last, because the passes would make shuffles of it again.
        text = str(module)
        changed = without_constant_lanes(text)
        if changed != text:
            module = llvm.parse_assembly(changed)
    return module, machine


def _multiply_pairs() -> str:
    """The definition of MULTIPLY_PAIRS for this machine."""
    if host_has("avx512bf16"):
        body = """
  %x = bitcast <16 x i32> %left to <32 x bfloat>
  %y = bitcast <16 x i32> %right to <32 x bfloat>
  %sum = call <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float> %sums, <32 x bfloat> %x, <32 x bfloat> %y)
  ret <16 x float> %sum
}
declare <16 x float> @llvm.x86.avx512bf16.dpbf16ps.512(<16 x float>, <32 x bfloat>, <32 x bfloat>)
"""  # noqa: E501
    else:
        body = """
  %left.low = shl <16 x i32> %left, splat (i32 16)
  %right.low = shl <16 x i32> %right, splat (i32 16)
  %left.high = and <16 x i32> %left, splat (i32 -65536)
  %right.high = and <16 x i32> %right, splat (i32 -65536)
  %x.low = bitcast <16 x i32> %left.low to <16 x float>
  %y.low = bitcast <16 x i32> %right.low to <16 x float>
  %x.high = bitcast <16 x i32> %left.high to <16 x float>
  %y.high = bitcast <16 x i32> %right.high to <16 x float>
  %first = call <16 x float> @llvm.fma.v16f32(<16 x float> %x.high, <16 x float> %y.high, <16 x float> %sums)
  %sum = call <16 x float> @llvm.fma.v16f32(<16 x float> %x.low, <16 x float> %y.low, <16 x float> %first)
  ret <16 x float> %sum
}
declare <16 x float> @llvm.fma.v16f32(<16 x float>, <16 x float>, <16 x float>)
"""  # noqa: E501
    return (
        f"define linkonce_odr hidden <16 x float> @{MULTIPLY_PAIRS}"
        "(<16 x float> %sums, <16 x i32> %left, <16 x i32> %right) alwaysinline {" + body
    )


def compile_object(ir: str) -> bytes:
    """Compiles LLVM IR to an object file for this machine, or takes it from the cache."""
    identity = "\n".join([str(PIPELINE_VERSION), llvmlite.__version__, *host(), ir])
    name = f"{hashlib.sha256(identity.encode()).hexdigest()}.o"
    code = cache.read(name)
    if code is None:
        with _lock:
            module, machine = _optimised(ir)
            code = machine.emit_object(module)
        cache.write(name, code)
    return code


class LoadedCode:
    """Machine code in memory; it stays as long as this object."""

    def __init__(self, code: bytes):
        _register_symbols()
        if blas.PREFIX.encode() in code:
            # Only now, because this imports SciPy.
            with _lock:
                blas.register()
        with _lock:
            machine = _target_machine()
            self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
            self._engine.finalize_object()

    def address(self, symbol: str) -> int:
        """The address of a function."""
        with _lock:
            address = self._engine.get_function_address(symbol)
        if not address:
            raise LookupError(f"the compiled module has no function {symbol!r}")
        return address


@functools.cache
def _register_symbols() -> None:
    """Makes the functions of the runtime known to LLVM by name."""
    from cokernel import _runtime

    with _lock:
        for name, address in _runtime.function_addresses().items():
            llvm.add_symbol(name, address)
