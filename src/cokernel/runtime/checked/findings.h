// What a checked launch has found, as numbers; `Hooks::checked_report` makes a text of it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checked/options.h"
#include "failure.h"

namespace cokernel::checked {

// What a copy does that writes an element a second time.
inline constexpr const char* kWritesAgain = "copy writes again";

// One of those a finding is about: a core, or a DMA that it started.
struct Party {
  int32_t program = 0;
  int32_t index = 0;
  int32_t coordinates[4] = {0, 0, 0, 0};
  int32_t site = -1;
  const char* access = "";  // "read", "write", "atomic update", "signal", ...
  bool is_dma = false;
  int32_t dma_site = -1;
};

// Pieces of a block, as [begin, end) in bytes: in order, and neither overlapping nor touching.
template <typename Position>
class Parts {
 public:
  static constexpr std::size_t kMost = 1024;

  void add(Position begin, Position end);
  void add(const Parts& other) {
    for (const auto& [begin, end] : other.all_) add(begin, end);
    is_cut_off_ |= other.is_cut_off_;
  }
  bool empty() const { return all_.empty(); }
  const std::vector<std::pair<Position, Position>>& all() const { return all_; }
  // There were more pieces than are kept.
  bool is_cut_off() const { return is_cut_off_; }
  int64_t bytes() const {
    int64_t sum = 0;
    for (const auto& [begin, end] : all_) sum += static_cast<int64_t>(end - begin);
    return sum;
  }

 private:
  std::vector<std::pair<Position, Position>> all_;
  bool is_cut_off_ = false;
};

template <typename Position>
void Parts<Position>::add(Position begin, Position end) {
  // The first piece that could touch the new one, and the first behind all that do.
  const auto first =
      std::lower_bound(all_.begin(), all_.end(), begin,
                       [](const auto& part, Position position) { return part.second < position; });
  auto last = first;
  for (; last != all_.end() && last->first <= end; ++last) {
    begin = std::min(begin, last->first);
    end = std::max(end, last->second);
  }
  if (first != last) {
    *first = {begin, end};
    all_.erase(first + 1, last);
  } else if (all_.size() < kMost) {
    all_.insert(first, {begin, end});
  } else {
    is_cut_off_ = true;
  }
}

// What of a block is concerned; `place` is its first byte.
struct MemoryRange {
  Place place;
  int64_t element_bytes = 0;
  Parts<int64_t> parts;
};

// What is read of one dimension of a Ref, in elements: also from the padding of its tiles, which
// begins at its extent.
struct Span {
  int64_t start = 0;
  int64_t stop = 0;
  int64_t extent = 0;
};

// Elements in the padding of a Ref's tiles, by their row-major numbers in the padded shape.
struct PickedPadding {
  std::vector<int64_t> shape;
  Parts<int64_t> elements;

  void add(const PickedPadding& other) {
    if (shape.empty()) shape = other.shape;
    if (shape == other.shape) elements.add(other.elements);
  }
};

// What a core looks at again and again: memory, or a semaphore.
struct Polled {
  Party party;
  std::optional<MemoryRange> memory;
  std::optional<Place> semaphore;
  int64_t semaphore_count = 0;
};

struct Finding {
  const char* kind = "";
  std::optional<Party> first;  // None for what nobody did.
  std::optional<Party> second;
  std::vector<Party> more;            // SemaphoreOverflow: who else signalled what is counted.
  std::optional<Party> allocator;     // UninitialisedRead: the scope that asked for the memory.
  std::optional<MemoryRange> memory;  // What the parties touched, and nobody else.
  std::optional<Place> semaphore;
  int64_t semaphore_count = 0;
  // How often it was met: by an access, which counts once, into however many pieces the shadow
  // memory divides what it touches.
  int64_t occurrences = 1;
  uint64_t event = 0;       // Race: the access that met it; 0 once launches are joined.
  Parts<int64_t> meetings;  // UninitialisedRead of an output: the reads; see `State::meeting`.
  // The other cores that did the same: who took the place of `first` and of `second`.
  std::vector<std::pair<Party, std::optional<Party>>> also;
  // Race: the copies that have met it, by agent and epoch, and whether others have, too, or those
  // for which no wait would have helped.
  std::set<std::pair<uint32_t, uint32_t>> copies;
  bool has_others = false;
  // Race: it was met by copies alone that nobody has waited for before their memory ended.
  bool is_unwaited = false;
  // UninitialisedRead: of what a write brings that races with the read.
  bool is_too_early = false;
  // UninitialisedRead: perhaps not all of `memory` is what the value comes from.
  bool is_inexact = false;
  // UninitialisedRead of padding: of a window, and of elements that were picked one by one.
  std::vector<Span> window;
  PickedPadding padding;
  std::vector<Polled> polled;                            // Livelock.
  std::vector<std::pair<const char*, int64_t>> numbers;  // What the kind says besides: "value" ...
  const char* use = nullptr;                             // UninitialisedRead.
  bool ends = false;                                     // The launch.
  Schedule schedule;                                     // The one that showed it first.
};

class Findings {
 public:
  explicit Findings(int64_t limit) : limit_(limit) {}

