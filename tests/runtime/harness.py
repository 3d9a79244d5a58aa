"""Programs written in LLVM IR by hand, and what launches them through the runtime module."""

import llvmlite.binding as llvm

from cokernel import _runtime

WORKERS = [1, 2, 4]

OFFSETS = _runtime.abi_offsets()

DECLARATIONS = f"""
declare token @llvm.coro.id(i32, ptr, ptr, ptr)
declare i64 @llvm.coro.size.i64()
declare ptr @llvm.coro.begin(token, ptr)
declare token @llvm.coro.save(ptr)
declare i8 @llvm.coro.suspend(token, i1)
declare void @llvm.coro.end(ptr, i1, token)
declare i32 @cokernel_semaphore_wait(ptr, ptr, i64, i32, i32)
declare void @cokernel_semaphore_signal(ptr, ptr, i64, i32)
declare i32 @cokernel_barrier_wait(ptr, i32)
declare ptr @cokernel_frame(ptr, i64)
declare void @cokernel_finish(ptr)
declare void @cokernel_fail(ptr, i32, i32, i64)
declare void @cokernel_fail_index(ptr, i32, i32, i64, i64, i64)
declare i32 @cokernel_callback(ptr, i32, ptr, ptr, i32)

define ptr @memory_of(ptr %core) alwaysinline {{
  %field = getelementptr i8, ptr %core, i64 {OFFSETS["Core.memory"]}
  %memory = load ptr, ptr %field
  ret ptr %memory
}}
define ptr @other_core(ptr %core, i32 %index) alwaysinline {{
  %launch = load ptr, ptr %core
  %field = getelementptr i8, ptr %launch, i64 {OFFSETS["Launch.cores"]}
  %cores = load ptr, ptr %field
  %wide = sext i32 %index to i64
  %offset = mul i64 %wide, {OFFSETS["sizeof.Core"]}
  %other = getelementptr i8, ptr %cores, i64 %offset
  ret ptr %other
}}
define i32 @index_of(ptr %core) alwaysinline {{
  %field = getelementptr i8, ptr %core, i64 {OFFSETS["Core.index"]}
  %index = load i32, ptr %field
  ret i32 %index
}}
define ptr @buffer_of(ptr %core, i64 %number) alwaysinline {{
  %field = getelementptr i8, ptr %core, i64 {OFFSETS["Core.buffers"]}
  %buffers = load ptr, ptr %field
  %slot = getelementptr ptr, ptr %buffers, i64 %number
  %buffer = load ptr, ptr %slot
  ret ptr %buffer
}}
define i1 @stopped(ptr %core) alwaysinline {{
  %launch = load ptr, ptr %core
  %field = getelementptr i8, ptr %launch, i64 {OFFSETS["Launch.stop"]}
  %stop = load atomic i32, ptr %field monotonic, align 4
  %result = icmp ne i32 %stop, 0
  ret i1 %result
}}
"""

BEGIN = f"""
  %id = call token @llvm.coro.id(i32 64, ptr null, ptr null, ptr null)
  %size = call i64 @llvm.coro.size.i64()
  %frame = call ptr @cokernel_frame(ptr %core, i64 %size)
  %handle = call ptr @llvm.coro.begin(token %id, ptr %frame)
  %handle_field = getelementptr i8, ptr %core, i64 {OFFSETS["Core.handle"]}
  store ptr %handle, ptr %handle_field
"""

END = """
done:
  call void @cokernel_finish(ptr %core)
  br label %suspend
suspend:
  call void @llvm.coro.end(ptr %handle, i1 false, token none)
  ret ptr %handle
"""


def wait(number, semaphore, value=1, site=7, then="then"):
    """A wait that goes on at block `then<number>`; the code after it belongs to that block."""
    return f"""
  %save{number} = call token @llvm.coro.save(ptr %handle)
  %taken{number} = call i32 @cokernel_semaphore_wait(ptr %core, ptr {semaphore}, i64 {value},
                                                     i32 1, i32 {site})
  %now{number} = icmp ne i32 %taken{number}, 0
  br i1 %now{number}, label %{then}{number}, label %stop{number}
stop{number}:
  %woken{number} = call i8 @llvm.coro.suspend(token %save{number}, i1 false)
  switch i8 %woken{number}, label %suspend [
    i8 0, label %{then}{number}
    i8 1, label %suspend
  ]
{then}{number}:
"""


# Two cores take turns; buffer 0 holds the number of rounds, buffer 1 counts the turns. What lives
# across the suspensions, the round and the total it has seen, lies in the frame.
PING_PONG = f"""
define ptr @ping_pong(ptr %core) presplitcoroutine {{
entry:
  {BEGIN}
  %rounds_at = call ptr @buffer_of(ptr %core, i64 0)
  %rounds = load i64, ptr %rounds_at
  %turns = call ptr @buffer_of(ptr %core, i64 1)
  %index = call i32 @index_of(ptr %core)
  %partner_index = sub i32 1, %index
  %partner = call ptr @other_core(ptr %core, i32 %partner_index)
  %theirs = call ptr @memory_of(ptr %partner)
  %mine = call ptr @memory_of(ptr %core)
  %first = icmp eq i32 %index, 0
  br label %loop
loop:
  %i = phi i64 [ 0, %entry ], [ %next, %again ]
  %more = icmp slt i64 %i, %rounds
  br i1 %more, label %turn, label %done
turn:
  br i1 %first, label %play, label %listen
listen:
  {wait(1, "%mine")}
  br label %play
play:
  %count = load i64, ptr %turns
  %counted = add i64 %count, 1
  store i64 %counted, ptr %turns
  call void @cokernel_semaphore_signal(ptr %core, ptr %theirs, i64 1, i32 8)
  br i1 %first, label %hear, label %again
hear:
  {wait(2, "%mine")}
  br label %again
again:
  %next = add i64 %i, 1
  br label %loop
  {END}
}}
"""


