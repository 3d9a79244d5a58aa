#include "pool.h"

#include <algorithm>
#include <system_error>
#include <thread>

#include "launch.h"
#include "platform.h"
#include "processor.h"
#include "scheduler.h"

namespace cokernel {

namespace {

// How long a helper without a launch looks for one before it sleeps. At first it keeps its
// processor; then it offers it to other threads at every look. The next launch of a program often
// comes within a millisecond, and a thread that sleeps takes a virtual machine 50 microseconds and
// more to wake, as long as a short launch takes.
constexpr int64_t kSpinNs = 30'000;
constexpr int64_t kYieldNs = 1'000'000;

std::atomic<Pool*> the_pool{nullptr};
std::once_flag pool_once;

}  // namespace

Pool& Pool::get() {
  std::call_once(pool_once, [] {
    the_pool.store(new Pool);
    // The helpers of the parent do not exist in a child, and the pool may have been locked.
    after_fork_in_child([] { the_pool.store(new Pool); });
  });
  return *the_pool.load(std::memory_order_relaxed);
}

void Pool::start_threads(int32_t wanted) {
  while (threads_ < wanted) {
    try {
      start_thread("cokernel", helper_main, this);
    } catch (const std::system_error&) {
      // The launches go on with fewer workers: helpers only make them faster.
      return;
    }
    ++threads_;
  }
}

void Pool::request(Launch* launch, int32_t helpers) {
  int32_t to_wake = 0;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A helper may ask for another one while worker 0 closes the launch, which must not be listed
    // again then: whoever took a place would find it gone. `over` is set before close() locks.
    if (launch->is_over()) return;
    const int32_t wanted = launch->helpers_wanted.load(std::memory_order_relaxed);
    const int32_t inside = launch->helpers_inside.load(std::memory_order_relaxed);
    const int32_t more = std::min(helpers, launch->worker_limit - 1 - inside - wanted);
    if (more <= 0) return;
    start_threads(launch->worker_limit - 1);
    make_way(current_processor());
    launch->helpers_wanted.store(wanted + more, std::memory_order_relaxed);
    wanted_.fetch_add(more);
    if (!launch->listed) {
      launch->listed = true;
      launches_.push_back(launch);
    }
    to_wake = std::min(more - spinning_.load(), sleeping_);
  }
  for (int32_t i = 0; i < to_wake; ++i) wanted_changed_.notify_one();
}

void Pool::close(Launch* launch) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (launch->listed) {
      launch->listed = false;
      launches_.erase(std::find(launches_.begin(), launches_.end(), launch));
    }
    wanted_.fetch_sub(launch->helpers_wanted.load(std::memory_order_relaxed));
    launch->helpers_wanted.store(0, std::memory_order_relaxed);
  }
  // Helpers look at `over` between cores, so that they are usually gone at once.
  const int64_t sleep_at = now_ns() + kSpinNs;
  while (launch->helpers_inside.load(std::memory_order_acquire) > 0) {
    if (now_ns() < sleep_at) {
      relax();
      continue;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    helper_left_.wait(lock, [launch] { return launch->helpers_inside.load() == 0; });
  }
}

// Keeps helpers off the processor of a thread that launches. Some schedulers wake a thread where
// its waker runs, and leave the two there to take turns while other processors idle: Linux may,
// and in virtual machines that pack threads onto few processors it is the rule. Called under the
// mutex.
void Pool::make_way(int processor) {
  for (Helper& helper : helpers_) {
    if (helper.inside || helper.avoided == processor) continue;
    helper.thread.keep_off(processor);
    helper.avoided = processor;
  }
}

// Gives the calling helper a place in a launch that wants one. Called under the mutex.
Launch* Pool::admit(Worker** worker) {
  for (size_t i = 0; i < launches_.size(); ++i) {
    Launch* launch = launches_[i];
    const int32_t wanted = launch->helpers_wanted.load(std::memory_order_relaxed);
    if (wanted == 0) continue;
    launch->helpers_wanted.store(wanted - 1, std::memory_order_relaxed);
    wanted_.fetch_sub(1);
    launch->helpers_inside.fetch_add(1, std::memory_order_relaxed);
    int32_t slot = 1;
    while (launch->slot_used[slot] != 0) ++slot;
    launch->slot_used[slot] = 1;
    launch->workers[slot].queue.open();
    if (slot >= launch->worker_slots.load(std::memory_order_relaxed)) {
      launch->worker_slots.store(slot + 1, std::memory_order_release);
    }
    launch->became_busy();
    if (wanted == 1) {
      launch->listed = false;
      launches_.erase(launches_.begin() + static_cast<std::ptrdiff_t>(i));
    }
    *worker = &launch->workers[slot];
    return launch;
  }
  return nullptr;
}

void Pool::helper_main(void* pool) { static_cast<Pool*>(pool)->serve(); }

void Pool::serve() {
  std::unique_lock<std::mutex> lock(mutex_);
  Helper& self = helpers_.emplace_back(Helper{ThreadHandle::of_caller()});
  while (true) {
    Worker* worker = nullptr;
    if (Launch* launch = admit(&worker)) {
      // A helper that seemed to be looking may have been taken by another launch.
      if (wanted_.load() > 0 && sleeping_ > 0) wanted_changed_.notify_one();
      self.inside = true;
      lock.unlock();
      launch->float_mode.apply();
      worker->begin(now_ns());
      worker->run_together();
      lock.lock();
      self.inside = false;
      launch->slot_used[worker->index] = 0;
      // The launch may be gone as soon as this is seen.
      if (launch->helpers_inside.fetch_sub(1, std::memory_order_release) == 1) {
        helper_left_.notify_all();
      }
    }
    if (wanted_.load() > 0) continue;
    lock.unlock();
    spinning_.fetch_add(1);
    const int64_t left_at = now_ns();
    while (wanted_.load(std::memory_order_relaxed) == 0) {
      const int64_t looked_for = now_ns() - left_at;
      if (looked_for >= kYieldNs) break;
      if (looked_for >= kSpinNs) std::this_thread::yield();
      for (int i = 0; i < 16; ++i) relax();
    }
    spinning_.fetch_sub(1);
    lock.lock();
    while (wanted_.load() == 0) {
      ++sleeping_;
      wanted_changed_.wait(lock);
      --sleeping_;
    }
  }
}

}  // namespace cokernel
