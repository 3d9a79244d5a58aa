"""The primitive `mpmd_map`: how it runs eagerly, what type it has, and how it is lowered.

Its parameters:

  jaxprs: one per program, all with the same inputs (arguments, outputs, scratch) and no constants.
  meshes: the mesh of each program.
  external_meshes: meshes on which no program runs, but to which Refs from outside are tied.
  out_avals: the types of the outputs.
  input_output_aliases: pairs (input, output), sorted; the output overwrites the input.
  compiler_params, interpret, debug, cost_estimate, name, metadata: as given to `mpmd_map`.
  target: the name of the chip that was pretended when the kernel was made, or None.
  scratch_transforms: only where scratch of GPU programs is laid out in a special way: what leads
    from each piece of scratch as it is laid out to what a program sees.
  made_at: only in checked mode, and where it is known: the user's line that made the kernel.
  batch: only in checked mode, under `jax.vmap`: for each vmap, the innermost first, the position
    of the input that says which element the launch is for. No program uses these inputs.
  derivative_of: only where the kernel is the derivative of another: the parameters of that one and
    its `num_inputs`. Its inputs and outputs come first here, before their tangents.
"""

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cokernel import _jax, meshes
from cokernel.meshes import is_gpu_mesh

mpmd_map_p = _jax.Primitive("mpmd_map")
mpmd_map_p.multiple_results = True


@contextlib.contextmanager
def tracing_context(mesh: Any, all_meshes: Sequence[Any], target: str | None) -> Iterator[None]:
    """What holds while a program on `mesh` of a kernel on `all_meshes` is traced or rewritten."""
    axes: dict[Any, int] = {}
    for other in all_meshes:
        axes.update(other.shape)
    with (
        meshes.target_or_nothing(target),
        mesh.tracing_context(),
        _jax.extend_axis_env_nd(axes.items()),
        # The axes of the mesh in order are what `program_id` and `num_programs` count.
        _jax.tracing_grid_env(tuple(mesh.shape.values()), ()),
        _jax.config._check_vma(False),
        # Control flow in a program is part of the program, also for those who debug around it.
        _jax.config.disable_jit(False),
        _jax.clear_xla_metadata(),
    ):
        yield


@mpmd_map_p.def_impl
def _run(*args: Any, **params: Any) -> Any:
    # JAX's own way to run one primitive: jitted once for each set of parameters, also while
    # `jax_disable_jit` is set.
    return _jax.apply_primitive(mpmd_map_p, *args, **params)


@mpmd_map_p.def_effectful_abstract_eval
def abstract_eval(
    *in_avals: Any,
    jaxprs: Sequence[Any],
    meshes: Sequence[Any],
    out_avals: Sequence[Any],
    input_output_aliases: Sequence[tuple[int, int]],
    **params: Any,
) -> tuple[tuple[Any, ...], set[Any]]:
    """Returns the types of the outputs and the effects that a launch has on its surroundings."""
    check_shardings(in_avals, out_avals, jaxprs[0].debug_info.arg_names)
    input_of_output = {out_index: in_index for in_index, out_index in input_output_aliases}
    results = [
        in_avals[input_of_output[index]] if index in input_of_output else aval
        for index, aval in enumerate(out_avals)
    ]
    all_meshes = (*meshes, *params["external_meshes"])
    effects = _effects(in_avals, jaxprs, meshes, all_meshes, params.get("interpret"))
    return tuple(map(_seen_from_outside, results)), effects


def has_side_effects(avals_in: Sequence[Any], params: Mapping[str, Any]) -> bool:
    """Returns whether a kernel must run even if nobody uses its results: if it prints, calls back
    or communicates."""
    _, effects = abstract_eval(*avals_in, **params)
    return any(
        not isinstance(effect, _jax.JaxprInputEffect | _jax.NamedAxisEffect) for effect in effects
    )


def _seen_from_outside(aval: Any) -> Any:
    # An array in a kernel's own memory space would be of no use to other primitives.
    if isinstance(aval, _jax.ShapedArray) and not isinstance(
        aval.memory_space, _jax.ArrayMemorySpace
    ):
        return aval.update(memory_space=_jax.ArrayMemorySpace.Device)
    return aval


