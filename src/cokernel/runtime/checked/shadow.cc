#include "checked/shadow.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace cokernel::checked {

namespace {

constexpr std::size_t kChunkBytes = std::size_t{256} << 10;

std::size_t bytes_of_cells(uint32_t shift) {
  return sizeof(Cells) + 2 * sizeof(uint32_t) * (kPageBytes >> shift);
}

}  // namespace

Shadow::~Shadow() {
  for (char* chunk : chunks_) std::free(chunk);
}

void Shadow::set_ranges(std::vector<std::pair<uintptr_t, uintptr_t>> ranges) {
  std::sort(ranges.begin(), ranges.end());
  for (const auto& [begin, end] : ranges) {
    if (begin >= end) continue;
    if (!regions_.empty() && begin < regions_.back().end) {
      regions_.back().end = std::max(regions_.back().end, end);
    } else {
      regions_.push_back({begin, end, begin >> kPageBits, nullptr});
    }
  }
  for (const Region& region : regions_) {
    page_bytes_ += (((region.end - 1) >> kPageBits) - region.first_page + 1) * sizeof(Page);
  }
  if (page_bytes_ == 0) return;
  pages_ = Zeroed(page_bytes_);
  auto* pages = static_cast<Page*>(pages_.data());
  for (Region& region : regions_) {
    region.pages = pages;
    pages += ((region.end - 1) >> kPageBits) - region.first_page + 1;
  }
}

Region* Shadow::find(uintptr_t address) {
  if (last_region_ < regions_.size()) {
    Region& last = regions_[last_region_];
    if (address >= last.begin && address < last.end) return &last;
  }
  const auto next =
      std::upper_bound(regions_.begin(), regions_.end(), address,
                       [](uintptr_t value, const Region& region) { return value < region.begin; });
  if (next == regions_.begin() || address >= (next - 1)->end) return nullptr;
  last_region_ = static_cast<std::size_t>(next - 1 - regions_.begin());
  return &*(next - 1);
}

void Shadow::resolve(const Access& access, uint32_t write, uint32_t read) {
  conflicting_.clear();
  const auto note = [&](uint32_t number) {
    if (find_races_ && !accesses_.is_before(number, *access.agent)) conflicting_.push_back(number);
  };
  const uint32_t writer = write & ~kUndefined;
  if (writer != 0) note(writer);
  Transition& last = *access.last;
  last.number = access.number;
  last.write = write;
  last.read = read;
  switch (access.kind) {
    case AccessKind::kRead:
      if (accesses_.has_atomics(read)) {
        accesses_.for_each(read, [&](uint32_t number) {
          if (is_atomic(accesses_[number].kind)) note(number);
        });
      }
      last.new_write = write;
      last.new_read = accesses_.with(read, access.number, *access.agent);
      break;
    case AccessKind::kAtomic:
    case AccessKind::kFetchAndAdd:
      accesses_.for_each(read, [&](uint32_t number) {
        if (!is_atomic(accesses_[number].kind)) note(number);
      });
      last.new_write = write;
      last.new_read = accesses_.with(read, access.number, *access.agent);
      break;
    default: {
      // What came before needs to be remembered no longer: who comes after this write comes after
      // it, too. Accesses that it races with stay, so that others that race with them are found.
      const std::size_t writers = conflicting_.size();
      accesses_.for_each(read, note);
      remaining_.assign(conflicting_.begin() + static_cast<std::ptrdiff_t>(writers),
                        conflicting_.end());
      uint32_t state = 0;
      if (access.kind != AccessKind::kWrite) state = write & kUndefined;
      last.new_write = access.number | state;
      last.new_read = remaining_.empty() ? 0 : accesses_.word_of(remaining_);
    }
  }
  last.has_conflicts = !conflicting_.empty();
}

void Shadow::report(const Access& access, uintptr_t begin, uintptr_t end) {
  for (const uint32_t number : conflicting_) {
    conflicts_.conflict(number, access.number, begin, end, access.element_bytes);
  }
  // A later access of the same epoch may come after the other agent has been waited for.
  access.last->number = 0;
}

