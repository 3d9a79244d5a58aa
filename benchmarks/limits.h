// What the peers written by hand share: threads, clocks and memory.
//
// benchmarks/native.py builds limits.cc, movement.cc and arithmetic.cc with -O3 -march=native and
// calls them through ctypes. Every function runs its work `repetitions` times and returns the
// median time of one, in seconds. A null `out` means memory that is allocated for each repetition,
// as XLA allocates the result of a kernel.

#pragma once

#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

inline constexpr int64_t kSubcores = 32;
inline constexpr int64_t kLanes = 16;
// The widest vectors of which the registers hold a dozen and a few.
#if defined(__AVX512F__)
inline constexpr int64_t kVectorBytes = 64;
#elif defined(__AVX__)
inline constexpr int64_t kVectorBytes = 32;
#else
inline constexpr int64_t kVectorBytes = 16;
#endif

inline double seconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Tells the processor that this is a loop that waits.
inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads that spin between pieces of work, so that no time goes into waking them.
class Team {
 public:
  explicit Team(int threads) : threads_(threads), caller_processor_(processor()) {
    for (int thread = 1; thread < threads; ++thread) {
      helpers_.emplace_back([this, thread] { help(thread); });
    }
  }

  ~Team() {
    stop_ = true;
    for (auto& helper : helpers_) helper.join();
  }

  // Calls work(subcore) for every subcore, dealt out to the threads in turn.
  void run(const std::function<void(int64_t)>& work) {
    work_ = &work;
    busy_ = threads_ - 1;
    generation_.fetch_add(1, std::memory_order_release);
    deal(0);
    while (busy_.load(std::memory_order_acquire) != 0) pause();
  }

 private:
  void deal(int thread) {
    for (int64_t subcore = thread; subcore < kSubcores; subcore += threads_) (*work_)(subcore);
  }

  static int processor() {
#if defined(__linux__)
    return sched_getcpu();
#else
    return -1;
#endif
  }

  // A scheduler may leave threads that spin on the processor of their caller, to take turns with it
  // while others idle; Cokernel keeps its threads off it too.
  void leave_caller() {
#if defined(__linux__)
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
    CPU_CLR(caller_processor_, &allowed);
    sched_setaffinity(0, sizeof(allowed), &allowed);
#endif
  }

  void help(int thread) {
    leave_caller();
    for (int64_t seen = 0;;) {
      while (generation_.load(std::memory_order_acquire) == seen) {
        if (stop_.load(std::memory_order_relaxed)) return;
        pause();
      }
      ++seen;
      deal(thread);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  const int threads_;
  const int caller_processor_;
  std::vector<std::thread> helpers_;
  const std::function<void(int64_t)>* work_ = nullptr;
  std::atomic<int64_t> generation_{0};
  std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
};

inline double median_time(int64_t repetitions, const std::function<void()>& work) {
  work();
  std::vector<double> times;
  for (int64_t i = 0; i < repetitions; ++i) {
    double start = seconds();
    work();
    times.push_back(seconds() - start);
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

// New memory for a result, in large pages where the system offers them on request, as Cokernel asks
// for them too.
inline float* allocate(int64_t size) {
  constexpr size_t kLargePage = size_t{2} << 20;
  size_t bytes = size * sizeof(float);
  bool large = bytes >= 2 * kLargePage;
  size_t alignment = large ? kLargePage : 64;
  bytes = (bytes + alignment - 1) / alignment * alignment;
  void* block = std::aligned_alloc(alignment, bytes);
#if defined(MADV_HUGEPAGE)
  if (large) madvise(block, bytes, MADV_HUGEPAGE);
#endif
  return static_cast<float*>(block);
}

// Runs work(subcore, out) on all subcores, with memory of `size` floats for the result.
inline double run_on_subcores(int threads, int64_t repetitions, int64_t size, float* out,
                              const std::function<void(int64_t, float*)>& work) {
  Team team(threads);
  return median_time(repetitions, [&] {
    float* target = out ? out : allocate(size);
    team.run([&](int64_t subcore) { work(subcore, target); });
    if (!out) std::free(target);
  });
}
