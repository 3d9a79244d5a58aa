// What compiled code calls besides semaphores, barriers and copies.
#include <time.h>

#include <cstdint>
#include <utility>

#include "abi.h"
#include "launch.h"
#include "platform.h"
#include "scheduler.h"

using cokernel::Core;
using cokernel::CoreState;
using cokernel::Failure;
using cokernel::FailureKind;
using cokernel::Launch;

void cokernel_yield(Core* core, int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  core->state.store(CoreState::kReady, std::memory_order_relaxed);
  cokernel::Worker* worker = core->worker;
  worker->start_next = true;
  if (worker->launch->together) {
    worker->queue.push(core);
  } else {
    worker->queue.push_alone(core);
  }
}

void* cokernel_frame(Core* core, int64_t bytes) {
  if (bytes > core->frame_bytes) core->launch->allocate_frame(core, bytes);
  core->handle = core->frame;
  return core->frame;
}

void cokernel_finish(Core* core) {
  Launch* launch = core->launch;
  core->state.store(CoreState::kFinished, std::memory_order_relaxed);
  if (!launch->together) {
    launch->unfinished.store(launch->unfinished.load(std::memory_order_relaxed) - 1,
                             std::memory_order_relaxed);
  } else if (launch->unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) {
    launch->set_done();
  }
}

void cokernel_fail_index(Core* core, int32_t site, int32_t dimension, int64_t start, int64_t size,
                         int64_t extent) {
  Failure failure;
  failure.kind = FailureKind::kOutOfBounds;
  failure.dimension = dimension;
  failure.start = start;
  failure.size = size;
  failure.extent = extent;
  core->launch->fail_at(core, site, std::move(failure));
}

void cokernel_fail_picked(Core* core, int32_t site, int32_t dimension, int64_t index,
                          int64_t extent, int64_t position) {
  Failure failure;
  failure.kind = FailureKind::kOutOfBounds;
  failure.dimension = dimension;
  failure.start = index;
  failure.size = 1;
  failure.extent = extent;
  failure.position = position;
  core->launch->fail_at(core, site, std::move(failure));
}

void cokernel_fail(Core* core, int32_t site, int32_t code, int64_t value) {
  Failure failure;
  failure.kind = FailureKind::kCheck;
  failure.code = code;
  failure.value = value;
  core->launch->fail_at(core, site, std::move(failure));
}

int32_t cokernel_callback(Core* core, int32_t callback, void** operands, void** results,
                          int32_t site) {
  core->site.store(site, std::memory_order_relaxed);
  Failure failure;
  failure.kind = FailureKind::kCallback;
  failure.callback = callback;
  cokernel::Hooks* hooks = core->launch->executable.spec.hooks.get();
  if (hooks == nullptr) {
    failure.text = "the executable has no callbacks";
  } else if (hooks->call(*core, callback, operands, results, failure)) {
    return 0;
  }
  core->launch->fail_at(core, site, std::move(failure));
  return 1;
}

void cokernel_delay(Core* core, int64_t nanoseconds) {
  // Long delays leave the processor to others, a millisecond at a time so that a stop is seen soon.
  constexpr int64_t kSpinNs = 100'000;
  constexpr int64_t kSliceNs = 1'000'000;
  const int64_t end = cokernel::now_ns() + nanoseconds;
  while (core->launch->stop.load(std::memory_order_relaxed) == 0) {
    const int64_t left = end - cokernel::now_ns();
    if (left <= 0) return;
    if (left < kSpinNs) {
      cokernel::relax();
      continue;
    }
    const int64_t slice = left - kSpinNs / 2 < kSliceNs ? left - kSpinNs / 2 : kSliceNs;
    const timespec time{0, static_cast<long>(slice)};
    nanosleep(&time, nullptr);
  }
}
