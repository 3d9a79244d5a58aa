// Launches as a whole: memory, helpers, many at once.
#include <cstring>
#include <thread>

#include "platform.h"
#include "support.h"

namespace cokernel::testing {
namespace {

void fill(Core* core) {
  // The prefix is zero whatever the launch before left there; all of it may be written.
  const Executable& executable = core->launch->executable;
  const ProgramSpec& program = executable.spec.programs[core->program];
  for (int64_t i = 0; i < program.semaphore_bytes; ++i) CHECK_EQUAL(core->memory[i], 0);
  std::memset(core->memory, core->index + 1, program.private_bytes);
  CHECK_EQUAL(reinterpret_cast<uintptr_t>(core->memory) % 64, 0);
  if (core->index == 0) {
    for (int64_t i = 0; i < executable.spec.device_semaphore_bytes; ++i) {
      CHECK_EQUAL(core->device[i], 0);
    }
    std::memset(core->device, 0x55, executable.spec.device_bytes);
  }
  auto* seen = static_cast<char**>(core->buffers[0]);
  seen[core->index] = core->memory;
  cokernel_finish(core);
}

void blocks_are_zeroed_in_front_and_do_not_overlap() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {function_program({3, 5}, fill)};
    spec.programs[0].private_bytes = 4096;
    spec.programs[0].semaphore_bytes = 48;
    spec.device_bytes = 1000;
    spec.device_semaphore_bytes = 32;
    Kernel kernel(spec);
    for (int launch = 0; launch < 10; ++launch) {
      std::vector<char*> seen(15);
      CHECK(kernel.launch({{seen.data(), 0}}).empty());
      for (int i = 0; i < 15; ++i) {
        for (int64_t byte = 0; byte < 4096; ++byte) CHECK_EQUAL(seen[i][byte], i + 1);
      }
    }
  }
}

void note_group(Core* core) {
  auto* shared = static_cast<char**>(core->buffers[0]);
  shared[core->index] = core->shared;
  CHECK_EQUAL(core->group, core->coordinates[0]);
  CHECK_EQUAL(core->index, core->coordinates[0] * 4 + core->coordinates[1]);
  CHECK(core->shared == core->launch->shared_memory + core->group * 128);
  cokernel_finish(core);
}

void groups_share_a_block() {
  ExecutableSpec spec;
  spec.programs = {function_program({2, 4}, note_group)};
  spec.programs[0].group_axis = 0;
  spec.group_count = 2;
  spec.shared_bytes = 100;
  Kernel kernel(spec);
  std::vector<char*> shared(8);
  CHECK(kernel.launch({{shared.data(), 0}}).empty());
  for (int i = 0; i < 8; ++i) CHECK(shared[i] == shared[i / 4 * 4]);
  CHECK(shared[0] != shared[4]);
}

// Cores of very different length, all ready at once and at one worker: the others must steal.
struct Storm : Coroutine {
  int round;
  void body() {
    auto* done = static_cast<std::atomic<int64_t>*>(core->buffers[0]);
    COROUTINE_BEGIN;
    for (round = 0; round < 20; ++round) {
      BARRIER();
      for (volatile int i = 0; i < (core->index % 7) * 200; i = i + 1) {
      }
      done->fetch_add(1, std::memory_order_relaxed);
    }
    COROUTINE_END;
  }
};

void steal_storms() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Storm>({64})};
    Kernel kernel(spec);
    for (int launch = 0; launch < 20; ++launch) {
      std::atomic<int64_t> done{0};
      CHECK(kernel.launch({{&done, 8}}).empty());
      CHECK_EQUAL(done, 64 * 20);
    }
  }
}

