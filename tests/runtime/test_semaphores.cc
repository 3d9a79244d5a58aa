// Cores that talk through semaphores, with one to four workers.
#include <atomic>
#include <cstdint>

#include "support.h"

namespace cokernel::testing {
namespace {

// Two cores in turns. Core 0 counts in plain memory that core 1 counts as well: the semaphores
// order them.
struct PingPong : Coroutine {
  int64_t i;
  int64_t rounds;
  int64_t* total;
  void body() {
    COROUTINE_BEGIN;
    rounds = *static_cast<int64_t*>(core->buffers[0]);
    total = static_cast<int64_t*>(core->buffers[1]);
    for (i = 0; i < rounds; ++i) {
      if (core->index == 0) {
        *total += 1;
        SIGNAL(semaphore_of(other_core(core, 1)), 1);
        WAIT(semaphore_of(core), 1);
      } else {
        WAIT(semaphore_of(core), 1);
        *total += 1;
        SIGNAL(semaphore_of(other_core(core, 0)), 1);
      }
    }
    COROUTINE_END;
  }
};

void ping_pong_alternates() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<PingPong>({2})};
    Kernel kernel(spec);
    for (int launch = 0; launch < 20; ++launch) {
      int64_t rounds = 1000, total = 0;
      CHECK(kernel.launch({{&rounds, 8}, {&total, 8}}).empty());
      CHECK_EQUAL(total, 2 * rounds);
    }
    const ExecutableStatistics statistics = kernel.executable->statistics();
    CHECK_EQUAL(statistics.launches, 20);
    CHECK_EQUAL(statistics.programs[0].cores, 40);
    CHECK_EQUAL(statistics.programs[0].waits, 40'000);
    CHECK_EQUAL(statistics.programs[0].signals, 40'000);
    CHECK_EQUAL(statistics.programs[0].resumes, statistics.programs[0].blocked);
  }
}

// A message goes once around all cores.
struct Ring : Coroutine {
  void body() {
    int64_t* message = static_cast<int64_t*>(core->buffers[0]);
    const int32_t last = core->launch->cores[0].launch->executable.core_count - 1;
    COROUTINE_BEGIN;
    if (core->index != 0) WAIT(semaphore_of(core), 1);
    *message += core->index;
    SIGNAL(semaphore_of(other_core(core, core->index == last ? 0 : core->index + 1)), 1);
    if (core->index == 0) WAIT(semaphore_of(core), 1);
    COROUTINE_END;
  }
};

void ring_of_ten_thousand() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Ring>({10'000})};
    Kernel kernel(spec);
    for (int launch = 0; launch < 3; ++launch) {
      int64_t message = 0;
      CHECK(kernel.launch({{&message, 8}}).empty());
      CHECK_EQUAL(message, int64_t{9'999} * 10'000 / 2);
    }
  }
}

// Every core sends a number to every other core, round after round, into a slot of its own.
constexpr int kCores = 32;
struct AllToAll : Coroutine {
  int round;
  int64_t sum;
  void body() {
    auto* mail = static_cast<int32_t*>(core->buffers[0]);  // [2][kCores][kCores]
    auto* result = static_cast<int64_t*>(core->buffers[1]);
    COROUTINE_BEGIN;
    sum = 0;
    for (round = 0; round < 20; ++round) {
      for (int to = 0; to < kCores; ++to) {
        mail[((round % 2) * kCores + to) * kCores + core->index] = round * 100 + core->index;
        SIGNAL(semaphore_of(other_core(core, to), round % 2), 1);
      }
      WAIT(semaphore_of(core, round % 2), kCores);
      for (int from = 0; from < kCores; ++from) {
        sum += mail[((round % 2) * kCores + core->index) * kCores + from];
      }
    }
    result[core->index] = sum;
    COROUTINE_END;
  }
};

void all_to_all() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<AllToAll>({kCores}, 2)};
    Kernel kernel(spec);
    for (int launch = 0; launch < 10; ++launch) {
      std::vector<int32_t> mail(2 * kCores * kCores);
      std::vector<int64_t> result(kCores);
      CHECK(kernel.launch({{mail.data(), 0}, {result.data(), 0}}).empty());
      for (const int64_t sum : result) {
        CHECK_EQUAL(sum, kCores * 100 * (19 * 20 / 2) + 20 * (kCores - 1) * kCores / 2);
      }
    }
  }
}

