#include "failure.h"

#include "launch.h"

namespace cokernel {

const char* name_of(FailureKind kind) {
  switch (kind) {
    case FailureKind::kNone:
      return "None";
    case FailureKind::kDeadlock:
      return "Deadlock";
    case FailureKind::kOutOfBounds:
      return "OutOfBounds";
    case FailureKind::kCheck:
      return "Check";
    case FailureKind::kCallback:
      return "Callback";
    case FailureKind::kTimeLimit:
      return "TimeLimit";
    case FailureKind::kInterrupted:
      return "Interrupted";
    case FailureKind::kInternal:
      return "Internal";
  }
  return "Internal";
}

const char* name_of(CoreState state) {
  switch (state) {
    case CoreState::kUnstarted:
      return "unstarted";
    case CoreState::kReady:
      return "ready";
    case CoreState::kRunning:
      return "running";
    case CoreState::kSemaphore:
      return "semaphore";
    case CoreState::kBarrier:
      return "barrier";
    case CoreState::kFinished:
      return "finished";
  }
  return "unknown";
}

const char* name_of(MemoryOwner owner) {
  switch (owner) {
    case MemoryOwner::kUnknown:
      return "unknown";
    case MemoryOwner::kPrivate:
      return "private";
    case MemoryOwner::kShared:
      return "shared";
    case MemoryOwner::kDevice:
      return "device";
    case MemoryOwner::kBuffer:
      return "buffer";
  }
  return "unknown";
}

namespace {

// The distance from `start` to `address` if that lies in the `bytes` from there, else -1.
int64_t offset_in(const void* address, const void* start, int64_t bytes) {
  const auto distance = static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) -
                                             reinterpret_cast<uintptr_t>(start));
  return distance >= 0 && distance < bytes ? distance : -1;
}

}  // namespace

Place place_of(const Launch& launch, const void* address) {
  const Executable& executable = launch.executable;
  Place place;
  for (size_t p = 0; p < executable.programs.size(); ++p) {
    const Executable::Program& program = executable.programs[p];
    const int64_t all = program.private_stride * program.core_count;
    const int64_t offset = offset_in(address, launch.cores[program.first_core].memory, all);
    if (offset < 0) continue;
    place.owner = MemoryOwner::kPrivate;
    place.program = static_cast<int32_t>(p);
    place.index = static_cast<int32_t>(offset / program.private_stride);
    place.offset = offset % program.private_stride;
    return place;
  }
  if (executable.shared_stride > 0) {
    const int64_t all = executable.shared_stride * executable.spec.group_count;
    const int64_t offset = offset_in(address, launch.shared_memory, all);
    if (offset >= 0) {
      place.owner = MemoryOwner::kShared;
      place.index = static_cast<int32_t>(offset / executable.shared_stride);
      place.offset = offset % executable.shared_stride;
      return place;
    }
  }
  if (executable.spec.device_bytes > 0) {
    const int64_t offset = offset_in(address, launch.cores[0].device, executable.spec.device_bytes);
    if (offset >= 0) {
      place.owner = MemoryOwner::kDevice;
      place.offset = offset;
      return place;
    }
  }
  for (size_t b = 0; b < launch.buffers.size(); ++b) {
    const int64_t offset = offset_in(address, launch.buffers[b], launch.buffer_bytes[b]);
    if (offset < 0) continue;
    place.owner = MemoryOwner::kBuffer;
    place.index = static_cast<int32_t>(b);
    place.offset = offset;
    return place;
  }
  return place;
}

std::vector<CoreSnapshot> snapshot_cores(const Launch& launch) {
  std::vector<CoreSnapshot> snapshots;
  snapshots.reserve(launch.core_count);
  for (int32_t i = 0; i < launch.core_count; ++i) {
    const Core& core = launch.cores[i];
    CoreSnapshot snapshot{};
    snapshot.program = core.program;
    snapshot.index = core.index;
    snapshot.group = core.group;
    for (int axis = 0; axis < 4; ++axis) snapshot.coordinates[axis] = core.coordinates[axis];
    snapshot.state = core.state.load(std::memory_order_relaxed);
    snapshot.site = core.site.load(std::memory_order_relaxed);
    if (snapshot.state == CoreState::kSemaphore) {
      const Semaphore* semaphore = core.semaphore.load(std::memory_order_relaxed);
      if (semaphore != nullptr) {
        snapshot.place = place_of(launch, semaphore);
        snapshot.count = semaphore->count.load(std::memory_order_relaxed);
      }
      snapshot.value = core.value.load(std::memory_order_relaxed);
      snapshot.decrement = core.decrement.load(std::memory_order_relaxed) != 0;
    } else if (snapshot.state == CoreState::kBarrier) {
      snapshot.arrived = core.barrier->arrived.load(std::memory_order_relaxed);
      snapshot.expected = core.barrier->expected.load(std::memory_order_relaxed);
    }
    snapshots.push_back(snapshot);
  }
  return snapshots;
}

}  // namespace cokernel
