"""CUDA: merges a kernel's programs into one, and hands it to JAX's Mosaic GPU compiler."""

from collections.abc import Mapping
from typing import Any

from cokernel import _jax, meshes, parameters
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
    if len(ctx.tokens_in):
        ctx.set_tokens_out(ctx.tokens_in)
    return stock.lower(ctx, *operands, **one)


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
        "compiler_params": _compiler_params(params["compiler_params"]),
    }


def _compiler_params(given: Any) -> Any:
    """Returns what a kernel's compiler parameters, of any kind, mean to Mosaic GPU."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if given is None or isinstance(given, plgpu.CompilerParams):
        return given
    if isinstance(given, _jax.TpuCompilerParams):
        raise NotImplementedError(
            "pltpu.CompilerParams mean nothing on a GPU: pass cokernel.CompilerParams or "
            "plgpu.CompilerParams"
        )
    parameters.check(given)
    # Workers, time limits and bounds checks are a CPU's.
    return None
