// Whole launches in checked mode: schedules, copies, clocks of many cores.
#include <cstdint>
#include <cstring>
#include <set>

#include "checked/checked_abi.h"
#include "checked/findings.h"
#include "checked/options.h"
#include "support.h"

namespace cokernel::testing {
namespace {

using checked::CheckedOptions;
using checked::CheckedRecord;
using checked::Strategy;

class CheckedHooks : public RecordingHooks {
 public:
  std::string checked_report(const Executable&, const CheckedRecord& record) override {
    kinds.clear();
    for (const checked::Finding& finding : record.findings.all()) kinds.insert(finding.kind);
    behaviour = record.behaviour;
    return record.failed ? name_of(record.failure.kind) : "";
  }
  std::multiset<std::string> kinds;
  uint64_t behaviour = 0;
};

struct CheckedKernel {
  CheckedKernel(ExecutableSpec spec, Strategy strategy, uint64_t seed) {
    CheckedOptions options;
    options.schedule.strategy = strategy;
    options.schedule.seed = seed;
    hooks = std::make_shared<CheckedHooks>();
    spec.name = "test";
    spec.hooks = hooks;
    spec.checked = std::make_shared<CheckedOptions>(options);
    executable = std::make_shared<Executable>(1, std::move(spec));
  }
  std::string launch(const std::vector<Buffer>& buffers) {
    return launch_executable(executable, buffers.data(), static_cast<int32_t>(buffers.size()));
  }
  std::shared_ptr<CheckedHooks> hooks;
  std::shared_ptr<Executable> executable;
};

constexpr Strategy kAll[] = {Strategy::kRandom, Strategy::kPct, Strategy::kRoundRobin,
                             Strategy::kDelayDma, Strategy::kRunToBlock};

#define STEP() SUSPEND_UNLESS(cokernel_checked_step(this->core, __LINE__))
#define CHECKED_WAIT(semaphore, value) \
  SUSPEND_UNLESS(cokernel_checked_wait(this->core, (semaphore), (value), 1, 0, __LINE__))

// A message goes once around very many cores.
struct Ring : Coroutine {
  void body() {
    const int32_t last = core->launch->executable.core_count - 1;
    int64_t* message = static_cast<int64_t*>(core->buffers[0]);
    COROUTINE_BEGIN;
    if (core->index != 0) CHECKED_WAIT(semaphore_of(core), 1);
    cokernel_checked_access(core, 1, kCheckedUpdate, message, 8, 8);
    *message += core->index;
    STEP();
    cokernel_checked_signal(
        core, semaphore_of(other_core(core, core->index == last ? 0 : core->index + 1)), 1, 2);
    if (core->index == 0) CHECKED_WAIT(semaphore_of(core), 1);
    COROUTINE_END;
  }
};

void a_ring_of_many_cores_is_in_order() {
  for (const Strategy strategy : kAll) {
    ExecutableSpec spec;
    spec.programs = {coroutine_program<Ring>({2000})};
    CheckedKernel kernel(spec, strategy, 1);
    int64_t message = 0;
    CHECK(kernel.launch({{&message, 8}}).empty());
    CHECK_EQUAL(message, int64_t{1999} * 2000 / 2);
    CHECK(kernel.hooks->kinds.empty());
  }
}

struct Arguments {
  char* target;
  char* source;
  int64_t bytes;
};

void copy(Core* core, void* block) {
  CHECK_EQUAL(reinterpret_cast<uintptr_t>(block) % 64, 0);
  const auto* arguments = static_cast<const Arguments*>(block);
  const int64_t elements = arguments->bytes / 4;
  const int64_t stride = 4;
  cokernel_checked_access(core, 50, kCheckedRead, arguments->source, arguments->bytes, 4);
  cokernel_checked_access(core, 51, kCheckedWrite, arguments->target, arguments->bytes, 4);
  std::memcpy(arguments->target, arguments->source, static_cast<size_t>(arguments->bytes));
  cokernel_checked_copy_undefined(core, arguments->target, arguments->source, 4, 1, &elements,
                                  &stride, &stride);
}

// Two buffers in turns: while one is copied the other is read. `kLate` waits one round too late.
template <bool kLate>
struct DoubleBuffer : Coroutine {
  static constexpr int kRounds = 9;
  static constexpr int64_t kBytes = 3000;
  int round;
  char* buffer(int number) { return core->memory + 64 + number % 2 * 4096; }
  void body() {
    COROUTINE_BEGIN;
    for (round = 0; round < kRounds; ++round) {
      STEP();
      {
        const Arguments arguments{buffer(round), static_cast<char*>(core->buffers[0]), kBytes};
        cokernel_checked_dma(core, 7, copy, &arguments, sizeof(arguments),
                             semaphore_of(core, round % 2), kBytes, nullptr, 0);
      }
      if (round == 0) continue;
      if (!kLate) CHECKED_WAIT(semaphore_of(core, (round - 1) % 2), kBytes);
      cokernel_checked_access(core, 8, kCheckedRead, buffer(round - 1), kBytes, 4);
      if (kLate) CHECKED_WAIT(semaphore_of(core, (round - 1) % 2), kBytes);
    }
    CHECKED_WAIT(semaphore_of(core, (kRounds - 1) % 2), kBytes);
    COROUTINE_END;
  }
};

template <typename Body>
std::multiset<std::string> kinds_of(Strategy strategy, uint64_t seed) {
  ExecutableSpec spec;
  spec.programs = {coroutine_program<Body>({3}, 4)};
  spec.programs[0].private_bytes = 64 + 2 * 4096;
  CheckedKernel kernel(spec, strategy, seed);
  std::vector<char> data(3000, 1);
  std::multiset<std::string> first;
  for (int launch = 0; launch < 3; ++launch) {
    CHECK(kernel.launch({{data.data(), 3000}}).empty());
    if (launch == 0) first = kernel.hooks->kinds;
    CHECK(kernel.hooks->kinds == first);
  }
  return first;
}

void double_buffering_is_right_only_if_it_waits_in_time() {
  for (const Strategy strategy : kAll) {
    for (uint64_t seed = 0; seed < 20; ++seed) {
      CHECK(kinds_of<DoubleBuffer<false>>(strategy, seed).empty());
      CHECK_EQUAL(kinds_of<DoubleBuffer<true>>(strategy, seed).count("Race"), 1);
    }
  }
}

// More copies in flight than a core has agents for at first, none of which its starter waits for.
struct Flood : Coroutine {
  int i;
  void body() {
    COROUTINE_BEGIN;
    for (i = 0; i < 3000; ++i) {
      STEP();
      const Arguments arguments{static_cast<char*>(core->buffers[1]) + 4 * i,
                                static_cast<char*>(core->buffers[0]), 4};
      cokernel_checked_dma(core, 7, copy, &arguments, sizeof(arguments), semaphore_of(core), 4,
                           nullptr, 0);
    }
    CHECKED_WAIT(semaphore_of(core), 4 * 3000);
    cokernel_checked_access(core, 8, kCheckedRead, core->buffers[1], 4 * 3000, 4);
    COROUTINE_END;
  }
};

void very_many_copies_may_be_in_flight() {
  for (const Strategy strategy : {Strategy::kRandom, Strategy::kDelayDma}) {
    ExecutableSpec spec;
    spec.programs = {coroutine_program<Flood>({1})};
    CheckedKernel kernel(spec, strategy, 3);
    std::vector<int32_t> source(1, 5), target(3000);
    CHECK(kernel.launch({{source.data(), 4}, {target.data(), 12000}}).empty());
    CHECK(kernel.hooks->kinds.empty());
    for (const int32_t value : target) CHECK_EQUAL(value, 5);
  }
}

// All cores wait for the first, which ends without a signal; memory of the launch is used again.
struct Stuck : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    if (core->index == 1) {
      SUSPEND_UNLESS(cokernel_checked_barrier(core, 4));
    } else if (core->index > 1) {
      CHECKED_WAIT(semaphore_of(core), 1);
    }
    COROUTINE_END;
  }
};

void a_deadlock_ends_the_launch_and_leaves_it_usable() {
  ExecutableSpec spec;
  spec.programs = {coroutine_program<Stuck>({4})};
  CheckedKernel kernel(spec, Strategy::kRandom, 0);
  for (int launch = 0; launch < 3; ++launch) CHECK(kernel.launch({}) == "Deadlock");
}

}  // namespace
}  // namespace cokernel::testing

int main() {
  using namespace cokernel::testing;
  a_ring_of_many_cores_is_in_order();
  double_buffering_is_right_only_if_it_waits_in_time();
  very_many_copies_may_be_in_flight();
  a_deadlock_ends_the_launch_and_leaves_it_usable();
}
