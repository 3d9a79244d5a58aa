#include "launch.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "checked/checked_launch.h"
#include "checked/state.h"
#include "platform.h"
#include "pool.h"
#include "watchdog.h"

namespace cokernel {

namespace {

constexpr int64_t kFrameChunkBytes = int64_t{256} << 10;

// The kernel's cores lie at the start of the block.
Core* make_cores(const Executable& executable, Launch* launch, char* block, Barrier* barriers) {
  Core* cores = reinterpret_cast<Core*>(block);
  for (size_t p = 0; p < executable.programs.size(); ++p) {
    const Executable::Program& program = executable.programs[p];
    const ProgramSpec& spec = program.spec;
    const int rank = static_cast<int>(spec.shape.size());
    for (int32_t i = 0; i < program.core_count; ++i) {
      Core* core = new (&cores[program.first_core + i]) Core{};
      core->launch = launch;
      core->memory = block + program.first_private + i * program.private_stride;
      core->device = block + executable.device_offset;
      core->index = i;
      core->program = static_cast<int32_t>(p);
      int32_t rest = i;
      for (int axis = rank - 1; axis >= 0; --axis) {
        core->coordinates[axis] = rest % spec.shape[axis];
        rest /= spec.shape[axis];
      }
      core->group = spec.group_axis < 0 ? 0 : core->coordinates[spec.group_axis];
      if (executable.spec.shared_bytes > 0 && core->group < executable.spec.group_count) {
        core->shared = block + executable.shared_offset + core->group * executable.shared_stride;
      }
      core->is_coroutine = spec.is_coroutine;
      if (spec.is_coroutine) {
        core->entry.ramp = reinterpret_cast<void* (*)(Core*)>(spec.entry);
      } else {
        core->entry.function = reinterpret_cast<void (*)(Core*)>(spec.entry);
      }
      core->barrier = &barriers[program.first_barrier + core->group];
      core->barrier->expected.fetch_add(1, std::memory_order_relaxed);
    }
  }
  return cores;
}

}  // namespace

Launch::Launch(Executable& executable)
    : LaunchHeader{},
      executable(executable),
      core_count(executable.core_count),
      worker_limit(executable.worker_limit),
      workers(new Worker[executable.worker_limit]),
      slot_used(executable.worker_limit, 0),
      block_(allocate_block(executable.block_bytes)),
      barriers_(new Barrier[executable.barrier_count]) {
  cores = make_cores(executable, this, block_, barriers_.get());
  shared_memory = block_ + executable.shared_offset;
  for (int32_t i = 0; i < worker_limit; ++i) {
    workers[i].launch = this;
    workers[i].index = i;
  }
  slot_used[0] = 1;
  of_launch_.programs.resize(executable.programs.size());
}

Launch::~Launch() {
  for (char* chunk : frame_chunks_) free_block(chunk);
  free_block(block_);
}

int64_t Launch::kept_bytes() const {
  return executable.block_bytes + frame_bytes_ + static_cast<int64_t>(sizeof(Launch)) +
         worker_limit * static_cast<int64_t>(sizeof(Worker)) +
         executable.barrier_count * static_cast<int64_t>(sizeof(Barrier));
}

void Launch::prepare(const Buffer* given, int32_t count) {
  stop.store(0, std::memory_order_relaxed);
  over.store(false, std::memory_order_relaxed);
  sleeping.store(false, std::memory_order_relaxed);
  failure_claimed.store(false, std::memory_order_relaxed);
  together = false;
  activity.store(0, std::memory_order_relaxed);
  taken_cores.store(0, std::memory_order_relaxed);
  unfinished.store(core_count, std::memory_order_relaxed);
  helpers_wanted.store(0, std::memory_order_relaxed);
  buffers.resize(count);
  buffer_bytes.resize(count);
  for (int32_t i = 0; i < count; ++i) {
    buffers[i] = given[i].data;
    buffer_bytes[i] = given[i].bytes;
  }
  const int32_t slots = worker_slots.exchange(1, std::memory_order_relaxed);
  for (int32_t i = 0; i < slots; ++i) workers[i].queue.reset(i == 0);

  for (const Executable::Program& program : executable.programs) {
    const auto zeroed = static_cast<size_t>(program.spec.semaphore_bytes);
    for (int32_t i = 0; i < program.core_count; ++i) {
      Core& core = cores[program.first_core + i];
      core.buffers = buffers.data();
      core.dma_count = 0;
      core.dma_bytes = 0;
      core.handle = nullptr;
      core.semaphore.store(nullptr, std::memory_order_relaxed);
      core.state.store(CoreState::kUnstarted, std::memory_order_relaxed);
      core.site.store(-1, std::memory_order_relaxed);
      core.waits = 0;
      core.blocked = 0;
      core.signals = 0;
      core.resumes = 0;
      if (zeroed > 0) std::memset(core.memory, 0, zeroed);
    }
  }
  if (executable.spec.shared_semaphore_bytes > 0) {
    for (int32_t group = 0; group < executable.spec.group_count; ++group) {
      std::memset(shared_memory + group * executable.shared_stride, 0,
                  static_cast<size_t>(executable.spec.shared_semaphore_bytes));
    }
  }
  if (executable.spec.device_semaphore_bytes > 0) {
    std::memset(block_ + executable.device_offset, 0,
                static_cast<size_t>(executable.spec.device_semaphore_bytes));
  }
}

bool Launch::run(const Buffer* given, int32_t count) {
  prepare(given, count);
  const std::vector<InstanceOperand>& operands = executable.spec.instance_operands;
  if (!operands.empty()) {
    std::string problem = instances_.enter(operands, buffers, buffer_bytes);
    if (!problem.empty()) {
      failure = Failure();
      failure.kind = FailureKind::kInternal;
      failure.text = std::move(problem);
      instances_.leave();
      finish_statistics(0, true);
      return false;
    }
  }
  float_mode = FloatMode::current();
  start_ns = now_ns();
  Watchdog::get().add(this);
  if (checked != nullptr) {
    checked->run();
  } else {
    run_cores();
  }
  Watchdog::get().remove(this);
  // Whoever claimed the failure has left: helpers in run_cores(), the watchdog just now.
  const bool failed = failure_claimed.load(std::memory_order_acquire);
  if (failed) {
    if (failure.kind == FailureKind::kDeadlock) failure.cores = snapshot_cores(*this);
    // Those that were stopped in a loop have said in which only when they left it.
    for (CoreSnapshot& core : failure.cores) {
      if (core.state != CoreState::kRunning) continue;
      core.site = cores[&core - failure.cores.data()].site.load(std::memory_order_relaxed);
    }
    forget_waiters();
  }
  if (!operands.empty()) instances_.leave();
  finish_statistics(now_ns() - start_ns, failed);
  return !failed;
}

void Launch::run_cores() {
  Worker& worker = workers[0];
  worker.begin(start_ns);
  if (worker_limit == 1) {
    help_after_ns = INT64_MAX;
    worker.run_alone();
    return;
  }
  const HelpPlan::Choice choice = executable.spec.help == Help::kAlways
                                      ? HelpPlan::Choice{true, 0}
                                      : executable.help_plan.choose();
  help_after_ns = choice.after_ns;
  if (choice.from_start && core_count > 1) {
    ask_for_help(std::min(core_count, worker_limit) - 1);
  }
  worker.run_alone();
  if (together) Pool::get().close(this);
  if (!failure_claimed.load(std::memory_order_relaxed)) {
    executable.help_plan.record(choice.from_start, now_ns() - start_ns);
  }
}

void Launch::ask_for_help(int32_t helpers) {
  if (!together) {
    together = true;
    activity.store(kBusyAgain, std::memory_order_relaxed);
  }
  Pool::get().request(this, helpers);
}

Core* Launch::take_unstarted_alone() {
  const uint64_t taken = taken_cores.load(std::memory_order_relaxed);
  if (!has_unstarted()) return nullptr;
  taken_cores.store(taken + 1, std::memory_order_relaxed);
  return &cores[taken & kFromFront];
}

Core* Launch::take_unstarted(bool from_back) {
  if (!has_unstarted()) return nullptr;
  const uint64_t one = from_back ? uint64_t{1} << 32 : 1;
  const uint64_t taken = taken_cores.fetch_add(one, std::memory_order_relaxed);
  const int64_t front = static_cast<int64_t>(taken & kFromFront);
  const int64_t back = static_cast<int64_t>(taken >> 32);
  if (front + back >= core_count) return nullptr;
  return from_back ? &cores[core_count - 1 - back] : &cores[front];
}

void Launch::became_idle() {
  const uint64_t now = activity.fetch_sub(1, std::memory_order_acq_rel) - 1;
  if ((now & kBusyMask) != 0) return;
  // Nobody was busy at that moment. If there is no work either, there will never be any: only busy
  // workers make cores ready. A worker that took one meanwhile was counted before it did.
  if (has_unstarted()) return;
  const int32_t slots = worker_slots.load(std::memory_order_acquire);
  for (int32_t i = 0; i < slots; ++i) {
    if (!workers[i].queue.locked_empty()) return;
  }
  if (activity.load(std::memory_order_acquire) != now) return;
  if (unfinished.load(std::memory_order_acquire) <= 0) return;
  fail_deadlocked();
}

void Launch::fail_deadlocked() {
  if (!claim_failure()) return;
  // The cores stay as they are: worker 0 describes them when all workers have left.
  failure = Failure();
  failure.kind = FailureKind::kDeadlock;
  request_stop();
}

void Launch::sleep_until_work() {
  sleeping.store(true, std::memory_order_relaxed);
  // Whoever pushes to a queue after this has looked at it sees that this worker sleeps, by the
  // order in which the lock of the queue was held.
  bool work = has_unstarted();
  const int32_t slots = worker_slots.load(std::memory_order_acquire);
  for (int32_t i = 0; i < slots && !work; ++i) work = !workers[i].queue.locked_empty();
  if (!work) {
    std::unique_lock<std::mutex> lock(mutex);
    wake.wait(lock, [this] { return !sleeping.load(std::memory_order_relaxed) || is_over(); });
  }
  sleeping.store(false, std::memory_order_relaxed);
}

void Launch::wake_sleeper() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    sleeping.store(false, std::memory_order_relaxed);
  }
  wake.notify_one();
}