def _effects(
    in_avals: Sequence[Any],
    jaxprs: Sequence[Any],
    meshes: Sequence[Any],
    all_meshes: Sequence[Any],
    interpret: Any,
) -> set[Any]:
    own_axes = {name for mesh in all_meshes for name in mesh.shape}
    effects: set[Any] = set()
    for mesh, jaxpr in zip(meshes, jaxprs, strict=True):
        position = {var: index for index, var in enumerate(jaxpr.invars)}
        for effect in jaxpr.effects:
            if isinstance(effect, _jax.JaxprInputEffect):
                index = position[effect.input]
                if index < len(in_avals) and isinstance(in_avals[index], _jax.AbstractRef):
                    effects.add(effect.replace(index))
            elif isinstance(effect, _jax.NamedAxisEffect):
                if effect.name not in own_axes:
                    effects.add(effect)
            elif isinstance(effect, _jax.CommsEffect) or not (
                mesh.discharges_effect(effect) or _jax.kernel_local_effects.contains(effect)
            ):
                effects.add(effect)
        if _reaches_other_devices(jaxpr, own_axes):
            effects.add(_jax.comms_effect)
    if any(map(is_gpu_mesh, meshes)) and interpret:
        # JAX's interpreter of GPU kernels keeps its state beside the program.
        effects.update(_jax.get_interpret_effects(interpret))
    effects.update(_jax.WriteEffect(index) for index in used_semaphores(in_avals, jaxprs))
    return effects


def _reaches_other_devices(jaxpr: Any, own_axes: set[Any]) -> bool:
    """Returns whether a signal or copy goes along an axis that is not the kernel's own.

    JAX notes only that the axis is used, which is no reason to keep a kernel that nobody needs.
    """
    senders = (_jax.pallas_primitives.semaphore_signal_p, _jax.tpu_primitives.dma_start_p)
    return any(
        isinstance(effect, _jax.NamedAxisEffect) and effect.name not in own_axes
        for eqn in all_equations(jaxpr)
        if eqn.primitive in senders
        for effect in eqn.effects
    )


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of all jaxprs within."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _jax.jaxprs_in_params(eqn.params):
            yield from all_equations(inner)


def used_semaphores(in_avals: Sequence[Any], jaxprs: Sequence[Any]) -> set[int]:
    """Returns the positions of the Ref arguments that hold semaphores and that a program uses.

    Signals and waits change them, but JAX gives them no effect that would say so.
    """
    positions = [
        index
        for index, aval in enumerate(in_avals)
        if isinstance(aval, _jax.AbstractRef)
        and isinstance(getattr(aval.inner_aval, "dtype", None), _jax.AbstractSemaphoreTy)
    ]
    used: set[int] = set()
    for jaxpr in jaxprs:
        operands = {atom for eqn in jaxpr.eqns for atom in eqn.invars if isinstance(atom, _jax.Var)}
        used.update(index for index in positions if jaxpr.invars[index] in operands)
    return used


def check_shardings(
    in_avals: Sequence[Any], out_avals: Sequence[Any], arg_names: Sequence[str]
) -> None:
    """Checks that inputs and outputs are on one device.

    Args:
      in_avals: the types of the inputs.
      out_avals: the types of the outputs.
      arg_names: the names of a program's parameters, of which the inputs are the first.
    """
    names = [f" ({name!r})" if name else "" for name in arg_names[: len(in_avals)]]
    names += [""] * (len(in_avals) - len(names))
    arguments = [f"argument {index}{name}" for index, name in enumerate(names)]
    outputs = [f"output {index}" for index in range(len(out_avals))]
    for what, aval in zip((*arguments, *outputs), (*in_avals, *out_avals), strict=True):
        if not isinstance(aval, _jax.ShapedArray):
            continue
        spec = aval.sharding.spec
        if any(axis is not None for axis in spec):
            raise ValueError(
                f"mpmd_map runs on one device at a time, but {what} is sharded as {spec} over a "
                f"mesh whose axis types are {aval.sharding.mesh.axis_types}: call the kernel "
                "inside jax.shard_map, where all of them are Manual"
            )
    varying = [
        f"{what} of type {aval.str_short()} varies over "
        f"{', '.join(map(str, sorted(aval.manual_axis_type.varying, key=str)))}"
        for what, aval in zip(arguments, in_avals, strict=True)
        if isinstance(aval, _jax.AbstractRef)
        and isinstance(aval.inner_aval, _jax.ShapedArray)
        and not aval.manual_axis_type.empty
    ]
    if varying:
        raise ValueError(
            "mpmd_map takes no Refs that vary over manual mesh axes; pass arrays, or use "
            f"jax.shard_map(..., check_vma=False): {'; '.join(varying)}"
        )


