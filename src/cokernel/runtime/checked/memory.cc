// Accesses to memory in checked mode.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "checked/blocks.h"
#include "checked/state.h"
#include "launch.h"

namespace cokernel::checked {

namespace {

uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

}  // namespace

// Tells the writes apart whose values came from undefined ones. Numbers of records change.
uint64_t State::origin_key(uint32_t number) const { return origin_key(accesses_[number]); }

uint64_t State::origin_key(const AccessRecord& access) {
  return mix(mix(access.agent, access.epoch), static_cast<uint64_t>(access.site));
}

uint32_t State::add_record(SiteCache& cache, const Agent& agent, int32_t site, AccessKind kind) {
  if (cache.agent != agent.id || cache.epoch != agent.write_epoch ||
      cache.collections != shadow_.collections()) {
    cache.agent = agent.id;
    cache.epoch = agent.write_epoch;
    cache.collections = shadow_.collections();
    std::fill(std::begin(cache.numbers), std::end(cache.numbers), 0);
    cache.last = Transition();
  }
  uint32_t& number = cache.numbers[static_cast<int>(kind)];
  if (number == 0) {
    AccessRecord access;
    access.agent = agent.id;
    access.epoch = kind == AccessKind::kRead ? agent.read_epoch : agent.write_epoch;
    access.core = agent.core;
    access.site = site;
    access.dma_site = agent.dma_site;
    access.kind = kind;
    access.is_dma = agent.is_dma;
    number = accesses_.add(access);
  }
  return number;
}

bool State::access(Core* core, int32_t site, AccessKind kind, uintptr_t begin, int64_t bytes,
                   int64_t element_bytes) {
  ++record.counts.accesses;
  if (bytes <= 0) return false;
  const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
  SiteCache& cache = cache_of(site);
  if (cache.region == nullptr || begin < cache.region->begin || begin >= cache.region->end) {
    cache.region = shadow_.find(begin);
    if (cache.region == nullptr) return false;
  }
  if (kind != AccessKind::kWrite && may_be_unfilled(begin, end)) fill_unwritten(begin, end);
  if (kind == AccessKind::kPoll) {
    // Who polls for long makes records, too.
    shadow_.collect_if_due();
    acquire_polled(core, *cache.region, begin, end);
    watch(begin, end);
    note_look(core, {site, nullptr, begin, end, element_bytes});
    if (schedule_.record) step_polled_.add(begin, end);
    last_probe_ = record_number(cache, agent_of(core), site, AccessKind::kRead);
    return shadow_.any_undefined(*cache.region, begin, std::min(end, cache.region->end));
  }
  if (kind != AccessKind::kRead) {
    const uintptr_t offset = begin - address_of(core->memory);
    const Executable::Program& program = launch_.executable.programs[core->program];
    const bool is_seen = offset >= static_cast<uintptr_t>(program.private_stride);
    if (is_seen || dma_ != nullptr) changed_at(begin, end);
    if (kind == AccessKind::kFetchAndAdd) {
      for (uintptr_t at = begin; at < end; at += static_cast<uintptr_t>(element_bytes)) {
        info(core).agent.seen.join(elements_[at].clock);
      }
    }
  }
  const Agent& agent = agent_of(core);
  const uint32_t number = record_number(cache, agent, site, kind);
  last_probe_ = number;
  const bool was_undefined =
      shadow_.access(*cache.region, {kind, number, &agent, element_bytes, &cache.last}, begin, end);
  has_read_undefined_ |= was_undefined && kind == AccessKind::kRead;
  if (is_scatter_ && kind == AccessKind::kWrite) note_scattered(number, begin, end, element_bytes);
  if (was_undefined && kind != AccessKind::kRead && kind != AccessKind::kWrite) {
    Meetings& known = updates_[{number_of(core), site}];
    if (known.event != event_) ++known.count;
    known.event = event_;
  }
  // Who raises a flag announces what it has done so far, and nothing that it does afterwards.
  if (kind != AccessKind::kRead && is_watched(begin, end)) info(core).agent.release();
  if (kind != AccessKind::kFetchAndAdd) return was_undefined;
  for (uintptr_t at = begin; at < end; at += static_cast<uintptr_t>(element_bytes)) {
    release_to_element(core, at);
  }
  return was_undefined;
}

void State::note_scattered(uint32_t number, uintptr_t begin, uintptr_t end, int64_t element_bytes) {
  const auto tell = [&](uintptr_t from, uintptr_t to) {
    Finding finding;
    finding.kind = "Race";
    finding.event = event_;
    finding.first = finding.second = party_of(number);
    finding.second->access = kWritesAgain;
    finding.memory = range_of(from, to, element_bytes);
    add(std::move(finding));
  };
  auto next = scattered_.upper_bound(begin);
  if (next != scattered_.begin()) {
    const auto [first, last] = *std::prev(next);
    if (last > begin) tell(begin, std::min(end, last));
  }
  for (; next != scattered_.end() && next->first < end; ++next) {
    tell(next->first, std::min(end, next->second));
  }
  uintptr_t& known = scattered_[begin];
  known = std::max(known, end);
}

// The writes that a core sees which polls. They are not noted as read: who resets a flag races with
// none of those who polled it.
void State::acquire_polled(Core* core, Region& region, uintptr_t begin, uintptr_t end) {
  polled_.clear();
  shadow_.for_each_piece(region, begin, end,
                         [&](uintptr_t, uintptr_t, uint32_t write, uint32_t read) {
                           if ((write & ~kUndefined) != 0) polled_.push_back(write & ~kUndefined);
                           accesses_.for_each(read, [&](uint32_t number) {
                             if (is_atomic(accesses_[number].kind)) polled_.push_back(number);
                           });
                         });
  for (const uint32_t number : polled_) acquire_from(core, number);
}

// A core that polls looks at few things, and at the same ones again and again.
void State::note_look(Core* core, const Look& look) {
  constexpr std::size_t kMostLooks = 16;
  CoreInfo& known = info(core);
  // Before that it need not be known.
  if (known.is_stuck || known.digest_at == 0) return;
  std::vector<Look>& looks = known.looks;
  if (looks.size() >= kMostLooks) return;
  for (const Look& other : looks) {
    if (other.site == look.site && other.semaphore == look.semaphore && other.begin == look.begin &&
        other.end == look.end) {
      return;
    }
  }
  looks.push_back(look);
}

void State::watch(uintptr_t begin, uintptr_t end) {
  const std::pair<uintptr_t, uintptr_t> range{begin, end};
  if (std::find(watched_.begin(), watched_.end(), range) != watched_.end()) return;
  watched_.push_back(range);
  watched_begin_ = std::min(watched_begin_, begin);
  watched_end_ = std::max(watched_end_, end);
}

bool State::is_watched(uintptr_t begin, uintptr_t end) const {
  if (begin >= watched_end_ || end <= watched_begin_) return false;
  return std::any_of(watched_.begin(), watched_.end(),
                     [&](const auto& range) { return begin < range.second && end > range.first; });
}

// What the writer knew when it wrote is not kept. What it knows by now is no less, so that a race
// may be missed, but none is invented.
void State::acquire_from(Core* core, uint32_t number) {
  const AccessRecord& access = accesses_[number];
  Agent& agent = info(core).agent;
  if (access.core == agent.core && !access.is_dma) return;
  if (accesses_.is_before(number, agent)) return;
  Agent& writer = cores_[access.core].agent;
  agent.seen.join(writer.seen);
  agent.seen.include(access.agent, access.epoch);
  if (access.is_dma) {
    if (access.core != agent.core) agent.seen.include(writer.id, writer.write_epoch - 1);
  } else if (writer.write_epoch == access.epoch) {
    // What it does from now on has not been seen.
    writer.release();
  }
}

// Programs draw tickets by fetch_and_add, so that it orders what comes before one and after
// another.
void State::release_to_element(Core* core, uintptr_t begin) {
  Element& element = elements_[begin];
  const Release release = info(core).agent.release();
  element.clock.join(release.clock);
  element.clock.include(release.agent, release.epoch);
  const uint64_t where = hash_of(place_of(launch_, reinterpret_cast<const void*>(begin)));
  if (element.behaviour != 0) element_behaviour_ -= mix(where, element.behaviour);
  element.behaviour = mix(element.behaviour ^ release.agent);
  element_behaviour_ += mix(where, element.behaviour);
}

void State::allocate(Core* core, int32_t site, void* address, int64_t bytes, int64_t element_bytes,
                     int32_t is_semaphore) {
  if (bytes <= 0) return;
  auto* begin = static_cast<char*>(address);
  if (is_semaphore != 0) {
    // Of semaphores that compiled code has cleared the count is zero, which is seen when they are
    // used next.
    if (is_semaphore == 1) {
      semaphores_.begin_scope(reinterpret_cast<Semaphore*>(begin),
                              reinterpret_cast<Semaphore*>(begin + bytes));
    }
    return;
  }
  const auto offset = begin - core->memory;
  if (offset < 0 || offset >= launch_.executable.programs[core->program].private_stride) return;
  Region* region = shadow_.find(address_of(begin));
  if (region == nullptr) return;
  const Agent& agent = agent_of(core);
  SiteCache& cache = cache_of(site);
  const uint32_t number = record_number(cache, agent, site, AccessKind::kAllocate);
  const auto fresh = [&](uintptr_t from, uintptr_t to) {
    fill(reinterpret_cast<char*>(from), static_cast<int64_t>(to - from));
  };
  const uintptr_t end = address_of(begin) + static_cast<uintptr_t>(bytes);
  allocations_[address_of(begin)] = {end, number_of(core), site};
  shadow_.allocate(*region, {AccessKind::kAllocate, number, &agent, element_bytes, &cache.last},
                   address_of(begin), end, options_.uninitialised, fresh);
}

Allocation State::allocation_at(uintptr_t address) const {
  auto next = allocations_.upper_bound(address);
  if (next == allocations_.begin()) return {};
  const Allocation& before = std::prev(next)->second;
  return address < before.end ? before : Allocation();
}

void State::release(Core* core, int32_t site, void* address, int64_t bytes, int32_t is_semaphore) {
  if (bytes <= 0) return;
  auto* begin = static_cast<char*>(address);
  const auto offset = begin - core->memory;
  if (offset < 0 || offset >= launch_.executable.programs[core->program].private_stride) return;
  if (is_semaphore != 0) {
    release_semaphores(core, site, begin, bytes, is_semaphore);
    return;
  }
  Region* region = shadow_.find(address_of(begin));
  if (region == nullptr) return;
  const Agent& agent = agent_of(core);
  SiteCache& cache = cache_of(site);
  const uint32_t number = record_number(cache, agent, site, AccessKind::kRelease);
  allocations_.erase(address_of(begin));
  if (options_.races && !in_flight_.empty()) {
    remember_scope(*region, address_of(begin), address_of(begin) + static_cast<uintptr_t>(bytes));
  }
  shadow_.access(*region, {AccessKind::kRelease, number, &agent, 1, &cache.last}, address_of(begin),
                 address_of(begin) + static_cast<uintptr_t>(bytes));
}

}  // namespace cokernel::checked
