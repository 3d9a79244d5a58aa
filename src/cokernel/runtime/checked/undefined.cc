// Which memory is undefined, where what it holds was read, and where it is put to use.
#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

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

// Calls visit(begin, end) for each run of true elements in a mask of so many elements.
template <typename Visit>
void for_each_run(const uint8_t* mask, int64_t count, Visit visit) {
  for (int64_t i = 0; i < count;) {
    if (mask[i] == 0) {
      ++i;
      continue;
    }
    int64_t next = i + 1;
    while (next < count && mask[next] != 0) ++next;
    visit(i, next);
    i = next;
  }
}

int64_t count_of(int64_t rank, const int64_t* extents) {
  int64_t count = 1;
  for (int64_t i = 0; i < rank; ++i) count *= extents[i];
  return count;
}

// What an agent, which may be a DMA that the core has started, reads at a site.
Reading reading_by(const Agent& agent, int32_t core, int32_t site) {
  Reading reading;
  reading.core = core;
  reading.site = site;
  reading.is_dma = agent.is_dma;
  reading.dma_site = agent.dma_site;
  return reading;
}

}  // namespace

// Calls visit(trail) for what a range of memory that is undefined comes from, in order; trails
// without reading are of what nobody has written. The words are those of its cells.
template <typename Visit>
void State::follow(uintptr_t begin, uintptr_t end, uint32_t write, uint32_t read, Visit visit) {
  int64_t next = static_cast<int64_t>(begin);
  const auto last = static_cast<int64_t>(end);
  const auto add_unknown = [&](int64_t stop) {
    if (next >= stop) return;
    Trail trail;
    trail.begin = trail.anchor = trail.source = next;
    trail.end = stop;
    const uint32_t writer = write & ~kUndefined;
    if (writer != 0 && trails_.is_full()) {
      const auto coarse = origins_.find(origin_key(writer));
      if (coarse != origins_.end()) {
        Origin origin = coarse->second;
        origin.is_exact = false;
        trail.pool = trails_.add_pool(std::move(origin));
      }
    }
    visit(trail);
  };
  if (!trails_.is_empty()) {
    const auto is_of = [&](const Trail& trail) {
      const uint32_t writer = write & ~kUndefined;
      bool result = writer != 0 && trail.writer == origin_key(writer);
      accesses_.for_each(read, [&](uint32_t number) {
        result |= is_atomic(accesses_[number].kind) && trail.writer == origin_key(number);
      });
      return result;
    };
    trails_.for_each(next, last, [&](const Trail& trail) {
      if (!is_of(trail)) return;
      add_unknown(trail.begin);
      next = trail.end;
      if (trail.reading != Trail::kUnwritten) return visit(trail);
      Trail unwritten;
      unwritten.begin = unwritten.anchor = unwritten.source = trail.begin;
      unwritten.end = trail.end;
      unwritten.reading = Trail::kUnwritten;
      visit(unwritten);
    });
  }
  add_unknown(last);
}

int32_t State::present_reading(const Core* core, int64_t element_bytes, uintptr_t address) {
  Reading reading;
  reading.core = number_of(core);
  if (last_probe_ != 0) {
    const AccessRecord& probe = accesses_[last_probe_];
    reading.site = probe.site;
    reading.is_dma = probe.is_dma;
    reading.dma_site = probe.dma_site;
  }
  reading.element_bytes = element_bytes;
  reading.allocated = allocation_at(address);
  return trails_.number_of(reading);
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
  const uint64_t writer = probe == 0 ? 0 : origin_key(probe);
  for_each_piece(element_bytes, rank, extents, source_strides, target_strides,
                 [&](int64_t source_offset, int64_t target_offset, int64_t, int64_t bytes) {
                   const uintptr_t begin =
                       address_of(source) + static_cast<uintptr_t>(source_offset);
                   const uintptr_t distance =
                       address_of(target) + static_cast<uintptr_t>(target_offset) - begin;
                   shadow_.for_each_undefined(
                       *from, begin, begin + static_cast<uintptr_t>(bytes),
                       [&](uintptr_t first, uintptr_t last, uint32_t write, uint32_t read) {
                         if (probe != 0) {
                           // A value that came from elsewhere has been read there first.
                           copied_.clear();
                           follow(first, last, write, read, [&](Trail trail) {
                             if (trail.reading < 0 && trail.pool < 0) {
                               trail.reading = present_reading(core, element_bytes, first);
                               trail.unit = trail.step = element_bytes;
                               trail.meeting = meeting(number_of(core), accesses_[probe].site);
                             }
                             add_origin(writer, trail);
                             copied_.push_back(trail);
                           });
                         }
                         shadow_.make_undefined(*to, first + distance, last + distance);
                         if (probe == 0) return;
                         for (Trail& trail : copied_) {
                           trail.begin += static_cast<int64_t>(distance);
                           trail.end += static_cast<int64_t>(distance);
                           trail.anchor += static_cast<int64_t>(distance);
                           trail.writer = writer;
                           trails_.set(trail);
                         }
                       });
                 });
}