bool Shadow::access_pages(Region& region, const Access& access, uintptr_t begin, uintptr_t end) {
  begin = std::max(begin, region.begin);
  end = std::min(end, region.end);
  if (begin >= end) return false;
  seen_writes_ = 0;
  Page* page = &region.pages[(begin >> kPageBits) - region.first_page];
  uintptr_t page_begin = begin & ~(kPageBytes - 1);
  for (; begin < end; ++page, page_begin += kPageBytes, begin = page_begin) {
    const uintptr_t stop = std::min(end, page_begin + kPageBytes);
    const bool is_whole = begin == std::max(page_begin, region.begin) &&
                          stop == std::min(page_begin + kPageBytes, region.end);
    if (page->cells == nullptr) {
      if (is_whole && page->split == 0) {
        touch(access, page->write, page->read, begin, stop);
        continue;
      }
      if (touch_part(access, region, *page, page_begin, begin, stop)) continue;
      divide(*page, begin, stop);
    }
    touch_cells(access, *page, page_begin, begin, stop, is_whole);
  }
  collect_if_due();
  return (seen_writes_ & kUndefined) != 0;
}

// An access to a part of a page that has no cells. False if it needs some.
bool Shadow::touch_part(const Access& access, Region& region, Page& page, uintptr_t page_begin,
                        uintptr_t begin, uintptr_t end) {
  const uintptr_t split = page.split;
  if (split == 0) {
    uint32_t write = page.write;
    uint32_t read = page.read;
    const Transition& last = look_up(access, write, read);
    const bool changes = last.new_write != write || last.new_read != read;
    if (changes && begin != std::max(page_begin, region.begin)) return false;
    if (changes) {
      page.later_write = write;
      page.later_read = read;
      page.write = last.new_write;
      page.read = last.new_read;
      page.split = static_cast<uint32_t>(end - page_begin);
    }
    if (last.has_conflicts) report(access, begin, end);
    return true;
  }
  if (begin >= page_begin + split) {
    const Transition& last = look_up(access, page.later_write, page.later_read);
    const bool changes = last.new_write != page.later_write || last.new_read != page.later_read;
    if (changes) {
      // The walk goes on where it was.
      if (begin != page_begin + split || last.new_write != page.write ||
          last.new_read != page.read) {
        return false;
      }
      const bool is_at_end = end == std::min(page_begin + kPageBytes, region.end);
      page.split = is_at_end ? 0 : static_cast<uint32_t>(end - page_begin);
    }
    if (last.has_conflicts) report(access, begin, end);
    return true;
  }
  if (end > page_begin + split) return false;
  const Transition& last = look_up(access, page.write, page.read);
  if (last.new_write != page.write || last.new_read != page.read) return false;
  if (last.has_conflicts) report(access, begin, end);
  return true;
}

void Shadow::touch_cells(const Access& access, Page& page, uintptr_t page_begin, uintptr_t begin,
                         uintptr_t end, bool is_whole) {
  if (!is_whole) divide(page, begin, end);
  Cells& cells = *page.cells;
  uint32_t* const writes = cells.writes();
  uint32_t* const reads = cells.reads();
  const uint32_t shift = cells.shift;
  // Of a page at the edge of a region the cells beyond the edge are never looked at.
  uint32_t i = static_cast<uint32_t>((begin - page_begin) >> shift);
  const uint32_t last =
      static_cast<uint32_t>((end - page_begin + (uintptr_t{1} << shift) - 1) >> shift);
  bool is_uniform = is_whole;
  uint32_t first_write = 0;
  uint32_t first_read = 0;
  bool is_first = true;
  while (i < last) {
    const uint32_t write = writes[i];
    const uint32_t read = reads[i];
    uint32_t next = i + 1;
    while (next < last && writes[next] == write && reads[next] == read) ++next;
    const uintptr_t from = std::max(begin, page_begin + (uintptr_t{i} << shift));
    const uintptr_t to = std::min(end, page_begin + (uintptr_t{next} << shift));
    uint32_t new_write = write;
    uint32_t new_read = read;
    touch(access, new_write, new_read, from, to);
    if (new_write != write) std::fill(writes + i, writes + next, new_write);
    if (new_read != read) std::fill(reads + i, reads + next, new_read);
    if (is_first) {
      first_write = new_write;
      first_read = new_read;
      is_first = false;
    } else if (new_write != first_write || new_read != first_read) {
      is_uniform = false;
    }
    i = next;
  }
  if (is_uniform) {
    free_cells(page.cells);
    page.cells = nullptr;
    page.write = first_write;
    page.read = first_read;
  }
}