def _check_type(ctx_factory: Any, *in_atoms: Any, **params: Any) -> tuple[Any, Any]:
    del ctx_factory
    return abstract_eval(*(atom.aval for atom in in_atoms), **params)


_jax.custom_typechecks[mpmd_map_p] = _check_type


def lower(ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers a kernel for the platform of `ctx`, with its name, metadata and cost beside it."""
    # Imported here, so that `import cokernel` does not load the compiler.
    from cokernel import lowering

    _check_shapes(ctx.avals_in, params)
    platforms = ctx.platforms or ctx.module_context.platforms
    block = _jax.mlir.ir.InsertionPoint.current.block
    num_operations = len(block.operations)
    # A TPU describes itself; only where there is none, the chip that the kernel was made for does.
    pretended = params["target"] if tuple(platforms) == ("cpu",) else None
    if params.get("batch") and tuple(platforms) != ("cpu",):
        ctx, operands, params = _without_batch(ctx, operands, params)
    with meshes.target_or_nothing(pretended):
        results = lowering.lower(platforms, ctx, *operands, **params)
    _annotate_calls(list(block.operations)[num_operations:], params)
    return results


def _without_batch(
    ctx: Any, operands: Sequence[Any], params: Mapping[str, Any]
) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """The same call without the numbers of elements, which only reports on a CPU tell."""
    dropped = set(params["batch"])

    def kept(items: Sequence[Any]) -> list[Any]:
        return [item for number, item in enumerate(items) if number not in dropped]

    jaxprs = []
    for jaxpr in params["jaxprs"]:
        names = jaxpr.debug_info.arg_names
        info = jaxpr.debug_info._replace(arg_names=None if names is None else tuple(kept(names)))
        jaxprs.append(jaxpr.replace(invars=kept(jaxpr.invars), debug_info=info))
    rest = {name: value for name, value in params.items() if name != "batch"}
    # An input that overwrites has another number without those in front of it.
    aliases = tuple(
        (number - sum(position < number for position in dropped), output)
        for number, output in params["input_output_aliases"]
    )
    changed = {"jaxprs": tuple(jaxprs), "input_output_aliases": aliases}
    return ctx.replace(avals_in=kept(ctx.avals_in)), tuple(kept(operands)), {**rest, **changed}


def _check_shapes(in_avals: Sequence[Any], params: Mapping[str, Any]) -> None:
    names = params["jaxprs"][0].debug_info.arg_names
    for name, aval in zip(names, in_avals, strict=False):
        if isinstance(aval, _jax.ShapedArray) and not _jax.is_constant_shape(aval.shape):
            raise NotImplementedError(
                f"kernel {params['name']!r} is compiled for the shapes it is given, but its "
                f"argument {name!r} has the symbolic shape {aval.str_short()}: export it once for "
                "each shape"
            )


def _annotate_calls(operations: Sequence[Any], params: Mapping[str, Any]) -> None:
    """Gives the calls of a kernel its name, metadata and cost, where XLA's tools show them."""
    ir = _jax.mlir.ir
    notes = {"kernel_name": params["name"]}
    if params["metadata"]:
        notes["kernel_metadata"] = json.dumps(dict(params["metadata"]), sort_keys=True)
    if params["cost_estimate"] is not None:
        notes["cost_estimate"] = json.dumps(dataclasses.asdict(params["cost_estimate"]))
    for operation in operations:
        if operation.operation.name != "stablehlo.custom_call":
            continue
        attributes = operation.attributes
        known = {}
        if "mhlo.frontend_attributes" in attributes:
            known = {item.name: item.attr for item in attributes["mhlo.frontend_attributes"]}
        known |= {name: ir.StringAttr.get(text) for name, text in notes.items()}
        attributes["mhlo.frontend_attributes"] = ir.DictAttr.get(known)


_jax.register_lowering(mpmd_map_p, lower)