void Launch::set_done() {
  {
    std::lock_guard<std::mutex> lock(mutex);
    over.store(true, std::memory_order_release);
  }
  wake.notify_one();
}

void Launch::request_stop() {
  stop.store(1, std::memory_order_release);
  set_done();
}

void Launch::fail_at(Core* core, int32_t site, Failure&& description) {
  core->site.store(site, std::memory_order_relaxed);
  if (!claim_failure()) return;
  failure = std::move(description);
  failure.program = core->program;
  failure.index = core->index;
  failure.group = core->group;
  std::copy(std::begin(core->coordinates), std::end(core->coordinates), failure.coordinates);
  failure.site = site;
  request_stop();
}

void Launch::allocate_frame(Core* core, int64_t bytes) noexcept {
  const int64_t rounded = (bytes + 63) / 64 * 64;
  std::lock_guard<SpinLock> lock(frame_lock_);
  if (rounded > frame_left_) {
    const int64_t chunk = std::max(rounded, kFrameChunkBytes);
    frame_chunks_.push_back(allocate_block(static_cast<size_t>(chunk)));
    frame_free_ = frame_chunks_.back();
    frame_left_ = chunk;
    frame_bytes_ += chunk;
  }
  core->frame = frame_free_;
  core->frame_bytes = rounded;
  frame_free_ += rounded;
  frame_left_ -= rounded;
}