# Each core waits for as many signals as it has places before it, and nobody signals.
STUCK = f"""
define ptr @stuck(ptr %core) presplitcoroutine {{
entry:
  {BEGIN}
  %mine = call ptr @memory_of(ptr %core)
  %second = getelementptr i8, ptr %mine, i64 {OFFSETS["sizeof.Semaphore"]}
  %index = call i32 @index_of(ptr %core)
  %value = sext i32 %index to i64
  {wait(1, "%second", value="%value", site=31)}
  br label %done
  {END}
}}
"""

FUNCTIONS = """
define void @nothing(ptr %core) {
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @add_one(ptr %core) {
  %index = call i32 @index_of(ptr %core)
  %wide = sext i32 %index to i64
  %from = call ptr @buffer_of(ptr %core, i64 0)
  %to = call ptr @buffer_of(ptr %core, i64 1)
  %source = getelementptr float, ptr %from, i64 %wide
  %target = getelementptr float, ptr %to, i64 %wide
  %old = load float, ptr %source
  %new = fadd float %old, 1.0
  store float %new, ptr %target
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @bad_index(ptr %core) {
  call void @cokernel_fail_index(ptr %core, i32 12, i32 1, i64 90, i64 20, i64 100)
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @bad_check(ptr %core) {
  call void @cokernel_fail(ptr %core, i32 13, i32 3, i64 -4)
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @runaway(ptr %core) {
entry:
  br label %loop
loop:
  %stop = call i1 @stopped(ptr %core)
  br i1 %stop, label %done, label %loop
done:
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @call_back(ptr %core) {
  %operands = alloca ptr
  %results = alloca ptr
  %operand = call ptr @buffer_of(ptr %core, i64 0)
  %result = call ptr @buffer_of(ptr %core, i64 1)
  store ptr %operand, ptr %operands
  store ptr %result, ptr %results
  %failed = call i32 @cokernel_callback(ptr %core, i32 0, ptr %operands, ptr %results, i32 14)
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @count_instance(ptr %core) {
  %index = call i32 @index_of(ptr %core)
  %wide = sext i32 %index to i64
  %counts = call ptr @buffer_of(ptr %core, i64 0)
  %mine = getelementptr i64, ptr %counts, i64 %wide
  %old = load i64, ptr %mine
  %new = add i64 %old, 1
  store i64 %new, ptr %mine
  call void @cokernel_finish(ptr %core)
  ret void
}
define void @read_instance(ptr %core) {
  %index = call i32 @index_of(ptr %core)
  %wide = sext i32 %index to i64
  %counts = call ptr @buffer_of(ptr %core, i64 0)
  %results = call ptr @buffer_of(ptr %core, i64 1)
  %from = getelementptr i64, ptr %counts, i64 %wide
  %to = getelementptr i64, ptr %results, i64 %wide
  %value = load i64, ptr %from
  store i64 %value, ptr %to
  call void @cokernel_finish(ptr %core)
  ret void
}
"""


def compile_programs():
    """Compiles the programs above. Returns a function from a name to its address."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name, address in _runtime.function_addresses().items():
        llvm.add_symbol(name, address)
    machine = llvm.Target.from_default_triple().create_target_machine(opt=2, jit=True)
    module = llvm.parse_assembly(DECLARATIONS + PING_PONG + STUCK + FUNCTIONS)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=2))
    builder.getModulePassManager().run(module, builder)
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()

    def address_of(name):
        return engine.get_function_address(name)

    address_of.engine = engine
    address_of.ir = str(module)
    return address_of


def program(name, entry, shape=(1,), *, is_coroutine=False, semaphores=0):
    """The description of a program as register_executable wants it."""
    return {
        "name": name,
        "entry": entry,
        "is_coroutine": is_coroutine,
        "shape": shape,
        "group_axis": -1,
        "private_bytes": semaphores * OFFSETS["sizeof.Semaphore"],
        "semaphore_bytes": semaphores * OFFSETS["sizeof.Semaphore"],
        "uses_barrier": False,
    }


def launch(key, *arrays):
    """Launches on NumPy arrays, which live until the launch is over."""
    _runtime.launch(key, [(array.ctypes.data, array.nbytes) for array in arrays])


class Reports:
    """A `report` that keeps what it was given."""

    def __init__(self):
        self.failures = []

    def __call__(self, failure):
        self.failures.append(failure)
        return f"told: {failure['kind']}"
