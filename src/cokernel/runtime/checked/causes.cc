// Which findings of a launch follow from others; some of it is only known when the launch is over.
#include <algorithm>
#include <utility>

#include "checked/state.h"
#include "launch.h"

namespace cokernel::checked {

namespace {

bool is_read(AccessKind kind) {
  return kind == AccessKind::kRead || kind == AccessKind::kUpdate || is_atomic(kind);
}

bool is_access(AccessKind kind) {
  return kind != AccessKind::kAllocate && kind != AccessKind::kRelease;
}

// Whether two accesses to one element are a race where nothing orders them.
bool do_clash(AccessKind one, AccessKind other) {
  if (!is_access(one) || !is_access(other)) return false;
  if (is_atomic(one) && is_atomic(other)) return false;
  return one != AccessKind::kRead || other != AccessKind::kRead;
}

}  // namespace

// What a DMA does is known by where it was started.
State::Reader State::reader_of(int32_t core, int32_t site, bool is_dma, int32_t dma_site) {
  return is_dma ? Reader{core, dma_site, true} : Reader{core, site, false};
}

void State::add_race(const AccessRecord& before, const AccessRecord& after, uintptr_t begin,
                     uintptr_t end, int64_t element_bytes) {
  Finding finding;
  finding.kind = "Race";
  finding.event = event_;
  finding.first = party_of(after);
  finding.second = party_of(before);
  finding.memory = range_of(begin, end, element_bytes);
  // To wait for the copy helps its own core, and who it brings something to.
  const auto is_for = [&](const AccessRecord& copy, const AccessRecord& other) {
    if (copy.core == other.core) return true;
    const Place& place = finding.memory->place;
    const Core& core = launch_.cores[other.core];
    return !other.is_dma && place.owner == MemoryOwner::kPrivate && place.program == core.program &&
           place.index == core.index;
  };
  for (const auto& [one, other] : {std::pair(&before, &after), std::pair(&after, &before)}) {
    if (!one->is_dma) continue;
    finding.copies.emplace(one->agent, one->epoch);
    finding.has_others = finding.has_others || !is_for(*one, *other);
  }
  finding.has_others = finding.has_others || finding.copies.empty();
  add(std::move(finding));
  if (!is_read(before.kind) || after.kind != AccessKind::kWrite) return;
  const Reader reader =
      reader_of(static_cast<int32_t>(before.core), before.site, before.is_dma, before.dma_site);
  const uint64_t writer = origin_key(after);
  std::vector<LateWrite>& known = late_writes_[reader];
  const auto same = std::find_if(known.begin(), known.end(),
                                 [&](const LateWrite& other) { return other.writer == writer; });
  // Who reads what so many others write has read much by then, and is told of it by itself.
  constexpr std::size_t kMostWriters = 256;
  if (same != known.end()) {
    same->parts.add(begin, end);
  } else if (known.size() < kMostWriters) {
    known.push_back({writer, {}});
    known.back().parts.add(begin, end);
  }
}

// Shadow memory remembers only that the scope has ended, but a copy that comes later races with
// what the scope has done as well.
void State::remember_scope(Region& region, uintptr_t begin, uintptr_t end) {
  constexpr std::size_t kMostEnded = std::size_t{1} << 14;
  shadow_.for_each_piece(region, begin, end,
                         [&](uintptr_t first, uintptr_t last, uint32_t write, uint32_t read) {
                           const auto note = [&](uint32_t number) {
                             if (number == 0 || ended_.size() >= kMostEnded) return;
                             if (is_access(accesses_[number].kind))
                               ended_.push_back({first, last, accesses_[number]});
                           };
                           note(write & ~kUndefined);
                           accesses_.for_each(read, note);
                         });
}

void State::race_in_ended_scope(const AccessRecord& copy, uintptr_t begin, uintptr_t end,
                                int64_t element_bytes) {
  for (const Ended& known : ended_) {
    const uintptr_t first = std::max(begin, known.begin);
    const uintptr_t last = std::min(end, known.end);
    if (first >= last || !do_clash(known.access.kind, copy.kind)) continue;
    if (dma_ == nullptr || dma_->agent.is_after(known.access.agent, known.access.epoch)) continue;
    add_race(known.access, copy, first, last, element_bytes);
  }
}

// Whether the write that it should have waited for comes is only known later.
void State::add_undefined_read(Finding finding, const Parts<uintptr_t>& parts) {
  if (options_.stop_at_first || !finding.memory.has_value() || !finding.window.empty() ||
      !finding.padding.elements.empty()) {
    add(std::move(finding));
    return;
  }
  if (!record.findings.reserve(finding)) return;
  finding.schedule = schedule_;
  const Party& first = *finding.first;
  const Party second = finding.second.value_or(Party());
  const auto& programs = launch_.executable.programs;
  const Reader reader = reader_of(programs[first.program].first_core + first.index, first.site,
                                  first.is_dma, first.dma_site);
  // A block of memory is known by where it begins.
  const uintptr_t block =
      parts.all().front().first - static_cast<uintptr_t>(finding.memory->parts.all().front().first);
  const auto [entry, is_new] =
      early_read_numbers_.emplace(std::tuple(reader, second.program, second.index, second.site,
                                             second.dma_site, finding.use, block),
                                  early_reads_.size());
  if (is_new) {
    early_reads_.push_back({std::move(finding), reader, parts});
    if (!early_reads_.back().finding.meetings.empty()) {
      early_reads_.back().finding.occurrences = early_reads_.back().finding.meetings.bytes();
    }
    return;
  }
  EarlyRead& known = early_reads_[entry->second];
  known.parts.add(parts);
  known.finding.memory->parts.add(finding.memory->parts);
  known.finding.is_inexact |= finding.is_inexact;
  known.finding.meetings.add(finding.meetings);
  known.finding.occurrences = known.finding.meetings.empty()
                                  ? known.finding.occurrences + finding.occurrences
                                  : known.finding.meetings.bytes();
}

Parts<uintptr_t> State::without_late_writes(const Reader& reader, const Parts<uintptr_t>& parts,
                                            const std::set<uint64_t>& writers) const {
  const auto known = late_writes_.find(reader);
  if (known == late_writes_.end()) return parts;
  Parts<uintptr_t> brought;
  for (const LateWrite& write : known->second) {
    if (writers.count(write.writer) != 0) brought.add(write.parts);
  }
  Parts<uintptr_t> rest;
  auto next = brought.all().begin();
  for (auto [begin, end] : parts.all()) {
    while (next != brought.all().end() && next->second <= begin) ++next;
    for (auto part = next; begin < end; ++part) {
      if (part == brought.all().end() || part->first >= end) {
        rest.add(begin, end);
        break;
      }
      if (begin < part->first) rest.add(begin, part->first);
      begin = std::max(begin, part->second);
    }
  }
  return rest;
}

// The late writes that bring a value: one of something undefined does so if that was only read too
// early as well.
std::set<uint64_t> State::writers_of_values() const {
  std::set<uint64_t> found;
  for (bool has_changed = true; has_changed;) {
    has_changed = false;
    for (const auto& [reader, writes] : late_writes_) {
      for (const LateWrite& write : writes) {
        if (found.count(write.writer) != 0) continue;
        const auto origin = origins_.find(write.writer);
        if (origin != origins_.end()) {
          const Reading& read = trails_.reading(origin->second.reading);
          const Reader source = reader_of(read.core, read.site, read.is_dma, read.dma_site);
          if (!without_late_writes(source, origin->second.parts, found).empty()) continue;
        }
        found.insert(write.writer);
        has_changed = true;
      }
    }
  }
  return found;
}

void State::settle() {
  const std::set<uint64_t> writers = writers_of_values();
  record.findings.end_reservations();
  for (EarlyRead& read : early_reads_) {
    Finding& finding = read.finding;
    const Parts<uintptr_t> rest = without_late_writes(read.reader, read.parts, writers);
    finding.is_too_early = rest.empty();
    if (!rest.empty() && rest.bytes() != read.parts.bytes()) {
      const int64_t element_bytes = finding.memory->element_bytes;
      finding.memory.reset();
      for (const auto& [begin, end] : rest.all()) {
        MemoryRange range = range_of(begin, end, element_bytes);
        if (finding.memory.has_value()) {
          finding.memory->parts.add(range.parts);
        } else {
          finding.memory = std::move(range);
        }
      }
    }
    record.findings.add_reserved(finding);
  }
  for (Finding& finding : record.findings.all()) {
    finding.is_unwaited = !finding.has_others && !finding.copies.empty() &&
                          std::all_of(finding.copies.begin(), finding.copies.end(),
                                      [&](const auto& copy) { return unwaited_.count(copy) != 0; });
  }
}

}  // namespace cokernel::checked
