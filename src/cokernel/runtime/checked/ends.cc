// Findings, and what is looked at when a scope or a launch ends.
#include <algorithm>
#include <utility>

#include "checked/state.h"
#include "launch.h"

namespace cokernel::checked {

namespace {

// A livelock names no more of what its cores poll.
constexpr std::size_t kMostPolled = 16;

const char* name_of(AccessKind kind, bool is_dma) {
  switch (kind) {
    case AccessKind::kRead:
    case AccessKind::kPoll:
      return is_dma ? "copy reads" : "read";
    case AccessKind::kWrite:
      return is_dma ? "copy writes" : "write";
    case AccessKind::kAtomic:
    case AccessKind::kFetchAndAdd:
      return "atomic update";
    case AccessKind::kUpdate:
      return "update";
    case AccessKind::kAllocate:
      return "allocate";
    case AccessKind::kRelease:
      return "release";
  }
  return "access";
}

}  // namespace

Party State::party_of_core(int32_t number, int32_t site, const char* access) const {
  const Core& core = launch_.cores[number];
  Party party;
  party.program = core.program;
  party.index = core.index;
  std::copy(std::begin(core.coordinates), std::end(core.coordinates), party.coordinates);
  party.site = site;
  party.access = access;
  return party;
}

Party State::party_of(uint32_t number) const { return party_of(accesses_[number]); }

Party State::party_of(const AccessRecord& access) const {
  Party party = party_of_core(static_cast<int32_t>(access.core), access.site,
                              name_of(access.kind, access.is_dma));
  party.is_dma = access.is_dma;
  party.dma_site = access.dma_site;
  return party;
}

MemoryRange State::range_of(uintptr_t begin, uintptr_t end, int64_t element_bytes) const {
  MemoryRange range;
  range.place = place_of(launch_, reinterpret_cast<const void*>(begin));
  range.element_bytes = element_bytes;
  range.parts.add(range.place.offset, range.place.offset + static_cast<int64_t>(end - begin));
  return range;
}

void State::set_semaphore(Finding& finding, const SemaphoreState& semaphore) const {
  finding.semaphore = semaphore.place;
  finding.semaphore_count = semaphore.count;
}

void State::add(Finding finding, bool ends) {
  finding.schedule = schedule_;
  finding.ends = ends;
  const bool is_new = record.findings.add(finding);
  if ((ends || (is_new && options_.stop_at_first)) && launch_.claim_failure()) {
    launch_.failure = Failure();
    launch_.request_stop();
  }
}

void State::conflict(uint32_t earlier, uint32_t later, uintptr_t begin, uintptr_t end,
                     int64_t element_bytes) {
  const AccessRecord& before = accesses_[earlier];
  const AccessRecord& after = accesses_[later];
  const auto ends_scope = [](const AccessRecord& one, const AccessRecord& other) {
    return one.kind == AccessKind::kRelease ||
           (one.kind == AccessKind::kAllocate && one.core == other.core);
  };
  if (!ends_scope(before, after) && !ends_scope(after, before)) {
    add_race(before, after, begin, end, element_bytes);
    return;
  }
  // The copy first, then the end of the scope.
  const bool is_swapped = ends_scope(after, before);
  const AccessRecord& copy = is_swapped ? before : after;
  const AccessRecord& scope = is_swapped ? after : before;
  Finding finding;
  finding.kind = "CopyInFlight";
  finding.first = party_of(copy);
  finding.second = party_of(scope);
  // A copy is counted once, whatever it touches in pieces and however many scopes it comes to.
  const bool is_new =
      in_flight_at_end_.emplace(copy.agent, copy.epoch, copy.site, copy.kind).second;
  finding.occurrences = is_new ? 1 : 0;
  finding.memory = range_of(begin, end, element_bytes);
  add(std::move(finding));
  unwaited_.emplace(copy.agent, copy.epoch);
  if (!is_swapped && copy.is_dma) race_in_ended_scope(copy, begin, end, element_bytes);
}

// What is left in a semaphore when it ends.
void State::report_left(SemaphoreState& semaphore) {
  for (Signal& signal : semaphore.signals) {
    if (signal.is_reported || signal.core < 0) continue;
    signal.is_reported = true;
    if (signal.is_dma ? !options_.unwaited_copies : !options_.leftovers) continue;
    if (signal.is_dma) {
      unwaited_.emplace(signal.release.agent, signal.release.epoch);
      unwaited_.emplace(signal.release.agent, signal.reading_epoch);
    }
    Finding finding;
    finding.kind = signal.is_dma ? "UnwaitedCopy" : "LeftoverSemaphore";
    finding.first = party_of_signal(signal.core, signal.site, signal.is_dma);
    if (signal.taker >= 0) {
      finding.second = party_of_core(signal.taker, signal.taker_site, "wait");
    }
    set_semaphore(finding, semaphore);
    finding.numbers = {{"value", semaphore.count}, {"moved", signal.amount}, {"left", signal.left}};
    add(std::move(finding));
  }
}

// A wait that ended within a copy which another wait has taken the rest of.
void State::report_misfit(SemaphoreState& semaphore) {
  if (!options_.unwaited_copies || semaphore.count != 0) return;
  for (const auto& dma : in_flight_) {
    if (dma->arrival == &semaphore || dma->departure == &semaphore) return;
  }
  const Moved* wait = semaphore.matching.misfit();
  if (wait == nullptr) return;
  // The smallest copy is the one that most likely was meant.
  const std::vector<Moved>& brought = semaphore.matching.brought();
  const Moved& copy = *std::min_element(
      brought.begin(), brought.end(),
      [](const Moved& one, const Moved& other) { return one.bytes < other.bytes; });
  Finding finding;
  finding.kind = "WaitTooLarge";
  finding.first = party_of_core(wait->core, wait->site, "wait");
  finding.second = party_of_signal(copy.core, copy.site, true);
  set_semaphore(finding, semaphore);
  finding.numbers = {{"wanted", wait->bytes},
                     {"moved", copy.bytes},
                     {"brought", static_cast<int64_t>(brought.size())}};
  semaphore.matching.give_up();
  add(std::move(finding));
}

void State::release_semaphores(Core* core, int32_t site, char* begin, int64_t bytes,
                               int32_t is_semaphore) {
  const auto* first = reinterpret_cast<Semaphore*>(begin);
  const auto* last = reinterpret_cast<Semaphore*>(begin + bytes);
  const auto is_inside = [&](const SemaphoreState* semaphore) {
    return semaphore != nullptr && semaphore->semaphore >= first && semaphore->semaphore < last;
  };
  for (const auto& dma : in_flight_) {
    const bool arrives = is_inside(dma->arrival);
    if (!arrives && !is_inside(dma->departure)) continue;
    // A copy of another core to a semaphore whose counts last belongs to the next scope.
    if (is_semaphore == 2 && static_cast<int32_t>(dma->agent.core) != number_of(core)) continue;
    Finding finding;
    finding.kind = "CopyInFlight";
    finding.first = party_of_signal(static_cast<int32_t>(dma->agent.core), dma->site, true);
    finding.second = party_of_core(number_of(core), site, "release");
    unwaited_.emplace(dma->agent.id, arrives ? dma->agent.write_epoch : dma->agent.read_epoch);
    if (dma->departure == nullptr) unwaited_.emplace(dma->agent.id, dma->agent.read_epoch);
    set_semaphore(finding, arrives ? *dma->arrival : *dma->departure);
    finding.numbers = {{"moved", arrives ? dma->arrival_amount : dma->departure_amount}};
    add(std::move(finding));
  }
  for (const auto& semaphore : semaphores_.all()) {
    if (!is_inside(semaphore.get())) continue;
    // Others may have signalled already for the next time.
    if (is_semaphore == 2) continue;
    SemaphoreState& ended = semaphores_.at(semaphore->semaphore);
    report_left(ended);
    report_misfit(ended);
  }
}

void State::look_at_end() {
  for (const auto& semaphore : semaphores_.all()) {
    // Those in memory that outlives the launch are handed on to another kernel.
    if (semaphore->place.owner == MemoryOwner::kBuffer ||
        semaphore->place.owner == MemoryOwner::kUnknown) {
      continue;
    }
    SemaphoreState& ended = semaphores_.at(semaphore->semaphore);
    report_left(ended);
    report_misfit(ended);
  }
  look_at_outputs();
}

Party State::party_of_signal(int32_t core, int32_t site, bool is_dma) const {
  Party party = party_of_core(core, site, "signal");
  party.is_dma = is_dma;
  if (is_dma) party.dma_site = site;
  return party;
}

std::vector<Party> State::others_counted(const SemaphoreState& semaphore, int32_t core,
                                         int32_t site) const {
  // A report that lists more lines says no more.
  constexpr std::size_t kMostOthers = 8;
  std::vector<Party> found;
  for (const Signal& signal : semaphore.signals) {
    if (signal.core < 0 || (signal.core == core && signal.site == site)) continue;
    const Party party = party_of_signal(signal.core, signal.site, signal.is_dma);
    const bool is_known = std::any_of(found.begin(), found.end(), [&](const Party& other) {
      return other.program == party.program && other.site == party.site;
    });
    if (!is_known && found.size() < kMostOthers) found.push_back(party);
  }
  return found;
}

// The semaphores of the same core that count something, and this one of other cores.
std::vector<Starved::Untaken> State::untaken_beside(const SemaphoreState& waited) const {
  constexpr std::size_t kMostTold = 16;
  std::vector<Starved::Untaken> found;
  for (const auto& semaphore : semaphores_.all()) {
    const Place& place = semaphore->place;
    if (semaphore.get() == &waited || semaphore->count <= 0 || place.owner != waited.place.owner ||
        place.program != waited.place.program) {
      continue;
    }
    if (place.index != waited.place.index && place.offset != waited.place.offset) continue;
    Starved::Untaken untaken{place, semaphore->count, {}};
    for (const Signal& signal : semaphore->signals) {
      if (signal.core < 0) continue;
      untaken.from.push_back(
          {party_of_signal(signal.core, signal.site, signal.is_dma), signal.left, 1});
      if (untaken.from.size() == kMostTold) break;
    }
    if (untaken.from.empty()) continue;
    found.push_back(std::move(untaken));
    if (found.size() == kMostTold) break;
  }
  return found;
}

// What the cores lack that wait for semaphores; the deadlock itself is the failure of the launch.
void State::report_blocked_waits() {
  // To compare the semaphores of very many cores with each other would take long.
  constexpr int32_t kMostStarved = 256;
  int32_t starved_cores = 0;
  for (int32_t i = 0; i < launch_.core_count; ++i) {
    const Wait& wait = cores_[i].wait;
    if (wait.semaphore == nullptr) continue;
    Starved starved;
    starved.core = i;
    starved.is_for_copies = wait.is_dma;
    if (wait.is_dma) {
      for (const CopiesFrom& copies : wait.semaphore->copies) {
        starved.from.push_back(
            {party_of_signal(copies.core, copies.site, true), copies.amount, copies.times});
      }
    }
    if (starved_cores++ < kMostStarved) starved.untaken = untaken_beside(*wait.semaphore);
    record.starved.push_back(std::move(starved));
    const int64_t count = wait.semaphore->count;
    if (!wait.is_dma || count <= 0 || count >= wait.value || wait.semaphore->is_torn) continue;
    const std::deque<Signal>& signals = wait.semaphore->signals;
    add_wait_too_large(i, wait, signals.front(),
                       {{"left", count}, {"copies", static_cast<int64_t>(signals.size())}});
  }
}

// Whether what has ended the launch had just used an undefined value: nothing was probed between.
void State::note_use_that_failed() {
  const Failure& failure = launch_.failure;
  if (failure.kind == FailureKind::kNone || failure.program < 0) return;
  const int32_t core = launch_.executable.programs[failure.program].first_core + failure.index;
  const auto& use = cores_[core].last_use;
  if (use.site >= 0 && use.event == event_) record.failed_use_site = use.site;
}

// `signal` is what it waited for instead of its own copy, or as well as that.
void State::add_wait_too_large(int32_t core, const Wait& wait, const Signal& signal,
                               std::vector<std::pair<const char*, int64_t>> numbers) {
  Finding finding;
  finding.kind = "WaitTooLarge";
  finding.first = party_of_core(core, wait.site, "wait");
  if (signal.core >= 0) {
    finding.second = party_of_signal(signal.core, signal.site, signal.is_dma);
  }
  set_semaphore(finding, *wait.semaphore);
  finding.numbers = std::move(numbers);
  finding.numbers.emplace_back("wanted", wait.value);
  add(std::move(finding));
}

void State::fail_livelocked(int32_t number) {
  Finding finding;
  finding.kind = "Livelock";
  const auto tell = [&](int32_t core) {
    const CoreInfo& known = cores_[core];
    if (known.looks.empty()) {
      // It looks at nothing that others could change.
      const int32_t site = launch_.cores[core].site.load(std::memory_order_relaxed);
      finding.polled.push_back({party_of_core(core, site, "poll"), {}, {}, 0});
    }
    for (const Look& look : known.looks) {
      Polled polled{party_of_core(core, look.site, "poll"), {}, {}, 0};
      if (look.semaphore != nullptr) {
        polled.semaphore = look.semaphore->place;
        polled.semaphore_count = look.semaphore->count;
      } else {
        polled.memory = range_of(look.begin, look.end, look.element_bytes);
      }
      finding.polled.push_back(std::move(polled));
    }
  };
  tell(number);
  ready_.for_each([&](int32_t core) {
    if (core != number && finding.polled.size() < kMostPolled) tell(core);
  });
  finding.first = finding.polled.front().party;
  for (const Polled& polled : finding.polled) {
    if (!finding.second.has_value() && polled.party.index != finding.first->index) {
      finding.second = polled.party;
    }
  }
  finding.memory = finding.polled.front().memory;
  finding.semaphore = finding.polled.front().semaphore;
  finding.semaphore_count = finding.polled.front().semaphore_count;
  finding.numbers = {{"polls", cores_[number].polls}, {"pollers", ready_.count()}};
  add(std::move(finding), /*ends=*/true);
}

}  // namespace cokernel::checked
