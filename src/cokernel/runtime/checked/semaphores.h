// What checked mode knows of each semaphore: who signalled what is counted, and who waits.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "abi.h"
#include "checked/clock.h"
#include "failure.h"

namespace cokernel::checked {

// A signal, or the completion of a DMA, of which something is still counted.
struct Signal {
  int64_t left = 0;
  int64_t amount = 0;
  uint64_t serial = 0;
  Release release;
  uint32_t reading_epoch = 0;  // Of a DMA that says by this also that it has read; 0 of others.
  int32_t core = -1;           // -1: counted before the launch began.
  int32_t site = -1;
  bool is_dma = false;
  bool is_reported = false;
  int32_t taker = -1;  // The core that took a part of it last, and where.
  int32_t taker_site = -1;
};

// The copies from one line that have signalled a semaphore since its scope began.
struct CopiesFrom {
  int32_t core = -1;
  int32_t site = -1;
  int64_t amount = 0;
  int64_t times = 0;
};

// Bytes that a copy has brought, or that a wait for copies has taken, by a core at a site.
struct Moved {
  int64_t bytes = 0;
  int32_t core = -1;
  int32_t site = -1;
};

// What was brought and taken since the scope of a semaphore began.
class Matching {
 public:
  void bring(const Moved& moved) { note(brought_, moved); }
  void take(const Moved& moved) { note(taken_, moved); }
  // Something else has been added or taken, so that nothing can be told.
  void give_up() { is_known_ = false; }
  // A wait that can stand neither for a copy, nor for several, nor be one of several that stand for
  // one; null if there is none, or if it cannot be told. All that was brought has been taken.
  const Moved* misfit() const;
  const std::vector<Moved>& brought() const { return brought_; }

 private:
  void note(std::vector<Moved>& all, const Moved& moved);

  std::vector<Moved> brought_;
  std::vector<Moved> taken_;
  bool is_known_ = true;
};

struct SemaphoreState {
  Semaphore* semaphore = nullptr;
  int64_t count = 0;           // The sum of what is left of the signals, or less than zero.
  std::deque<Signal> signals;  // The oldest first.
  uint64_t next_serial = 0;
  std::vector<int32_t> waiters;  // Cores, the oldest first.
  // Up to which signal a core has acquired all that was counted when it read.
  std::vector<std::pair<int32_t, uint64_t>> read_by;
  int32_t number = 0;  // In the order of first use.
  Place place;
  uint64_t behaviour = 0;        // A hash of the operations on it, in order.
  std::vector<int64_t> readers;  // Who has read the count since it changed.
  int64_t largest_copy = 0;      // The most that one DMA has signalled.
  std::vector<CopiesFrom> copies;
  Matching matching;
  bool is_torn = false;  // A wait that was too large has taken a part of a copy.

  void add(Signal signal);
  // Takes `value` from the oldest signals. What is taken is acquired: a signal as soon as any of it
  // is taken, a DMA once all of it is. Null, or the DMA that a wait for more than any DMA has moved
  // took the beginning of: it ended within the bytes of another copy than its own.
  const Signal* take(int64_t value, Agent& agent, int32_t core, int32_t site);
  // Acquires what a wait for `value` that takes nothing has waited for.
  void look(int64_t value, Agent& agent);
  // Acquires all that is counted.
  void read(Agent& agent, int32_t core);
  void note_copy(const Signal& signal);
  void write_count() { semaphore->count.store(count, std::memory_order_relaxed); }
};

class SemaphoreTable {
 public:
  explicit SemaphoreTable(const Launch& launch) : launch_(launch) {}

  // Sees what compiled code has done to the count by itself.
  SemaphoreState& at(Semaphore* semaphore);
  // Begins the scope of an array of them.
  void begin_scope(const Semaphore* first, const Semaphore* last);
  // Those used so far, in the order of first use.
  const std::vector<std::unique_ptr<SemaphoreState>>& all() const { return all_; }

 private:
  const Launch& launch_;
  std::unordered_map<Semaphore*, SemaphoreState*> known_;
  std::vector<std::unique_ptr<SemaphoreState>> all_;
};

}  // namespace cokernel::checked