  // Adds it, or adds it to an equal one. Returns whether it is new. The limit does not hold for one
  // that ends the launch.
  bool add(const Finding& finding);
  // Keeps room for one that is added later, once it is known what it follows from; false if there
  // is none.
  bool reserve(const Finding& finding);
  void add_reserved(const Finding& finding) { put(finding, true, true); }
  void end_reservations() { reserved_.clear(); }
  // Of findings under several schedules the first goes for all; the others are only counted.
  void join(const Findings& other);
  bool empty() const { return all_.empty() && dropped_.empty(); }
  const std::vector<Finding>& all() const { return all_; }
  std::vector<Finding>& all() { return all_; }
  // How many different ones there was no room for.
  int64_t dropped() const { return static_cast<int64_t>(dropped_.size()); }

 private:
  using Key = std::tuple<std::string, int32_t, int32_t, int32_t, std::string, int32_t, int32_t,
                         int32_t, std::string, int32_t, int64_t, bool>;
  bool put(const Finding& finding, bool unite, bool has_room = false);
  bool is_full() const { return limited_ + static_cast<int64_t>(reserved_.size()) >= limit_; }
  static Key key_of(const Finding& finding);
  static void merge(Finding& known, const Finding& finding, bool unite);

  const int64_t limit_;
  int64_t limited_ = 0;  // So many of all that are kept count.
  std::set<Key> reserved_;
  std::set<Key> dropped_;
  std::vector<Finding> all_;
  std::map<Key, std::size_t> known_;
};

// One decision of a schedule: who could go on.
struct Candidate {
  int64_t agent;  // A core, in launch order, or below zero for a DMA: the same in every schedule.
  const char* operation;         // What it does next.
  std::vector<int64_t> objects;  // What that touches besides its own; empty if it is not known.
  int32_t core;                  // The core, or the one that started the DMA.
};

// A core that waits for a semaphore when the launch is deadlocked.
struct Starved {
  struct From {
    Party party;
    int64_t amount = 0;
    int64_t times = 0;
  };
  // Another semaphore that counts something which nobody has taken.
  struct Untaken {
    Place place;
    int64_t count = 0;
    std::vector<From> from;
  };
  int32_t core = 0;  // In the order of the launch.
  bool is_for_copies = false;
  std::vector<From> from;  // If so: the copies that have signalled the semaphore so far.
  std::vector<Untaken> untaken;
};

struct Counts {
  int64_t accesses = 0;
  int64_t signals = 0;
  int64_t waits = 0;
  int64_t barriers = 0;  // Arrivals at them.
  int64_t dmas = 0;
  int64_t cores = 0;
};

// What a step has done to memory that others see: it has polled, or written there.
struct Effects {
  std::vector<MemoryRange> polled;
  std::vector<MemoryRange> written;
  bool is_cut_off = false;  // There was more.
};

// All that is told of a checked launch.
struct CheckedRecord {
  explicit CheckedRecord(int64_t max_findings) : findings(max_findings) {}

  Findings findings;
  std::vector<int32_t> batch;  // Which elements of batches the launch is for.
  Schedule schedule;
  int64_t decisions = 0;
  std::vector<int32_t> choices;  // If the schedule asks for it, as what follows.
  std::vector<std::vector<Candidate>> candidates;
  std::vector<Effects> effects;  // What the steps that were chosen have done.
  std::vector<bool> continuing;  // Whether the first candidate is who took the step before.
  uint64_t behaviour = 0;        // Of the last schedule,
  int32_t schedules = 0;         // of so many,
  int32_t behaviours = 0;        // which showed so many different ones.
  Counts counts;
  int64_t claimed = 0;      // How many of the accesses loops have claimed.
  bool fits = true;         // The choices of the schedule could be taken.
  bool is_complete = true;  // Every schedule ran to its end.
  bool failed = false;
  // Where the core that has ended the launch had just used an undefined value; -1 if it had not.
  int32_t failed_use_site = -1;
  std::vector<Starved> starved;
  Failure failure;  // If the launch failed by more than a finding.
};

}  // namespace cokernel::checked
