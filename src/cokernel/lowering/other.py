"""Platforms that Cokernel knows nothing of: JAX's own fallback, for kernels of one program."""

from typing import Any

from cokernel.lowering import stock


def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a kernel of one program as JAX does.

    Raises:
      NotImplementedError: for a kernel of several programs.
    """
    if len(params["jaxprs"]) > 1:
        platforms = ctx.platforms or ctx.module_context.platforms
        meshes = ", ".join(map(str, params["meshes"]))
        raise NotImplementedError(
            f"kernel {params['name']!r} has {len(params['jaxprs'])} programs, on {meshes}, but on "
            f"{', '.join(platforms)} a kernel can have only one: run it on a CPU, a TPU or an "
            "NVIDIA GPU"
        )
    return stock.lower(ctx, *operands, **params)
