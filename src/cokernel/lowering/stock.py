"""Hands a kernel to JAX's own lowering of `mpmd_map`, which knows the accelerators' compilers."""

from typing import Any

from cokernel import _jax

# What JAX's primitive has no parameter for.
OWN_PARAMETERS = ("target", "derivative_of", "scratch_transforms", "made_at", "batch")


def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a kernel as JAX lowers `pl.kernel` on the platform of `ctx`.

    Args:
      ctx: JAX's LoweringRuleContext, for one platform.
      *operands: the MLIR values of the kernel's inputs.
      **params: the parameters of our primitive; `compiler_params` is one of JAX's, or None.
    """
    for name in OWN_PARAMETERS:
        params.pop(name, None)
    params["input_output_aliases"] = _jax.FrozenDict(dict(params["input_output_aliases"]))
    return _jax.common_lowerings[_jax.stock_mpmd_map_p].rule(ctx, *operands, **params)


def bind(*args: Any, **params: Any) -> Any:
    """Binds JAX's own primitive, also while `cokernel.pallas` has put ours in its place."""
    return _jax.Primitive.bind(_jax.stock_mpmd_map_p, *args, **params)
