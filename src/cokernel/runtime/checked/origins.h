// Where undefined values come from: for each element that holds one, the element that nobody wrote
// and the read that took the value from there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include "checked/findings.h"

namespace cokernel::checked {

// A piece of private memory that a scope has asked for, up to `end`.
struct Allocation {
  uintptr_t end = 0;
  int32_t core = -1;
  int32_t site = -1;
};

// Who reads what nobody has written.
struct Reading {
  int32_t core = -1;
  int32_t site = -1;
  int32_t dma_site = -1;
  bool is_dma = false;
  int64_t element_bytes = 1;
  Allocation allocated;      // The scope that asked for the memory, if one did.
  std::vector<Span> window;  // Where it reaches into the padding of tiles.
};

// What was read that a value comes from.
struct Origin {
  int32_t reading = -1;
  Parts<uintptr_t> parts;
  Parts<int64_t> meetings;  // The reads: what `State::meeting` calls them.
  PickedPadding padding;    // What was picked there from the padding of tiles.
  bool is_exact = true;     // All of it has reached the value.
  int64_t shared = 1;       // So many values have this origin together.
};

// Undefined values that lie one behind the other, at positions which are bytes of memory or numbers
// of elements, and the elements that they come from, which lie one behind the other as well.
struct Trail {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t unit = 1;    // The positions of one value.
  int64_t anchor = 0;  // The position of a value, of this trail or beside it, which comes from
  int64_t source = 0;  // this address; the next value comes from `step` bytes behind.
  int64_t step = 0;
  int64_t per = kAlways;  // So many positions, from the anchor on, were read at once,
  int64_t meeting = 0;    // the first of them in this meeting.
  int32_t reading = -1;
  int32_t pool = -1;     // At or above 0: of all values, the number of the origin that they share.
  bool is_kept = false;  // They were only read in order to be written back where they were.
  uint64_t writer = 0;   // Of memory: what `State::origin_key` calls who wrote it.

  // The reading of what has been written back as it was: still nobody has written it.
  static constexpr int32_t kUnwritten = -2;
  static constexpr int64_t kAlways = int64_t{1} << 40;

  int64_t source_at(int64_t position) const {
    return source + floor_of(position - anchor, unit) * step;
  }
  int64_t meeting_at(int64_t position) const {
    return per == kAlways ? meeting : meeting + floor_of(position - anchor, per);
  }
  static int64_t floor_of(int64_t one, int64_t other) {
    return one >= 0 ? one / other : -((other - 1 - one) / other);
  }
  // The same values at other positions: that which was at `from` is at `to`, and each takes
  // `size` of them.
  Trail moved(int64_t from, int64_t to, int64_t size) const;
  // Whether the values behind the end of this one go on where it stops.
  bool goes_on_as(const Trail& next) const;
};

class Origins {
 public:
  // Equal ones have one number.
  int32_t number_of(const Reading& reading);
  const Reading& reading(int32_t number) const { return readings_[number]; }

  // Remembers an origin that values share; -1 if there are too many of them.
  int32_t add_pool(Origin origin);
  const Origin& pool(int32_t number) const { return pools_[number]; }
  int32_t reading_of(const Trail& trail) const {
    return trail.pool >= 0 ? pools_[trail.pool].reading : trail.reading;
  }
  // Adds what the values of a trail in [begin, end) come from.
  void add_to(Origin& origin, const Trail& trail, int64_t begin, int64_t end) const;

  // The values in [begin, end) of memory.
  bool is_empty() const { return memory_.empty(); }
  // There were more than are kept: for what is not found here it is not known.
  bool is_full() const { return is_full_; }
  void set(const Trail& trail);
  void erase(int64_t begin, int64_t end);
  // Calls visit(trail) for what is known of a range, cut to it, in order.
  template <typename Visit>
  void for_each(int64_t begin, int64_t end, Visit visit) const {
    auto next = memory_.upper_bound(begin);
    if (next != memory_.begin()) --next;
    for (; next != memory_.end() && next->first < end; ++next) {
      Trail trail = next->second;
      trail.begin = trail.begin > begin ? trail.begin : begin;
      trail.end = trail.end < end ? trail.end : end;
      if (trail.begin < trail.end) visit(trail);
    }
  }

 private:
  std::vector<Reading> readings_;
  std::map<std::pair<int32_t, int32_t>, std::vector<int32_t>> known_;  // By core and site.
  std::vector<Origin> pools_;
  std::map<int64_t, Trail> memory_;  // By where they begin; none overlap.
  bool is_full_ = false;
};

// All that some values come from.
class Gathered {
 public:
  explicit Gathered(const Origins& origins) : origins_(&origins) {}
  // What the values of a trail in [begin, end) come from.
  void add(const Trail& trail, int64_t begin, int64_t end);
  void add(const Trail& trail) { add(trail, trail.begin, trail.end); }
  void add(const Origin& origin);
  // The origins, each with a reading of its own.
  std::vector<Origin> all() const;

