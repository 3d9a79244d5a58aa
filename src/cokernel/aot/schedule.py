"""Reads a compiled, scheduled module of XLA: its kernels' calls, and which of them overlap."""

import dataclasses
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from cokernel.lowering.tpu_mixed import ALLOCATE, PART_ATTRIBUTE, SPARSE, TENSOR

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?(?P<name>[\w.$-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?(?P<name>[\w.$-]+) = (?P<rest>.*)$")
_OPCODE = re.compile(
    r" (?P<opcode>call-start|call-update|call-done|custom-call|get-tuple-element)"
    r"\((?P<args>[^)]*)\)"
)
_OPERAND = re.compile(r"%([\w.$-]+)")
_KERNEL_NAME = re.compile(r'kernel_name="((?:[^"\\]|\\.)*)"')
_PART = re.compile(PART_ATTRIBUTE + r'="(\w+)"')
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
      unit: "TensorCore", "SparseCore" or "GPU".
      computation: the computation it is in; only calls of one computation can be compared.
      start: the position in the schedule at which it starts.
      end: the position at which it has ended.
      code_bytes: the size of its code, where the compiler tells.
      vmem_bytes: how much VMEM it takes, where the compiler tells.
      part: which part of a kernel it is, if that was lowered to several calls.
      operands: the names of what it is given.
      results: the names under which others are given what it returns.
    """

    name: str
    kernel: str
    unit: str
    computation: str
    start: int
    end: int
    code_bytes: int | None
    vmem_bytes: int | None
    part: str
    operands: tuple[str, ...]
    results: tuple[str, ...]

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


def problems(all_calls: Sequence[Call]) -> list[str]:
    """Returns why kernels of several calls would not work, which need not be so in other programs.

    The calls of a kernel with programs on TensorCores and SparseCores have to overlap, since they
    wait for each other, and have to be given the same memory.
    """
    kernels: defaultdict[tuple[str, str], defaultdict[str, list[Call]]]
    kernels = defaultdict(lambda: defaultdict(list))
    for call in all_calls:
        if call.part:
            kernels[call.computation, call.kernel][call.part].append(call)
    found = []
    for (_, kernel), parts in kernels.items():
        allocated: Sequence[Call | None] = parts[ALLOCATE] or [None] * len(parts[SPARSE])
        if not len(allocated) == len(parts[SPARSE]) == len(parts[TENSOR]):
            found.append(f"XLA merged or dropped calls of kernel {kernel!r}")
            continue
        sharing = [
            (allocate, *_sharing(allocate, parts[SPARSE], parts[TENSOR], position))
            for position, allocate in enumerate(allocated)
        ]
        for allocate, sparse, tensor in sharing:
            if not sparse.overlaps(tensor):
                found.append(
                    f"kernel {kernel!r} has programs on SparseCores and on a TensorCore, which "
                    f"may wait for each other, but XLA schedules them one after the other: "
                    f"{sparse.name} at {sparse.start} to {sparse.end}, {tensor.name} at "
                    f"{tensor.start}. Give programs of both kinds an output, and use both outputs"
                )
            if allocate is None:
                continue
            for call in (sparse, tensor):
                if not set(allocate.results) <= set(call.operands):
                    found.append(
                        f"the programs of kernel {kernel!r} share memory, but XLA gives "
                        f"{call.name} a copy of what {allocate.name} has made"
                    )
    return found


def _sharing(
    allocate: Call | None, sparse: Sequence[Call], tensor: Sequence[Call], position: int
) -> tuple[Call, Call]:
    """Returns the two calls that run the programs of one launch: those which are given most of what
    was allocated for it. Where nothing was, the order of the schedule has to do."""
    if allocate is None:
        return sparse[position], tensor[position]
    made = set(allocate.results)

    def shares(call: Call) -> int:
        return len(made & set(call.operands))

    return max(sparse, key=shares), max(tensor, key=shares)


def _computations(hlo: str) -> Iterator[tuple[str, list[str]]]:
    """Yields the name and instructions of each computation that the main thread runs."""
    name = ""
    lines: list[str] = []
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
    # The names of the results of each instruction that has several.
    elements: defaultdict[str, list[str]] = defaultdict(list)
    for position, line in enumerate(lines):
        instruction = _INSTRUCTION.match(line)
        operation = _OPCODE.search(line) if instruction else None
        if instruction is None or operation is None:
            continue
        name = instruction["name"]
        operands = tuple(_OPERAND.findall(operation["args"]))
        match operation["opcode"]:
            case "custom-call":
                target = _TARGET.search(line)
                if target is not None and target[1] in _MOSAIC_TARGETS:
                    unit = "GPU" if "gpu" in target[1] else "TensorCore"
                    call = _call(name, line, unit, computation, position)
                    found.append(dataclasses.replace(call, operands=operands))
            case "call-start":
                call = _call(name, line, "SparseCore", computation, position)
                started[name] = dataclasses.replace(call, operands=operands)
            case "call-update":
                # Only now has it got its inputs.
                call = started.pop(operands[0])
                started[name] = dataclasses.replace(call, start=position, operands=operands[1:])
            case "call-done":
                call = started.pop(operands[0])
                found.append(dataclasses.replace(call, end=position, results=(name,)))
            case "get-tuple-element":
                elements[operands[0]].append(name)
    found = [
        dataclasses.replace(call, results=tuple(elements.get(name, (name,))))
        for call in found
        for name in call.results
    ]
    return sorted(found, key=lambda call: call.start)


def _call(name: str, line: str, unit: str, computation: str, position: int) -> Call:
    kernel = _KERNEL_NAME.search(line)
    size = _PROGRAM_SIZE.search(line)
    part = _PART.search(line)
    return Call(
        name=name,
        kernel=_unescaped(kernel[1]) if kernel else "",
        unit=unit,
        computation=computation,
        start=position,
        end=position + 1,
        code_bytes=int(size[1]) if size else None,
        vmem_bytes=_used_vmem(line) if unit == "TensorCore" else None,
        part=part[1] if part else "",
        operands=(),
        results=(name,),
    )


_ESCAPE = re.compile(rb"\\([0-7]{1,3}|.)", re.DOTALL)
_CONTROLS = {b"n": b"\n", b"r": b"\r", b"t": b"\t"}


def _unescaped(text: str) -> str:
    """Returns what XLA has written as in C: bytes beyond ASCII are in octal."""

    def plain(found: re.Match[bytes]) -> bytes:
        escaped = found[1]
        return bytes([int(escaped, 8)]) if escaped.isdigit() else _CONTROLS.get(escaped, escaped)

    return _ESCAPE.sub(plain, text.encode()).decode(errors="replace")


def _used_vmem(line: str) -> int | None:
    used = _USED_MEMORY.search(line)
    if used is None:
        return None
    configs: list[dict[str, Any]] = json.loads(used[1])
    sizes = [int(config["size"]) for config in configs if config["memory_space"] == _VMEM]
    return sum(sizes) if sizes else None
