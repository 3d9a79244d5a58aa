"""Chooses how a kernel is lowered: one module for each platform."""

import importlib
from collections.abc import Sequence
from typing import Any

import jax

# The custom call through which XLA enters the runtime on a CPU.
CPU_CALL_TARGET = "cokernel_launch"

# The modules are imported when a kernel is lowered for their platform and not before, except that
# of the CPU: see `register_call_targets`.
_MODULES = {
    "cpu": "cokernel.lowering.cpu",
    "tpu": "cokernel.lowering.tpu",
    "cuda": "cokernel.lowering.gpu",
    "rocm": "cokernel.lowering.other",
}


def lower(platforms: Sequence[str], ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers the kernel that `params` describe for the one platform in `platforms`.

    Args:
      platforms: the names of the platforms that the module is lowered for.
      ctx: JAX's LoweringRuleContext.
      *operands: the MLIR values of the kernel's inputs.
      **params: the parameters of the primitive.

    Returns:
      The MLIR values of the kernel's outputs.

    Raises:
      NotImplementedError: for several platforms at once, and for one without a lowering.
    """
    if len(platforms) != 1:
        raise NotImplementedError(
            f"kernel {params['name']!r} cannot be lowered for several platforms at once "
            f"({', '.join(platforms)}): lower it for each on its own"
        )
    [platform] = platforms
    if platform not in _MODULES:
        raise NotImplementedError(
            f"kernel {params['name']!r} cannot run on {platform}: Cokernel lowers kernels for "
            f"{', '.join(_MODULES)}; place its arguments on a CPU with "
            "jax.default_device(jax.devices('cpu')[0])"
        )
    module = importlib.import_module(_MODULES[platform])
    return module.lower(ctx, *operands, **params)


def register_call_targets() -> None:
    """Tells JAX of the runtime's custom call, so that programs exported by another process run too.
    Starts no backend.
    """
    from cokernel import _runtime

    # Every process that runs a kernel on a CPU needs this module and LLVM, which take 30 ms to
    # import. A program's start has room for them; the first call of a kernel that is in the cache
    # takes little longer than that. What only compiling needs is imported when something compiles.
    from cokernel.lowering import cpu

    jax.ffi.register_ffi_target(CPU_CALL_TARGET, _runtime.ffi_handler(), platform="cpu")
    _runtime.set_loader(cpu.load)