// Of the reads that one write stores the values of, the first is told, with all that it met.
void State::add_origin(uint64_t writer, const Trail& trail) {
  const int32_t reading = trails_.reading_of(trail);
  const auto [entry, is_new] = origins_.try_emplace(writer);
  if (is_new) entry->second.reading = reading;
  if (entry->second.reading == reading) {
    trails_.add_to(entry->second, trail, trail.begin, trail.end);
  }
}

int64_t State::meeting(int32_t core, int32_t site) {
  Meetings& known = meetings_[{core, site}];
  if (known.event != event_) ++known.count;
  known.event = event_;
  return first_meeting(core) + known.count - 1;
}

void State::forget(void* address, int64_t element_bytes, int64_t rank, const int64_t* extents,
                   const int64_t* strides) {
  if (!options_.uninitialised) return;
  Region* region = shadow_.find(address_of(address));
  if (region == nullptr) return;
  for_each_piece(element_bytes, rank, extents, strides, strides,
                 [&](int64_t offset, int64_t, int64_t, int64_t bytes) {
                   const uintptr_t begin = address_of(address) + static_cast<uintptr_t>(offset);
                   const uintptr_t end = begin + static_cast<uintptr_t>(bytes);
                   shadow_.make_undefined(*region, begin, end);
                   trails_.erase(static_cast<int64_t>(begin), static_cast<int64_t>(end));
                 });
}

UndefinedRead& State::begin_read(Core* core, int32_t number, bool is_new) {
  CoreInfo& known = info(core);
  UndefinedRead& read = known.undefined_reads[number];
  // The elements of one read may be asked for one by one.
  if (is_new || read.event != event_ || read.serial == 0) {
    for (const Trail& trail : read.trails) {
      const int32_t reading = trails_.reading_of(trail);
      auto met = std::find_if(read.history.begin(), read.history.end(),
                              [&](const Origin& other) { return other.reading == reading; });
      if (met == read.history.end()) {
        met = read.history.insert(met, Origin());
        met->reading = reading;
      }
      trails_.add_to(*met, trail, trail.begin, trail.end);
      read.positions.add(trail.begin, trail.end);
    }
    read.trails.clear();
    read.of_padding = -1;
    read.picked = PickedPadding();
    read.event = event_;
  }
  read.serial = ++known.last_undefined_read;
  return read;
}

