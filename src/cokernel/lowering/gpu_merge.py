"""Several programs for a GPU become one warp-specialised program.

A GPU runs one program, whose threads (warpgroups, to the hardware) may take different branches. So
each program gets a range of the threads, asks for its own number within that range, and all share
the scratch, which is allocated by all threads together before they part.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax
from jax.experimental import pallas as pl

from cokernel import _jax, primitive
from cokernel.lowering.gpu_allocations import Allocated, hoisted
from cokernel.lowering.gpu_calls import without_calls

THREAD_AXIS = "cokernel_thread"


def merged(num_inputs: int, params: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns one mesh and one program that do what a kernel's programs do on their meshes.

    The program takes inputs and outputs, and allocates the scratch itself.

    Args:
      num_inputs: the number of the kernel's inputs.
      params: the parameters of the primitive.

    Raises:
      NotImplementedError: for a program that allocates memory which cannot be allocated once for
        the whole kernel.
    """
    meshes, jaxprs = params["meshes"], params["jaxprs"]
    mesh = _common_mesh(meshes)
    num_others = num_inputs + len(params["out_avals"])
    variables = jaxprs[0].invars
    scratch = [var.aval for var in variables[num_others:]]
    transforms = params.get("scratch_transforms") or ((),) * len(scratch)
    scratch_types = list(map(Allocated, scratch, transforms))
    several = len(meshes) > 1
    allocations: list[tuple[Any, list[Allocated]]] = []
    for jaxpr, other, start in zip(jaxprs, meshes, _starts(meshes), strict=True):
        program = without_calls(jaxpr)
        own_types: list[Allocated] = []
        if several:
            program, own_types = hoisted(program, other)
            program = _on_threads(program, other, mesh, start)
        allocations.append((program, own_types))
    hoisted_types = [allocated for _, own_types in allocations for allocated in own_types]
    threads: Any = () if mesh.thread_name is None else mesh.thread_name

    def all_programs(*refs: Any) -> None:
        values = [
            ref[...] if is_scalar else ref for ref, is_scalar in zip(refs, scalars, strict=True)
        ]

        def with_scratch(*allocated: Any) -> None:
            # A program applies the transforms itself.
            plain = [r.ref if isinstance(r, _jax.TransformedRef) else r for r in allocated]
            scratch, rest = plain[: len(scratch_types)], plain[len(scratch_types) :]
            starts = _starts(meshes)
            for (jaxpr, own_types), other, start in zip(allocations, meshes, starts, strict=True):
                own, rest = rest[: len(own_types)], rest[len(own_types) :]
                run = functools.partial(_jax.eval_jaxpr, jaxpr, (), *values, *scratch, *own)
                if not several:
                    run()
                    return
                thread = lax.axis_index(mesh.thread_name)
                is_its = (thread >= start) & (thread < start + (other.num_threads or 1))
                pl.when(is_its)(lambda run=run: _discard(run()))

        all_types = [*scratch_types, *hoisted_types]
        if all_types:
            pl.run_scoped(with_scratch, *all_types, collective_axes=threads)
        else:
            with_scratch()

    info = jaxprs[0].debug_info
    names = info.arg_names
    info = info._replace(arg_names=None if names is None else names[:num_others])
    if several:
        info = info.replace_func_name(params["name"])
    avals = [_as_ref(var.aval) for var in variables[:num_others]]
    scalars = [aval is not var.aval for aval, var in zip(avals, variables, strict=False)]
    tree = _jax.flatten_to_tree((tuple(avals), {}))
    with primitive.tracing_context(mesh, [mesh], None):
        jaxpr, _ = _jax.trace_to_jaxpr(all_programs, tree, info)
    assert not jaxpr.consts
    return mesh, jaxpr


def _as_ref(aval: Any) -> Any:
    """Returns the type by which a GPU's program receives an argument; scalars are in memory too."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if isinstance(aval, _jax.ShapedArray):
        return _jax.AbstractRef(aval, memory_space=plgpu.GMEM)
    return aval


def _discard(results: Any) -> None:
    del results


def _starts(meshes: Sequence[Any]) -> list[int]:
    """Returns the first thread of each program."""
    starts, next_start = [], 0
    for mesh in meshes:
        starts.append(next_start)
        next_start += mesh.num_threads or 1
    return starts


def _common_mesh(meshes: Sequence[Any]) -> Any:
    """Returns the mesh of all threads; the meshes agree on the rest, which was checked."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    if len(meshes) == 1:
        return meshes[0]
    first = meshes[0]
    return plgpu.Mesh(
        grid=first.grid,
        grid_names=first.grid_names,
        cluster=first.cluster,
        cluster_names=first.cluster_names,
        num_threads=sum(mesh.num_threads or 1 for mesh in meshes),
        thread_name=THREAD_AXIS,
    )


def _on_threads(jaxpr: Any, own: Any, mesh: Any, start: int) -> Any:
    """Returns the program with its own thread axis, at any depth, replaced by a range of `mesh`."""
    if own.thread_name is None:
        return jaxpr
    eqns = []
    for eqn in jaxpr.eqns:
        params = {
            name: _renamed_parameter(name, value, own, mesh, start)
            for name, value in eqn.params.items()
        }
        effects = _renamed_effects(eqn.effects, own.thread_name, mesh.thread_name)
        asks_for = eqn.params["axis_name"] if eqn.primitive is _jax.axis_index_p else None
        if asks_for != own.thread_name:
            eqns.append(eqn.replace(params=params, effects=effects))
            continue
        [index] = eqn.outvars
        thread = _jax.Var(index.aval)
        params["axis_name"] = mesh.thread_name
        eqns.append(eqn.replace(outvars=[thread], params=params, effects=effects))
        offset = _jax.Literal(index.aval.dtype.type(start), index.aval)
        eqns.append(
            _jax.new_jaxpr_eqn(
                [thread, offset], [index], lax.sub_p, {}, set(), eqn.source_info, eqn.ctx
            )
        )
    return jaxpr.replace(
        eqns=eqns,
        effects=_renamed_effects(jaxpr.effects, own.thread_name, mesh.thread_name),
    )


def _renamed_parameter(name: str, value: Any, own: Any, mesh: Any, start: int) -> Any:
    if isinstance(value, _jax.Jaxpr):
        return _on_threads(value, own, mesh, start)
    if isinstance(value, tuple) and any(isinstance(item, _jax.Jaxpr) for item in value):
        return tuple(_renamed_parameter(name, item, own, mesh, start) for item in value)
    if name == "collective_axes" and isinstance(value, tuple):
        return tuple(mesh.thread_name if axis == own.thread_name else axis for axis in value)
    return value


def _renamed_effects(effects: Any, old: Any, new: Any) -> set[Any]:
    return {
        _jax.NamedAxisEffect(new)
        if isinstance(effect, _jax.NamedAxisEffect) and effect.name == old
        else effect
        for effect in effects
    }
