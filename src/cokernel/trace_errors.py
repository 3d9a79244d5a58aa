"""What is wrong with a program, as far as tracing it shows, in words that help its author."""

import contextlib
import traceback
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
        elif (asked := _out_of_bounds(error)) is not None:
            raise ValueError(f"{_listed_programs(programs)} {asked}") from error
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
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code is _jax.axis_frame.__code__


def _out_of_bounds(error: ValueError) -> str | None:
    """What a program asks for that its Ref does not have, where JAX refuses to make the index; None
    for other errors. JAX says neither which Ref it is nor which dimension.
    """
    walked = list(traceback.walk_tb(error.__traceback__))
    frames = [frame for frame, _ in walked]
    if not frames or frames[-1].f_code is not _jax.NDIndexer.__post_init__.__code__:
        return None
    indexer: Any = frames[-1].f_locals["self"]
    wrong: Any = frames[-1].f_locals.get("idx")
    dimension = next(
        (number for number, index in enumerate(indexer.indices) if index is wrong), None
    )
    if dimension is None:
        return None
    extent = indexer.shape[dimension]
    asked = f"index {wrong}"
    if isinstance(wrong, _jax.Slice):
        asked = f"{wrong.size} elements from {wrong.start}"
        if wrong.stride != 1:
            asked += f", {wrong.stride} apart,"
    places = [
        f" at {frame.f_code.co_filename}:{line}" for frame, line in walked if _is_users(frame)
    ]
    at = places[-1] if places else ""
    return (
        f"asks for {asked} of dimension {dimension} of {_name_of_ref(frames)}{at}, but valid are 0 "
        f"to {extent - 1}"
    )


def _name_of_ref(frames: Sequence[Any]) -> str:
    """The Ref that is indexed in the innermost frames, by the variable that holds it in the user's
    own code, with the shape of what is indexed of it."""
    user_locals: dict[int, str] = {}
    found: Any = None
    for frame in frames:
        values = dict(frame.f_locals)
        if _is_users(frame):
            user_locals |= {id(value): name for name, value in values.items()}
        else:
            held = [getattr(value, "ref_or_view", value) for value in values.values()]
            found = next((value for value in held if _is_ref(value)), found)
    if found is None:
        return "a Ref"
    root = found.ref if isinstance(found, _jax.TransformedRef) else found
    name = user_locals.get(id(found)) or user_locals.get(id(root))
    shape = tuple(found.shape)
    return f"a Ref of shape {shape}" if name is None else f"{name!r} of shape {shape}"


def _is_users(frame: Any) -> bool:
    # What `dataclasses` has written for a class of JAX is in no file.
    code = frame.f_code
    return _jax.is_user_filename(code.co_filename) and not code.co_qualname.startswith("__create_")


def _is_ref(value: Any) -> bool:
    if isinstance(value, _jax.TransformedRef):
        return True
    return isinstance(getattr(value, "aval", None), _jax.AbstractRef)


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
