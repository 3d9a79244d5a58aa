#include "watchdog.h"

#include <atomic>
#include <chrono>

#include "launch.h"
#include "platform.h"

namespace cokernel {

namespace {

constexpr std::chrono::milliseconds kTick{10};
// A launch that has lasted this long is watched for Ctrl-C: until then the program's own handling
// of it is soon enough.
constexpr int64_t kLongNs = 100'000'000;
// Ticks without a launch after which the thread sleeps until there is one.
constexpr int kQuietTicks = 100;

std::atomic<Watchdog*> the_watchdog{nullptr};
std::once_flag watchdog_once;

void fail(Launch& launch, FailureKind kind, double elapsed_s) {
  if (!launch.claim_failure()) return;
  launch.failure = Failure();
  launch.failure.kind = kind;
  launch.failure.elapsed_s = elapsed_s;
  launch.failure.limit_s = launch.executable.spec.time_limit_s;
  launch.failure.cores = snapshot_cores(launch);
  launch.request_stop();
}

}  // namespace

Watchdog& Watchdog::get() {
  std::call_once(watchdog_once, [] {
    the_watchdog.store(new Watchdog);
    // The thread of the parent does not exist in a child, and the watchdog may have been locked.
    after_fork_in_child([] { the_watchdog.store(new Watchdog); });
  });
  return *the_watchdog.load(std::memory_order_relaxed);
}

void Watchdog::add(Launch* launch) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!started_) {
    start_thread("cokernel-watch", thread_main, this);
    started_ = true;
  }
  launch->watchdog_previous = nullptr;
  launch->watchdog_next = first_;
  if (first_ != nullptr) first_->watchdog_previous = launch;
  first_ = launch;
  if (asleep_) {
    asleep_ = false;
    launch_added_.notify_one();
  }
}

void Watchdog::remove(Launch* launch) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (launch->watchdog_previous != nullptr) {
    launch->watchdog_previous->watchdog_next = launch->watchdog_next;
  } else {
    first_ = launch->watchdog_next;
  }
  if (launch->watchdog_next != nullptr) {
    launch->watchdog_next->watchdog_previous = launch->watchdog_previous;
  }
}

bool Watchdog::look_at_launches(int64_t now, bool interrupted) {
  bool any_long = false;
  for (Launch* launch = first_; launch != nullptr; launch = launch->watchdog_next) {
    const int64_t elapsed = now - launch->start_ns;
    const double elapsed_s = static_cast<double>(elapsed) * 1e-9;
    const double limit_s = launch->executable.spec.time_limit_s;
    any_long = any_long || elapsed > kLongNs;
    if (limit_s > 0 && elapsed_s > limit_s) {
      fail(*launch, FailureKind::kTimeLimit, elapsed_s);
    } else if (interrupted) {
      fail(*launch, FailureKind::kInterrupted, elapsed_s);
    }
  }
  return any_long;
}

void Watchdog::thread_main(void* watchdog) { static_cast<Watchdog*>(watchdog)->watch(); }

void Watchdog::watch() {
  std::unique_lock<std::mutex> lock(mutex_);
  int quiet_ticks = 0;
  while (true) {
    quiet_ticks = first_ == nullptr ? quiet_ticks + 1 : 0;
    if (quiet_ticks > kQuietTicks) {
      asleep_ = true;
      launch_added_.wait(lock, [this] { return !asleep_; });
      quiet_ticks = 0;
    }
    // Nobody notifies between here and the tick, so that a launch costs no system call.
    launch_added_.wait_for(lock, kTick);
    if (look_at_launches(now_ns(), take_interrupt())) {
      watch_interrupts();
    } else {
      unwatch_interrupts();
    }
  }
}

}  // namespace cokernel
