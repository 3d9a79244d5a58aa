// What compiled programs and the runtime agree on: the structures both read, and the functions
// compiled code calls.
//
// The compiler addresses the fields of Core and Launch by the offsets that the extension module
// exports (`_runtime.abi_offsets()`), so a field may move; what a field means may not change
// without the compiler.
#pragma once

#include <atomic>
#include <cstdint>

namespace cokernel {

struct Barrier;
struct Launch;
struct Worker;

// A counting semaphore. All zero bytes is a semaphore that counts zero and has no waiters, so a
// block of them is initialised with memset.
struct Semaphore {
  std::atomic<int64_t> count;
  // The newest of the cores that wait, as a pointer to Core, or 0. The waiters form a ring through
  // Core::next, in which the newest is followed by the oldest. The lowest bit is the lock of this
  // semaphore.
  std::atomic<uintptr_t> waiters;
};
static_assert(sizeof(Semaphore) == 16);

enum class CoreState : uint8_t {
  kUnstarted,
  kReady,
  kRunning,
  kSemaphore,  // Waits for a semaphore.
  kBarrier,    // Waits in a barrier.
  kFinished,
};

// One point of a mesh during one launch. Compiled code receives a pointer to it as its only
// argument. Only the fields up to `dma_bytes` are read or written by compiled code.
struct alignas(64) Core {
  Launch* launch;
  char* memory;    // This core's private block: semaphores first, then VMEM, SMEM and temporaries.
  char* shared;    // The block its SparseCore (or CoreMesh) shares; null where the mesh has none.
  char* device;    // The block all cores of the launch share (HBM scratch).
  void** buffers;  // Kernel operands and then results, in the order of the custom call.
  int32_t coordinates[4];  // The position on each axis of the mesh, in the order of `mesh.shape`.
  int32_t index;           // The row-major position in the mesh.
  int32_t group;           // Which shared block this core uses.
  int32_t program;         // Which program of the kernel it runs.
  int32_t reserved;
  int64_t dma_count;  // Counted by compiled code: DMAs started, and the bytes they moved.
  int64_t dma_bytes;

  // What follows is the runtime's own. Atomic fields are those that a report may read while the
  // core runs; only the worker that runs the core writes them, or the one that wakes it.
  // The coroutine, once it has its frame. Compiled code stores it here as well: LLVM then knows
  // that others see the frame, and does not move a store into it behind a call that publishes the
  // core.
  void* handle;
  union {
    void* (*ramp)(Core*);     // If is_coroutine,
    void (*function)(Core*);  // otherwise.
  } entry;
  Worker* worker;  // Runs the core, or ran it last: the home to which it is woken.
  Core* next;      // In a queue of ready cores, or in the ring of waiters.
  std::atomic<Semaphore*> semaphore;  // In state kSemaphore: for what it waits,
  std::atomic<int64_t> value;         // how much it needs,
  std::atomic<uint8_t> decrement;     // and whether it takes that.
  std::atomic<CoreState> state;
  bool is_coroutine;
  std::atomic<int32_t> site;  // The last call that named a site; -1 before.
  int64_t waits;              // Statistics of this launch.
  int64_t blocked;
  int64_t signals;
  int64_t resumes;
  Barrier* barrier;  // Of its program and group.
  void* frame;       // Memory for the coroutine frame, kept from launch to launch.
  int64_t frame_bytes;
};

// The part of a launch that compiled code reads.
struct LaunchHeader {
  std::atomic<int32_t> stop;  // Nonzero: leave the program. Polled in loops.
  Core* cores;                // All of them: programs in order, row-major in each mesh.
  char* shared_memory;        // The shared blocks; group g begins at g * align64(shared_bytes).
};

}  // namespace cokernel

extern "C" {

// Every function takes the core that calls it. `site` is the number of the place in the user's
// program, an index into the table of sites that the compiler hands over with the executable; the
// runtime only passes it on to reports.
//
// A function that may ask the caller to suspend publishes the core before it returns: from then on
// another thread may resume it. So the coroutine is saved (llvm.coro.save) before the call, and
// nothing but the suspension follows it.

// Takes `value` from the semaphore (or only looks, if `decrement` is 0) and returns 1, or makes the
// core a waiter and returns 0: compiled code must then suspend. When the core is resumed the
// semaphore has been taken on its behalf. An acquire operation.
int32_t cokernel_semaphore_wait(cokernel::Core* core, cokernel::Semaphore* semaphore, int64_t value,
                                int32_t decrement, int32_t site);

// Adds to the semaphore and makes the waiters that can now proceed ready, oldest first. A release
// operation.
void cokernel_semaphore_signal(cokernel::Core* core, cokernel::Semaphore* semaphore,
                               int64_t increment, int32_t site);

// The count, limited to the range of int32.
int32_t cokernel_semaphore_read(cokernel::Core* core, cokernel::Semaphore* semaphore);

// Joins the barrier of the core's group (all cores of its program with the same group). Returns 1
// for the core that completes it, which goes on at once; 0 for the others, which must suspend.
int32_t cokernel_barrier_wait(cokernel::Core* core, int32_t site);

// Puts the core at the end of its ready queue; compiled code must suspend after it. Keeps polling
// loops fair.
void cokernel_yield(cokernel::Core* core, int32_t site);

// The memory of the core's coroutine frame, aligned to 64 bytes; it lives until the launch ends.
// Its address must be the handle of the coroutine (llvm.coro.begin returns the memory it is given).
// Ends the process in the unlikely case that there is no memory for it: a ramp has no way out.
void* cokernel_frame(cokernel::Core* core, int64_t bytes);

// The program of this core has ended, well or by a failure. The last call a coroutine makes.
void cokernel_finish(cokernel::Core* core);

// Records the first failure of the launch and sets `LaunchHeader::stop`. Compiled code then leaves
// the program. [start, start + size) was asked of dimension `dimension`, which has `extent`
// elements.
void cokernel_fail_index(cokernel::Core* core, int32_t site, int32_t dimension, int64_t start,
                         int64_t size, int64_t extent);
// The same of one index, which an array of indices has at a position.
void cokernel_fail_picked(cokernel::Core* core, int32_t site, int32_t dimension, int64_t index,
                          int64_t extent, int64_t position);
// `code` selects one of the messages of the site (a failed check, a bad device_id, a negative
// count,
// ...); `value` goes into it.
void cokernel_fail(cokernel::Core* core, int32_t site, int32_t code, int64_t value);

// Calls Python: `operands` and `results` point at dense row-major arrays described by callback
// number `callback` of the executable. Returns 0, or 1 if Python raised, which is recorded as the
// launch's failure.
int32_t cokernel_callback(cokernel::Core* core, int32_t callback, void** operands, void** results,
                          int32_t site);

// Waits, or returns early if the launch stops.
void cokernel_delay(cokernel::Core* core, int64_t nanoseconds);

// Copies a strided block: `rank` extents, and strides in bytes. For what is not one or a few
// contiguous runs. Source and target may be the same block, but may not overlap otherwise.
void cokernel_copy(void* target, const void* source, int64_t element_bytes, int64_t rank,
                   const int64_t* extents, const int64_t* target_strides,
                   const int64_t* source_strides);
}
