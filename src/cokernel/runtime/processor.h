// What depends on the processor: the hint that a thread spins, and locks held for a few
// instructions.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <thread>

namespace cokernel {

// What two threads write often lies this far apart, so that they do not slow each other down. Two
// lines of 64 bytes, since x86-64 fetches pairs of lines and Apple's processors have lines of 128.
inline constexpr std::size_t kApart = 128;

// Tells the processor that this thread waits for another one.
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield" ::: "memory");
#endif
}

// How the processor treats tiny numbers and rounds. XLA sets its threads to flush denormals, and a
// core must compute the same on whichever thread it runs.
class FloatMode {
 public:
#if defined(__x86_64__)
  static FloatMode current() { return FloatMode(__builtin_ia32_stmxcsr()); }
  void apply() const { __builtin_ia32_ldmxcsr(static_cast<unsigned>(bits_)); }
#elif defined(__aarch64__)
  static FloatMode current() {
    uint64_t bits;
    asm volatile("mrs %0, fpcr" : "=r"(bits));
    return FloatMode(bits);
  }
  void apply() const { asm volatile("msr fpcr, %0" ::"r"(bits_)); }
#else
  static FloatMode current() { return FloatMode(0); }
  void apply() const {}
#endif
  FloatMode() = default;

 private:
  explicit FloatMode(uint64_t bits) : bits_(bits) {}
  uint64_t bits_ = 0;
};

// Waits a little longer each time it is called. After some 64 rounds it lets other threads of the
// machine run, because the one it waits for may have lost its processor.
class Backoff {
 public:
  void wait() {
    if (++rounds_ < 64) {
      relax();
    } else {
      std::this_thread::yield();
    }
  }

 private:
  int rounds_ = 0;
};

class SpinLock {
 public:
  void lock() {
    Backoff backoff;
    while (locked_.exchange(1, std::memory_order_acquire) != 0) {
      while (locked_.load(std::memory_order_relaxed) != 0) backoff.wait();
    }
  }
  void unlock() { locked_.store(0, std::memory_order_release); }

 private:
  std::atomic<uint32_t> locked_{0};
};

}  // namespace cokernel
