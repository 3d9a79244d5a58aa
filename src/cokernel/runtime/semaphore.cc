// Counting semaphores. Everything but reading happens under the lock of the semaphore, the lowest
// bit of `waiters`; while a launch has a single worker the same steps are taken without it.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "abi.h"
#include "launch.h"
#include "processor.h"
#include "scheduler.h"

namespace cokernel {
namespace {

constexpr uintptr_t kLocked = 1;

Core* lock(Semaphore* semaphore) {
  Backoff backoff;
  uintptr_t word = semaphore->waiters.load(std::memory_order_relaxed) & ~kLocked;
  while (!semaphore->waiters.compare_exchange_weak(word, word | kLocked, std::memory_order_acquire,
                                                   std::memory_order_relaxed)) {
    if ((word & kLocked) != 0) backoff.wait();
    word &= ~kLocked;
  }
  return reinterpret_cast<Core*>(word);
}

void unlock(Semaphore* semaphore, Core* newest) {
  semaphore->waiters.store(reinterpret_cast<uintptr_t>(newest), std::memory_order_release);
}

int64_t count_of(const Semaphore* semaphore) {
  return semaphore->count.load(std::memory_order_relaxed);
}

void set_count(Semaphore* semaphore, int64_t count) {
  semaphore->count.store(count, std::memory_order_relaxed);
}

// Removes the waiters that can proceed from the ring, oldest first, and takes the semaphore for
// them. A waiter that needs more than there is does not hold up those behind it. Returns the newest
// one that is left; `ready` becomes the list of the removed ones.
Core* release_waiters(Semaphore* semaphore, Core* newest, int64_t count, Core** ready) {
  Core* previous = newest;
  Core* last_ready = nullptr;
  bool more = true;
  // A wait for zero or less never waits, so that nobody can proceed once the count is used up.
  while (more && count > 0) {
    Core* core = previous->next;
    more = core != newest;
    const int64_t value = core->value.load(std::memory_order_relaxed);
    if (value > count) {
      previous = core;
      continue;
    }
    if (core->decrement.load(std::memory_order_relaxed) != 0) count -= value;
    if (core == previous) {
      newest = nullptr;
      more = false;
    } else {
      previous->next = core->next;
      if (core == newest) newest = previous;
    }
    if (last_ready == nullptr) {
      *ready = core;
    } else {
      last_ready->next = core;
    }
    last_ready = core;
    core->next = nullptr;
  }
  set_count(semaphore, count);
  return newest;
}

}  // namespace
}  // namespace cokernel

using cokernel::Core;
using cokernel::CoreState;
using cokernel::Semaphore;

int32_t cokernel_semaphore_wait(Core* core, Semaphore* semaphore, int64_t value, int32_t decrement,
                                int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  ++core->waits;
  const bool together = core->launch->together;
  Core* newest = together
                     ? cokernel::lock(semaphore)
                     : reinterpret_cast<Core*>(semaphore->waiters.load(std::memory_order_relaxed));
  const int64_t count = cokernel::count_of(semaphore);
  if (count >= value) {
    if (decrement != 0) cokernel::set_count(semaphore, count - value);
    if (together) cokernel::unlock(semaphore, newest);
    return 1;
  }
  ++core->blocked;
  core->semaphore.store(semaphore, std::memory_order_relaxed);
  core->value.store(value, std::memory_order_relaxed);
  core->decrement.store(decrement != 0, std::memory_order_relaxed);
  core->state.store(CoreState::kSemaphore, std::memory_order_relaxed);
  if (newest == nullptr) {
    core->next = core;
  } else {
    core->next = newest->next;
    newest->next = core;
  }
  // From here on the core may be running elsewhere.
  cokernel::unlock(semaphore, core);
  return 0;
}

void cokernel_semaphore_signal(Core* core, Semaphore* semaphore, int64_t increment, int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  ++core->signals;
  Core* ready = nullptr;
  if (core->launch->together) {
    Core* newest = cokernel::lock(semaphore);
    const int64_t count = cokernel::count_of(semaphore) + increment;
    if (newest == nullptr) {
      cokernel::set_count(semaphore, count);
    } else {
      newest = cokernel::release_waiters(semaphore, newest, count, &ready);
    }
    cokernel::unlock(semaphore, newest);
  } else {
    auto* newest = reinterpret_cast<Core*>(semaphore->waiters.load(std::memory_order_relaxed));
    const int64_t count = cokernel::count_of(semaphore) + increment;
    if (newest == nullptr) {
      cokernel::set_count(semaphore, count);
    } else {
      newest = cokernel::release_waiters(semaphore, newest, count, &ready);
      semaphore->waiters.store(reinterpret_cast<uintptr_t>(newest), std::memory_order_relaxed);
    }
  }
  // To make a core ready may let helpers in, so the semaphore is left alone from here on.
  while (ready != nullptr) {
    Core* next = ready->next;
    core->worker->make_ready(ready);
    ready = next;
  }
}

int32_t cokernel_semaphore_read(Core*, Semaphore* semaphore) {
  const int64_t count = semaphore->count.load(std::memory_order_acquire);
  return static_cast<int32_t>(std::clamp<int64_t>(count, std::numeric_limits<int32_t>::min(),
                                                  std::numeric_limits<int32_t>::max()));
}
