// What the machine can do: the movement and the arithmetic of the benchmark kernels, written by
// hand.
//
// benchmarks/native.py builds this with -O3 -march=native and calls it through ctypes. Every
// function runs its work `repetitions` times and returns the median time of one, in seconds. A null
// `out` means memory that is allocated for each repetition, as XLA allocates the result of a
// kernel.

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace {

constexpr int64_t kSubcores = 32;
constexpr int64_t kLanes = 16;

double seconds() {
  auto now = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(now).count();
}

// Tells the processor that this is a loop that waits.
void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Threads that spin between pieces of work, so that no time goes into waking them.
class Team {
 public:
  explicit Team(int threads) : threads_(threads) {
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

  void help(int thread) {
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
  std::vector<std::thread> helpers_;
  const std::function<void(int64_t)>* work_ = nullptr;
  std::atomic<int64_t> generation_{0};
  std::atomic<int> busy_{0};
  std::atomic<bool> stop_{false};
};

double median_time(int64_t repetitions, const std::function<void()>& work) {
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
float* allocate(int64_t size) {
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
double run_on_subcores(int threads, int64_t repetitions, int64_t size, float* out,
                       const std::function<void(int64_t, float*)>& work) {
  Team team(threads);
  return median_time(repetitions, [&] {
    float* target = out ? out : allocate(size);
    team.run([&](int64_t subcore) { work(subcore, target); });
    if (!out) std::free(target);
  });
}

// Two cores and what they do next, for a round trip without threads: the least a scheduler can do.
struct Core {
  Core* other;
  int64_t semaphore;
  int64_t done;
  bool waiting;
};

}  // namespace

extern "C" {

// A round trip between two threads that sleep on a condition variable.
double round_trip_condition_variable(int64_t rounds) {
  std::mutex mutex;
  std::condition_variable changed;
  int turn = 0;
  auto play = [&](int me) {
    std::unique_lock<std::mutex> lock(mutex);
    for (int64_t round = 0; round < rounds; ++round) {
      changed.wait(lock, [&] { return turn == me; });
      turn = 1 - me;
      changed.notify_one();
    }
  };
  std::thread other(play, 1);
  double start = seconds();
  play(0);
  other.join();
  return (seconds() - start) / static_cast<double>(rounds);
}

// A round trip between two threads that spin on two counters.
double round_trip_two_threads(int64_t rounds) {
  alignas(64) std::atomic<int64_t> ping{0};
  alignas(64) std::atomic<int64_t> pong{0};
  std::thread other([&] {
    for (int64_t round = 1; round <= rounds; ++round) {
      while (ping.load(std::memory_order_acquire) < round) pause();
      pong.store(round, std::memory_order_release);
    }
  });
  double start = seconds();
  for (int64_t round = 1; round <= rounds; ++round) {
    ping.store(round, std::memory_order_release);
    while (pong.load(std::memory_order_acquire) < round) pause();
  }
  other.join();
  return (seconds() - start) / static_cast<double>(rounds);
}

// A round trip between two cores that one thread runs in turn, through a queue of those that can go
// on.
double round_trip_one_thread(int64_t rounds) {
  Core cores[2] = {{&cores[1], 0, 0, false}, {&cores[0], 0, 0, false}};
  cores[0].semaphore = 1;
  Core* queue[2] = {&cores[0], &cores[1]};
  int64_t head = 0, tail = 2;
  double start = seconds();
  while (head != tail) {
    Core* core = queue[head++ & 1];
    // The compiler must not see through the switch from one core to the other.
    asm volatile("" : "+r"(core) : : "memory");
    while (core->done < rounds) {
      if (core->semaphore == 0) {
        core->waiting = true;
        break;
      }
      --core->semaphore;
      ++core->done;
      ++core->other->semaphore;
      if (core->other->waiting) {
        core->other->waiting = false;
        queue[tail++ & 1] = core->other;
      }
    }
  }
  return (seconds() - start) / static_cast<double>(rounds);
}

// out[i] = table[indices[i]], by windows of rows that are first collected in memory of the
// subcore's own.
double gather(const float* table, const int32_t* indices, float* out, int64_t rows, int64_t width,
              int64_t window, int threads, int64_t repetitions) {
  const int64_t share = rows / kSubcores;
  return run_on_subcores(threads, repetitions, rows * width, out, [=](int64_t subcore, float* to) {
    std::vector<int32_t> chosen(window);
    std::vector<float> collected(window * width);
    for (int64_t row = subcore * share; row < (subcore + 1) * share; row += window) {
      std::memcpy(chosen.data(), indices + row, window * sizeof(int32_t));
      for (int64_t i = 0; i < window; ++i) {
        std::memcpy(&collected[i * width], table + chosen[i] * width, width * sizeof(float));
      }
      std::memcpy(to + row * width, collected.data(), window * width * sizeof(float));
    }
  });
}

// out = x * 2 + 1, by windows that are copied into memory of the subcore's own and out of it.
double affine(const float* x, float* out, int64_t size, int64_t window, int threads,
              int64_t repetitions) {
  const int64_t share = size / kSubcores;
  return run_on_subcores(threads, repetitions, size, out, [=](int64_t subcore, float* to) {
    std::vector<float> in(window), result(window);
    for (int64_t at = subcore * share; at < (subcore + 1) * share; at += window) {
      std::memcpy(in.data(), x + at, window * sizeof(float));
      for (int64_t i = 0; i < window; ++i) result[i] = in[i] * 2 + 1;
      std::memcpy(to + at, result.data(), window * sizeof(float));
    }
  });
}

// Iterates x -> 2.9 x (1 - x) on sixteen lanes for each subcore.
double iterate(const float* x, float* out, int64_t steps, int threads, int64_t repetitions) {
  const int64_t size = kSubcores * kLanes;
  return run_on_subcores(threads, repetitions, size, out, [=](int64_t subcore, float* to) {
    float lanes[kLanes];
    std::memcpy(lanes, x + subcore * kLanes, sizeof lanes);
    for (int64_t step = 0; step < steps; ++step) {
      for (float& lane : lanes) lane = 2.9f * lane * (1 - lane);
    }
    std::memcpy(to + subcore * kLanes, lanes, sizeof lanes);
  });
}

}  // extern "C"
