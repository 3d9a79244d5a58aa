// The barrier of the cores of one program and group.
#include "abi.h"
#include "launch.h"
#include "scheduler.h"

using cokernel::Barrier;
using cokernel::Core;
using cokernel::CoreState;

int32_t cokernel_barrier_wait(Core* core, int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  ++core->waits;
  Barrier& barrier = *core->barrier;
  const bool together = core->launch->together;
  if (together) barrier.lock.lock();
  const int64_t arrived = barrier.arrived.load(std::memory_order_relaxed) + 1;
  if (arrived < barrier.expected.load(std::memory_order_relaxed)) {
    ++core->blocked;
    core->state.store(CoreState::kBarrier, std::memory_order_relaxed);
    core->next = nullptr;
    if (barrier.first == nullptr) {
      barrier.first = core;
    } else {
      barrier.last->next = core;
    }
    barrier.last = core;
    barrier.arrived.store(arrived, std::memory_order_relaxed);
    // From here on the core may be running elsewhere.
    if (together) barrier.lock.unlock();
    return 0;
  }
  Core* ready = barrier.first;
  barrier.first = nullptr;
  barrier.last = nullptr;
  barrier.arrived.store(0, std::memory_order_relaxed);
  if (together) barrier.lock.unlock();
  while (ready != nullptr) {
    Core* next = ready->next;
    core->worker->make_ready(ready);
    ready = next;
  }
  return 1;
}
