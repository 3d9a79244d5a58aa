// Why a launch failed, as numbers; `Hooks::report` makes a text of it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "abi.h"

namespace cokernel {

enum class FailureKind {
  kNone,
  kDeadlock,
  kOutOfBounds,
  kCheck,
  kCallback,
  kTimeLimit,
  kInterrupted,
  kInternal,
};

const char* name_of(FailureKind kind);
const char* name_of(CoreState state);

enum class MemoryOwner { kUnknown, kPrivate, kShared, kDevice, kBuffer };

const char* name_of(MemoryOwner owner);

// Where a semaphore or another piece of memory lies.
struct Place {
  MemoryOwner owner = MemoryOwner::kUnknown;
  int32_t index = -1;    // kPrivate: the core in its mesh; kShared: the group; kBuffer: the buffer.
  int32_t program = -1;  // kPrivate: the program of that core.
  int64_t offset = 0;    // In bytes, from the start of the block.
};

struct CoreSnapshot {
  int32_t program;
  int32_t index;
  int32_t group;
  int32_t coordinates[4];
  CoreState state;
  int32_t site;
  // In state kSemaphore:
  Place place;
  int64_t count = 0;
  int64_t value = 0;
  bool decrement = false;
  // In state kBarrier:
  int64_t arrived = 0;
  int64_t expected = 0;
};

struct Failure {
  FailureKind kind = FailureKind::kNone;
  // The core that failed; program is -1 if it was none in particular.
  int32_t program = -1;
  int32_t index = 0;
  int32_t group = 0;
  int32_t coordinates[4] = {0, 0, 0, 0};
  int32_t site = -1;
  // kOutOfBounds
  int32_t dimension = 0;
  int64_t start = 0;
  int64_t size = 0;
  int64_t extent = 0;
  int64_t position = -1;  // Where in an array of indices; below zero: in none.
  // kCheck
  int32_t code = 0;
  int64_t value = 0;
  // kCallback and kInternal
  int32_t callback = -1;
  std::string exception_type;
  std::string text;
  // kTimeLimit and kInterrupted
  double limit_s = 0;
  double elapsed_s = 0;
  // kDeadlock, kTimeLimit and kInterrupted: all cores of the launch, programs in order.
  std::vector<CoreSnapshot> cores;
};

Place place_of(const Launch& launch, const void* address);

// Sees the cores as they are now; they may be running.
std::vector<CoreSnapshot> snapshot_cores(const Launch& launch);

}  // namespace cokernel
