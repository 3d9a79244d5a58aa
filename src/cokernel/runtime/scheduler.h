// Workers and their queues of ready cores. docs/runtime.md explains the states.
#pragma once

#include <atomic>
#include <cstdint>

#include "abi.h"
#include "processor.h"

namespace cokernel {

struct Launch;

// A first-in first-out list through Core::next. While a launch has a single worker that worker uses
// the `alone` functions, which take no lock.
class ReadyQueue {
 public:
  bool empty() const { return size_.load(std::memory_order_relaxed) == 0; }
  int32_t size() const { return size_.load(std::memory_order_relaxed); }
  // Changes whenever a core is taken.
  uint32_t taken() const { return taken_.load(std::memory_order_relaxed); }

  void push_alone(Core* core) {
    core->next = nullptr;
    append(core);
  }
  Core* pop_alone() { return empty() ? nullptr : remove(); }

  // False if the owner is absent.
  bool push(Core* core);
  Core* pop();
  // Under the lock, so that it sees every push that is not still to come.
  bool locked_empty();

  void open();
  // Marks the owner as absent and returns true, unless there is a core in the queue.
  bool close_if_empty();
  // Forgets what is queued. Nobody else may use the queue.
  void reset(bool open);

 private:
  void append(Core* core) {
    if (head_ == nullptr) {
      head_ = core;
    } else {
      tail_->next = core;
    }
    tail_ = core;
    size_.store(size() + 1, std::memory_order_relaxed);
  }
  Core* remove() {
    Core* core = head_;
    head_ = core->next;
    size_.store(size() - 1, std::memory_order_relaxed);
    taken_.store(taken() + 1, std::memory_order_relaxed);
    return core;
  }

  SpinLock lock_;
  bool open_ = false;
  std::atomic<int32_t> size_{0};
  std::atomic<uint32_t> taken_{0};
  Core* head_ = nullptr;
  Core* tail_ = nullptr;
};

// A thread's place in a launch. Worker 0 is the thread that launches.
struct alignas(kApart) Worker {
  ReadyQueue queue;

  // Only the thread that has this place uses what follows.
  alignas(kApart) Launch* launch = nullptr;
  int32_t index = 0;
  int32_t until_check = 1;     // Picks and wake-ups until the clock is read again,
  int32_t check_interval = 1;  // and from then to the next time.
  int64_t last_check_ns = 0;
  uint32_t picks = 0;
  bool start_next = false;  // A core has yielded: one that has not started goes first.

  // Runs cores until the launch is over. Only worker 0.
  void run_alone();
  // Runs cores until the launch is over or, for a helper, until there is nothing to do.
  void run_together();

  // Makes a core that nobody else refers to ready.
  void make_ready(Core* core);
  void begin(int64_t now);

 private:
  Core* pick_alone();
  Core* pick_together();
  Core* steal_any();
  // Waits for work. Returns a core, or null if the worker is to leave the launch.
  Core* idle();
  Core* look_around(int32_t& lone_victim, uint32_t& lone_taken, int& lone_rounds);
  void run(Core* core);
  void count_event(bool is_wake) {
    if (--until_check <= 0) consider_help(is_wake);
  }
  void consider_help(bool is_wake);
};

}  // namespace cokernel
