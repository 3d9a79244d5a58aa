"""What is wrong with a program, as far as tracing it shows, in words that help its author."""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from cokernel import _jax
from cokernel.primitive import all_equations


@contextlib.contextmanager
def explained(programs: Sequence[tuple[str, Any]]) -> Iterator[None]:
    """Adds what JAX cannot know to errors that it raises while a program is traced: one of
    `programs`, each given as what it is called and the mesh that it runs on.
    """
    try:
        yield
    except NameError as error:
        if "unbound axis name" not in str(error):
            raise
        raise NameError(
            f"{_listed_programs(programs)} uses an axis that it does not have"
            f"{_their_axes(programs)}: {str(error).partition('. ')[0]}"
        ) from error
    except AssertionError as error:
        if not _asks_for_a_grid(error):
            raise
        raise ValueError(
            f"{_listed_programs(programs)} asks for pl.program_id or pl.num_programs outside of a "
            "pipeline, but a kernel of meshes has no grid: ask for lax.axis_index(axis) and "
            f"lax.axis_size(axis){_their_axes(programs)}"
        ) from error
    except ValueError as error:
        if "Unsupported TPU device kind" in str(error):
            error.add_note(
                "This kernel asks about the TPU it runs on. Make it inside `with "
                'cokernel.target("v6e"):` to run it on a machine without one.'
            )
        raise


def check_axis_names(
    jaxpr: Any, mesh: Any, meshes: Sequence[Any], external_meshes: Sequence[Any]
) -> None:
    """Checks that a program asks for its position only on axes of its own mesh, and names no axis
    that there is not.

    Args:
      jaxpr: the program.
      mesh: the mesh that it runs on.
      meshes: those of all programs of its kernel.
      external_meshes: those that Refs from outside are tied to and that no program runs on.

    Raises:
      ValueError: otherwise.
    """
    known = {axis for other in (*meshes, *external_meshes) for axis in other.shape}
    known |= set(_jax.get_axis_env().axis_sizes)
    # A GPU program may map over the warps of its thread.
    known |= {
        axis
        for eqn in all_equations(jaxpr)
        for other in eqn.params.get("meshes", ())
        for axis in other.shape
    }
    for eqn in all_equations(jaxpr):
        for effect in eqn.effects:
            if isinstance(effect, _jax.NamedAxisEffect) and effect.name not in known:
                raise ValueError(
                    f"program {jaxpr.debug_info.func_src_info} names the axis {effect.name!r} at "
                    f"{_jax.summarize_source(eqn.source_info)}, but there are only the axes "
                    f"{_listed(sorted(known, key=str))}"
                )
    others = {axis for other in meshes for axis in other.shape} - set(mesh.shape)
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


def _asks_for_a_grid(error: AssertionError) -> bool:
    """Whether the error is that of JAX for a program without a grid, which has no message."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback is not None and traceback.tb_frame.f_code is _jax.axis_frame.__code__


def _listed(axes: Iterable[Any]) -> str:
    return ", ".join(map(repr, axes))


def _listed_programs(programs: Sequence[tuple[str, Any]]) -> str:
    if len(programs) == 1:
        return f"program {programs[0][0]}"
    return f"one of the programs {', '.join(source for source, _ in programs)}"


def _their_axes(programs: Sequence[tuple[str, Any]]) -> str:
    if len(programs) == 1:
        [(_, mesh)] = programs
        return f"; it runs on {mesh}, whose axes are {_listed(mesh.shape)}"
    return "".join(
        f"; {source} runs on {mesh}, whose axes are {_listed(mesh.shape)}"
        for source, mesh in programs
    )
