"""Lines of the user's program: where an operation of a kernel, or the kernel itself, is written."""

import dataclasses
import functools
import itertools
import os
import re
import sysconfig
from typing import Any

from cokernel import _jax

# A message that names a line shall name the user's, and not one of these.
_jax.exclude_from_sources(__file__)

# Files whose code traces a program: what stands outside of them in a traceback called the kernel.
_OWN_TRACER = os.path.join(os.path.dirname(__file__), "tracing.py")
_TRACERS = frozenset({_OWN_TRACER, _jax.stock_mpmd.__file__})

# Where this package lies, where Python keeps its own files, and what is installed.
_LIBRARIES = (
    os.path.join(os.path.dirname(__file__), ""),
    *(
        os.path.join(path, "")
        for name, path in sysconfig.get_paths().items()
        if name in ("stdlib", "platstdlib", "purelib", "platlib")
    ),
)

# So many calls between a program and the function that does something are told.
MOST_CALLERS = 3


@dataclasses.dataclass(frozen=True)
class SourceLine:
    """A line of the user's program."""

    file: str
    line: int
    function: str
    # Where the user's own functions were called from that led there, the innermost first.
    callers: tuple["SourceLine", ...] = ()

    def __str__(self) -> str:
        return f"{self.file}:{self.line} ({self.function})"


@functools.lru_cache(maxsize=4096)
def user_line(traceback: Any) -> SourceLine | None:
    """The user's line that a traceback of JAX comes from, with those that called its function from
    within the program; None inside library helpers.
    """
    frame = _jax.user_frame(traceback)
    if frame is None:
        return None
    function = frame.function_name
    callers: list[SourceLine] = []
    has_begun = False
    for code, instruction in zip(*traceback.raw_frames(), strict=True):
        if code.co_filename in _TRACERS:
            # What called the kernel is no part of it.
            break
        if not _jax.is_user_filename(code.co_filename):
            continue
        if not has_begun:
            has_begun = True
            continue
        # A function within another is code of that one (`pl.when`, `pl.loop`), not a call of it.
        name = code.co_qualname
        if function == name or function.startswith(f"{name}.<locals>."):
            continue
        if len(callers) == MOST_CALLERS:
            break
        caller = _jax.raw_frame_to_frame(code, instruction)
        callers.append(SourceLine(caller.file_name, caller.start_line, caller.function_name))
        function = name
    return SourceLine(frame.file_name, frame.start_line, frame.function_name, tuple(callers))


@functools.lru_cache(maxsize=4096)
def line_that_made(traceback: Any) -> SourceLine | None:
    """The user's line that a traceback of JAX comes from, with the lines that called its function:
    a helper that makes kernels says little without them.

    Callers are told up to the user's own outermost: not the library that runs it, such as pytest.
    """
    frame = _jax.user_frame(traceback)
    if frame is None:
        return None
    file, line, is_library = frame.file_name, frame.start_line, _is_library(frame.file_name)
    callers: list[SourceLine] = []
    raw_frames = (
        raw
        for raw in zip(*traceback.raw_frames(), strict=True)
        if _jax.is_user_filename(raw[0].co_filename)
    )
    for code, instruction in itertools.islice(raw_frames, 1, None):
        was_library, is_library = is_library, _is_library(code.co_filename)
        if (is_library and not was_library) or len(callers) == MOST_CALLERS:
            break
        caller = _jax.raw_frame_to_frame(code, instruction)
        if (caller.file_name, caller.start_line) == (file, line):
            # As of a lambda or a generator, whose line is told already.
            continue
        file, line = caller.file_name, caller.start_line
        callers.append(SourceLine(file, line, caller.function_name))
    return SourceLine(frame.file_name, frame.start_line, frame.function_name, tuple(callers))


@functools.lru_cache(maxsize=4096)
def _is_library(file: str) -> bool:
    """Whether a file is Python's own or installed, so that its user is somebody else."""
    return file.startswith("<frozen ") or file.startswith(_LIBRARIES)


def traceback_here() -> Any:
    """Who called whom up to here, for `user_line`. Cheap, because lines are looked up later."""
    return _jax.xla_client.Traceback.get_traceback()


def line_of_definition(debug_info: Any) -> SourceLine | None:
    """Where the function begins that was traced to a jaxpr, at its decorators; None for a function
    without Python source.
    """
    source = None if debug_info is None else debug_info.func_src_info
    # As in "body at /home/me/example.py:12".
    found = re.fullmatch(r"(.+) at (.+):(\d+)", source or "", re.DOTALL)
    if found is None or not _jax.is_user_filename(found[2]):
        return None
    return SourceLine(found[2], int(found[3]), found[1])
