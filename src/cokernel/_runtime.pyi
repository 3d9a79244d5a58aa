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

class CheckedSchedule(TypedDict):
    # "random" (default) | "pct" | "round_robin" | "delay_dma" | "run_to_block" | "choices"
    strategy: NotRequired[str]
    seed: NotRequired[int]
    depth: NotRequired[int]  # "pct": one more than the changes of priority.
    # The number of the launch whose part of the schedule is taken; -1 (default): they are counted.
    launch: NotRequired[int]
    # "choices": the candidate taken at each decision; when they are used up each core runs until it
    # blocks.
    choices: NotRequired[Sequence[int]]
    record: NotRequired[bool]  # Whether "choices" and "candidates" are reported.

class CheckedSpec(TypedDict):
    races: NotRequired[bool]  # Default True, as for what follows.
    uninitialised: NotRequired[bool]
    leftovers: NotRequired[bool]
    unwaited_copies: NotRequired[bool]
    stop_at_first: NotRequired[bool]  # Default False.
    max_findings: NotRequired[int]
    # Of memory that starts uninitialised: "nan" (default), "zeros", "random", "keep" or a byte.
    fill: NotRequired[str | int]
    schedules: NotRequired[int]  # How often a launch runs, with seeds that count upwards.
    schedule: NotRequired[CheckedSchedule]
    # Plain result buffers and the bytes of their elements. They start undefined, unless they are
    # an operand as well.
    outputs: NotRequired[Sequence[tuple[int, int]]]
    # Whether probes tell of all that the kernel reads and writes, so that outputs need not be
    # filled before somebody reads what nobody has written. Default False.
    sees_all: NotRequired[bool]
    batch: NotRequired[Sequence[int]]  # Buffers that hold which elements of batches it is for.

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
    # Checked mode: one worker, and compiled code calls the functions named cokernel_checked_*.
    checked: NotRequired[CheckedSpec | None]
    # Called at the end of every checked launch. A text that is not empty fails the launch.
    checked_report: NotRequired[Callable[[CheckedRecord], str]]
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
    # Of an index that comes from an array of indices: where in it.
    position: NotRequired[int]
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
    schedule: NotRequired[FindingSchedule]  # In checked mode.
    # In checked mode: where the core that failed had just used an undefined value, or -1.
    use_site: NotRequired[int]

class Party(TypedDict):
    program: int
    program_name: str
    coordinates: tuple[int, ...]
    index: int
    site: int
    # "read" | "write" | "update" | "atomic update" | "copy reads" | "copy writes" | "allocate" |
    # "release" | "signal" | "wait" | "poll" | "use"
    access: str
    is_dma: bool  # A DMA that the core started,
    dma_site: int  # there; else -1.

class MemoryInfo(TypedDict):
    owner: str  # As in SemaphoreInfo.
    index: int
    program: int
    offset: int  # Of the first element concerned.
    parts: list[tuple[int, int]]  # Offset and bytes of each piece, in ascending order.
    is_cut_off: bool  # There were more pieces.
    element_bytes: int

class Polled(TypedDict):
    party: Party
    memory: MemoryInfo | None
    semaphore: SemaphoreInfo | None

class FindingSchedule(TypedDict):
    strategy: str
    seed: int
    depth: int
    launch: int
    choices: list[int]

class Finding(TypedDict):
    # "Race" | "Livelock" | "UninitialisedRead" | "LeftoverSemaphore" | "UnwaitedCopy" |
    # "SemaphoreUnderflow" | "SemaphoreOverflow" | "CopyInFlight" | "WaitTooLarge" | "NeverWritten".
    # A deadlock or a bad index is the failure of the launch.
    kind: str
    # Race: the later access and the earlier one. UninitialisedRead: who read it and who used it.
    # CopyInFlight: the copy and the end of the scope. Leftovers: who signalled, and who took a part
    # of it last. WaitTooLarge: who waits and who signalled. None for NeverWritten.
    first: Party | None
    second: Party | None
    memory: MemoryInfo | None
    semaphore: SemaphoreInfo | None
    count: int  # Of elements.
    occurrences: int  # Equal ones. Those of the same cores in the same run have united elements.
    also: list[list[Party]]  # The other cores that took the places of `first` and `second`.
    schedule: FindingSchedule  # The one that showed it first.
    use: NotRequired[
        str
    ]  # UninitialisedRead: "branch", "index", "output", "amount", "callback", "loop".
    # LeftoverSemaphore, UnwaitedCopy, SemaphoreUnderflow, SemaphoreOverflow: the count.
    value: NotRequired[int]
    wanted: NotRequired[int]  # WaitTooLarge, SemaphoreUnderflow, SemaphoreOverflow.
    moved: NotRequired[int]  # UnwaitedCopy, CopyInFlight, WaitTooLarge: what was signalled,
    left: NotRequired[int]  # and what is left of it.
    polls: NotRequired[int]  # Livelock, as are the number of cores that poll,
    pollers: NotRequired[int]
    polled: NotRequired[list[Polled]]  # and what they look at.

class ScheduleRecord(FindingSchedule):
    decisions: int  # Moments at which more than one could go on.
    fits: bool  # Whether the choices that the schedule lists could all be taken.
    # If the schedule asks for them, who could: cores in launch order, then DMAs in the order of
    # start, as (agent, operation, objects, core); the core that took the step before comes first,
    # if it could go on and has not polled: "continuing". An agent is the number of a core, or
    # below zero for a DMA; an operation "start", "step", "wait", "poll", "barrier" or "copy";
    # objects are the semaphores and the memory that the step synchronises by, a number below zero
    # where that is the core's own affair, and none where they are not known. All these numbers are
    # the same under every schedule. `choices` are positions in these lists.
    candidates: NotRequired[list[list[tuple[int, str, tuple[int, ...], int]]]]
    continuing: NotRequired[list[bool]]

class CheckedCounts(TypedDict):
    accesses: int
    signals: int
    waits: int
    barriers: int
    dmas: int
    cores: int

class CheckedRecord(TypedDict):
    executable: str
    findings: list[Finding]
    dropped: int  # Different findings beyond max_findings.
    batch: list[int]  # Which elements of batches the launch was for.
    is_complete: bool  # No run was ended by a failure or a finding.
    schedule: ScheduleRecord
    schedules: int  # How many runs this is the record of; what follows is that of the last,
    behaviour: int  # equal if all semaphores saw the same operations in the same order.
    behaviours: int  # How many different ones there were.
    counts: CheckedCounts
    claimed: int  # How many of the accesses loops have claimed, see runtime/checked/claims.cc.
    failure: Failure | None

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

    Its keys are those of CheckedSchedule.
    """

def set_claims(are_taken: bool) -> bool:
    """Sets whether checked launches of the process take what loops claim, which changes nothing but
    their time; they do unless told otherwise. Returns what was set before.
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
