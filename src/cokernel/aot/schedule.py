"""Reads a compiled, scheduled module of XLA: its kernels' calls, and which of them overlap."""

import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.$-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.$-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(r" (?P<opcode>call-start|call-update|call-done|custom-call)\((?P<args>[^)]*)\)")
_KERNEL_NAME = re.compile(r'kernel_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_PROGRAM_SIZE = re.compile(r'"program_size":"(\d+)"')
_USED_MEMORY = re.compile(r'"used_scoped_memory_configs":(\[[^\]]*\])')

_MOSAIC_TARGETS = ("tpu_custom_call", "mosaic_gpu_v2", "mosaic_gpu")
# XLA's number for the memory that JAX calls VMEM.
_VMEM = "1"


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of a kernel in the schedule.

    Attributes:
      name: XLA's name of the instruction.
      kernel: the kernel's name, empty where XLA does not know it.
      unit: "SparseCore", or "TensorCore" (the main thread, which is a GPU's as well).
      computation: the computation it is in; only calls of one computation can be compared.
      start: the position in the schedule at which it starts.
      end: the position at which it has ended.
      code_bytes: the size of its code, where the compiler tells.
      vmem_bytes: how much VMEM it takes, where the compiler tells.
    """

    name: str
    kernel: str
    unit: str
    computation: str
    start: int
    end: int
    code_bytes: int | None
    vmem_bytes: int | None

    def overlaps(self, other: "Call") -> bool:
        """Returns whether the schedule lets both run at the same time."""
        return (
            self.computation == other.computation
            and self.unit != other.unit
            and self.start < other.end
            and other.start < self.end
        )


def calls(hlo: str) -> list[Call]:
    """Returns the calls of kernels in a scheduled module, in the order of the schedule."""
    return [call for name, lines in _computations(hlo) for call in _calls_of(name, lines)]


def overlapping(all_calls: Sequence[Call]) -> list[tuple[Call, Call]]:
    """Returns the pairs of calls that overlap, each once."""
    return [
        (first, second)
        for index, first in enumerate(all_calls)
        for second in all_calls[index + 1 :]
        if first.overlaps(second)
    ]


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and instructions of each computation that the main thread runs."""
    name, lines = "", []
    for line in hlo.splitlines():
        if line.startswith("}"):
            if name and 'execution_thread="sparsecore"' not in line:
                yield name, lines
            name, lines = "", []
        elif name:
            lines.append(line)
        elif found := _COMPUTATION.match(line):
            name = found["name"]


def _calls_of(computation: str, lines: Sequence[str]) -> list[Call]:
    found: list[Call] = []
    # The name of a started call by each name that it goes on under.
    started: dict[str, Call] = {}
    for position, line in enumerate(lines):
        instruction = _INSTRUCTION.match(line)
        operation = _OPCODE.search(line) if instruction else None
        if instruction is None or operation is None:
            continue
        name = instruction["name"]
        operands = [text.strip().lstrip("%").split(" ")[-1] for text in operation["args"].split(",")]
        match operation["opcode"]:
            case "custom-call":
                target = _TARGET.search(line)
                if target is not None and target[1] in _MOSAIC_TARGETS:
                    found.append(
                        _call(name, line, "TensorCore", computation, position, position + 1)
                    )
            case "call-start":
                started[name] = _call(name, line, "SparseCore", computation, position, position)
            case "call-update":
                # Only now has it got its inputs.
                call = started.pop(operands[0].lstrip("%"))
                started[name] = dataclasses.replace(call, start=position)
            case "call-done":
                call = started.pop(operands[0].lstrip("%"))
                found.append(dataclasses.replace(call, end=position))
    return sorted(found, key=lambda call: call.start)


def _call(name: str, line: str, unit: str, computation: str, start: int, end: int) -> Call:
    kernel = _KERNEL_NAME.search(line)
    size = _PROGRAM_SIZE.search(line)
    return Call(
        name=name,
        kernel=json.loads(f'"{kernel[1]}"') if kernel else "",
        unit=unit,
        computation=computation,
        start=start,
        end=end,
        code_bytes=int(size[1]) if size else None,
        vmem_bytes=_used_vmem(line) if unit == "TensorCore" else None,
    )


def _used_vmem(line: str) -> int | None:
    used = _USED_MEMORY.search(line)
    if used is None:
        return None
    configs: list[dict[str, Any]] = json.loads(used[1])
    sizes = [int(config["size"]) for config in configs if config["memory_space"] == _VMEM]
    return sum(sizes) if sizes else None