// Semaphores in memory that outlives the launch must not refer to its cores.
void Launch::forget_waiters() {
  for (int32_t i = 0; i < core_count; ++i) {
    if (cores[i].state.load(std::memory_order_relaxed) == CoreState::kSemaphore) {
      Semaphore* semaphore = cores[i].semaphore.load(std::memory_order_relaxed);
      semaphore->waiters.store(0, std::memory_order_relaxed);
    } else if (cores[i].state.load(std::memory_order_relaxed) == CoreState::kBarrier) {
      Barrier* barrier = cores[i].barrier;
      barrier->arrived.store(0, std::memory_order_relaxed);
      barrier->first = nullptr;
      barrier->last = nullptr;
    }
  }
}

void Launch::finish_statistics(int64_t nanoseconds, bool failed) {
  of_launch_.launches = 1;
  of_launch_.helped_launches = together ? 1 : 0;
  of_launch_.failures = failed ? 1 : 0;
  of_launch_.nanoseconds = nanoseconds;
  for (size_t p = 0; p < executable.programs.size(); ++p) {
    const Executable::Program& program = executable.programs[p];
    ProgramStatistics sum;
    sum.launches = 1;
    for (int32_t i = 0; i < program.core_count; ++i) {
      const Core& core = cores[program.first_core + i];
      if (core.state.load(std::memory_order_relaxed) != CoreState::kUnstarted) ++sum.cores;
      sum.dma_count += core.dma_count;
      sum.dma_bytes += core.dma_bytes;
      sum.waits += core.waits;
      sum.blocked += core.blocked;
      sum.signals += core.signals;
      sum.resumes += core.resumes;
    }
    of_launch_.programs[p] = sum;
  }
  executable.add_statistics(of_launch_);
}

std::string launch_executable(const std::shared_ptr<Executable>& executable, const Buffer* buffers,
                              int32_t count) {
  std::unique_ptr<Launch> launch;
  try {
    launch = executable->take_launch();
  } catch (const std::bad_alloc&) {
    Failure failure;
    failure.kind = FailureKind::kInternal;
    failure.text = "out of memory: a launch of kernel '" + executable->spec.name + "' needs " +
                   std::to_string(executable->block_bytes) + " bytes for its cores";
    return executable->report(failure);
  }
  std::string error;
  if (executable->spec.checked != nullptr) {
    error = checked::run_checked(*executable, *launch, buffers, count);
  } else if (!launch->run(buffers, count)) {
    error = executable->report(launch->failure);
  }
  executable->give_back(std::move(launch));
  return error;
}

}  // namespace cokernel
