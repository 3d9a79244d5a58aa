// Shadow memory: who touched which bytes last, and which bytes are undefined.
//
// Memory is divided into pages of 1 KiB. As long as all of a page is alike, one cell describes it,
// so that whole tiles cost a cell per KiB; otherwise it has a cell for each granule of 1 to 512
// bytes, as fine as the accesses to it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "checked/accesses.h"
#include "checked/clock.h"
#include "checked/zeroed.h"

namespace cokernel::checked {

inline constexpr int kPageBits = 10;
inline constexpr uintptr_t kPageBytes = uintptr_t{1} << kPageBits;
// The binary logarithm of the bytes of the largest granule.
inline constexpr uint32_t kLargestShift = kPageBits - 1;

// In the word of a cell that holds the last write.
inline constexpr uint32_t kUndefined = uint32_t{1} << 31;

// The cells of a page: `count` last writes, then as many words of reads and atomics.
struct Cells {
  uint32_t shift;  // The binary logarithm of the bytes of a granule.
  uint32_t count;
  uint32_t* writes() { return reinterpret_cast<uint32_t*>(this + 1); }
  const uint32_t* writes() const { return reinterpret_cast<const uint32_t*>(this + 1); }
  uint32_t* reads() { return writes() + count; }
};

// A loop that walks through a page leaves it in two parts until it has come to the end.
struct Page {
  uint32_t write;
  uint32_t read;
  uint32_t later_write;  // What holds from offset `split` on.
  uint32_t later_read;
  uint32_t split;  // 0: `write` and `read` describe all of the page.
  Cells* cells;    // Not null: these describe the page, and nothing else does.
};

struct Region {
  uintptr_t begin;
  uintptr_t end;
  uintptr_t first_page;
  Page* pages;
};

// Told of accesses that nothing orders: `earlier` and `later` are numbers of records.
class Conflicts {
 public:
  virtual ~Conflicts() = default;
  virtual void conflict(uint32_t earlier, uint32_t later, uintptr_t begin, uintptr_t end,
                        int64_t element_bytes) = 0;
};

// What an access makes of a cell, remembered because the next cell is most often the same.
struct Transition {
  uint32_t write = 0;
  uint32_t read = 0;
  uint32_t number = 0;  // Of the access; 0: nothing is remembered.
  uint32_t new_write = 0;
  uint32_t new_read = 0;
  bool has_conflicts = false;
};

struct Access {
  AccessKind kind;
  uint32_t number;  // Of its record.
  const Agent* agent;
  int64_t element_bytes;
  Transition* last;  // Of the accesses from its site.
};

class Shadow {
 public:
  Shadow(Accesses& accesses, Conflicts& conflicts, bool find_races)
      : accesses_(accesses), conflicts_(conflicts), find_races_(find_races) {}
  ~Shadow();
  Shadow(const Shadow&) = delete;
  Shadow& operator=(const Shadow&) = delete;

  // Overlapping ranges become one region. Call before anything else, once.
  void set_ranges(std::vector<std::pair<uintptr_t, uintptr_t>> ranges);
  // Null if the address is in no region.
  Region* find(uintptr_t address);

  // Returns whether something there was undefined before.
  bool access(Region& region, const Access& access, uintptr_t begin, uintptr_t end) {
    Page& page = region.pages[(begin >> kPageBits) - region.first_page];
    if (page.cells != nullptr) {
      // Loops over registers touch one cell after the other.
      const uint32_t shift = page.cells->shift;
      const auto i = static_cast<uint32_t>((begin & (kPageBytes - 1)) >> shift);
      uint32_t& write = page.cells->writes()[i];
      uint32_t& read = page.cells->reads()[i];
      const Transition& last = *access.last;
      if (end - begin == uintptr_t{1} << shift && (begin & (end - begin - 1)) == 0 &&
          end <= region.end && last.write == write && last.read == read &&
          last.number == access.number && !last.has_conflicts) {
        write = last.new_write;
        read = last.new_read;
        return (last.write & kUndefined) != 0;
      }
    }
    return access_pages(region, access, begin, end);
  }