// Many cores wait for one semaphore; core 0 feeds it one by one, and each that got it counts.
struct Queue : Coroutine {
  int i;
  void body() {
    auto* order = static_cast<int32_t*>(core->buffers[0]);
    auto* next = static_cast<std::atomic<int32_t>*>(core->buffers[1]);
    COROUTINE_BEGIN;
    if (core->index == 0) {
      for (i = 1; i < 100; ++i) {
        SIGNAL(device_semaphore(core), 1);
        YIELD();
      }
    } else {
      WAIT(device_semaphore(core), 1);
      order[next->fetch_add(1)] = core->index;
    }
    COROUTINE_END;
  }
};

void waiters_proceed_oldest_first() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Queue>({100})};
    spec.device_bytes = spec.device_semaphore_bytes = sizeof(Semaphore);
    Kernel kernel(spec);
    std::vector<int32_t> order(100);
    std::atomic<int32_t> next{0};
    CHECK(kernel.launch({{order.data(), 0}, {&next, 0}}).empty());
    CHECK_EQUAL(next, 99);
    if (mode.workers > 1) continue;
    for (int i = 0; i < 99; ++i) CHECK_EQUAL(order[i], i + 1);
  }
}

// Core 1 needs five and waits first; core 2 needs one, and only it signals the other four.
struct Unequal : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    if (core->index == 0) {
      WAIT(semaphore_of(core), 2);  // Both have begun.
      SIGNAL(device_semaphore(core), 1);
    } else if (core->index == 1) {
      SIGNAL(semaphore_of(other_core(core, 0)), 1);
      WAIT(device_semaphore(core), 5);
    } else {
      SIGNAL(semaphore_of(other_core(core, 0)), 1);
      WAIT(device_semaphore(core), 1);
      SIGNAL(device_semaphore(core), 5);
    }
    COROUTINE_END;
  }
};

void a_waiter_that_needs_more_does_not_hold_up_others() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Unequal>({3})};
    spec.device_bytes = spec.device_semaphore_bytes = sizeof(Semaphore);
    Kernel kernel(spec);
    for (int launch = 0; launch < 200; ++launch) CHECK(kernel.launch().empty());
  }
}

// Cores that only look leave the count to the one that takes it at last.
struct Lookers : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    if (core->index == 0) {
      WAIT(semaphore_of(core), 9);
      WAIT(device_semaphore(core), 7);
      CHECK_EQUAL(cokernel_semaphore_read(core, device_semaphore(core)), 0);
    } else {
      if (core->index == 5) SIGNAL(device_semaphore(core), 7);
      LOOK(device_semaphore(core), 7);
      SIGNAL(semaphore_of(other_core(core, 0)), 1);
    }
    COROUTINE_END;
  }
};

void looking_takes_nothing() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Lookers>({10})};
    spec.device_bytes = spec.device_semaphore_bytes = sizeof(Semaphore);
    Kernel kernel(spec);
    for (int launch = 0; launch < 100; ++launch) CHECK(kernel.launch().empty());
  }
}

// Core 0 polls a semaphore that the last core signals. With one worker the others run only because
// polling yields.
struct Poller : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    if (core->index == 0) {
      while (cokernel_semaphore_read(core, semaphore_of(core)) < 3) YIELD();
    } else {
      SIGNAL(semaphore_of(other_core(core, 0)), 1);
    }
    COROUTINE_END;
  }
};

void polling_is_fair() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Poller>({4})};
    Kernel kernel(spec);
    for (int launch = 0; launch < 500; ++launch) CHECK(kernel.launch().empty());
  }
}

void a_read_is_limited_to_32_bits() {
  Semaphore semaphore{};
  semaphore.count = int64_t{1} << 40;
  CHECK_EQUAL(cokernel_semaphore_read(nullptr, &semaphore), INT32_MAX);
  semaphore.count = -(int64_t{1} << 40);
  CHECK_EQUAL(cokernel_semaphore_read(nullptr, &semaphore), INT32_MIN);
}

}  // namespace
}  // namespace cokernel::testing

int main() {
  using namespace cokernel::testing;
  ping_pong_alternates();
  ring_of_ten_thousand();
  all_to_all();
  waiters_proceed_oldest_first();
  a_waiter_that_needs_more_does_not_hold_up_others();
  looking_takes_nothing();
  polling_is_fair();
  a_read_is_limited_to_32_bits();
}