void Shadow::divide(Page& page, uintptr_t begin, uintptr_t end) {
  const uintptr_t offsets = (begin | end | page.split) & (kPageBytes - 1);
  const uint32_t shift = offsets == 0
                             ? kLargestShift
                             : static_cast<uint32_t>(__builtin_ctz(static_cast<unsigned>(offsets)));
  if (page.cells != nullptr && page.cells->shift <= shift) return;
  Cells* finer = allocate_cells(shift);
  if (page.cells == nullptr) {
    const uint32_t split = page.split == 0 ? finer->count : page.split >> shift;
    std::fill_n(finer->writes(), split, page.write);
    std::fill_n(finer->reads(), split, page.read);
    std::fill_n(finer->writes() + split, finer->count - split, page.later_write);
    std::fill_n(finer->reads() + split, finer->count - split, page.later_read);
    page.split = 0;
  } else {
    const uint32_t difference = page.cells->shift - shift;
    for (uint32_t i = 0; i < finer->count; ++i) {
      finer->writes()[i] = page.cells->writes()[i >> difference];
      finer->reads()[i] = page.cells->reads()[i >> difference];
    }
    free_cells(page.cells);
  }
  page.cells = finer;
}

Cells* Shadow::allocate_cells(uint32_t shift) {
  Cells* cells;
  if (!free_[shift].empty()) {
    cells = free_[shift].back();
    free_[shift].pop_back();
  } else {
    const std::size_t bytes = bytes_of_cells(shift);
    if (bytes > chunk_left_) {
      auto* chunk = static_cast<char*>(std::malloc(kChunkBytes));
      if (chunk == nullptr) throw std::bad_alloc();
      chunks_.push_back(chunk);
      chunk_left_ = kChunkBytes;
      cell_bytes_ += kChunkBytes;
    }
    cells = reinterpret_cast<Cells*>(chunks_.back() + (kChunkBytes - chunk_left_));
    chunk_left_ -= bytes;
  }
  cells->shift = shift;
  cells->count = static_cast<uint32_t>(kPageBytes >> shift);
  return cells;
}

void Shadow::free_cells(Cells* cells) { free_[cells->shift].push_back(cells); }

void Shadow::make_undefined(Region& region, uintptr_t begin, uintptr_t end) {
  for_each_cell(region, begin, end,
                [](uint32_t& write, uint32_t&, uintptr_t, uintptr_t) { write |= kUndefined; });
}

bool Shadow::any_undefined(const Region& region, uintptr_t begin, uintptr_t end) const {
  const Page* page = &region.pages[(begin >> kPageBits) - region.first_page];
  uintptr_t page_begin = begin & ~(kPageBytes - 1);
  for (; begin < end; ++page, page_begin += kPageBytes, begin = page_begin) {
    const uintptr_t stop = std::min(end, page_begin + kPageBytes);
    uint32_t all = 0;
    if (page->cells == nullptr) {
      const uintptr_t split = page->split == 0 ? stop : page_begin + page->split;
      if (begin < split) all |= page->write;
      if (stop > split) all |= page->later_write;
    } else {
      const uint32_t shift = page->cells->shift;
      const uint32_t* writes = page->cells->writes();
      const auto first = static_cast<uint32_t>((begin - page_begin) >> shift);
      const auto last = static_cast<uint32_t>((stop - 1 - page_begin) >> shift);
      for (uint32_t i = first; i <= last; ++i) all |= writes[i];
    }
    if ((all & kUndefined) != 0) return true;
  }
  return false;
}

// Records of epochs that no cell refers to any more would fill the memory in a long launch.
void Shadow::collect() {
  accesses_.collect([&](auto mark) {
    for (const Region& region : regions_) {
      const std::size_t count = ((region.end - 1) >> kPageBits) - region.first_page + 1;
      for (std::size_t p = 0; p < count; ++p) {
        Page& page = region.pages[p];
        if (page.cells == nullptr) {
          mark(page.write & ~kUndefined);
          mark(page.read);
          if (page.split == 0) continue;
          mark(page.later_write & ~kUndefined);
          mark(page.later_read);
          continue;
        }
        for (uint32_t i = 0; i < page.cells->count; ++i) {
          mark(page.cells->writes()[i] & ~kUndefined);
          mark(page.cells->reads()[i]);
        }
      }
    }
  });
  const auto rename = [&](uint32_t& write, uint32_t& read) {
    write = accesses_.renamed(write & ~kUndefined) | (write & kUndefined);
    read = accesses_.renamed(read);
  };
  for (Region& region : regions_) {
    const std::size_t count = ((region.end - 1) >> kPageBits) - region.first_page + 1;
    for (std::size_t p = 0; p < count; ++p) {
      Page& page = region.pages[p];
      if (page.cells == nullptr) {
        rename(page.write, page.read);
        if (page.split != 0) rename(page.later_write, page.later_read);
        continue;
      }
      for (uint32_t i = 0; i < page.cells->count; ++i) {
        rename(page.cells->writes()[i], page.cells->reads()[i]);
      }
    }
  }
  accesses_.end_collection();
  ++collections_;
  next_collection_ = std::max(std::size_t{1} << 20, 2 * accesses_.size());
}

}  // namespace cokernel::checked