bool State::undefined(Core* core, void* address, int64_t element_bytes, int64_t rank,
                      const int64_t* extents, const int64_t* strides, uint8_t* mask, int32_t number,
                      int64_t position) {
  if (!options_.uninitialised) return false;
  Region* region = shadow_.find(address_of(address));
  if (region == nullptr) return false;
  if (rank == 0 || (rank == 1 && strides[0] == element_bytes)) {
    const int64_t bytes = element_bytes * (rank == 0 ? 1 : extents[0]);
    const uintptr_t begin = address_of(address);
    const uintptr_t end = std::min(begin + static_cast<uintptr_t>(bytes), region->end);
    if (!shadow_.any_undefined(*region, begin, end)) return false;
  }
  UndefinedRead* read = nullptr;
  if (mask != nullptr) std::memset(mask, 0, static_cast<std::size_t>(count_of(rank, extents)));
  for_each_piece(element_bytes, rank, extents, strides, strides,
                 [&](int64_t offset, int64_t, int64_t at, int64_t bytes) {
                   const uintptr_t begin = address_of(address) + static_cast<uintptr_t>(offset);
                   shadow_.for_each_undefined(
                       *region, begin, begin + static_cast<uintptr_t>(bytes),
                       [&](uintptr_t first, uintptr_t last, uint32_t write, uint32_t seen) {
                         if (read == nullptr) read = &begin_read(core, number);
                         follow(first, last, write, seen, [&](const Trail& trail) {
                           read->add(as_read(core, trail, begin, position + at, element_bytes),
                                     trails_);
                         });
                         if (mask == nullptr) return;
                         const auto from = static_cast<int64_t>(first - begin) / element_bytes;
                         const auto to = static_cast<int64_t>(last - 1 - begin) / element_bytes;
                         std::memset(mask + at + from, 1, static_cast<std::size_t>(to - from + 1));
                       });
                 });
  return read != nullptr;
}

// A trail of memory as one of the elements that are read there: the one at the address `begin` has
// the number `first`.
Trail State::as_read(Core* core, const Trail& trail, uintptr_t begin, int64_t first,
                     int64_t element_bytes) {
  const auto base = static_cast<int64_t>(begin);
  Trail result;
  result.begin = result.anchor = first + (trail.begin - base) / element_bytes;
  result.end = first + (trail.end - 1 - base) / element_bytes + 1;
  if (trail.reading < 0 && trail.pool < 0) {
    const int64_t source = base + (result.begin - first) * element_bytes;
    result.reading = present_reading(core, element_bytes, static_cast<uintptr_t>(trail.begin));
    result.source = source;
    result.step = element_bytes;
    result.per = result.end - result.begin;
    result.meeting = meeting(number_of(core), trails_.reading(result.reading).site);
    return result;
  }
  if (trail.unit == element_bytes && (trail.begin - base) % element_bytes == 0 &&
      (trail.pool >= 0 || (trail.anchor - base) % element_bytes == 0)) {
    Trail moved = trail.moved(base, first, 1);
    moved.begin = result.begin;
    moved.end = result.end;
    moved.writer = 0;
    return moved;
  }
  // Of elements of another size it is not followed which part comes from where.
  Gathered gathered(trails_);
  gathered.add(trail);
  Origin origin = gathered.all().front();
  origin.is_exact = origin.is_exact && trail.pool < 0 && trail.end - trail.begin <= trail.unit;
  origin.shared = result.end - result.begin;
  result.pool = trails_.add_pool(std::move(origin));
  return result;
}

void State::read_padding(Core* core, int32_t site, int32_t number, int64_t rank,
                         const int64_t* window) {
  Reading reading = reading_by(agent_of(core), number_of(core), site);
  for (int64_t i = 0; i < rank; ++i) {
    reading.window.push_back({window[i], window[rank + i], window[2 * rank + i]});
  }
  UndefinedRead& read = begin_read(core, number, true);
  read.of_padding = trails_.number_of(reading);
  read.meeting = meeting(reading.core, site);
}

void State::pick_padding(Core* core, int32_t site, int32_t number, int64_t element, int64_t rank,
                         const int64_t* shape) {
  const Reading reading = reading_by(agent_of(core), number_of(core), site);
  UndefinedRead& read = begin_read(core, number);
  read.of_padding = trails_.number_of(reading);
  read.meeting = meeting(reading.core, site);
  read.picked.shape.assign(shape, shape + rank);
  read.picked.elements.add(element, element + 1);
}