  // Whether an access would conflict with nothing and, if that is asked for, meet nothing
  // undefined.
  bool is_quiet(Region& region, const Access& access, uintptr_t begin, uintptr_t end,
                bool is_defined) {
    bool result = true;
    for_each_piece(region, begin, end, [&](uintptr_t, uintptr_t, uint32_t write, uint32_t read) {
      if (!result) return;
      result =
          !(is_defined && (write & kUndefined) != 0) && !look_up(access, write, read).has_conflicts;
    });
    // Conflicts are told from what was looked up right before.
    if (!result) access.last->number = 0;
    return result;
  }

  // The begin of the life of a range: it becomes undefined, if `is_undefined`, but for what an
  // agent of another core has written and nothing orders before `access`. Calls fresh(begin, end)
  // for what did.
  template <typename Fresh>
  void allocate(Region& region, const Access& access, uintptr_t begin, uintptr_t end,
                bool is_undefined, Fresh fresh);

  void make_undefined(Region& region, uintptr_t begin, uintptr_t end);
  bool any_undefined(const Region& region, uintptr_t begin, uintptr_t end) const;
  // Calls visit(begin, end, write word, read word) for each piece that is alike.
  template <typename Visit>
  void for_each_piece(Region& region, uintptr_t begin, uintptr_t end, Visit visit);
  template <typename Visit>
  void for_each_undefined(Region& region, uintptr_t begin, uintptr_t end, Visit visit) {
    for_each_piece(region, begin, end,
                   [&](uintptr_t from, uintptr_t to, uint32_t write, uint32_t read) {
                     if ((write & kUndefined) != 0) visit(from, to, write, read);
                   });
  }

  std::size_t bytes() const { return page_bytes_ + cell_bytes_; }

 private:
  bool access_pages(Region& region, const Access& access, uintptr_t begin, uintptr_t end);
  void resolve(const Access& access, uint32_t write, uint32_t read);
  const Transition& look_up(const Access& access, uint32_t write, uint32_t read) {
    const Transition& last = *access.last;
    if (write != last.write || read != last.read || access.number != last.number) {
      resolve(access, write, read);
    }
    seen_writes_ |= write;
    return last;
  }
  void touch(const Access& access, uint32_t& write, uint32_t& read, uintptr_t begin,
             uintptr_t end) {
    const Transition& last = look_up(access, write, read);
    write = last.new_write;
    read = last.new_read;
    if (last.has_conflicts) report(access, begin, end);
  }
  void report(const Access& access, uintptr_t begin, uintptr_t end);
  bool touch_part(const Access& access, Region& region, Page& page, uintptr_t page_begin,
                  uintptr_t begin, uintptr_t end);
  void touch_cells(const Access& access, Page& page, uintptr_t page_begin, uintptr_t begin,
                   uintptr_t end, bool is_whole);

  // Calls visit(write, read, begin, end) with references to the words of every piece of the range;
  // pages are divided where the range begins or ends.
  template <typename Visit>
  void for_each_cell(Region& region, uintptr_t begin, uintptr_t end, Visit visit);

  // Gives the page cells fine enough for a range that begins and ends there.
  void divide(Page& page, uintptr_t begin, uintptr_t end);
  Cells* allocate_cells(uint32_t shift);
  void free_cells(Cells* cells);
  void collect();

  Accesses& accesses_;
  Conflicts& conflicts_;
  const bool find_races_;
  uint32_t seen_writes_ = 0;  // All the words of last writes that an access has met.
  std::vector<uint32_t> conflicting_;
  std::vector<uint32_t> remaining_;
  std::vector<Region> regions_;
  Zeroed pages_;
  std::size_t last_region_ = 0;
  std::size_t page_bytes_ = 0;
  std::size_t cell_bytes_ = 0;
  std::vector<Cells*> free_[kLargestShift + 1];
  std::vector<char*> chunks_;
  std::size_t chunk_left_ = 0;
  std::size_t next_collection_ = std::size_t{1} << 20;
  uint64_t collections_ = 0;

