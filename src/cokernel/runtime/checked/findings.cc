#include "checked/findings.h"

#include <algorithm>

namespace cokernel::checked {

// The sites tell apart the Refs of private memory, which is a block of its own for every core; all
// other memory is told apart by what holds it.
Findings::Key Findings::key_of(const Finding& finding) {
  Party first = finding.first.value_or(Party());
  Party second = finding.second.value_or(Party());
  // Which of the two came first is up to the schedule.
  if (finding.second.has_value() && std::string(finding.kind) == "Race") {
    const auto rank = [](const Party& party) {
      return std::make_tuple(party.program, party.site, std::string(party.access));
    };
    if (rank(second) < rank(first)) std::swap(first, second);
  }
  int32_t owner = -1;
  int64_t where = 0;
  if (finding.memory.has_value()) {
    const Place& place = finding.memory->place;
    owner = static_cast<int32_t>(place.owner);
    where = place.owner == MemoryOwner::kPrivate ? place.program : place.index;
    if (place.owner == MemoryOwner::kShared) where = 0;
  } else if (finding.semaphore.has_value()) {
    const Place& place = *finding.semaphore;
    owner = static_cast<int32_t>(place.owner);
    where = place.offset * 4096 + place.program;
  }
  return Key(finding.kind, first.program, first.site, first.dma_site, first.access, second.program,
             second.site, second.dma_site, second.access, owner, where);
}

bool Findings::add(const Finding& finding) {
  const auto [entry, is_new] = known_.emplace(key_of(finding), all_.size());
  if (is_new) {
    if (static_cast<int64_t>(all_.size()) >= limit_) {
      known_.erase(entry);
      ++dropped_;
      return true;
    }
    all_.push_back(finding);
    return true;
  }
  Finding& known = all_[entry->second];
  known.occurrences += finding.occurrences;
  if (known.memory.has_value() && finding.memory.has_value()) {
    MemoryRange& range = *known.memory;
    const MemoryRange& other = *finding.memory;
    if (range.place.owner == other.place.owner && range.place.index == other.place.index &&
        range.place.program == other.place.program) {
      const int64_t end =
          std::max(range.place.offset + range.bytes, other.place.offset + other.bytes);
      range.place.offset = std::min(range.place.offset, other.place.offset);
      range.bytes = end - range.place.offset;
    }
    known.count += finding.count;
  }
  return false;
}

void Findings::join(const Findings& other) {
  for (const Finding& finding : other.all_) add(finding);
  dropped_ += other.dropped_;
}

}  // namespace cokernel::checked
