"""What a chip's compiler said of a function: as an object, as text, as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from cokernel.aot.memory import MemoryUse
from cokernel.aot.places import Place
from cokernel.aot.schedule import Call, overlapping


@dataclasses.dataclass(frozen=True)
class Registers:
    """What the machine code of one GPU kernel takes.

    Attributes:
      kernel: its name.
      registers: of each CUDA thread.
      spilled_bytes: how much of them goes through memory, written and read.
      code_bytes: the size of the code, None if it was not found out.
    """

    kernel: str
    registers: int
    spilled_bytes: int
    code_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of a function that was compiled for a chip that is not there.

    Attributes:
      function: the function's name.
      target: the chip.
      accepted: whether the chip's compiler accepted it. That is a check of types, resources and
        legality, and no more: nothing ran.
      stage: where it was refused: "trace", "lower", "compile", "schedule"; "" if accepted.
      message: why it was refused, in the words of who refused it.
      crashed: whether the compiler's process ended without an answer.
      timed_out: whether the compiler was stopped because it took too long.
      place: the user's line that is refused, if it was found.
      seconds: how long the compiler took, None if it did not finish.
      memory: what the kernels ask of each memory, and what the chip has.
      code_bytes: the size of the generated code; for a GPU, that of all kernels.
      compiler_bytes: the compiler's own account, in bytes: arguments, outputs, temporaries, ...
      hbm_bytes: what the chip has for these, in its large memory; None if it was not compiled.
      calls: the kernels' calls in the compiled schedule.
      registers: of each GPU kernel.
    """

    function: str
    target: str
    accepted: bool
    stage: str = ""
    message: str = ""
    crashed: bool = False
    timed_out: bool = False
    place: Place | None = None
    seconds: float | None = None
    memory: Sequence[MemoryUse] = ()
    code_bytes: int | None = None
    compiler_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    hbm_bytes: int | None = None
    calls: Sequence[Call] = ()
    registers: Sequence[Registers] = ()

    def overlaps(self) -> list[tuple[str, str]]:
        """Returns the names of the calls that the schedule lets run at the same time, in pairs."""
        return [(first.name, second.name) for first, second in overlapping(self.calls)]

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as plain data."""
        return {**dataclasses.asdict(self), "overlaps": self.overlaps()}

    def to_json(self) -> str:
        """Returns the report as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=100, highlight=False)
        with console.capture() as captured:
            render(self, console)
        return captured.get().rstrip()


def render(report: Report, console: Any) -> None:
    """Prints a report on a rich console."""
    from rich.table import Table
    from rich.text import Text

    verdict = Text("accepted", "bold green") if report.accepted else Text("refused", "bold red")
    if report.crashed:
        verdict = Text("the compiler crashed", "bold red")
    if report.timed_out:
        verdict = Text("the compiler took too long", "bold red")
    title = Text.assemble(f"{report.function} for {report.target}: ", verdict)
    if report.seconds is not None:
        title.append(f" after {report.seconds:.2f} s")
    console.print(title)
    if not report.accepted:
        if report.place is not None:
            where = f"program {report.place.program}" if report.place.program else "the function"
            at = f" at {report.place.line}" if report.place.line else ""
            console.print(Text(f"  {where}{at}: {report.place.what}"))
        console.print(Text(report.message))
    if report.memory:
        table = Table("kernel", "memory", "asked", "chip has", "largest piece", box=None)
        for use in report.memory:
            budget = "" if use.budget is None else f"{use.budget:,}"
            style = "bold red" if use.exceeds else ""
            row = (use.kernel, use.memory, f"{use.asked:,}", budget, use.largest)
            table.add_row(*map(Text, row), style=style)
        console.print(table)
    if report.code_bytes is not None:
        console.print(f"  code {report.code_bytes:,} bytes")
    if report.compiler_bytes:
        console.print(f"  {_in_hbm(report)}")
    for registers in report.registers:
        size = "" if registers.code_bytes is None else f", code {registers.code_bytes:,} bytes"
        console.print(
            Text(
                f"  {registers.kernel}: {registers.registers} registers a thread, "
                f"{registers.spilled_bytes:,} bytes spilled{size}"
            )
        )
    for call in report.calls:
        size = "" if call.code_bytes is None else f", code {call.code_bytes:,} bytes"
        vmem = "" if call.vmem_bytes is None else f", VMEM {call.vmem_bytes:,} bytes"
        kernel = f" of kernel {call.kernel!r}" if call.kernel else ""
        console.print(Text(f"  call {call.name}{kernel} on the {call.unit}{size}{vmem}"))
    if report.accepted and not report.calls:
        console.print("  the compiled function calls no kernel of programs")
    for first, second in report.overlaps():
        console.print(Text(f"  {first} and {second} overlap"))


_IN_HBM = {"argument_size": "arguments", "output_size": "outputs", "temp_size": "temporaries"}


def _in_hbm(report: Report) -> str:
    """Returns what the compiled function takes of the chip's large memory, as a line of text."""
    sizes = [
        f"{label} {report.compiler_bytes[name]:,}"
        for name, label in _IN_HBM.items()
        if name in report.compiler_bytes
    ]
    has = "" if report.hbm_bytes is None else f", of which the chip has {report.hbm_bytes:,}"
    return f"HBM: {', '.join(sizes)} bytes{has}"
