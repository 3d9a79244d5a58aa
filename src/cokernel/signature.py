"""The types of a call: of arguments, outputs and scratch, outside a kernel and inside."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from cokernel import _jax, meshes


@dataclasses.dataclass(frozen=True, eq=False)
class KernelSpec:
    """What `mpmd_map` was given, checked as far as it can be without arguments."""

    programs: tuple[tuple[Any, Callable[..., None]], ...]
    out_types: Any
    scratch_types: Any
    compiler_params: Any
    interpret: Any
    debug: bool
    cost_estimate: Any
    name: str | None
    metadata: Any
    input_output_aliases: tuple[tuple[int, int], ...]
    target: str | None
    # Who called `mpmd_map`; see `source_lines.user_line`.
    made_by: Any

    @property
    def meshes(self) -> tuple[Any, ...]:
        """The mesh of each program."""
        return tuple(mesh for mesh, _ in self.programs)

    @property
    def title(self) -> str:
        """The name of the kernel as a whole, an identifier where possible."""
        return self.name or "_and_".join(function_name(fn) for _, fn in self.programs)


def function_name(fn: Callable[..., Any]) -> str:
    """Returns the name of a function, looking through `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def is_ref(value: Any) -> bool:
    """Returns whether `value` is a Ref, or stands for one while something is traced."""
    if isinstance(value, _jax.Ref):
        return True
    return isinstance(value, _jax.Tracer) and isinstance(value.aval, _jax.AbstractRef)


class Signature:
    """The types of one call: of its arguments, outputs and scratch, outside and inside.

    Attributes:
      in_avals: the type of each argument's leaf, outside the kernel.
      out_avals: the type of each output, outside.
      out_tree: how the outputs are arranged for the caller.
      body_args, body_kwargs: the types of what every program receives, arranged as it is passed.
    """

    def __init__(self, spec: KernelSpec, flat_args: Sequence[Any], in_tree: Any):
        self.spec = spec
        self.flat_args = flat_args
        self.in_avals: list[Any] = [jax.typeof(x) for x in flat_args]
        self.out_tree: Any
        scratch_tree: Any
        out_leaves, self.out_tree = jax.tree.flatten(spec.out_types)
        out_paths = [path for path, _ in jax.tree.leaves_with_path(spec.out_types)]
        self._out_leaves = out_leaves
        self.out_avals = [
            _out_aval(leaf, path, spec) for path, leaf in zip(out_paths, out_leaves, strict=True)
        ]
        scratch_leaves, scratch_tree = jax.tree.flatten(spec.scratch_types)
        scratch_paths = [path for path, _ in jax.tree.leaves_with_path(spec.scratch_types)]
        scratch_avals = [
            _scratch_aval(leaf, path, spec)
            for path, leaf in zip(scratch_paths, scratch_leaves, strict=True)
        ]
        self.num_inputs = len(self.in_avals)
        self.num_outputs = len(self.out_avals)
        self.num_scratch = len(scratch_avals)
        # How a GPU's scratch is laid out; a program's Refs come with it.
        self.scratch_transforms = tuple(
            aval.transforms if isinstance(aval, _jax.TransformedRef) else ()
            for aval in scratch_avals
        )

        space = default_memory_space(spec.meshes)
        inputs = jax.tree.map(
            functools.partial(_to_ref_aval, default_space=space),
            in_tree.unflatten(self.in_avals),
            is_leaf=lambda x: isinstance(x, _jax.TransformedRef),
        )
        self._input_leaves = jax.tree.leaves(inputs)
        outputs = self.out_tree.unflatten([_to_ref_aval(a, space) for a in self.out_avals])
        scratch = scratch_tree.unflatten(scratch_avals)
        self.body_args = [*inputs, *_positional(outputs)]
        self.body_kwargs: dict[str, Any] = {}
        if isinstance(scratch, Mapping):
            self.body_kwargs = dict(scratch)
        else:
            self.body_args.extend(_positional(scratch))

    def argument_names(self) -> tuple[str, ...]:
        """Returns the names that the first program has for what it receives."""
        _, fn = self.spec.programs[0]
        info = _jax.debug_info("mpmd_map", fn, self.body_args, self.body_kwargs)
        return self.plain_names(info.arg_names or ())

    def plain_names(self, names: Sequence[str]) -> tuple[str, ...]:
        """Returns the names of a program's parameters without the parts of a `ref.at[...]`.

        Such an argument consists of the Ref, which keeps the parameter's name, and its indices.
        """
        leaves = jax.tree.leaves(
            (self._input_leaves, self.body_args, self.body_kwargs),
            is_leaf=lambda x: isinstance(x, _jax.TransformedRef),
        )
        if not any(isinstance(arg, _jax.TransformedRef) for arg in leaves):
            return tuple(names)
        return tuple(name.removesuffix(".ref") for name in names)

    def describe_counts(self) -> str:
        """Says of what the arguments of a program consist."""
        num_args = len(self.body_args) + len(self.body_kwargs)
        num_scratch = 0
        scratch = self.spec.scratch_types
        if isinstance(scratch, Mapping):
            num_scratch = len(scratch)
        else:
            num_scratch = len(_positional(scratch))
        num_outputs = len(_positional(self.spec.out_types))
        num_inputs = num_args - num_outputs - num_scratch
        return (
            f"{num_args} ({num_inputs} from the call, {num_outputs} from out_types, "
            f"{num_scratch} from scratch_types)"
        )

    def check_aliases(self) -> None:
        """Checks that aliased inputs and outputs exist and have equal shapes and dtypes."""
        seen_outputs = set()
        for in_index, out_index in self.spec.input_output_aliases:
            if not 0 <= in_index < self.num_inputs or not 0 <= out_index < self.num_outputs:
                raise ValueError(
                    f"input_output_aliases of kernel {self.spec.title!r} maps input {in_index} to "
                    f"output {out_index}, but the kernel has {self.num_inputs} inputs and "
                    f"{self.num_outputs} outputs"
                )
            if out_index in seen_outputs:
                raise ValueError(
                    f"input_output_aliases of kernel {self.spec.title!r} maps two inputs to output "
                    f"{out_index}"
                )
            seen_outputs.add(out_index)
            if is_ref(self.flat_args[in_index]):
                raise ValueError(
                    f"input {in_index} of kernel {self.spec.title!r} is a Ref, which is written in "
                    "place: take it out of input_output_aliases"
                )
            in_aval, out_aval = self.in_avals[in_index], self.out_avals[out_index]
            if _shape_and_dtype(in_aval) != _shape_and_dtype(out_aval):
                raise ValueError(
                    f"input_output_aliases of kernel {self.spec.title!r} maps input {in_index} of "
                    f"type {in_aval.str_short()} to output {out_index} of type "
                    f"{out_aval.str_short()}; an output can only overwrite an input of its own type"
                )

    def check_refs_passed_once(self, arg_names: Sequence[str]) -> None:
        """Checks that no Ref is passed as two arguments."""
        names: dict[int, str] = {}
        for value, name in zip(self.flat_args, arg_names, strict=False):
            if not is_ref(value):
                continue
            key = id(_jax.get_referent(value))
            if key in names:
                raise ValueError(
                    f"kernel {self.spec.title!r} received the same Ref twice, as {names[key]!r} "
                    f"and as {name!r}; pass it once"
                )
            names[key] = name

    def external_meshes(self, consts: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the meshes that Refs from outside are tied to and that no program runs on."""
        found: list[Any] = []
        for aval in (*self.in_avals, *self.out_avals, *map(jax.typeof, consts)):
            space = getattr(aval, "memory_space", None)
            if isinstance(space, _jax.CoreMemorySpace) and (
                space.mesh not in self.spec.meshes and space.mesh not in found
            ):
                found.append(space.mesh)
        if found:
            meshes.check_compatible([*self.spec.meshes, *found])
        return tuple(found)

    def out_avals_seen_from_outside(self, jaxprs: Sequence[Any]) -> tuple[Any, ...]:
        """Returns the output types, with the shard_map axes they vary over where none are given.

        An output may differ wherever an argument differs or a program asks for its position.
        """
        if not _jax.config._check_vma.value:
            return tuple(self.out_avals)
        own_axes = {name for mesh in self.spec.meshes for name in mesh.shape}
        varying = {
            effect.name
            for jaxpr in jaxprs
            for effect in jaxpr.effects
            if isinstance(effect, _jax.NamedAxisEffect) and effect.name not in own_axes
        }
        for aval in self.in_avals:
            if isinstance(aval, _jax.ShapedArray):
                varying |= aval.manual_axis_type.varying
        joined = _jax.ManualAxisType(varying=frozenset(varying))
        return tuple(
            aval.update(manual_axis_type=joined)
            if isinstance(aval, _jax.ShapedArray)
            and getattr(leaf, "manual_axis_type", None) is None
            else aval
            for leaf, aval in zip(self._out_leaves, self.out_avals, strict=True)
        )


def check_outputs_leave_the_cores(spec: KernelSpec) -> None:
    """Checks that no output stays with the cores: semaphores, and what `space @ mesh` ties to them,
    have no value that Python could hold.
    """
    for path, leaf in jax.tree.leaves_with_path(spec.out_types):
        aval = _out_aval(leaf, path, spec)
        is_semaphore = isinstance(getattr(aval, "dtype", None), _jax.AbstractSemaphoreTy)
        space = getattr(aval, "memory_space", None)
        if is_semaphore or (
            isinstance(space, _jax.CoreMemorySpace)
            and space.memory_space in (_jax.TpuMemorySpace.VMEM, _jax.TpuMemorySpace.SMEM)
        ):
            what = "holds semaphores" if is_semaphore else f"lives in {space}, one for each core"
            raise ValueError(
                f"out_types{jax.tree_util.keystr(path)} of kernel {spec.title!r} {what}, so only "
                "another kernel can use it: call both kernels in one function under jax.jit"
            )


def _shape_and_dtype(aval: Any) -> Any:
    # A type that stands for several arrays has no shape of its own, and is compared as a whole.
    return (aval.shape, aval.dtype) if isinstance(aval, _jax.ShapedArray) else aval


def _positional(tree: Any) -> list[Any]:
    """Returns the arguments that a pytree of outputs or scratch stands for."""
    if tree is None:
        return []
    return list(tree) if isinstance(tree, Sequence) else [tree]


def default_memory_space(all_meshes: Sequence[Any]) -> Any:
    """Returns where the Refs of plain arrays live: where the meshes say, or HBM if they differ."""
    spaces = {mesh.default_memory_space for mesh in all_meshes}
    return spaces.pop() if len(spaces) == 1 else _jax.TpuMemorySpace.HBM


def _out_aval(leaf: Any, path: Any, spec: KernelSpec) -> Any:
    where = f"out_types{jax.tree_util.keystr(path)} of kernel {spec.title!r}"
    if isinstance(leaf, jax.ShapeDtypeStruct) and leaf.manual_axis_type is None:
        # JAX insists on it under `shard_map(check_vma=True)`; ours is found after tracing.
        leaf = leaf.update(manual_axis_type=_jax.ManualAxisType())
    try:
        return _jax.convert_out_type_to_aval(leaf)
    except (TypeError, ValueError, AttributeError) as error:
        raise TypeError(
            f"{where} must be a jax.ShapeDtypeStruct, a memory reference such as "
            f"pltpu.HBM((8,), jnp.float32) or a semaphore type, got {leaf!r}: {error}"
        ) from error


def _scratch_aval(leaf: Any, path: Any, spec: KernelSpec) -> Any:
    where = f"scratch_types{jax.tree_util.keystr(path)} of kernel {spec.title!r}"
    if not hasattr(leaf, "get_ref_aval"):
        raise TypeError(
            f"{where} must be a memory reference such as pltpu.VMEM((8,), jnp.float32), or a "
            f"semaphore type, got {leaf!r}"
        )
    aval = leaf.get_ref_aval()
    if any(map(meshes.is_gpu_mesh, spec.meshes)):
        # All threads of a block share all of its scratch. It may come as it is laid out.
        return aval
    space = aval.memory_space
    if isinstance(space, _jax.CoreMemorySpace):
        if space.mesh not in spec.meshes:
            raise ValueError(
                f"{where} is tied to {space.mesh}, on which no program of the kernel runs; its "
                f"meshes are {', '.join(map(str, spec.meshes))}"
            )
        return aval
    if len(spec.meshes) == 1 or space == _jax.TpuMemorySpace.HBM:
        return aval
    groups = {meshes.shared_memory_group(mesh) for mesh in spec.meshes} - {None}
    if space == _jax.TpuMemorySpace.VMEM_SHARED and len(groups) == 1:
        return aval
    raise ValueError(
        f"{where} does not say to which of the kernel's {len(spec.meshes)} meshes it belongs: "
        f"write `{space}(...) @ mesh` for {aval.str_short()}"
    )


def _to_ref_aval(aval: Any, default_space: Any) -> Any:
    """Returns the type that a program sees for a value of type `aval` outside."""
    match aval:
        case _jax.AbstractRef() | _jax.TransformedRef():
            return aval
        case _jax.ShapedArray():
            space = aval.memory_space
            if space == _jax.ArrayMemorySpace.Device:
                space = default_space
            # Inside the kernel there is one device, and a Ref has no weak type.
            inner = aval.update(weak_type=False, manual_axis_type=_jax.ManualAxisType())
            return _jax.AbstractRef(inner, memory_space=space)
        case _ if hasattr(aval, "get_ref_aval"):
            return aval.get_ref_aval()
        case _jax.AbstractValue():
            return _jax.AbstractRef(aval, memory_space=default_space)
        case _:
            raise TypeError(f"a kernel cannot take an argument of type {aval!r}")