// Long and short phases with pauses in which helpers and worker 0 go to sleep.
struct Phases : Coroutine {
  int round;
  void body() {
    auto* total = static_cast<int64_t*>(core->buffers[0]);
    COROUTINE_BEGIN;
    for (round = 0; round < 10; ++round) {
      if (core->index == 0) {
        cokernel_delay(core, 300'000);
        *total += 1;
        SIGNAL(semaphore_of(other_core(core, 1)), 1);
        WAIT(semaphore_of(core), 1);
      } else {
        WAIT(semaphore_of(core), 1);
        cokernel_delay(core, 300'000);
        *total += 1;
        SIGNAL(semaphore_of(other_core(core, 0)), 1);
      }
    }
    COROUTINE_END;
  }
};

void workers_wake_from_sleep() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Phases>({2})};
    Kernel kernel(spec);
    for (int launch = 0; launch < 5; ++launch) {
      int64_t total = 0;
      CHECK(kernel.launch({{&total, 8}}).empty());
      CHECK_EQUAL(total, 20);
    }
  }
}

// Two cores that can only end if they run at the same time.
void meet(Core* core) {
  auto* here = static_cast<std::atomic<int32_t>*>(core->buffers[0]);
  here->fetch_add(1);
  while (here->load() < 2 && core->launch->stop.load() == 0) std::this_thread::yield();
  cokernel_finish(core);
}

void helpers_run_cores_at_the_same_time() {
  ExecutableSpec spec = spec_for({2, Help::kAlways});
  spec.programs = {function_program({2}, meet)};
  spec.time_limit_s = 30;
  Kernel kernel(spec);
  for (int launch = 0; launch < 100; ++launch) {
    std::atomic<int32_t> here{0};
    CHECK(kernel.launch({{&here, 4}}).empty());
  }
  CHECK_EQUAL(kernel.executable->statistics().helped_launches, 100);
}

struct Exchange : Coroutine {
  int i;
  void body() {
    auto* total = static_cast<std::atomic<int64_t>*>(core->buffers[0]);
    COROUTINE_BEGIN;
    for (i = 0; i < 20; ++i) {
      SIGNAL(semaphore_of(other_core(core, (core->index + 1) % 8)), 1);
      WAIT(semaphore_of(core), 1);
    }
    total->fetch_add(1);
    COROUTINE_END;
  }
};

void many_threads_launch_the_same_kernel() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Exchange>({8})};
    Kernel kernel(spec);
    std::vector<std::thread> threads;
    std::atomic<int64_t> total{0};
    for (int t = 0; t < 6; ++t) {
      threads.emplace_back([&] {
        for (int launch = 0; launch < 100; ++launch) {
          CHECK(kernel.launch({{&total, 8}}).empty());
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQUAL(total, 6 * 100 * 8);
    CHECK_EQUAL(kernel.executable->statistics().launches, 600);
  }
}

void wrong_specs_are_refused() {
  const auto refused = [](const std::function<void(ExecutableSpec&)>& change) {
    ExecutableSpec spec;
    spec.programs = {function_program({2}, meet)};
    change(spec);
    try {
      Executable executable(1, spec);
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  CHECK(!refused([](ExecutableSpec&) {}));
  CHECK(refused([](ExecutableSpec& spec) { spec.programs.clear(); }));
  CHECK(refused([](ExecutableSpec& spec) { spec.programs[0].shape = {2, 0}; }));
  CHECK(refused([](ExecutableSpec& spec) { spec.programs[0].shape = {1, 1, 1, 1, 1}; }));
  CHECK(refused([](ExecutableSpec& spec) { spec.programs[0].shape = {1 << 20, 1 << 20}; }));
  CHECK(refused([](ExecutableSpec& spec) { spec.programs[0].group_axis = 1; }));
  CHECK(refused([](ExecutableSpec& spec) { spec.programs[0].semaphore_bytes = 16; }));
  CHECK(refused([](ExecutableSpec& spec) { spec.programs[0].entry = nullptr; }));
  CHECK(refused([](ExecutableSpec& spec) { spec.device_semaphore_bytes = 16; }));
}

}  // namespace
}  // namespace cokernel::testing

int main() {
  using namespace cokernel::testing;
  blocks_are_zeroed_in_front_and_do_not_overlap();
  groups_share_a_block();
  steal_storms();
  workers_wake_from_sleep();
  helpers_run_cores_at_the_same_time();
  many_threads_launch_the_same_kernel();
  wrong_specs_are_refused();
}