void State::mark_undefined(Core* core, void* address, int64_t element_bytes, int64_t rank,
                           const int64_t* extents, const int64_t* strides, const uint8_t* mask,
                           int64_t position, const int64_t* sources) {
  if (!options_.uninitialised) return;
  Region* region = shadow_.find(address_of(address));
  if (region == nullptr) return;
  Resolver::Runs runs;
  std::vector<uintptr_t> targets;
  for_each_piece(element_bytes, rank, extents, strides, strides,
                 [&](int64_t offset, int64_t, int64_t at, int64_t bytes) {
                   const uintptr_t begin = address_of(address) + static_cast<uintptr_t>(offset);
                   const auto place = [&](int64_t i) {
                     return begin + static_cast<uintptr_t>(i * element_bytes);
                   };
                   for_each_run(mask + at, bytes / element_bytes, [&](int64_t first, int64_t last) {
                     shadow_.make_undefined(*region, place(first), place(last));
                     runs.emplace_back(position + at + first, position + at + last);
                     targets.push_back(place(first));
                   });
                 });
  if (runs.empty() || last_probe_ == 0) return;
  Resolver resolver(trails_, info(core).undefined_reads, sources, runs);
  const uint64_t writer = origin_key(last_probe_);
  for (std::size_t i = 0; i < runs.size(); ++i) {
    const auto [begin, end] = runs[i];
    const auto target = static_cast<int64_t>(targets[i]);
    resolver.for_each(begin, end, [&](const Trail& trail) {
      Trail stored = trail.moved(begin, target, element_bytes);
      stored.writer = writer;
      if (trail.is_kept && stored.source_at(stored.begin) == stored.begin &&
          stored.source_at(stored.end - element_bytes) == stored.end - element_bytes) {
        stored.reading = Trail::kUnwritten;
        trails_.set(stored);
        return;
      }
      trails_.set(stored);
      add_origin(writer, trail);
    });
  }
}

void State::report_undefined(Core* core, int32_t site, int32_t use, const uint8_t* mask,
                             int64_t count, const int64_t* sources, bool is_again) {
  const int32_t number = number_of(core);
  info(core).last_use = {site, event_};
  Gathered gathered(trails_);
  const auto& reads = info(core).undefined_reads;
  if (mask != nullptr) {
    Resolver::Runs runs;
    for_each_run(mask, count, [&](int64_t first, int64_t last) { runs.emplace_back(first, last); });
    Resolver resolver(trails_, reads, sources, runs);
    for (const auto& [begin, end] : runs) {
      resolver.for_each(begin, end, [&](const Trail& trail) { gathered.add(trail); });
    }
  } else {
    // All that these reads have met.
    for (const Source& source : Source::all(sources)) {
      const auto read = reads.find(source.number);
      if (read == reads.end()) continue;
      if (read->second.of_padding >= 0) {
        gathered.add(read->second.with_padding(trails_));
      } else {
        for (const Trail& trail : read->second.trails) gathered.add(trail);
      }
    }
  }
  int64_t occurrences = is_again ? 0 : 1;
  const auto tell = [&](const Origin& origin) {
    Finding finding;
    finding.kind = "UninitialisedRead";
    finding.use = name_of_use(use);
    finding.second = party_of_core(number, site, "use");
    set_undefined_read(finding, origin, number, site);
    // It is the use that is counted, whatever it has read.
    finding.meetings = Parts<int64_t>();
    finding.occurrences = occurrences;
    add_undefined_read(std::move(finding), origin.parts);
  };
  const std::vector<Origin> all = gathered.all();
  for (const Origin& origin : all) tell(origin);
  if (all.empty()) tell(Origin());
}

void State::set_undefined_read(Finding& finding, const Origin& origin, int32_t core,
                               int32_t site) const {
  if (origin.reading < 0) {
    finding.first = party_of_core(core, site, "read");
    return;
  }
  const Reading& read = trails_.reading(origin.reading);
  finding.first = party_of_core(read.core, read.site, read.is_dma ? "copy reads" : "read");
  finding.first->is_dma = read.is_dma;
  finding.first->dma_site = read.dma_site;
  finding.window = read.window;
  finding.padding = origin.padding;
  finding.meetings = origin.meetings;
  finding.is_inexact = !origin.is_exact;
  if (read.allocated.site >= 0) {
    finding.allocator = party_of_core(read.allocated.core, read.allocated.site, "allocate");
  }
  for (const auto& [begin, end] : origin.parts.all()) {
    MemoryRange range = range_of(begin, end, read.element_bytes);
    if (finding.memory.has_value()) {
      finding.memory->parts.add(range.parts);
    } else {
      finding.memory = std::move(range);
    }
  }
}

