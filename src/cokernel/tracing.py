"""`mpmd_map` and `kernel`: validate, trace the programs, give all one signature, bind.

What the user passes becomes, for every program, a jaxpr with the same inputs in the same order: the
arguments, then what any of the programs closes over, then the outputs, then the scratch.
"""

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cokernel import _jax, meshes, parameters
from cokernel.primitive import mpmd_map_p, tracing_context

_PYTHON_VALUES = (bool, int, float, complex, np.ndarray, np.generic)


def mpmd_map(
    meshes_and_fns: Sequence[tuple[Any, Callable[..., None]]],
    /,
    out_types: Any = (),
    *,
    scratch_types: Any = (),
    compiler_params: Any = None,
    interpret: Any = False,
    debug: bool = False,
    cost_estimate: Any = None,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Callable[..., Any]:
    """Makes one kernel of several programs, each on its own mesh of cores.

    All programs start together and receive the same Refs: the arguments, the outputs, and the
    scratch. They communicate through Refs, semaphores, barriers and asynchronous copies.

    Args:
      meshes_and_fns: pairs of a mesh and the function that each of its cores runs. A function
        returns None and writes its results into the output Refs.
      out_types: a pytree of `jax.ShapeDtypeStruct`s or memory references, one for each output. The
        elements of a sequence become arguments of their own.
      scratch_types: Refs and semaphores that live as long as a launch; a sequence passes them as
        further positional arguments, a mapping by keyword. In a kernel of several programs, each
        says to which mesh it belongs: `pltpu.VMEM((8,), jnp.float32) @ mesh`.
      compiler_params: a `cokernel.CompilerParams` or, with what only a TPU understands ignored, a
        `pltpu.CompilerParams`.
      interpret: accepted for compatibility; on a CPU the kernel runs natively either way.
      debug: whether each program's jaxpr is printed when it is traced.
      cost_estimate: a `pl.CostEstimate` for XLA's cost analysis.
      name: the kernel's name in messages, profiles and lowered code. Defaults to the functions'.
      metadata: strings that are attached to the kernel in the lowered module.
      input_output_aliases: which output (by its index among all outputs) overwrites which input
        (by its index among all arguments), given as {input: output}.

    Returns:
      A function that takes pytrees of arrays or Refs, runs the kernel on them, and returns outputs
      arranged as in `out_types`. Like a function under `jax.jit`, it is traced once for each set
      of argument types.

    Raises:
      TypeError, ValueError: if the arguments contradict each other; each says what was expected.
    """
    programs = _checked_programs(meshes_and_fns)
    meshes.check_compatible([mesh for mesh, _ in programs])
    parameters.check(compiler_params)
    spec = KernelSpec(
        programs=programs,
        out_types=out_types,
        scratch_types=scratch_types,
        compiler_params=compiler_params,
        interpret=interpret,
        debug=debug,
        cost_estimate=cost_estimate,
        name=name,
        metadata=None if metadata is None else _jax.FrozenDict(dict(metadata)),
        input_output_aliases=tuple(sorted((input_output_aliases or {}).items())),
        target=meshes.current_target(),
    )
    return _callable_kernel(spec)


def kernel(
    body: Any = None,
    out_type: Any = (),
    *,
    mesh: Any,
    scratch_types: Any = (),
    compiler_params: Any = None,
    interpret: Any = False,
    cost_estimate: Any = None,
    debug: bool = False,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    input_output_aliases: Mapping[int, int] | None = None,
) -> Any:
    """Makes a kernel in one of three forms; what the arguments mean is said at `mpmd_map`.

      run = kernel(body, out_type, mesh=mesh)

      @kernel(out_type=..., mesh=mesh)
      def run(x_ref, o_ref): ...

      run = kernel([vector_body, scalar_body], out_type, mesh=[vector_mesh, scalar_mesh])

    Returns:
      A function that runs the kernel; in the second form, a decorator that makes one.

    Raises:
      ValueError: if one of `body` and `mesh` is a sequence and the other is not, or if their
        lengths differ.
    """
    make = functools.partial(
        mpmd_map,
        out_types=out_type,
        scratch_types=scratch_types,
        compiler_params=compiler_params,
        interpret=interpret,
        cost_estimate=cost_estimate,
        debug=debug,
        name=name,
        metadata=metadata,
        input_output_aliases=input_output_aliases,
    )
    if body is None:
        if isinstance(mesh, Sequence):
            raise ValueError(
                "a kernel made by decoration has one program and takes one mesh; for several "
                "programs pass sequences: kernel([body, ...], mesh=[mesh, ...])"
            )
        return lambda function: make([(mesh, function)])
    if isinstance(body, Sequence) != isinstance(mesh, Sequence):
        raise ValueError(
            "body and mesh must both be sequences or both be single, got "
            f"{type(body).__name__} and {type(mesh).__name__}"
        )
    if not isinstance(body, Sequence):
        return make([(mesh, body)])
    if len(body) != len(mesh):
        raise ValueError(f"each body needs its mesh, got {len(body)} bodies and {len(mesh)} meshes")
    return make(list(zip(mesh, body, strict=True)))


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

    @property
    def meshes(self) -> tuple[Any, ...]:
        """The mesh of each program."""
        return tuple(mesh for mesh, _ in self.programs)

    @property
    def title(self) -> str:
        """The name of the kernel as a whole, an identifier where possible."""
        return self.name or "_and_".join(_function_name(fn) for _, fn in self.programs)


def _checked_programs(meshes_and_fns: Any) -> tuple[tuple[Any, Callable[..., None]], ...]:
    programs = tuple(meshes_and_fns)
    if not programs:
        raise ValueError("a kernel needs at least one program: mpmd_map([(mesh, function), ...])")
    for index, program in enumerate(programs):
        if not isinstance(program, tuple | list) or len(program) != 2:
            raise TypeError(f"program {index} must be a pair of a mesh and a function: {program!r}")
        mesh, fn = program
        if not isinstance(mesh, _jax.Mesh):
            raise TypeError(
                f"program {index} needs a mesh of cores in front of its function, such as "
                f"cokernel.CoreMesh(core=4), got {mesh!r}"
            )
        if not callable(fn):
            raise TypeError(f"program {index} needs a function behind its mesh, got {fn!r}")
    return tuple((mesh, fn) for mesh, fn in programs)


def _function_name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", type(fn).__name__)


def _callable_kernel(spec: KernelSpec) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        return _trace_and_bind(spec, args)

    run.__name__ = run.__qualname__ = spec.title
    run_jitted = jax.jit(run)

    def wrapper(*args: Any) -> Any:
        # One jitted function per kernel makes the second call with equal types cheap. Refs go the
        # other way, where it can be seen whether one of them is passed and closed over as well;
        # the primitive's own implementation is jitted too.
        is_eager = _jax.trace_state_clean()
        if not is_eager or any(map(_is_ref, _jax.tracing_registry.flatten(args)[0])):
            return _trace_and_bind(spec, args)
        if _jax.config.disable_jit.value:
            with _jax.config.disable_jit(False):
                return run_jitted(*args)
        return run_jitted(*args)

    functools.update_wrapper(wrapper, run)
    if len(spec.programs) == 1:
        wrapper.__doc__ = spec.programs[0][1].__doc__
    del wrapper.__wrapped__
    return wrapper


def _is_ref(value: Any) -> bool:
    if isinstance(value, _jax.Ref):
        return True
    return isinstance(value, _jax.Tracer) and isinstance(value.aval, _jax.AbstractRef)


def _trace_and_bind(spec: KernelSpec, args: tuple[Any, ...]) -> Any:
    flat_args, in_tree = _jax.tracing_registry.flatten(args)
    flat_args = [jnp.asarray(x) if isinstance(x, _PYTHON_VALUES) else x for x in flat_args]
    signature = Signature(spec, flat_args, in_tree)
    signature.check_aliases()
    _check_outer_axes(spec)

    traced = []
    program_names = _distinct_names(spec)
    for (mesh, fn), program_name in zip(spec.programs, program_names, strict=True):
        traced.append(_trace_program(signature, mesh, fn, program_name))
    signature.check_refs_passed_once(traced[0].debug_info.arg_names)
    jaxprs, consts = _unify(signature, traced)

    if spec.debug:
        for mesh, jaxpr in zip(spec.meshes, jaxprs, strict=True):
            print(f"program {jaxpr.debug_info.func_src_info} on {mesh}:\n{jaxpr}")

    external_meshes = signature.external_meshes(consts)
    with jax.named_scope(spec.title):
        flat_outs = mpmd_map_p.bind(
            *flat_args,
            *consts,
            jaxprs=tuple(jaxprs),
            meshes=spec.meshes,
            external_meshes=external_meshes,
            out_avals=signature.out_avals_seen_from_outside(jaxprs),
            input_output_aliases=spec.input_output_aliases,
            compiler_params=spec.compiler_params,
            interpret=spec.interpret,
            debug=spec.debug,
            cost_estimate=spec.cost_estimate,
            name=spec.title,
            metadata=spec.metadata,
            target=spec.target,
        )
    return signature.out_tree.unflatten(flat_outs)


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
        self.in_avals = [jax.typeof(x) for x in flat_args]
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

        space = default_memory_space(spec.meshes)
        inputs = jax.tree.map(
            functools.partial(_to_ref_aval, default_space=space),
            in_tree.unflatten(self.in_avals),
            is_leaf=lambda x: isinstance(x, _jax.TransformedRef),
        )
        outputs = self.out_tree.unflatten([_to_ref_aval(a, space) for a in self.out_avals])
        scratch = scratch_tree.unflatten(scratch_avals)
        self.body_args = [*inputs, *_positional(outputs)]
        self.body_kwargs: dict[str, Any] = {}
        if isinstance(scratch, Mapping):
            self.body_kwargs = dict(scratch)
        else:
            self.body_args.extend(_positional(scratch))

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
            in_aval, out_aval = self.in_avals[in_index], self.out_avals[out_index]
            if (in_aval.shape, in_aval.dtype) != (out_aval.shape, out_aval.dtype):
                raise ValueError(
                    f"input_output_aliases of kernel {self.spec.title!r} maps input {in_index} of "
                    f"type {in_aval.str_short()} to output {out_index} of type "
                    f"{out_aval.str_short()}; an output can only overwrite an input of its own type"
                )

    def check_refs_passed_once(self, arg_names: Sequence[str]) -> None:
        """Checks that no Ref is passed as two arguments."""
        names: dict[int, str] = {}
        for value, name in zip(self.flat_args, arg_names, strict=False):
            if not _is_ref(value):
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
            return _jax.AbstractRef(aval, memory_space=None)
        case _:
            raise TypeError(f"a kernel cannot take an argument of type {aval!r}")


def _check_outer_axes(spec: KernelSpec) -> None:
    outer = _jax.get_axis_env().axis_sizes
    for mesh in spec.meshes:
        for name in mesh.shape:
            if name in outer:
                raise ValueError(
                    f"the axis {name!r} of {mesh} has the name of an axis of the surrounding "
                    "shard_map or vmap, so a program could not tell them apart: rename one of them"
                )


def _distinct_names(spec: KernelSpec) -> list[str]:
    names = [spec.name or _function_name(fn) for _, fn in spec.programs]
    if len(set(names)) < len(names):
        names = [f"{n}__{mesh.core_type}" for n, mesh in zip(names, spec.meshes, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{n}_{index}" for index, n in enumerate(names)]
    # A name is the first word of a jaxpr's source information.
    return [n.replace(" ", "_") for n in names]


def _trace_program(signature: Signature, mesh: Any, fn: Callable[..., Any], name: str) -> Any:
    spec = signature.spec
    info = _jax.debug_info("mpmd_map", fn, signature.body_args, signature.body_kwargs)
    info = info.replace_func_name(name)
    _check_call(signature, fn, info.func_src_info)
    in_tree = _jax.flatten_to_tree((signature.body_args, signature.body_kwargs))
    with _advice_on_missing_target(), tracing_context(mesh, spec.meshes, spec.target):
        jaxpr, out_tree = _jax.trace_to_jaxpr(fn, in_tree, info)
    if jaxpr.consts:
        # What a function closes over can change between calls, so it is traced each time.
        _jax.trace_to_jaxpr.evict_weakref(fn)
    if out_tree.tree != jax.tree.structure(None):
        raise ValueError(
            f"program {info.func_src_info} must return None and write its results to its output "
            f"Refs, but it returned {out_tree.tree}"
        )
    _check_axis_names(spec, mesh, jaxpr)
    return jaxpr


def _check_call(signature: Signature, fn: Callable[..., Any], source: str) -> None:
    try:
        parameters_of_fn = inspect.signature(fn)
    except (TypeError, ValueError):
        return  # A built-in function without a signature; calling it will tell.
    try:
        parameters_of_fn.bind(*signature.body_args, **signature.body_kwargs)
    except TypeError as error:
        advice = ""
        if signature.body_kwargs:
            advice = f"; scratch is passed by keyword: {', '.join(signature.body_kwargs)}"
        raise TypeError(
            f"program {source} takes {parameters_of_fn}, but the kernel passes it "
            f"{signature.describe_counts()} arguments{advice}: {error}"
        ) from None


@contextlib.contextmanager
def _advice_on_missing_target() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        if "Unsupported TPU device kind" in str(error):
            error.add_note(
                "This kernel asks about the TPU it runs on. Make it inside `with "
                'cokernel.target("v6e"):` to run it on a machine without one.'
            )
        raise


def _check_axis_names(spec: KernelSpec, mesh: Any, jaxpr: Any) -> None:
    """Checks that a program asks for its position only on axes of its own mesh."""
    others = {axis for other in spec.meshes for axis in other.shape} - set(mesh.shape)
    if not others:
        return
    for eqn in all_equations(jaxpr):
        if eqn.primitive is not _jax.axis_index_p:
            continue
        asked = eqn.params["axis_name"]
        wrong = others.intersection(asked if isinstance(asked, tuple) else (asked,))
        if wrong:
            raise ValueError(
                f"program {jaxpr.debug_info.func_src_info} asks for its index on the axis "
                f"{sorted(map(str, wrong))[0]!r} at {_jax.summarize_source(eqn.source_info)}, but "
                f"it runs on {mesh}, which has no such axis"
            )


def all_equations(jaxpr: Any) -> Iterator[Any]:
    """Yields the equations of a jaxpr and of all jaxprs within."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _jax.jaxprs_in_params(eqn.params):
            yield from all_equations(inner)


def _unify(signature: Signature, traced: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Turns what programs close over into inputs that all of them have, each once.

    Returns the programs' jaxprs without constants, and the values for the new inputs, which come
    after those of the call.
    """
    fns = [fn for _, fn in signature.spec.programs]
    for jaxpr, fn in zip(traced, fns, strict=True):
        _check_consts(jaxpr, _closed_over_names(fn))
    consts: dict[int, Any] = {}
    for jaxpr in traced:
        for const in jaxpr.consts:
            consts.setdefault(id(_jax.get_referent(const)), const)
    if not consts:
        return list(traced), []

    arg_names = traced[0].debug_info.arg_names
    passed = {
        id(_jax.get_referent(value)): name
        for value, name in zip(signature.flat_args, arg_names, strict=False)
        if _is_ref(value)
    }
    names: dict[int, str] = {}
    for fn in fns:
        names = {**_closed_over_names(fn), **names}
    for key in consts:
        if key in passed:
            raise ValueError(
                f"kernel {signature.spec.title!r} receives a Ref as {passed[key]!r} and a program "
                f"closes over the same Ref as {names.get(key, 'a variable')!r}; use only one of "
                "the two"
            )
    const_names = tuple(names.get(key, "") for key in consts)
    return [_with_const_inputs(jaxpr, consts, const_names, signature) for jaxpr in traced], list(
        consts.values()
    )


def _with_const_inputs(
    jaxpr: Any, consts: Mapping[int, Any], const_names: tuple[str, ...], signature: Signature
) -> Any:
    own = {
        id(_jax.get_referent(const)): var
        for const, var in zip(jaxpr.consts, jaxpr.constvars, strict=True)
    }
    const_vars = [
        own[key] if key in own else _jax.Var(jax.typeof(const)) for key, const in consts.items()
    ]
    n = signature.num_inputs
    names = jaxpr.debug_info.arg_names
    info = jaxpr.debug_info._replace(arg_names=(*names[:n], *const_names, *names[n:]))
    return jaxpr.replace(
        constvars=(),
        invars=[*jaxpr.invars[:n], *const_vars, *jaxpr.invars[n:]],
        debug_info=info,
    )


def _closed_over_names(fn: Callable[..., Any]) -> dict[int, str]:
    """Returns the names of the variables that a function closes over, by the value's identity."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    try:
        variables = inspect.getclosurevars(inspect.unwrap(fn))
    except (TypeError, ValueError):
        return {}
    return {
        id(_jax.get_referent(value)): name
        for name, value in (variables.globals | variables.nonlocals).items()
    }


def _check_consts(jaxpr: Any, names: Mapping[int, str]) -> None:
    refused = []
    for const in jaxpr.consts:
        aval = jax.typeof(const)
        if isinstance(aval, _jax.AbstractRef) or (
            isinstance(aval, _jax.ShapedArray) and not aval.shape
        ):
            continue
        name = names.get(id(_jax.get_referent(const)), "an unnamed array")
        refused.append(f"{name} of type {aval.str_short()}")
    if refused:
        raise ValueError(
            f"program {jaxpr.debug_info.func_src_info} closes over arrays: {', '.join(refused)}. "
            "A program can close over scalars and Refs; pass arrays to the kernel as arguments"
        )
