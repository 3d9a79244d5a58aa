// What the machine can do: its memory, its arithmetic, and the ways to wake a thread.

#include "limits.h"

#include <condition_variable>
#include <cstring>
#include <mutex>

namespace {

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

// Reads `read` bytes and writes `written` bytes with all threads, as fast as their memory allows.
double traffic(int64_t read, int64_t written, int threads, int64_t repetitions) {
  constexpr int64_t kPiece = 4096;
  const int64_t pieces = (std::max(read, written) + kPiece - 1) / kPiece;
  std::vector<char> source(read + 1, 1), target(written + 1, 1);
  std::atomic<int64_t> seen{0};
  return run_on_subcores(threads, repetitions, 0, nullptr, [&](int64_t subcore, float*) {
    int64_t sum = 0;
    const int64_t end = (subcore + 1) * pieces / kSubcores;
    for (int64_t piece = subcore * pieces / kSubcores; piece < end; ++piece) {
      const int64_t from = piece * read / pieces, to = (piece + 1) * read / pieces;
      const int64_t start = piece * written / pieces, stop = (piece + 1) * written / pieces;
      if (read == written) {
        std::memcpy(&target[start], &source[from], to - from);
        continue;
      }
      for (int64_t i = from; i < to; i += 64) sum += source[i];
      std::memset(&target[start], static_cast<int>(piece), stop - start);
    }
    seen += sum;
  });
}

// Does `count` multiplications with additions in float32 with all threads, in registers.
double multiply_adds(int64_t count, int threads, int64_t repetitions) {
  // Enough independent sums, in the widest vectors, that the units never wait for a result.
  constexpr int kSums = 12;
  using Vector __attribute__((vector_size(kVectorBytes))) = float;
  const int64_t steps = count / (kSubcores * kSums * (kVectorBytes / sizeof(float)));
  std::atomic<int> seen{0};
  return run_on_subcores(threads, repetitions, 0, nullptr, [&](int64_t, float*) {
    Vector sums[kSums] = {};
    Vector scale = Vector{} + 0.5f, shift = Vector{} + 1.0f;
    asm volatile("" : "+m"(scale), "+m"(shift));
    for (int64_t step = 0; step < steps; ++step) {
      for (Vector& sum : sums) sum = sum * scale + shift;
    }
    Vector total{};
    for (Vector& sum : sums) total += sum;
    seen += static_cast<int>(total[0]);
  });
}

}  // extern "C"
