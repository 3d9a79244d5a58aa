"""`mpmd_map` and `kernel`: validate, trace the programs, give all one signature, bind.

What the user passes becomes, for every program, a jaxpr with the same inputs in the same order: the
arguments, then what any of the programs closes over, then the outputs, then the scratch.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cokernel import _jax, meshes, parameters, source_lines, trace_errors
from cokernel.checking import options, state
from cokernel.closures import unify
from cokernel.primitive import check_shardings, mpmd_map_p, tracing_context
from cokernel.signature import (
    KernelSpec,
    Signature,
    check_outputs_leave_the_cores,
    function_name,
    is_ref,
)

# A message that names a line shall name the user's, and not one of these.
_jax.exclude_from_sources(__file__)

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
      interpret: a `cokernel.Checked`, or what JAX has in its place (`pltpu.InterpretParams`), runs
        the kernel in checked mode. True and False mean the same on a CPU: it runs natively.
      debug: whether each program's jaxpr is printed when it is traced.
      cost_estimate: a `pl.CostEstimate`, attached to the call in the lowered and in the compiled
        module. XLA's own cost analysis on a CPU counts every custom call as unknown (-1).
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
    options.from_interpret(interpret)
    parameters.check_descriptions(name, metadata, cost_estimate)
    parameters.check_aliases(input_output_aliases)
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
        made_by=source_lines.traceback_here(),
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
        if not is_eager or any(map(is_ref, _jax.tracing_registry.flatten(args)[0])):
            return _trace_and_bind(spec, args)
        check_outputs_leave_the_cores(spec)
        if _jax.config.disable_jit.value:
            with _jax.config.disable_jit(False):
                return run_jitted(*args)
        return run_jitted(*args)

    wrapper.__name__ = wrapper.__qualname__ = spec.title
    wrapper.__doc__ = "\n\n".join(fn.__doc__ for _, fn in spec.programs if fn.__doc__) or None
    return wrapper


def _trace_and_bind(spec: KernelSpec, args: tuple[Any, ...]) -> Any:
    flat_args, in_tree = _jax.tracing_registry.flatten(args)
    flat_args = [jnp.asarray(x) if isinstance(x, _PYTHON_VALUES) else x for x in flat_args]
    signature = Signature(spec, flat_args, in_tree)
    signature.check_aliases()
    _check_outer_axes(spec)
    check_shardings(signature.in_avals, signature.out_avals, signature.argument_names())

    traced = []
    program_names = _distinct_names(spec)
    for (mesh, fn), program_name in zip(spec.programs, program_names, strict=True):
        traced.append(_trace_program(signature, mesh, fn, program_name))
    signature.check_refs_passed_once(traced[0].debug_info.arg_names)
    jaxprs, consts = unify(signature, traced)

    if spec.debug:
        for mesh, jaxpr in zip(spec.meshes, jaxprs, strict=True):
            print(f"program {jaxpr.debug_info.func_src_info} on {mesh}:\n{jaxpr}")

    external_meshes = signature.external_meshes(consts)
    extra: dict[str, Any] = {}
    if any(signature.scratch_transforms):
        extra["scratch_transforms"] = signature.scratch_transforms
    interpret = _interpret(spec)
    if interpret and (made_at := source_lines.line_that_made(spec.made_by)) is not None:
        # A native kernel reports nothing that needs it, and is the same wherever it is made.
        extra["made_at"] = made_at
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
            interpret=interpret,
            debug=spec.debug,
            cost_estimate=spec.cost_estimate,
            name=spec.title,
            metadata=spec.metadata,
            target=spec.target,
            **extra,
        )
    return signature.out_tree.unflatten(flat_outs)


def _interpret(spec: KernelSpec) -> Any:
    """Returns what the primitive is told of checked mode, or of JAX's interpreter for GPUs."""
    checked = state.effective(spec.interpret)
    if any(map(meshes.is_gpu_mesh, spec.meshes)):
        return parameters.gpu_interpreter_params(spec.interpret, checked)
    return checked or spec.interpret


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
    names = [spec.name or function_name(fn) for _, fn in spec.programs]
    if len(set(names)) < len(names):
        names = [f"{n}__{mesh.core_type}" for n, mesh in zip(names, spec.meshes, strict=True)]
    if len(set(names)) < len(names):
        names = [f"{n}_{index}" for index, n in enumerate(names)]
    # A name is the first word of a jaxpr's source information.
    return [n.replace(" ", "_") for n in names]


def _trace_program(signature: Signature, mesh: Any, fn: Callable[..., Any], name: str) -> Any:
    spec = signature.spec
    info = _jax.debug_info("mpmd_map", fn, signature.body_args, signature.body_kwargs)
    info = info.replace_func_name(name)._replace(arg_names=signature.plain_names(info.arg_names))
    _check_call(signature, fn, info.func_src_info)
    in_tree = _jax.flatten_to_tree((signature.body_args, signature.body_kwargs))
    source = info.func_src_info
    with trace_errors.explained([(source, mesh)]), tracing_context(mesh, spec.meshes, spec.target):
        jaxpr, out_tree = _jax.trace_to_jaxpr(fn, in_tree, info)
    if jaxpr.consts:
        # What a function closes over can change between calls, so it is traced each time.
        _jax.trace_to_jaxpr.evict_weakref(fn)
    returned = out_tree.unflatten()
    if returned is not None:
        raise ValueError(
            f"program {info.func_src_info} must return None and write its results to its output "
            f"Refs, but it returned {returned}"
        )
    external_meshes = signature.external_meshes(jaxpr.consts)
    trace_errors.check_axis_names(jaxpr, mesh, spec.meshes, external_meshes)
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
