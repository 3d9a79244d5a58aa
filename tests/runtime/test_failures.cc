// Launches that end with an error, and the launches after them.
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "platform.h"
#include "support.h"

namespace cokernel::testing {
namespace {

// Core 0 waits for a semaphore of its own, the others for one of the device.
struct Stuck : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    if (core->index == 0) {
      SIGNAL(semaphore_of(core, 1), 2);
      WAIT(semaphore_of(core, 1), 3);
    } else if (core->index == 1) {
      WAIT(device_semaphore(core, 1), 4);
    } else if (core->index == 2) {
      WAIT(reinterpret_cast<Semaphore*>(core->shared), 5);
    } else if (core->index == 3) {
      LOOK(static_cast<Semaphore*>(core->buffers[0]) + 1, 6);
    }
    COROUTINE_END;
  }
};

ExecutableSpec stuck_spec(const Mode& mode) {
  ExecutableSpec spec = spec_for(mode);
  spec.programs = {coroutine_program<Stuck>({5}, 2)};
  spec.device_bytes = 64;
  spec.device_semaphore_bytes = 32;
  spec.group_count = 1;
  spec.shared_bytes = 16;
  spec.shared_semaphore_bytes = 16;
  return spec;
}

void a_deadlock_names_every_semaphore() {
  for (const Mode& mode : modes()) {
    Kernel kernel(stuck_spec(mode));
    for (int launch = 0; launch < 100; ++launch) {
      Semaphore semaphores[2] = {};
      CHECK(kernel.launch({{semaphores, sizeof(semaphores)}}) == "Deadlock");
      const std::vector<CoreSnapshot>& cores = kernel.hooks->failure.cores;
      CHECK_EQUAL(cores.size(), 5);
      for (int i = 0; i < 4; ++i) CHECK(cores[i].state == CoreState::kSemaphore);
      CHECK(cores[4].state == CoreState::kFinished);
      CHECK(cores[0].place.owner == MemoryOwner::kPrivate);
      CHECK_EQUAL(cores[0].place.index, 0);
      CHECK_EQUAL(cores[0].place.offset, 16);
      CHECK_EQUAL(cores[0].count, 2);
      CHECK_EQUAL(cores[0].value, 3);
      CHECK(cores[0].decrement);
      CHECK(cores[1].place.owner == MemoryOwner::kDevice);
      CHECK_EQUAL(cores[1].place.offset, 16);
      CHECK(cores[2].place.owner == MemoryOwner::kShared);
      CHECK_EQUAL(cores[2].place.index, 0);
      CHECK(cores[3].place.owner == MemoryOwner::kBuffer);
      CHECK_EQUAL(cores[3].place.offset, 16);
      CHECK(!cores[3].decrement);
      // Nothing refers to the cores of the launch that is over.
      CHECK_EQUAL(semaphores[1].waiters.load(), 0);
    }
    CHECK_EQUAL(kernel.executable->statistics().failures, 100);
  }
}

// Core 17 fails; the others wait or run until they are stopped.
struct OneFails : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    if (core->index == 17) {
      cokernel_fail_index(core, 5, 1, 10, 20, 16);
    } else if (core->index % 2 == 0) {
      WAIT(semaphore_of(core), 1);
    } else {
      while (core->launch->stop.load(std::memory_order_relaxed) == 0) YIELD();
    }
    COROUTINE_END;
  }
};

void the_first_failure_stops_everything() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<OneFails>({4, 8})};
    Kernel kernel(spec);
    for (int launch = 0; launch < 100; ++launch) {
      CHECK(kernel.launch() == "OutOfBounds");
      const Failure& failure = kernel.hooks->failure;
      CHECK_EQUAL(failure.index, 17);
      CHECK_EQUAL(failure.coordinates[0], 2);
      CHECK_EQUAL(failure.coordinates[1], 1);
      CHECK_EQUAL(failure.site, 5);
      CHECK_EQUAL(failure.dimension, 1);
      CHECK_EQUAL(failure.start, 10);
      CHECK_EQUAL(failure.size, 20);
      CHECK_EQUAL(failure.extent, 16);
    }
  }
}

void all_fail(Core* core) {
  cokernel_fail(core, 1, 2, core->index);
  cokernel_finish(core);
}

void of_many_failures_one_is_reported() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {function_program({64}, all_fail)};
    Kernel kernel(spec);
    for (int launch = 0; launch < 100; ++launch) {
      CHECK(kernel.launch() == "Check");
      CHECK_EQUAL(kernel.hooks->failure.code, 2);
      CHECK_EQUAL(kernel.hooks->failure.value, kernel.hooks->failure.index);
    }
    CHECK_EQUAL(kernel.hooks->reports, 100);
  }
}

