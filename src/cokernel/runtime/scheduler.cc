#include "scheduler.h"

#include "launch.h"
#include "platform.h"

namespace cokernel {

namespace {

// How long an idle worker looks for work before it sleeps.
constexpr int64_t kSpinNs = 50'000;
// A single ready core is left to its home worker, whose caches hold its memory, unless that worker
// has not taken a core for this many looks at its queue (about a microsecond).
constexpr int kLoneRounds = 64;
// If this time passes from event to event, one ready core is worth a helper.
constexpr int64_t kLongEventNs = 2'000;
constexpr int32_t kLongestCheckInterval = 16;
constexpr int32_t kNever = INT32_MAX;
// So often a worker looks first for cores that wait elsewhere, so that none of them starves.
constexpr uint32_t kFairPicks = 64;

}  // namespace

bool ReadyQueue::push(Core* core) {
  core->next = nullptr;
  lock_.lock();
  if (!open_) {
    lock_.unlock();
    return false;
  }
  append(core);
  lock_.unlock();
  return true;
}

Core* ReadyQueue::pop() {
  if (empty()) return nullptr;
  lock_.lock();
  Core* core = empty() ? nullptr : remove();
  lock_.unlock();
  return core;
}

bool ReadyQueue::locked_empty() {
  lock_.lock();
  const bool result = empty();
  lock_.unlock();
  return result;
}

void ReadyQueue::open() {
  lock_.lock();
  open_ = true;
  lock_.unlock();
}

bool ReadyQueue::close_if_empty() {
  lock_.lock();
  const bool closed = empty();
  if (closed) open_ = false;
  lock_.unlock();
  return closed;
}

void ReadyQueue::reset(bool open) {
  head_ = nullptr;
  tail_ = nullptr;
  size_.store(0, std::memory_order_relaxed);
  open_ = open;
}

void Worker::begin(int64_t now) {
  last_check_ns = now;
  check_interval = 1;
  until_check = launch->worker_limit > 1 ? 1 : kNever;
  picks = 0;
  start_next = false;
}

void Worker::run(Core* core) {
  // From the call on another worker may have the core, so nothing here touches it afterwards.
  core->worker = this;
  const bool fresh = core->state.load(std::memory_order_relaxed) == CoreState::kUnstarted;
  core->state.store(CoreState::kRunning, std::memory_order_relaxed);
  if (!fresh) {
    ++core->resumes;
    void* handle = core->handle;
    (*static_cast<void (**)(void*)>(handle))(handle);
  } else if (core->is_coroutine) {
    core->entry.ramp(core);
  } else {
    core->entry.function(core);
  }
}

Core* Worker::pick_alone() {
  if (start_next || ++picks % kFairPicks == 0) {
    start_next = false;
    if (Core* core = launch->take_unstarted_alone()) return core;
  }
  if (Core* core = queue.pop_alone()) return core;
  return launch->take_unstarted_alone();
}

void Worker::run_alone() {
  while (!launch->is_over()) {
    if (launch->together) {
      run_together();
      return;
    }
    Core* core = pick_alone();
    if (core == nullptr) {
      if (launch->unfinished.load(std::memory_order_relaxed) > 0) launch->fail_deadlocked();
      return;
    }
    count_event(false);
    run(core);
  }
}

Core* Worker::steal_any() {
  const int32_t slots = launch->worker_slots.load(std::memory_order_acquire);
  for (int32_t step = 1; step < slots; ++step) {
    Worker& victim = launch->workers[(index + step) % slots];
    if (Core* core = victim.queue.pop()) return core;
  }
  return nullptr;
}

Core* Worker::pick_together() {
  if (start_next || ++picks % kFairPicks == 0) {
    start_next = false;
    if (Core* core = launch->take_unstarted(index != 0)) return core;
    if (picks % kFairPicks == 0) {
      if (Core* core = steal_any()) return core;
    }
  }
  if (Core* core = queue.pop()) return core;
  return launch->take_unstarted(index != 0);
}

void Worker::run_together() {
  while (!launch->is_over()) {
    Core* core = pick_together();
    if (core == nullptr) {
      core = idle();
      if (core == nullptr) return;
    }
    count_event(false);
    run(core);
  }
}

// One look for work that other workers have not begun. What is found is taken as a busy worker, as
// became_idle() requires.
Core* Worker::look_around(int32_t& lone_victim, uint32_t& lone_taken, int& lone_rounds) {
  ReadyQueue* source = nullptr;
  const bool unstarted = launch->has_unstarted();
  if (!queue.empty()) {
    source = &queue;
  } else if (!unstarted) {
    const int32_t slots = launch->worker_slots.load(std::memory_order_acquire);
    for (int32_t step = 1; step < slots && source == nullptr; ++step) {
      const int32_t victim = (index + step) % slots;
      ReadyQueue& other = launch->workers[victim].queue;
      const int32_t size = other.size();
      if (size >= 2) {
        source = &other;
      } else if (size == 1) {
        if (lone_victim >= 0 && lone_victim != victim) continue;
        if (lone_victim < 0 || lone_taken != other.taken()) {
          lone_victim = victim;
          lone_taken = other.taken();
          lone_rounds = kLoneRounds;
        } else if (--lone_rounds <= 0) {
          source = &other;
          lone_victim = -1;
        }
      } else if (lone_victim == victim) {
        lone_victim = -1;
      }
    }
  }
  if (source == nullptr && !unstarted) return nullptr;
  launch->became_busy();
  Core* core = source != nullptr ? source->pop() : launch->take_unstarted(index != 0);
  if (core == nullptr) launch->became_idle();
  return core;
}

Core* Worker::idle() {
  launch->became_idle();
  int32_t lone_victim = -1;
  uint32_t lone_taken = 0;
  int lone_rounds = 0;
  int64_t sleep_at = 0;
  for (uint32_t round = 1; !launch->is_over(); ++round) {
    if (Core* core = look_around(lone_victim, lone_taken, lone_rounds)) return core;
    relax();
    if (round % 64 != 0) continue;
    const int64_t now = now_ns();
    if (sleep_at == 0) sleep_at = now + kSpinNs;
    if (now < sleep_at) continue;
    if (index == 0) {
      launch->sleep_until_work();
      sleep_at = 0;
    } else if (queue.close_if_empty()) {
      return nullptr;
    }
  }
  return nullptr;
}

void Worker::make_ready(Core* core) {
  core->state.store(CoreState::kReady, std::memory_order_relaxed);
  if (!launch->together) {
    queue.push_alone(core);
  } else {
    Worker* home = core->worker;
    if (!home->queue.push(core)) {
      // This worker's own queue is open, because this worker is here.
      home = this;
      queue.push(core);
    }
    // A single core on another worker is not worth the wake-up: see consider_help().
    if (launch->sleeping.load(std::memory_order_relaxed) &&
        (home->index == 0 || home->queue.size() > 1)) {
      launch->wake_sleeper();
    }
  }
  count_event(true);
}

void Worker::consider_help(bool is_wake) {
  if (launch->worker_limit == 1) {
    until_check = kNever;
    return;
  }
  const int64_t now = now_ns();
  const int64_t since = now - last_check_ns;
  const int32_t events = check_interval;
  last_check_ns = now;
  if (since < kLongEventNs) {
    check_interval = events * 2 < kLongestCheckInterval ? events * 2 : kLongestCheckInterval;
  } else {
    check_interval = 1;
  }
  until_check = check_interval;
  if (now - launch->start_ns < launch->help_after_ns) return;
  const int32_t present = 1 + launch->helpers_inside.load(std::memory_order_relaxed) +
                          launch->helpers_wanted.load(std::memory_order_relaxed);
  const int32_t absent = launch->worker_limit - present;
  const bool sleeper = launch->sleeping.load(std::memory_order_relaxed);
  if (absent <= 0 && !sleeper) return;
  const int32_t unstarted = launch->unstarted_count();
  const int32_t spare = queue.size() + (unstarted > 0 ? unstarted : 0);
  if (spare == 0) return;
  // A core that wakes another one often waits right afterwards, and the worker runs the woken one.
  if (is_wake && spare == 1 && since < kLongEventNs * events) return;
  if (sleeper) {
    launch->wake_sleeper();
  } else {
    launch->ask_for_help(spare < absent ? spare : absent);
  }
}

}  // namespace cokernel
