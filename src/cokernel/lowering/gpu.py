"""CUDA: merges a kernel's programs into one, and hands it to JAX's Mosaic GPU compiler."""

import re
from collections.abc import Mapping
from typing import Any

from cokernel import _jax, meshes, parameters, primitive
from cokernel.lowering import gpu_merge, stock


def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a kernel to a custom call of Mosaic GPU. See `primitive.py` for the parameters.

    Raises:
      NotImplementedError: for programs on meshes that a GPU has not.
    """
    check_meshes(params)
    one = as_one_program(len(operands), params)
    # The interpreter is for where there is no GPU; the order that its effect asks for is XLA's own.
    one["interpret"] = False
    [jaxpr] = one["jaxprs"]
    info = jaxpr.debug_info.replace_func_name(_symbol(params["name"]))
    one["jaxprs"] = (jaxpr.replace(debug_info=info),)
    if len(ctx.tokens_in):
        ctx.set_tokens_out(ctx.tokens_in)
    block = _jax.mlir.ir.InsertionPoint.current.block
    num_operations = len(block.operations)
    results = stock.lower(ctx, *operands, **one)
    [call] = [
        operation
        for operation in list(block.operations)[num_operations:]
        if operation.operation.name == "stablehlo.custom_call"
    ]
    # Mosaic GPU has no parameter for it.
    given = params["compiler_params"]
    asked = isinstance(given, parameters.CompilerParams) and given.has_side_effects
    if asked or primitive.has_side_effects(ctx.avals_in, params):
        call.attributes["has_side_effect"] = _jax.mlir.ir.BoolAttr.get(True)
    return results


# Of what a file may be called, in which Mosaic GPU puts what it dumps of a kernel.
_LONGEST_SYMBOL = 100


def _symbol(name: str) -> str:
    """Returns a kernel's name as the assembler takes it: ASCII letters, digits and underscores."""
    symbol = re.sub(r"\W", "_", name, flags=re.ASCII)[:_LONGEST_SYMBOL]
    return symbol if symbol[:1].isalpha() else f"kernel_{symbol}"


def check_meshes(params: Mapping[str, Any]) -> None:
    """Checks that all programs are on meshes of GPUs."""
    for mesh, jaxpr in zip(params["meshes"], params["jaxprs"], strict=True):
        if not meshes.is_gpu_mesh(mesh):
            raise NotImplementedError(
                f"kernel {params['name']!r} cannot run on a GPU, because program "
                f"{jaxpr.debug_info.func_src_info} is on {mesh}: write it for a mesh of "
                "jax.experimental.pallas.mosaic_gpu"
            )


def as_one_program(num_inputs: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a kernel of GPU programs as those of a kernel of one."""
    mesh, jaxpr = gpu_merge.merged(num_inputs, params)
    return {
        **params,
        "meshes": (mesh,),
        "jaxprs": (jaxpr,),
        "compiler_params": _compiler_params(params["name"], params["compiler_params"]),
    }


def _compiler_params(name: str, given: Any) -> Any:
    """Returns what a kernel's compiler parameters, of any kind, mean to Mosaic GPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if given is None or isinstance(given, plgpu.CompilerParams):
        return given
    if isinstance(given, _jax.TpuCompilerParams):
        raise NotImplementedError(
            f"kernel {name!r} has pltpu.CompilerParams, which mean nothing on a GPU: pass "
            "cokernel.CompilerParams or plgpu.CompilerParams"
        )
    parameters.check(given)
    # Workers, time limits and bounds checks are a CPU's.
    return None
