"""The C++ runtime: launches, scheduler, semaphores, barriers, the XLA FFI handler."""

from collections.abc import Callable, Sequence
from typing import Any, NotRequired, TypedDict

class ProgramSpec(TypedDict):
    name: str
    entry: int  # Address of `ptr entry(Core*)` (coroutine) or `void entry(Core*)`.
    is_coroutine: bool
    shape: Sequence[int]  # The mesh of the program, at most four axes.
    group_axis: int  # coordinates[group_axis] is the group of a core; -1: all are in group 0.
    private_bytes: int
    semaphore_bytes: int  # The prefix of the private block that is zeroed for every launch.
    uses_barrier: bool

class InstanceOperandSpec(TypedDict):
    buffer: int  # Index into the table of buffers: operands, then results.
    is_output: bool
    bytes: int  # Of one instance.
    count: int  # Instances: the cores of the mesh the operand is tied to.

class CallbackSpec(TypedDict):
    function: Callable[[CoreInfo, list[int], list[int]], object]
    operands: int  # How many addresses `function` gets in its second argument,
    results: int  # and in its third.

class ExecutableSpec(TypedDict):
    name: NotRequired[str]
    programs: Sequence[ProgramSpec]
    group_count: NotRequired[int]  # Default 0.
    shared_bytes: NotRequired[int]  # Of one group. Groups lie align64(shared_bytes) apart.
    shared_semaphore_bytes: NotRequired[int]  # The zeroed prefix of each.
    device_bytes: NotRequired[int]
    device_semaphore_bytes: NotRequired[int]
    instance_operands: NotRequired[Sequence[InstanceOperandSpec]]
    num_workers: NotRequired[int]  # 0 (default): as many as the hardware has threads.
    time_limit_s: NotRequired[float]  # 0 (default): none.
    help: NotRequired[str]  # "auto" (default), "always" or "never" ask for helper threads.
    report: NotRequired[Callable[[Failure], str]]
    callbacks: NotRequired[Sequence[CallbackSpec]]
    keep_alive: NotRequired[object]

class CoreInfo(TypedDict):
    program: int  # Index into the programs of the executable.
    program_name: str
    coordinates: tuple[int, ...]
    index: int
    group: int
    site: int

class SemaphoreInfo(TypedDict):
    owner: str  # "private" | "shared" | "device" | "buffer" | "unknown"
    # private: the row-major index of the owning core in its mesh, and `program`;
    # shared: the group; buffer: the index into the table of buffers; else -1.
    index: int
    program: int  # Of the owning core if private, else -1.
    offset: int  # Bytes from the start of that block.
    count: int  # What the semaphore counts now.

class BarrierInfo(TypedDict):
    group: int
    arrived: int
    expected: int

class CoreSnapshot(TypedDict):
    program: int
    program_name: str
    coordinates: tuple[int, ...]
    index: int
    group: int
    state: str  # "unstarted" | "ready" | "running" | "semaphore" | "barrier" | "finished"
    site: int  # Where it waits; otherwise its last wait, signal, barrier or yield; -1: none yet.
    semaphore: NotRequired[SemaphoreInfo]  # In state "semaphore",
    value: NotRequired[int]  # with the count the wait needs,
    decrement: NotRequired[bool]  # and whether it takes it.
    barrier: NotRequired[BarrierInfo]  # In state "barrier".

class Failure(TypedDict):
    # "Deadlock" | "OutOfBounds" | "Check" | "Callback" | "TimeLimit" | "Interrupted" | "Internal"
    kind: str
    executable: str  # The name of the executable.
    # The core that failed; absent for Deadlock, TimeLimit, Interrupted and most Internal failures.
    program: NotRequired[int]
    program_name: NotRequired[str]
    coordinates: NotRequired[tuple[int, ...]]
    index: NotRequired[int]
    site: NotRequired[int]
    # OutOfBounds: [start, start + size) of dimension `dimension`, which has `extent` elements.
    dimension: NotRequired[int]
    start: NotRequired[int]
    size: NotRequired[int]
    extent: NotRequired[int]
    # Check: which message of the site, and the number that goes into it.
    code: NotRequired[int]
    value: NotRequired[int]
    # Callback: its number, what it raised and the formatted traceback.
    callback: NotRequired[int]
    exception_type: NotRequired[str]
    text: NotRequired[str]  # Callback and Internal.
    limit_s: NotRequired[float]  # TimeLimit.
    elapsed_s: NotRequired[float]  # TimeLimit and Interrupted.
    # Deadlock, TimeLimit and Interrupted: every core of the launch, programs in order.
    cores: NotRequired[list[CoreSnapshot]]

class ProgramStatistics(TypedDict):
    name: str
    launches: int
    cores: int  # Cores that ran.
    dma_count: int
    dma_bytes: int
    waits: int
    blocked: int  # Waits (and barrier waits) that had to suspend.
    signals: int
    resumes: int

class ExecutableStatistics(TypedDict):
    key: int
    name: str
    launches: int
    helped_launches: int  # Launches that asked for helper threads.
    failures: int
    nanoseconds: int  # From the start to the end of the launches, together.
    programs: list[ProgramStatistics]

def register_executable(key: int, spec: ExecutableSpec) -> None:
    """Makes a compiled kernel known under `key` (0 <= key < 2**64); replaces an earlier one."""

def unregister_executable(key: int) -> None:
    """Forgets `key`. Launches that still run keep their executable until they end."""

def executable_is_registered(key: int) -> bool: ...
def set_loader(
    loader: Callable[[int, str], object] | None,
) -> Callable[[int, str], object] | None:
    """Sets what is called with (key, module text) when a launch meets an unknown key.

    The loader must register the key before it returns. Returns the loader before.
    """

def set_schedule(schedule: dict[str, Any] | None) -> dict[str, Any] | None:
    """Sets the schedule of all checked launches of the process, in place of the one in their
    options; None gives that back. Launches are counted from 0 again. Returns the schedule before.

    Keys: "strategy", "seed", "depth", "launch", "choices", "record"; see `Schedule.for_runtime`.
    """

def launch(key: int, buffers: Sequence[int | tuple[int, int]]) -> None:
    """Runs an executable on buffers given as addresses or as (address, bytes) pairs.

    Raises RuntimeError with the text of the report if the launch fails. Releases the GIL.
    """

def ffi_handler() -> Any:
    """The capsule for `jax.ffi.register_ffi_target(..., platform="cpu")`.

    Attributes of the custom call: `key`, an int64 with the bit pattern of the executable's key,
    and `module`, a string that only the loader looks at.
    """

def abi_offsets() -> dict[str, int]:
    """Offsets and sizes for compiled code: "Core.memory", "sizeof.Core", "Launch.stop" ..."""

def function_addresses() -> dict[str, int]:
    """Name and address of every function compiled code may call."""

def statistics(key: int | None = None) -> list[ExecutableStatistics]:
    """Totals since the start or the last reset, of one executable or of all."""

def last_statistics() -> ExecutableStatistics | None:
    """What the launch that ended last did."""

def reset_statistics() -> None: ...
def instance_table() -> dict[str, int]:
    """The handles and the bytes now held for `space @ mesh` results: "handles", "bytes"."""
