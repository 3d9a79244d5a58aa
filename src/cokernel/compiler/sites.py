"""The places of the user's program that can block or fail, numbered for the runtime and spelt out
in reports.
"""

from typing import Any

from cokernel.records import record
from cokernel.source_lines import SourceLine


@record(frozen=True)
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
                **callers_of(site.line),
                **dict(site.details),
            }
            for site in self._numbers
        ]


def callers_of(line: SourceLine | None) -> dict[str, Any]:
    """Who called the function of a line, as plain data under "callers"; nothing if nobody did."""
    if line is None or not line.callers:
        return {}
    plain = [
        {"file": caller.file, "line": caller.line, "function": caller.function}
        for caller in line.callers
    ]
    return {"callers": plain}
