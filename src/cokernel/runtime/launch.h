// One execution of a kernel. The object and its memory are used again by later launches of the same
// executable.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "abi.h"
#include "executable.h"
#include "failure.h"
#include "instances.h"
#include "processor.h"
#include "scheduler.h"

namespace cokernel {

namespace checked {
class State;
}

struct Buffer {
  void* data = nullptr;
  int64_t bytes = 0;  // 0: not known.
};

// The cores of one program and group meet here.
struct alignas(kApart) Barrier {
  std::atomic<int64_t> arrived{0};
  std::atomic<int64_t> expected{0};
  SpinLock lock;
  Core* first = nullptr;  // The waiting cores, in the order in which they came.
  Core* last = nullptr;
};

struct Launch : LaunchHeader {
  explicit Launch(Executable& executable);
  ~Launch();
  Launch(const Launch&) = delete;
  Launch& operator=(const Launch&) = delete;

  // Runs the kernel. False if it failed; `failure` then says why.
  bool run(const Buffer* buffers, int32_t count);

  // The memory it holds between launches.
  int64_t kept_bytes() const;

  // --- What follows is called by workers, the pool, the watchdog and compiled code. ---

  // True for the first failure: the caller then fills in `failure` and calls request_stop().
  bool claim_failure() { return !failure_claimed.exchange(true, std::memory_order_acq_rel); }
  void fail_at(Core* core, int32_t site, Failure&& description);
  void fail_deadlocked();
  void request_stop();
  // All cores have finished.
  void set_done();
  bool is_over() const { return over.load(std::memory_order_acquire); }

  int32_t unstarted_count() const {
    const uint64_t taken = taken_cores.load(std::memory_order_relaxed);
    return core_count - static_cast<int32_t>(taken & kFromFront) -
           static_cast<int32_t>(taken >> 32);
  }
  bool has_unstarted() const { return unstarted_count() > 0; }
  Core* take_unstarted_alone();
  Core* take_unstarted(bool from_back);

  // Lets helpers in, if that has not been done, and asks for some.
  void ask_for_help(int32_t helpers);

  // Worker 0 has seen no work for a while. Returns when there may be some or the launch is over.
  void sleep_until_work();
  void wake_sleeper();

  // A worker has found nothing to do. If it was the last one, the launch is deadlocked.
  void became_idle();
  // A worker has seen work. Called before it takes it.
  void became_busy() { activity.fetch_add(kBusyAgain, std::memory_order_acq_rel); }

  // Gives the core memory for its frame, which it keeps for later launches.
  void allocate_frame(Core* core, int64_t bytes) noexcept;

  // `activity` holds the number of busy workers in its lower half, and in its upper half how often
  // a worker has become busy.
  static constexpr uint64_t kBusyAgain = (uint64_t{1} << 32) + 1;
  static constexpr uint64_t kBusyMask = (uint64_t{1} << 32) - 1;

  // Written before helpers are let in, and read by all.
  Executable& executable;
  int32_t core_count = 0;
  int32_t worker_limit = 1;
  bool together = false;  // Helpers may be in: locks are needed. Worker 0 sets it.
  FloatMode float_mode;   // Of the thread that launches; helpers compute in the same.
  int64_t start_ns = 0;
  int64_t help_after_ns = 0;
  std::atomic<bool> over{false};
  std::atomic<bool> sleeping{false};  // Worker 0 sleeps, or is about to.
  std::unique_ptr<Worker[]> workers;
  std::vector<void*> buffers;
  std::vector<int64_t> buffer_bytes;

  alignas(kApart) std::atomic<uint64_t> activity{0};
  // How many cores have been handed out from the front, in the lower half, and from the back.
  // Neighbouring cores often work on neighbouring memory, which two workers had better not touch
  // at the same time for the first time: worker 0 takes from the front and helpers from the back.
  alignas(kApart) std::atomic<uint64_t> taken_cores{0};
  static constexpr uint64_t kFromFront = (uint64_t{1} << 32) - 1;
  alignas(kApart) std::atomic<int32_t> unfinished{0};

  // The pool's. The counts are written under its mutex.
  alignas(kApart) std::atomic<int32_t> helpers_inside{0};
  std::atomic<int32_t> helpers_wanted{0};
  std::atomic<int32_t> worker_slots{1};  // One more than the highest place ever used.
  std::vector<uint8_t> slot_used;
  bool listed = false;

  // The watchdog's.
  Launch* watchdog_previous = nullptr;
  Launch* watchdog_next = nullptr;

  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<bool> failure_claimed{false};
  Failure failure;

  // Null in native mode. Set by who launches.
  checked::State* checked = nullptr;

 private:
  void prepare(const Buffer* buffers, int32_t count);
  void run_cores();
  void forget_waiters();
  void finish_statistics(int64_t nanoseconds, bool failed);

  char* block_ = nullptr;
  std::unique_ptr<Barrier[]> barriers_;
  SpinLock frame_lock_;
  std::vector<char*> frame_chunks_;
  char* frame_free_ = nullptr;
  int64_t frame_left_ = 0;
  int64_t frame_bytes_ = 0;
  InstanceUse instances_;
  ExecutableStatistics of_launch_;
};

// Runs an executable and returns the text of the error, empty if there was none.
std::string launch_executable(const std::shared_ptr<Executable>& executable, const Buffer* buffers,
                              int32_t count);

}  // namespace cokernel