 private:
  const Origins* origins_;
  std::map<int32_t, Origin> by_reading_;
  std::map<int32_t, int64_t> from_pools_;  // How many values of each there are.
};

// Undefined values that a program has read, at the positions of its elements.
struct UndefinedRead {
  std::vector<Trail> trails;  // In order.
  uint64_t serial = 0;        // Later reads have higher ones; 0: there was none.
  uint64_t event = 0;
  int32_t of_padding = -1;  // At or above 0: it also reads what lies in the padding of tiles.
  PickedPadding picked;     // What of that it has picked,
  int64_t meeting = 0;      // and in which meeting.
  // What earlier executions of the read have met, and at which positions.
  std::vector<Origin> history;
  Parts<int64_t> positions;

  void add(const Trail& trail, Origins& origins);
  // All that is undefined, where some of it lies in the padding.
  Origin with_padding(const Origins& origins) const;
  // The first trail that ends behind a position.
  std::vector<Trail>::const_iterator at(int64_t position) const;
};

// Which values of a mask come from which of a read, as compiled code says it: the element with the
// index i is, of the read, that with the number `base` + sum of i[d] * strides[d], and all those
// that `free` dimensions lead to from there.
struct Source {
  static constexpr int64_t kKnown = 1;    // Otherwise it may be any element of the read.
  static constexpr int64_t kSure = 2;     // What is undefined there has reached the value.
  static constexpr int64_t kEarlier = 4;  // It may have been read in an earlier iteration.
  static constexpr int64_t kKept = 16;    // It was read in order to be written back where it was.
  static constexpr int64_t kMoved = 8;    // No element of the read is more than one of the mask.

  int32_t number = 0;
  int64_t flags = 0;
  int64_t base = 0;
  int64_t rank = 0;
  const int64_t* dimensions = nullptr;  // Pairs of extent and stride,
  int64_t free_rank = 0;
  const int64_t* free = nullptr;  // and of the free ones.

  bool is(int64_t flag) const { return (flags & flag) != 0; }
  // Reads the sources that words tell of.
  static std::vector<Source> all(const int64_t* words);
  // The number in the read of an element of the mask, and behind how many more of them the next
  // ones lie in steps of `stride`.
  int64_t find(int64_t position, int64_t& stride, int64_t& length) const;
  // Calls visit(first, count) for all numbers that the free dimensions lead to.
  template <typename Visit>
  void for_each_free(int64_t first, Visit visit) const {
    visit_free(first, 0, visit);
  }

 private:
  template <typename Visit>
  void visit_free(int64_t first, int64_t dimension, const Visit& visit) const {
    if (dimension == free_rank) return visit(first, int64_t{1});
    const int64_t extent = free[2 * dimension];
    const int64_t stride = free[2 * dimension + 1];
    if (dimension == free_rank - 1 && stride == 1) return visit(first, extent);
    for (int64_t i = 0; i < extent; ++i) visit_free(first + i * stride, dimension + 1, visit);
  }
};

// Where the undefined values of a mask come from.
class Resolver {
 public:
  // The positions of some values, as [begin, end).
  using Runs = std::vector<std::pair<int64_t, int64_t>>;

  // `reads` are those of a core by their numbers, `words` tell of the sources, and `runs` are the
  // values of the mask that are undefined.
  Resolver(Origins& origins, const std::unordered_map<int32_t, UndefinedRead>& reads,
           const int64_t* words, const Runs& runs);

  // Calls visit(trail), with positions in the mask, for all the values of a run.
  template <typename Visit>
  void for_each(int64_t begin, int64_t end, Visit visit) {
    while (begin < end) {
      const Trail trail = next(begin, end);
      if (trail.end <= begin) return;
      visit(trail);
      begin = trail.end;
    }
  }

 private:
  struct Candidate {
    Source source;
    const UndefinedRead* read = nullptr;
    int32_t pool = -1;  // What values have in common of which there is no place.
  };
  // What a candidate says of a value: whether it comes from there, and for how many values behind
  // each other it says the same.
  struct Match {
    bool is_found = false;
    int64_t number = 0;  // In the read,
    int64_t stride = 0;
    int64_t length = 0;
    const Trail* trail = nullptr;  // and what holds it, if that is one element.
  };

  Trail next(int64_t begin, int64_t end);
  static const Trail* all_of(const Candidate& candidate, const Match& match);
  static bool is_pooled(const Candidate& candidate);
  Match match(const Candidate& candidate, int64_t position) const;
  Trail taken(Candidate& candidate, const Match& match, int64_t begin, int64_t end);
  Trail shared(int32_t pool, int64_t begin, int64_t end) const;
  int32_t pool_of(Candidate& candidate);
  bool covers(const Candidate& candidate) const;
  int32_t inexact(const Trail& trail, int64_t begin, int64_t end);

  Origins& origins_;
  const Runs& runs_;
  int64_t count_ = 0;  // Of the undefined values.
  std::vector<Candidate> candidates_;
};

}  // namespace cokernel::checked
