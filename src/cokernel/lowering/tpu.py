"""TPU: hands a kernel's programs to JAX's Mosaic compiler."""

from collections.abc import Mapping, Sequence
from typing import Any

from cokernel import _jax, parameters, primitive
from cokernel.lowering import stock, tpu_cores, tpu_mixed
from cokernel.meshes import CoreMesh

_TPU_MESHES = (_jax.TensorCoreMesh, _jax.ScalarSubcoreMesh, _jax.VectorSubcoreMesh)


def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a kernel to a custom call of Mosaic. See `primitive.py` for the parameters.

    Raises:
      NotImplementedError: for a program on a mesh that a TPU has not.
    """
    _check_meshes(params)
    given = params["compiler_params"]
    params["compiler_params"] = compiler_params(given, params["meshes"])
    if not isinstance(given, _jax.TpuCompilerParams):
        # XLA drops a call whose results nobody uses, and with it what the kernel prints or sends.
        effects = primitive.has_side_effects(ctx.avals_in, params)
        own = params["compiler_params"].has_side_effects
        params["compiler_params"] = params["compiler_params"].replace(
            has_side_effects=effects or own
        )
    params["meshes"], params["jaxprs"] = tpu_cores.widened(params["meshes"], params["jaxprs"])
    if tpu_mixed.is_mixed(params["meshes"]):
        return tpu_mixed.lower(ctx, *operands, **params)
    return stock.lower(ctx, *operands, **params)


def _check_meshes(params: Mapping[str, Any]) -> None:
    for mesh, jaxpr in zip(params["meshes"], params["jaxprs"], strict=True):
        if isinstance(mesh, _TPU_MESHES):
            continue
        advice = (
            "a CoreMesh is made of CPU cores; to run on a TPU as well, write it for a "
            "TensorCoreMesh, a ScalarSubcoreMesh or a VectorSubcoreMesh"
            if isinstance(mesh, CoreMesh)
            else "a TPU has TensorCores and SparseCores"
        )
        raise NotImplementedError(
            f"kernel {params['name']!r} cannot run on a TPU, because program "
            f"{jaxpr.debug_info.func_src_info} is on {mesh}: {advice}"
        )


def compiler_params(given: Any, meshes: Sequence[Any]) -> Any:
    """Returns what a kernel's compiler parameters, of any kind, mean to Mosaic."""
    if isinstance(given, _jax.TpuCompilerParams):
        return given
    own = parameters.resolve(given)
    on_tensor_core = any(isinstance(mesh, _jax.TensorCoreMesh) for mesh in meshes)
    return _jax.TpuCompilerParams(
        # In the TensorCore's tiling, which Mosaic assumes by default, SparseCores can gather and
        # scatter only rows whose length is a multiple of a tile's.
        use_tc_tiling_on_sc=None if on_tensor_core else False,
        has_side_effects=own.has_side_effects,
        collective_id=own.collective_id,
        disable_bounds_checks=not own.bounds_checks,
    )