void call_back(Core* core) {
  cokernel_callback(core, core->index == 3 ? 1 : 0, nullptr, nullptr, 9);
  cokernel_finish(core);
}

void a_callback_that_raises_is_a_failure() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {function_program({4}, call_back)};
    Kernel kernel(spec);
    CHECK(kernel.launch() == "Callback");
    CHECK_EQUAL(kernel.hooks->failure.index, 3);
    CHECK_EQUAL(kernel.hooks->failure.site, 9);
    CHECK_EQUAL(kernel.hooks->failure.callback, 1);
    CHECK(kernel.hooks->failure.exception_type == "ValueError");
  }
}

// Core 0 never ends by itself, core 1 waits for it.
struct Runaway : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    if (core->index == 0) {
      while (core->launch->stop.load(std::memory_order_relaxed) == 0) relax();
    } else {
      WAIT(semaphore_of(core), 1);
    }
    COROUTINE_END;
  }
};

void a_time_limit_ends_a_runaway_loop() {
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Runaway>({2})};
    spec.time_limit_s = 0.05;
    Kernel kernel(spec);
    CHECK(kernel.launch() == "TimeLimit");
    const Failure& failure = kernel.hooks->failure;
    CHECK(failure.elapsed_s >= 0.05);
    CHECK_EQUAL(failure.cores.size(), 2);
    CHECK(failure.cores[0].state == CoreState::kRunning);
    // With one worker the second core cannot have begun; with more it has, unless the machine was
    // too busy to run the helper.
    CHECK(failure.cores[1].state == CoreState::kUnstarted ||
          (mode.workers > 1 && failure.cores[1].state == CoreState::kSemaphore));
  }
}

void delayed(Core* core) {
  cokernel_delay(core, int64_t{3600} * 1'000'000'000);
  cokernel_finish(core);
}

void a_delay_ends_with_the_launch() {
  ExecutableSpec spec;
  spec.programs = {function_program({1}, delayed)};
  spec.time_limit_s = 0.02;
  Kernel kernel(spec);
  CHECK(kernel.launch() == "TimeLimit");
}

std::atomic<int> handler_calls{0};

void an_interrupt_ends_a_launch_and_reaches_the_handler() {
  struct sigaction action{};
  action.sa_handler = [](int) { ++handler_calls; };
  struct sigaction before;
  sigaction(SIGINT, &action, &before);
  for (const Mode& mode : modes()) {
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Runaway>({2})};
    Kernel kernel(spec);
    handler_calls = 0;
    std::atomic<bool> over{false};
    // The watchdog takes some time to see that the launch is a long one.
    std::thread sender([&over] {
      while (!over) {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        if (!over) kill(getpid(), SIGINT);
      }
    });
    CHECK(kernel.launch() == "Interrupted");
    over = true;
    sender.join();
    CHECK(handler_calls.load() > 0);
    CHECK_EQUAL(kernel.hooks->failure.cores.size(), 2);
  }
  // Once no launch is a long one the handler is back.
  struct sigaction now;
  do {
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    sigaction(SIGINT, nullptr, &now);
  } while ((now.sa_flags & SA_SIGINFO) != 0);
  CHECK(now.sa_handler == action.sa_handler);
  sigaction(SIGINT, &before, nullptr);
}

struct Works : Coroutine {
  void body() {
    COROUTINE_BEGIN;
    SIGNAL(semaphore_of(other_core(core, 1 - core->index)), 1);
    WAIT(semaphore_of(core), 1);
    COROUTINE_END;
  }
};

void kernels_work_after_failures() {
  for (const Mode& mode : modes()) {
    Kernel bad(stuck_spec(mode));
    ExecutableSpec spec = spec_for(mode);
    spec.programs = {coroutine_program<Works>({2})};
    Kernel good(spec);
    for (int round = 0; round < 100; ++round) {
      Semaphore semaphores[2] = {};
      CHECK(!bad.launch({{semaphores, sizeof(semaphores)}}).empty());
      CHECK(good.launch().empty());
    }
  }
}

}  // namespace
}  // namespace cokernel::testing

int main() {
  using namespace cokernel::testing;
  a_deadlock_names_every_semaphore();
  the_first_failure_stops_everything();
  of_many_failures_one_is_reported();
  a_callback_that_raises_is_a_failure();
  a_time_limit_ends_a_runaway_loop();
  a_delay_ends_with_the_launch();
  an_interrupt_ends_a_launch_and_reaches_the_handler();
  kernels_work_after_failures();
}
