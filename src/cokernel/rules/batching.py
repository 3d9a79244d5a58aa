"""Batching: under `jax.vmap` a kernel is launched once for each element of the batch.

A launch uses all workers, so launches one after the other lose little, and any kernel can be
batched this way, whatever its bodies do with indices, DMAs and semaphores.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from cokernel import _jax
from cokernel.checking.options import from_interpret
from cokernel.meshes import is_gpu_mesh
from cokernel.primitive import check_shardings, mpmd_map_p
from cokernel.rules.discharge import written_inputs
from cokernel.signature import default_memory_space


def batch(
    axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Returns the batched outputs of a kernel whose inputs are batched as `dims` says.

    Args:
      axis_data: the name and the size of the batch.
      args: the inputs.
      dims: for each input the dimension that is the batch, or None where there is none.
      **params: the parameters of the primitive.
    """
    _check_axis_name(axis_data.name, params)
    if all(dim is None for dim in dims):
        outs = mpmd_map_p.bind(*args, **params)
        return outs, [None] * len(outs)
    # Also the dimension that is batched must not be sharded.
    arg_names = params["jaxprs"][0].debug_info.arg_names
    check_shardings([jax.typeof(arg) for arg in args], (), arg_names)
    _check_types(args, dims, params)
    original = params.get("derivative_of")
    if original is not None and _only_tangents_are_batched(args, dims, original):
        return _batch_tangents(axis_data, args, dims, original, params)
    _check_written_refs(args, dims, params)
    if axis_data.size == 0:
        outs = [lax.empty((0, *aval.shape), aval.dtype) for aval in params["out_avals"]]
    elif axis_data.size == 1:
        # One launch and, as reshapes are free, nothing else.
        outs = [jnp.expand_dims(out, 0) for out in _launch_element(0, 1, args, dims, params)]
    elif _jax.trace_state_clean():
        # Outside of jit, a loop would be traced and compiled each time.
        with _jax.config.disable_jit(False):
            outs = _jitted_loop(axis_data.size, tuple(dims), _jax.FrozenDict(params))(*args)
    else:
        outs = _launch_all(axis_data.size, dims, params, *args)
    return outs, [0] * len(outs)


def _launch_all(size: int, dims: Sequence[Any], params: Any, *args: Any) -> Sequence[Any]:
    def launch(_: None, index: Any) -> tuple[None, Sequence[Any]]:
        return None, _launch_element(index, size, args, dims, params)

    _, outs = lax.scan(launch, None, jnp.arange(size))
    return outs


@functools.lru_cache(maxsize=512)
def _jitted_loop(size: int, dims: tuple[Any, ...], params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_launch_all, size, dims, params))


def _only_tangents_are_batched(args: Sequence[Any], dims: Sequence[Any], original: Any) -> bool:
    num_primals = original["num_inputs"]
    in_avals = [jax.typeof(arg) for arg in args[:num_primals]]
    return all(dim is None for dim in dims[:num_primals]) and not (
        written_inputs(in_avals, original["jaxprs"])
    )


def _batch_tangents(
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    original: Any,
    params: dict[str, Any],
) -> tuple[Sequence[Any], Sequence[Any]]:
    """Computes the outputs once and only their tangents for each element, as `jax.jacfwd` asks."""
    num_primals, num_outputs = original["num_inputs"], len(original["out_avals"])
    kernel = {name: value for name, value in original.items() if name != "num_inputs"}
    primal_outs = mpmd_map_p.bind(*args[:num_primals], **kernel)
    alone = {name: value for name, value in params.items() if name != "derivative_of"}
    outs, out_dims = batch(axis_data, args, dims, **alone)
    return (
        [*primal_outs, *outs[num_outputs:]],
        [*[None] * num_outputs, *out_dims[num_outputs:]],
    )