 public:
  // Changes when the numbers of all records have changed.
  uint64_t collections() const { return collections_; }
  // Forgets records that nothing refers to, once there are very many.
  void collect_if_due() {
    if (accesses_.size() > next_collection_) collect();
  }
};

template <typename Visit>
void Shadow::for_each_cell(Region& region, uintptr_t begin, uintptr_t end, Visit visit) {
  while (begin < end) {
    const uintptr_t page_begin = begin & ~(kPageBytes - 1);
    const uintptr_t page_end = page_begin + kPageBytes;
    const uintptr_t stop = end < page_end ? end : page_end;
    Page& page = region.pages[(begin >> kPageBits) - region.first_page];
    const bool is_whole =
        (begin == page_begin || begin == region.begin) && (stop == page_end || stop == region.end);
    if (!is_whole || page.split != 0) divide(page, begin, stop);
    if (page.cells == nullptr) {
      visit(page.write, page.read, begin, stop);
    } else {
      Cells& cells = *page.cells;
      const uint32_t first = static_cast<uint32_t>((begin - page_begin) >> cells.shift);
      const uint32_t last = static_cast<uint32_t>(
          (stop - page_begin + (uintptr_t{1} << cells.shift) - 1) >> cells.shift);
      for (uint32_t i = first; i < last; ++i) {
        // At the edge of a region a cell may reach beyond it.
        const uintptr_t at = page_begin + (uintptr_t{i} << cells.shift);
        const uintptr_t next = at + (uintptr_t{1} << cells.shift);
        visit(cells.writes()[i], cells.reads()[i], at > begin ? at : begin,
              next < stop ? next : stop);
      }
    }
    begin = stop;
  }
}

template <typename Fresh>
void Shadow::allocate(Region& region, const Access& access, uintptr_t begin, uintptr_t end,
                      bool is_undefined, Fresh fresh) {
  for_each_cell(region, begin, end,
                [&](uint32_t& write, uint32_t& read, uintptr_t from, uintptr_t to) {
                  const uint32_t number = write & ~kUndefined;
                  if (number != 0 && accesses_[number].core != access.agent->core &&
                      !accesses_.is_before(number, *access.agent)) {
                    return;
                  }
                  write = access.number | (is_undefined ? kUndefined : 0);
                  read = 0;
                  fresh(from, to);
                });
}

template <typename Visit>
void Shadow::for_each_piece(Region& region, uintptr_t begin, uintptr_t end, Visit visit) {
  while (begin < end) {
    const uintptr_t page_begin = begin & ~(kPageBytes - 1);
    const uintptr_t stop = end < page_begin + kPageBytes ? end : page_begin + kPageBytes;
    Page& page = region.pages[(begin >> kPageBits) - region.first_page];
    if (page.cells == nullptr) {
      const uintptr_t split = page_begin + page.split;
      if (begin < split) {
        const uintptr_t middle = stop < split ? stop : split;
        visit(begin, middle, page.write, page.read);
        begin = middle;
      }
      if (begin < stop && page.split != 0) visit(begin, stop, page.later_write, page.later_read);
      if (begin < stop && page.split == 0) visit(begin, stop, page.write, page.read);
      begin = stop;
      continue;
    }
    Cells& cells = *page.cells;
    const uint32_t* writes = cells.writes();
    const uint32_t* reads = cells.reads();
    uint32_t i = static_cast<uint32_t>((begin - page_begin) >> cells.shift);
    while (begin < stop) {
      uint32_t next = i + 1;
      uintptr_t to = page_begin + (uintptr_t{next} << cells.shift);
      while (to < stop && writes[next] == writes[i] && reads[next] == reads[i]) {
        ++next;
        to = page_begin + (uintptr_t{next} << cells.shift);
      }
      if (to > stop) to = stop;
      visit(begin, to, writes[i], reads[i]);
      begin = to;
      i = next;
    }
  }
}

}  // namespace cokernel::checked
