// The accesses that shadow memory remembers. Every access of one agent, in one epoch, from one site
// is the same record; shadow cells hold the numbers of records, or of sets of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "checked/clock.h"

namespace cokernel::checked {

enum class AccessKind : uint8_t {
  kRead,
  kWrite,
  kAtomic,
  kUpdate,
  kFetchAndAdd,
  kPoll,
  kAllocate,
  kRelease
};

inline bool is_atomic(AccessKind kind) {
  return kind == AccessKind::kAtomic || kind == AccessKind::kFetchAndAdd;
}

struct AccessRecord {
  uint32_t agent = 0;
  uint32_t epoch = 0;
  uint32_t core = 0;
  int32_t site = -1;
  int32_t dma_site = -1;
  AccessKind kind = AccessKind::kRead;
  bool is_dma = false;
};

// In the word of a shadow cell that holds reads and atomics: the number of a set follows.
inline constexpr uint32_t kIsSet = uint32_t{1} << 31;

class Accesses {
 public:
  Accesses();

  // The number of a new record; numbers begin with 1.
  uint32_t add(const AccessRecord& record);
  const AccessRecord& operator[](uint32_t number) const { return records_[number]; }

  bool is_before(uint32_t number, const Agent& agent) const {
    const AccessRecord& record = records_[number];
    return agent.is_after(record.agent, record.epoch);
  }

  // The reads and atomics of a cell once `number`, an access of `agent`, has been added. Those that
  // the new one makes needless are left out.
  uint32_t with(uint32_t word, uint32_t number, const Agent& agent);

  template <typename Visit>
  void for_each(uint32_t word, Visit visit) const {
    if (word == 0) return;
    if ((word & kIsSet) == 0) {
      visit(word);
      return;
    }
    const Set& set = sets_[word & ~kIsSet];
    for (uint32_t i = 0; i < set.count; ++i) visit(members_[set.first + i]);
  }
  bool has_atomics(uint32_t word) const {
    if (word == 0) return false;
    return (word & kIsSet) != 0 ? sets_[word & ~kIsSet].has_atomics
                                : is_atomic(records_[word].kind);
  }

  // The word for these records, which are sorted.
  uint32_t word_of(const std::vector<uint32_t>& numbers);

  std::size_t bytes() const;
  std::size_t size() const { return records_.size() + members_.size(); }

  // Forgets what is not in use: `used(mark)` calls mark(word) for each word in use; afterwards
  // `renamed(word)` is what a word has become.
  template <typename Used>
  void collect(Used used);
  uint32_t renamed(uint32_t word) const {
    return (word & kIsSet) != 0 ? new_sets_[word & ~kIsSet] : new_records_[word];
  }
  void end_collection();

 private:
  struct Set {
    uint32_t first;
    uint32_t count;
    bool has_atomics;
  };
  void sweep();

  std::vector<AccessRecord> records_;
  std::vector<Set> sets_;
  std::vector<uint32_t> members_;
  std::unordered_multimap<uint64_t, uint32_t> set_of_hash_;
  std::vector<uint32_t> scratch_;
  // During a collection: 1 for what is in use, then the new words.
  std::vector<uint32_t> new_records_;
  std::vector<uint32_t> new_sets_;
};

template <typename Used>
void Accesses::collect(Used used) {
  new_records_.assign(records_.size(), 0);
  new_sets_.assign(sets_.size(), 0);
  used([this](uint32_t word) {
    if ((word & kIsSet) != 0) {
      new_sets_[word & ~kIsSet] = 1;
    } else {
      new_records_[word] = 1;
    }
  });
  sweep();
}

}  // namespace cokernel::checked
