// What a checked launch has found, as numbers; `Hooks::checked_report` makes a text of it.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "checked/options.h"
#include "failure.h"

namespace cokernel::checked {

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

// Bytes [offset, offset + bytes) of a block, of which `count` elements are concerned.
struct MemoryRange {
  Place place;
  int64_t bytes = 0;
  int64_t element_bytes = 0;
};

struct Finding {
  const char* kind = "";
  std::optional<Party> first;  // None for what nobody did.
  std::optional<Party> second;
  std::optional<MemoryRange> memory;
  std::optional<Place> semaphore;
  int64_t semaphore_count = 0;
  int64_t count = 0;  // Of elements.
  int64_t occurrences = 1;
  std::vector<std::pair<const char*, int64_t>> numbers;  // What the kind says besides: "value" ...
  const char* use = nullptr;                             // UninitialisedRead.
  Schedule schedule;                                     // The one that showed it first.
};

class Findings {
 public:
  explicit Findings(int64_t limit) : limit_(limit) {}

  // Adds it, or adds it to an equal one. Returns whether it is new.
  bool add(const Finding& finding);
  void join(const Findings& other);
  bool empty() const { return all_.empty() && dropped_ == 0; }
  const std::vector<Finding>& all() const { return all_; }
  int64_t dropped() const { return dropped_; }

 private:
  using Key = std::tuple<std::string, int32_t, int32_t, int32_t, std::string, int32_t, int32_t,
                         int32_t, std::string, int32_t, int64_t>;
  static Key key_of(const Finding& finding);

  const int64_t limit_;
  int64_t dropped_ = 0;
  std::vector<Finding> all_;
  std::map<Key, std::size_t> known_;
};

// One decision of a schedule: who could go on.
struct Candidate {
  int64_t agent;          // A core, in launch order, or -1 - the number of a DMA.
  const char* operation;  // What it does next.
  int64_t object;         // The number of the semaphore, or -1.
};

struct Counts {
  int64_t accesses = 0;
  int64_t signals = 0;
  int64_t waits = 0;
  int64_t dmas = 0;
  int64_t cores = 0;
};

// All that is told of a checked launch.
struct CheckedRecord {
  explicit CheckedRecord(int64_t max_findings) : findings(max_findings) {}

  Findings findings;
  Schedule schedule;
  int64_t decisions = 0;
  std::vector<int32_t> choices;  // If the schedule asks for it, as what follows.
  std::vector<std::vector<Candidate>> candidates;
  std::vector<bool> continuing;  // Whether the first candidate is who took the step before.
  uint64_t behaviour = 0;        // Of the last schedule,
  int32_t schedules = 0;         // of so many,
  int32_t behaviours = 0;        // which showed so many different ones.
  Counts counts;
  bool failed = false;
  Failure failure;  // If the launch failed by more than a finding.
};

}  // namespace cokernel::checked
