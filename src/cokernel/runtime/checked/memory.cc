// Accesses to memory in checked mode, and which of it is undefined.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "checked/blocks.h"
#include "checked/state.h"
#include "launch.h"

namespace cokernel::checked {

namespace {

uintptr_t address_of(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

const char* name_of_use(int32_t use) {
  constexpr const char* kNames[] = {"branch", "index", "output", "amount", "callback", "loop"};
  return use >= 0 && use < 6 ? kNames[use] : "value";
}

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

void State::copy_undefined(Core* core, void* target, const void* source, int64_t element_bytes,
                           int64_t rank, const int64_t* extents, const int64_t* target_strides,
                           const int64_t* source_strides) {
  if (!options_.uninitialised) return;
  // A DMA tells of what it reads before it says where that goes.
  if (dma_ != nullptr && !has_read_undefined_) return;
  Region* from = shadow_.find(address_of(source));
  Region* to = shadow_.find(address_of(target));
  if (from == nullptr || to == nullptr) return;
  const uint32_t probe = last_probe_;
  UndefinedRead read;
  if (probe != 0) {
    const Agent& agent = agent_of(core);
    read.core = number_of(core);
    read.site = accesses_[probe].site;
    read.is_dma = agent.is_dma;
    read.dma_site = agent.dma_site;
    read.element_bytes = element_bytes;
  }
  for_each_piece(
      element_bytes, rank, extents, source_strides, target_strides,
      [&](int64_t source_offset, int64_t target_offset, int64_t, int64_t bytes) {
        const uintptr_t begin = address_of(source) + static_cast<uintptr_t>(source_offset);
        const uintptr_t distance =
            address_of(target) + static_cast<uintptr_t>(target_offset) - begin;
        shadow_.for_each_undefined(
            *from, begin, begin + static_cast<uintptr_t>(bytes),
            [&](uintptr_t first, uintptr_t last, uint32_t write, uint32_t) {
              shadow_.make_undefined(*to, first + distance, last + distance);
              if (probe == 0) return;
              // A value that came from elsewhere has been read there first.
              const uint32_t writer = write & ~kUndefined;
              const auto origin = writer == 0 ? origins_.end() : origins_.find(origin_key(writer));
              if (origin != origins_.end()) {
                add_origin(probe, UndefinedRead(origin->second));
              } else {
                if (read.parts.empty()) {
                  read.allocated = allocation_at(first);
                  read.meetings = meeting(read.core, read.site);
                }
                read.parts.add(first, last);
              }
            });
      });
  if (!read.parts.empty()) add_origin(probe, read);
}

// Of the reads that one write stores the values of, the first is told, with all that it met.
void State::add_origin(uint32_t probe, const UndefinedRead& read) {
  const auto [entry, is_new] = origins_.emplace(origin_key(probe), read);
  UndefinedRead& known = entry->second;
  if (is_new || known.core != read.core || known.site != read.site) return;
  known.parts.add(read.parts);
  known.padding.add(read.padding);
  known.meetings.add(read.meetings);
}

Parts<int64_t> State::meeting(int32_t core, int32_t site) {
  Meetings& known = meetings_[{core, site}];
  if (known.event != event_) ++known.count;
  known.event = event_;
  const int64_t number = first_meeting(core) + known.count - 1;
  Parts<int64_t> result;
  result.add(number, number + 1);
  return result;
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

State::Allocation State::allocation_at(uintptr_t address) const {
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

void State::forget(void* address, int64_t element_bytes, int64_t rank, const int64_t* extents,
                   const int64_t* strides) {
  if (!options_.uninitialised) return;
  Region* region = shadow_.find(address_of(address));
  if (region == nullptr) return;
  for_each_piece(element_bytes, rank, extents, strides, strides,
                 [&](int64_t offset, int64_t, int64_t, int64_t bytes) {
                   const uintptr_t begin = address_of(address) + static_cast<uintptr_t>(offset);
                   shadow_.make_undefined(*region, begin, begin + static_cast<uintptr_t>(bytes));
                 });
}

bool State::undefined(Core* core, void* address, int64_t element_bytes, int64_t rank,
                      const int64_t* extents, const int64_t* strides, uint8_t* mask,
                      int32_t number) {
  if (!options_.uninitialised) return false;
  Region* region = shadow_.find(address_of(address));
  if (region == nullptr) return false;
  if (rank == 0 || (rank == 1 && strides[0] == element_bytes)) {
    const int64_t bytes = element_bytes * (rank == 0 ? 1 : extents[0]);
    const uintptr_t begin = address_of(address);
    const uintptr_t end = std::min(begin + static_cast<uintptr_t>(bytes), region->end);
    if (!shadow_.any_undefined(*region, begin, end)) return false;
  }
  UndefinedRead read;
  // What was copied here has been read elsewhere, and that is the read to tell of.
  bool is_read_here = true;
  for_each_piece(element_bytes, rank, extents, strides, strides,
                 [&](int64_t offset, int64_t, int64_t, int64_t bytes) {
                   const uintptr_t begin = address_of(address) + static_cast<uintptr_t>(offset);
                   shadow_.for_each_undefined(
                       *region, begin, begin + static_cast<uintptr_t>(bytes),
                       [&](uintptr_t first, uintptr_t last, uint32_t write, uint32_t) {
                         if (read.core < 0) is_read_here = note_undefined_read(read, core, write);
                         if (!is_read_here) return;
                         if (read.parts.empty()) {
                           read.allocated = allocation_at(first);
                           read.meetings = meeting(read.core, read.site);
                         }
                         read.parts.add(first, last);
                       });
                 });
  if (read.core < 0) return false;
  if (is_read_here) read.element_bytes = element_bytes;
  CoreInfo& known = info(core);
  UndefinedRead& last = known.undefined_reads[number];
  if (last.core == read.core && last.site == read.site &&
      last.serial == known.last_undefined_read) {
    // The elements of one read may be asked for one by one.
    last.parts.add(read.parts);
    last.meetings.add(read.meetings);
  } else {
    last = std::move(read);
  }
  last.serial = ++known.last_undefined_read;
  if (mask == nullptr) return true;
  int64_t count = 1;
  for (int64_t i = 0; i < rank; ++i) count *= extents[i];
  std::memset(mask, 0, static_cast<std::size_t>(count));
  for_each_piece(element_bytes, rank, extents, strides, strides,
                 [&](int64_t offset, int64_t, int64_t number, int64_t bytes) {
                   const uintptr_t begin = address_of(address) + static_cast<uintptr_t>(offset);
                   shadow_.for_each_undefined(
                       *region, begin, begin + static_cast<uintptr_t>(bytes),
                       [&](uintptr_t first, uintptr_t last, uint32_t, uint32_t) {
                         const auto from = static_cast<int64_t>(first - begin) / element_bytes;
                         const auto to = static_cast<int64_t>(last - 1 - begin) / element_bytes;
                         std::memset(mask + number + from, 1,
                                     static_cast<std::size_t>(to - from + 1));
                       });
                 });
  return true;
}

void State::read_padding(Core* core, int32_t site, int32_t number, int64_t rank,
                         const int64_t* window) {
  const Agent& agent = agent_of(core);
  UndefinedRead read;
  read.core = number_of(core);
  read.site = site;
  read.is_dma = agent.is_dma;
  read.dma_site = agent.dma_site;
  for (int64_t i = 0; i < rank; ++i) {
    read.window.push_back({window[i], window[rank + i], window[2 * rank + i]});
  }
  read.meetings = meeting(read.core, site);
  CoreInfo& known = info(core);
  read.serial = ++known.last_undefined_read;
  known.undefined_reads[number] = std::move(read);
}

void State::pick_padding(Core* core, int32_t site, int32_t number, int64_t element, int64_t rank,
                         const int64_t* shape) {
  const Agent& agent = agent_of(core);
  CoreInfo& known = info(core);
  UndefinedRead& read = known.undefined_reads[number];
  // The elements of one read come one by one, like those that nobody has written.
  const bool goes_on = read.core == number_of(core) && read.site == site &&
                       read.dma_site == agent.dma_site && read.serial == known.last_undefined_read;
  if (!goes_on) {
    read = UndefinedRead();
    read.core = number_of(core);
    read.site = site;
    read.is_dma = agent.is_dma;
    read.dma_site = agent.dma_site;
  }
  read.padding.shape.assign(shape, shape + rank);
  read.padding.elements.add(element, element + 1);
  read.meetings.add(meeting(read.core, site));
  read.serial = ++known.last_undefined_read;
}

bool State::note_undefined_read(UndefinedRead& read, const Core* core, uint32_t write) {
  read.core = number_of(core);
  if (last_probe_ != 0) {
    const AccessRecord& probe = accesses_[last_probe_];
    read.site = probe.site;
    read.is_dma = probe.is_dma;
    read.dma_site = probe.dma_site;
  }
  const uint32_t writer = write & ~kUndefined;
  if (writer == 0) return true;
  const auto origin = origins_.find(origin_key(writer));
  if (origin == origins_.end()) return true;
  read = origin->second;
  return false;
}

void State::mark_undefined(Core* core, void* address, int64_t element_bytes, int64_t rank,
                           const int64_t* extents, const int64_t* strides, const uint8_t* mask,
                           const int32_t* reads, int32_t read_count) {
  if (!options_.uninitialised) return;
  Region* region = shadow_.find(address_of(address));
  if (region == nullptr) return;
  bool any = false;
  for_each_piece(element_bytes, rank, extents, strides, strides,
                 [&](int64_t offset, int64_t, int64_t first, int64_t bytes) {
                   const uintptr_t begin = address_of(address) + static_cast<uintptr_t>(offset);
                   const int64_t count = bytes / element_bytes;
                   const uint8_t* here = mask + first;
                   for (int64_t i = 0; i < count;) {
                     if (here[i] == 0) {
                       ++i;
                       continue;
                     }
                     int64_t next = i + 1;
                     while (next < count && here[next] != 0) ++next;
                     shadow_.make_undefined(*region,
                                            begin + static_cast<uintptr_t>(i * element_bytes),
                                            begin + static_cast<uintptr_t>(next * element_bytes));
                     any = true;
                     i = next;
                   }
                 });
  if (!any || last_probe_ == 0) return;
  const UndefinedRead& read = undefined_read_of(core, reads, read_count);
  if (read.core >= 0) add_origin(last_probe_, read);
}

const State::UndefinedRead& State::undefined_read_of(Core* core, const int32_t* reads,
                                                     int32_t count) {
  static const UndefinedRead nothing;
  const UndefinedRead* found = nullptr;
  const auto consider = [&](const UndefinedRead& read) {
    if (found == nullptr || read.serial > found->serial) found = &read;
  };
  const auto& known = info(core).undefined_reads;
  for (int32_t i = 0; i < count; ++i) {
    const auto entry = known.find(reads[i]);
    if (entry != known.end()) consider(entry->second);
  }
  if (found == nullptr) {
    for (const auto& [number, read] : known) consider(read);
  }
  return found != nullptr ? *found : nothing;
}

void State::report_undefined(Core* core, int32_t site, int32_t use, const int32_t* reads,
                             int32_t read_count) {
  const UndefinedRead& read = undefined_read_of(core, reads, read_count);
  const int32_t number = number_of(core);
  info(core).last_use = {site, event_};
  Finding finding;
  finding.kind = "UninitialisedRead";
  finding.use = name_of_use(use);
  finding.second = party_of_core(number, site, "use");
  set_undefined_read(finding, read, number, site);
  // It is the use that is counted, whatever it has read.
  finding.meetings = Parts<int64_t>();
  add_undefined_read(std::move(finding), read.parts);
}

}  // namespace cokernel::checked