void State::look_at_outputs() {
  if (!options_.uninitialised) return;
  for (const auto& [buffer, element_bytes] : options_.outputs) {
    if (buffer < 0 || buffer >= static_cast<int32_t>(launch_.buffers.size())) continue;
    const auto begin = reinterpret_cast<uintptr_t>(launch_.buffers[buffer]);
    Region* region = shadow_.find(begin);
    if (region == nullptr) continue;
    look_at_output(buffer, *region, begin,
                   begin + static_cast<uintptr_t>(launch_.buffer_bytes[buffer]),
                   std::max<int64_t>(element_bytes, 1));
  }
}

void State::look_at_output(int32_t buffer, Region& region, uintptr_t begin, uintptr_t end,
                           int64_t element_bytes) {
  // Of each write what its values come from, by the number of its record.
  std::vector<std::pair<uint32_t, Gathered>> written;
  int64_t occurrences = 1;
  shadow_.for_each_undefined(
      region, begin, end, [&](uintptr_t first, uintptr_t last, uint32_t write, uint32_t read) {
        const uint32_t writer = write & ~kUndefined;
        uint32_t adder = 0;
        accesses_.for_each(read, [&](uint32_t number) {
          if (is_atomic(accesses_[number].kind)) adder = number;
        });
        const auto add_never_written = [&](uintptr_t from, uintptr_t to) {
          Finding finding;
          finding.kind = "NeverWritten";
          finding.memory = range_of(from, to, element_bytes);
          finding.memory->place.index = buffer;
          // The pieces of one output are one finding.
          finding.occurrences = std::exchange(occurrences, 0);
          add(std::move(finding));
        };
        if (writer == 0 && adder == 0) return add_never_written(first, last);
        const uint32_t last_writer = writer != 0 ? writer : adder;
        follow(first, last, write, read, [&](const Trail& trail) {
          if (trail.reading == Trail::kUnwritten) {
            add_never_written(static_cast<uintptr_t>(trail.begin),
                              static_cast<uintptr_t>(trail.end));
            return;
          }
          if (trail.reading < 0 && trail.pool < 0) {
            add_sum_of_undefined(last_writer, static_cast<uintptr_t>(trail.begin),
                                 static_cast<uintptr_t>(trail.end), element_bytes);
            return;
          }
          auto known = std::find_if(written.begin(), written.end(),
                                    [&](const auto& other) { return other.first == last_writer; });
          if (known == written.end()) {
            known = written.insert(written.end(), {last_writer, Gathered(trails_)});
          }
          known->second.add(trail);
        });
      });
  for (const auto& [writer, gathered] : written) {
    for (const Origin& origin : gathered.all()) {
      Finding finding;
      finding.kind = "UninitialisedRead";
      finding.use = "output";
      finding.second = party_of(writer);
      set_undefined_read(finding, origin, -1, -1);
      add_undefined_read(std::move(finding), origin.parts);
    }
  }
}

// It was added to, or updated, before anybody wrote it.
void State::add_sum_of_undefined(uint32_t writer, uintptr_t begin, uintptr_t end,
                                 int64_t element_bytes) {
  Finding finding;
  finding.kind = "UninitialisedRead";
  finding.use = "output";
  finding.first = finding.second = party_of(writer);
  finding.memory = range_of(begin, end, element_bytes);
  const AccessRecord& update = accesses_[writer];
  const auto core = static_cast<int32_t>(update.core);
  const auto known = updates_.find({core, update.site});
  if (known != updates_.end()) {
    const int64_t one = first_meeting(core);
    finding.meetings.add(one, one + known->second.count);
  }
  Parts<uintptr_t> parts;
  parts.add(begin, end);
  add_undefined_read(std::move(finding), parts);
}

}  // namespace cokernel::checked
