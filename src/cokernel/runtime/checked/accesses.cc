#include "checked/accesses.h"

#include <algorithm>
#include <utility>

#include "checked/random.h"

namespace cokernel::checked {

Accesses::Accesses() : records_(1) {}

uint32_t Accesses::add(const AccessRecord& record) {
  records_.push_back(record);
  return static_cast<uint32_t>(records_.size() - 1);
}

uint32_t Accesses::with(uint32_t word, uint32_t number, const Agent& agent) {
  if (word == 0 || word == number) return number;
  // An access stands for an earlier one that came before it and conflicts with no more than it.
  const bool atomic = is_atomic(records_[number].kind);
  scratch_.clear();
  bool known = false;
  for_each(word, [&](uint32_t other) {
    if (other == number) known = true;
    if (is_atomic(records_[other].kind) == atomic && is_before(other, agent)) return;
    scratch_.push_back(other);
  });
  if (known) return word;
  scratch_.push_back(number);
  std::sort(scratch_.begin(), scratch_.end());
  return word_of(scratch_);
}

uint32_t Accesses::word_of(const std::vector<uint32_t>& numbers) {
  if (numbers.empty()) return 0;
  if (numbers.size() == 1) return numbers[0];
  uint64_t hash = numbers.size();
  for (const uint32_t number : numbers) hash = mix(hash, number);
  const auto [first, last] = set_of_hash_.equal_range(hash);
  for (auto entry = first; entry != last; ++entry) {
    const Set& set = sets_[entry->second];
    if (set.count == numbers.size() &&
        std::equal(numbers.begin(), numbers.end(), members_.begin() + set.first)) {
      return entry->second | kIsSet;
    }
  }
  Set set{static_cast<uint32_t>(members_.size()), static_cast<uint32_t>(numbers.size()), false};
  for (const uint32_t number : numbers) {
    set.has_atomics |= is_atomic(records_[number].kind);
    members_.push_back(number);
  }
  sets_.push_back(set);
  const auto number = static_cast<uint32_t>(sets_.size() - 1);
  set_of_hash_.emplace(hash, number);
  return number | kIsSet;
}

std::size_t Accesses::bytes() const {
  return records_.capacity() * sizeof(AccessRecord) + sets_.capacity() * sizeof(Set) +
         members_.capacity() * sizeof(uint32_t) + set_of_hash_.size() * 48;
}

void Accesses::sweep() {
  for (std::size_t s = 0; s < sets_.size(); ++s) {
    if (new_sets_[s] == 0) continue;
    for (uint32_t i = 0; i < sets_[s].count; ++i) new_records_[members_[sets_[s].first + i]] = 1;
  }
  // Records keep their order, so that the members of a set stay sorted.
  std::vector<AccessRecord> records(1);
  new_records_[0] = 0;
  for (std::size_t r = 1; r < records_.size(); ++r) {
    if (new_records_[r] == 0) continue;
    records.push_back(records_[r]);
    new_records_[r] = static_cast<uint32_t>(records.size() - 1);
  }
  records_ = std::move(records);
  const std::vector<Set> sets = std::move(sets_);
  const std::vector<uint32_t> members = std::move(members_);
  sets_.clear();
  members_.clear();
  set_of_hash_.clear();
  for (std::size_t s = 0; s < sets.size(); ++s) {
    if (new_sets_[s] == 0) continue;
    scratch_.clear();
    for (uint32_t i = 0; i < sets[s].count; ++i) {
      scratch_.push_back(new_records_[members[sets[s].first + i]]);
    }
    new_sets_[s] = word_of(scratch_);
  }
}

void Accesses::end_collection() {
  new_records_ = std::vector<uint32_t>();
  new_sets_ = std::vector<uint32_t>();
}

}  // namespace cokernel::checked