def _launch_element(
    index: Any, size: int, args: Sequence[Any], dims: Sequence[Any], params: Any
) -> list[Any]:
    """Runs the kernel on element `index` of the batch and writes its batched Refs back."""
    elements = [_element(arg, dim, index) for arg, dim in zip(args, dims, strict=True)]
    if size > 1 and _tells_elements(params):
        number = jnp.asarray(index, np.int32)
        outs = mpmd_map_p.bind(*elements, number, **_with_number(params, len(elements)))
    else:
        outs = mpmd_map_p.bind(*elements, **params)
    in_avals = [jax.typeof(element) for element in elements]
    for position in written_inputs(in_avals, params["jaxprs"]):
        # What is written is batched, as was checked before.
        where = (*(slice(None),) * dims[position], index)
        args[position][where] = jax.freeze(elements[position])
    return list(outs)


def _tells_elements(params: Any) -> bool:
    """Whether the kernel runs in checked mode, whose reports say which element they are about."""
    if any(map(is_gpu_mesh, params["meshes"])):
        return False
    return from_interpret(params["interpret"]) is not None


def _with_number(params: Any, position: int) -> dict[str, Any]:
    """The parameters of a kernel that takes the number of the element as a further, last input."""
    space = default_memory_space((*params["meshes"], *params["external_meshes"]))
    aval = _jax.AbstractRef(_jax.ShapedArray((), np.dtype(np.int32)), memory_space=space)
    return {
        **params,
        "jaxprs": tuple(_with_input(jaxpr, aval, position) for jaxpr in params["jaxprs"]),
        "batch": (*params.get("batch", ()), position),
    }


def _with_input(jaxpr: Any, aval: Any, position: int) -> Any:
    """A program with an input in front of its outputs that it does not use."""
    names = jaxpr.debug_info.arg_names
    if names is not None:
        names = (*names[:position], "batch_element", *names[position:])
    return jaxpr.replace(
        invars=[*jaxpr.invars[:position], _jax.Var(aval), *jaxpr.invars[position:]],
        debug_info=jaxpr.debug_info._replace(arg_names=names),
    )


def _element(arg: Any, dim: int | None, index: Any) -> Any:
    if dim is None:
        return arg
    aval = jax.typeof(arg)
    where = (*(slice(None),) * dim, index)
    if isinstance(aval, _jax.AbstractRef):
        return jax.new_ref(arg[where], memory_space=aval.memory_space)
    # An array that is to be in a kernel's own memory space, such as SMEM, can't be sliced while it
    # is there.
    space = aval.memory_space
    if isinstance(space, _jax.ArrayMemorySpace):
        return lax.dynamic_index_in_dim(arg, index, dim, keepdims=False)
    plain = _jax.with_memory_space_constraint(arg, _jax.ArrayMemorySpace.Device)
    element = lax.dynamic_index_in_dim(plain, index, dim, keepdims=False)
    return _jax.with_memory_space_constraint(element, space)


def _check_axis_name(name: Any, params: dict[str, Any]) -> None:
    """Refuses programs that ask for their place in the batch: a launch does not know it."""
    for jaxpr in params["jaxprs"]:
        if any(
            isinstance(effect, _jax.NamedAxisEffect) and effect.name == name
            for effect in jaxpr.effects
        ):
            raise NotImplementedError(
                f"program {jaxpr.debug_info.func_src_info} uses the axis {name!r} of the "
                "surrounding vmap: pass `lax.axis_index(...)` to the kernel as an argument"
            )


def _check_types(args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]) -> None:
    names = params["jaxprs"][0].debug_info.arg_names
    for arg, dim, name in zip(args, dims, names, strict=False):
        aval = jax.typeof(arg)
        if dim is not None and aval.is_high:
            raise NotImplementedError(
                f"kernel {params['name']!r} cannot be batched over {name!r} of type {aval}, which "
                "stands for several arrays: pass those arrays instead"
            )


def _check_written_refs(args: Sequence[Any], dims: Sequence[Any], params: dict[str, Any]) -> None:
    in_avals = [jax.typeof(arg) for arg in args]
    for position in written_inputs(in_avals, params["jaxprs"]):
        if dims[position] is None:
            names = params["jaxprs"][0].debug_info.arg_names
            raise ValueError(
                f"kernel {params['name']!r} writes to the Ref {names[position]!r}, which is the "
                "same for the whole batch, while other inputs are batched: make the Ref inside the "
                "function that is batched, or batch it too"
            )


_jax.batching.fancy_primitive_batchers[mpmd_map_p] = batch
