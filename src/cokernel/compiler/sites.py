"""The places of the user's program that can block or fail, numbered for the runtime and spelt out
in reports.
"""

import dataclasses
import functools
from typing import Any

from cokernel import _jax, tracing

# Files whose code traces a program: what stands outside of them in a traceback called the kernel.
_TRACERS = frozenset({tracing.__file__, _jax.stock_mpmd.__file__})

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


@dataclasses.dataclass(frozen=True)
class Site:
    """One operation of one program on one Ref, at one source line."""

    # The name of the program, and its number among those of the kernel, since names may repeat.
    program: str
    program_number: int
    # What the program does there, as the user would say it: "semaphore_wait", "dma_wait", "read",
    # "write", ...
    operation: str
    # The Ref or semaphore, as the user named it.
    name: str
    line: SourceLine | None
    # Whatever else a report wants, as sorted pairs: shape, number of DMA bytes, which semaphores
    # are signalled.
    details: tuple[tuple[str, Any], ...] = ()


class SiteTable:
    """Numbers sites in the order they are first seen; equal sites share a number."""

    def __init__(self) -> None:
        self._numbers: dict[Site, int] = {}

    def number(self, site: Site) -> int:
        """The number of a site."""
        return self._numbers.setdefault(site, len(self._numbers))

    def to_list(self) -> list[dict[str, Any]]:
        """The table as plain data, in the order of the numbers."""
        return [
            {
                "program": site.program,
                "program_number": site.program_number,
                "operation": site.operation,
                "name": site.name,
                "file": site.line.file if site.line else None,
                "line": site.line.line if site.line else None,
                "function": site.line.function if site.line else None,
                **_callers(site.line),
                **dict(site.details),
            }
            for site in self._numbers
        ]


def _callers(line: SourceLine | None) -> dict[str, Any]:
    if line is None or not line.callers:
        return {}
    plain = [
        {"file": caller.file, "line": caller.line, "function": caller.function}
        for caller in line.callers
    ]
    return {"callers": plain}
