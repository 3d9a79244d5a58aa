#include "checked/findings.h"

#include <algorithm>
#include <string_view>

namespace cokernel::checked {

namespace {

// Whatever was left of a signal, it is one mistake, whoever took a part of it; so is a copy that
// outlives its scope, whichever scope it comes to, and a wait that is too large, whichever copy it
// has met.
bool is_of_the_first(const Finding& finding) {
  const std::string_view kind = finding.kind;
  return kind == "LeftoverSemaphore" || kind == "UnwaitedCopy" || kind == "CopyInFlight" ||
         kind == "WaitTooLarge";
}

// Of all that has signalled too often, the schedule says who did it last.
bool is_of_its_semaphore(const Finding& finding) {
  return std::string_view(finding.kind) == "SemaphoreOverflow";
}

bool is_next_scope(const Finding& finding) {
  return finding.second.has_value() && std::string_view(finding.second->access) == "allocate";
}

}  // namespace

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
  if (is_of_the_first(finding)) second = Party();
  if (is_of_its_semaphore(finding)) first = Party();
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
             second.site, second.dma_site, second.access, owner, where, finding.is_too_early);
}

namespace {

// Beyond this it is only counted who else did the same.
constexpr std::size_t kMostOthers = 64;

bool is_same_core(const std::optional<Party>& one, const std::optional<Party>& other) {
  if (!one.has_value() || !other.has_value()) return one.has_value() == other.has_value();
  return one->program == other->program && one->index == other->index && one->site == other->site &&
         one->is_dma == other->is_dma && std::string_view(one->access) == other->access;
}

bool is_same_block(const Place& one, const Place& other) {
  return one.owner == other.owner && one.index == other.index && one.program == other.program;
}

}  // namespace

// Unites the elements, but only with those that the same cores have touched.
void Findings::merge(Finding& known, const Finding& finding, bool unite) {
  if (!finding.meetings.empty()) {
    known.meetings.add(finding.meetings);
    known.occurrences = known.meetings.bytes();
  } else if (finding.event == 0 || finding.event != known.event) {
    known.occurrences += finding.occurrences;
    known.event = finding.event;
  }
  known.is_unwaited = known.is_unwaited && finding.is_unwaited;
  known.has_others = known.has_others || finding.has_others;
  // Beyond that it is taken to have been met by others as well.
  constexpr std::size_t kMostCopies = 4096;
  if (known.copies.size() < kMostCopies) {
    known.copies.insert(finding.copies.begin(), finding.copies.end());
  } else {
    known.has_others = true;
  }
  // The end of its scope says more of a copy than the begin of the next one.
  if (is_next_scope(known) && finding.second.has_value() && !is_next_scope(finding)) {
    known.second = finding.second;
  }
  const auto names = [&](const std::optional<Party>& first, const std::optional<Party>& second) {
    if (is_of_its_semaphore(known)) {
      return first->program == finding.first->program && first->index == finding.first->index;
    }
    if (is_of_the_first(known)) return is_same_core(first, finding.first);
    return (is_same_core(first, finding.first) && is_same_core(second, finding.second)) ||
           (is_same_core(first, finding.second) && is_same_core(second, finding.first));
  };
  if (names(known.first, known.second)) {
    if (unite) known.padding.add(finding.padding);
    if (!unite || !known.memory.has_value() || !finding.memory.has_value()) return;
    MemoryRange& range = *known.memory;
    const MemoryRange& other = *finding.memory;
    if (!is_same_block(range.place, other.place)) return;
    range.place.offset = std::min(range.place.offset, other.place.offset);
    range.parts.add(other.parts);
    known.is_inexact = known.is_inexact || finding.is_inexact;
  } else if (known.also.size() < kMostOthers && finding.first.has_value()) {
    for (const auto& [first, second] : known.also) {
      if (names(first, second)) return;
    }
    // Which of two came first is up to the schedule.
    const bool is_swapped = finding.second.has_value() && known.first->site != finding.first->site;
    known.also.emplace_back(is_swapped ? *finding.second : *finding.first,
                            is_swapped ? finding.first : finding.second);
  }
  for (const auto& [first, second] : finding.also) {
    Finding other;
    other.first = first;
    other.second = second;
    other.occurrences = 0;
    other.is_unwaited = finding.is_unwaited;
    merge(known, other, false);
  }
}

bool Findings::add(const Finding& finding) { return put(finding, true); }

bool Findings::put(const Finding& finding, bool unite, bool has_room) {
  const Key key = key_of(finding);
  const auto [entry, is_new] = known_.emplace(key, all_.size());
  if (!is_new) {
    merge(all_[entry->second], finding, unite);
    return false;
  }
  // One that is told below a race takes no room.
  if (!finding.ends && !finding.is_too_early && !has_room && is_full()) {
    known_.erase(entry);
    return dropped_.insert(key).second;
  }
  limited_ += finding.ends || finding.is_too_early ? 0 : 1;
  all_.push_back(finding);
  if (!finding.meetings.empty()) all_.back().occurrences = finding.meetings.bytes();
  return true;
}

bool Findings::reserve(const Finding& finding) {
  const Key key = key_of(finding);
  if (known_.count(key) != 0 || reserved_.count(key) != 0) return true;
  if (is_full()) {
    dropped_.insert(key);
    return false;
  }
  reserved_.insert(key);
  return true;
}

void Findings::join(const Findings& other) {
  for (Finding finding : other.all_) {
    // Accesses are numbered in each launch anew.
    finding.event = 0;
    finding.meetings = Parts<int64_t>();
    finding.copies.clear();
    put(finding, false);
  }
  dropped_.insert(other.dropped_.begin(), other.dropped_.end());
}

}  // namespace cokernel::checked
