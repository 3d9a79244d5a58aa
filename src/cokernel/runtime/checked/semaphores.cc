#include "checked/semaphores.h"

#include <algorithm>

namespace cokernel::checked {

namespace {

// To match more than so many copies and waits takes too long.
constexpr std::size_t kMostMatched = 8;

// Matches waits with copies: one with one, one with several, or several with one.
class Search {
 public:
  Search(const std::vector<Moved>& brought, const std::vector<Moved>& taken)
      : copies_(sums_of(brought)),
        waits_(sums_of(taken)),
        failed_(copies_.size() * waits_.size()) {}

  bool succeeds() { return matches(copies_.size() - 1, waits_.size() - 1); }

 private:
  // By the set, as bits.
  static std::vector<int64_t> sums_of(const std::vector<Moved>& all) {
    std::vector<int64_t> sums(std::size_t{1} << all.size());
    for (std::size_t set = 1; set < sums.size(); ++set) {
      const auto last = static_cast<std::size_t>(__builtin_ctzll(set));
      sums[set] = sums[set & (set - 1)] + all[last].bytes;
    }
    return sums;
  }

  // Whether those that are left can be matched.
  bool matches(std::size_t copies, std::size_t waits) {
    if (waits == 0 || copies == 0) return waits == copies;
    if (failed_[copies * waits_.size() + waits]) return false;
    const std::size_t wait = waits & (~waits + 1);
    for (std::size_t set = copies; set != 0; set = (set - 1) & copies) {
      if (copies_[set] == waits_[wait] && matches(copies & ~set, waits & ~wait)) return true;
    }
    for (std::size_t set = waits; set != 0; set = (set - 1) & waits) {
      if ((set & wait) == 0) continue;
      for (std::size_t left = copies; left != 0; left &= left - 1) {
        const std::size_t copy = left & (~left + 1);
        if (copies_[copy] == waits_[set] && matches(copies & ~copy, waits & ~set)) return true;
      }
    }
    failed_[copies * waits_.size() + waits] = true;
    return false;
  }

  const std::vector<int64_t> copies_;
  const std::vector<int64_t> waits_;
  std::vector<bool> failed_;
};

}  // namespace

void Matching::note(std::vector<Moved>& all, const Moved& moved) {
  if (all.size() < kMostMatched) {
    all.push_back(moved);
  } else {
    is_known_ = false;
  }
}

const Moved* Matching::misfit() const {
  if (!is_known_ || brought_.empty() || taken_.empty()) return nullptr;
  if (Search(brought_, taken_).succeeds()) return nullptr;
  // The largest of those that no single copy has brought.
  const Moved* found = nullptr;
  for (const Moved& wait : taken_) {
    const bool fits = std::any_of(brought_.begin(), brought_.end(),
                                  [&](const Moved& copy) { return copy.bytes == wait.bytes; });
    if (!fits && (found == nullptr || wait.bytes > found->bytes)) found = &wait;
  }
  return found;
}

void SemaphoreState::add(Signal signal) {
  signal.amount = signal.left;
  signal.serial = next_serial++;
  count += signal.left;
  if (signal.is_dma) {
    largest_copy = std::max(largest_copy, signal.left);
    note_copy(signal);
    matching.bring({signal.left, signal.core, signal.site});
  } else {
    matching.give_up();
  }
  if (signal.left > 0) {
    // What makes up for a count below zero is not there to be taken.
    signal.left = std::min(signal.left, std::max<int64_t>(count, 0));
    if (signal.left > 0) signals.push_back(std::move(signal));
  } else {
    // A negative signal takes back what was signalled, and orders nothing.
    int64_t rest = -signal.left;
    while (rest > 0 && !signals.empty()) {
      const int64_t part = std::min(rest, signals.back().left);
      signals.back().left -= part;
      rest -= part;
      if (signals.back().left == 0) signals.pop_back();
    }
  }
  write_count();
}

void SemaphoreState::note_copy(const Signal& signal) {
  // Of more lines a report would tell no more.
  constexpr std::size_t kMostCopies = 16;
  const auto known = std::find_if(copies.begin(), copies.end(), [&](const CopiesFrom& other) {
    return other.core == signal.core && other.site == signal.site && other.amount == signal.amount;
  });
  if (known != copies.end()) {
    ++known->times;
  } else if (copies.size() < kMostCopies) {
    copies.push_back({signal.core, signal.site, signal.amount, 1});
  }
}

const Signal* SemaphoreState::take(int64_t value, Agent& agent, int32_t core, int32_t site) {
  const bool is_larger = largest_copy > 0 && value > largest_copy;
  count -= value;
  while (value > 0 && !signals.empty()) {
    Signal& oldest = signals.front();
    const int64_t part = std::min(value, oldest.left);
    value -= part;
    oldest.left -= part;
    oldest.taker = core;
    oldest.taker_site = site;
    if (!oldest.is_dma || oldest.left == 0) agent.acquire(oldest.release);
    if (oldest.left == 0) signals.pop_front();
  }
  write_count();
  if (!is_larger || signals.empty()) return nullptr;
  const Signal& next = signals.front();
  return next.is_dma && next.left < next.amount ? &next : nullptr;
}

void SemaphoreState::look(int64_t value, Agent& agent) {
  for (const Signal& signal : signals) {
    if (value <= 0) break;
    if (!signal.is_dma || value >= signal.left) agent.acquire(signal.release);
    value -= signal.left;
  }
}

void SemaphoreState::read(Agent& agent, int32_t core) {
  auto known = std::find_if(read_by.begin(), read_by.end(),
                            [core](const auto& entry) { return entry.first == core; });
  if (known == read_by.end()) known = read_by.emplace(read_by.end(), core, 0);
  // The newest ones are those it has not seen.
  for (auto signal = signals.rbegin(); signal != signals.rend(); ++signal) {
    if (signal->serial < known->second) break;
    if (!signal->is_dma || signal->left == signal->amount) agent.acquire(signal->release);
  }
  known->second = next_serial;
}

void SemaphoreTable::begin_scope(const Semaphore* first, const Semaphore* last) {
  for (const std::unique_ptr<SemaphoreState>& known : all_) {
    if (known->semaphore < first || known->semaphore >= last) continue;
    known->copies.clear();
    known->largest_copy = 0;
    known->matching = Matching();
    known->is_torn = false;
  }
}

SemaphoreState& SemaphoreTable::at(Semaphore* semaphore) {
  SemaphoreState*& known = known_[semaphore];
  if (known == nullptr) {
    all_.push_back(std::make_unique<SemaphoreState>());
    known = all_.back().get();
    known->semaphore = semaphore;
    known->number = static_cast<int32_t>(all_.size()) - 1;
    known->place = place_of(launch_, semaphore);
  }
  const int64_t count = semaphore->count.load(std::memory_order_relaxed);
  if (count != known->count) {
    // Compiled code has cleared it, or it comes from an earlier launch.
    known->signals.clear();
    known->count = count;
    known->matching.give_up();
    if (count > 0) {
      Signal signal;
      signal.left = signal.amount = count;
      signal.serial = known->next_serial++;
      known->signals.push_back(std::move(signal));
    }
  }
  return *known;
}

}  // namespace cokernel::checked
