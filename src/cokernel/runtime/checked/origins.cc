#include "checked/origins.h"

#include <algorithm>
#include <tuple>

namespace cokernel::checked {

namespace {

// Beyond these it is told less exactly where values come from.
constexpr std::size_t kMostTrails = std::size_t{1} << 18;
constexpr std::size_t kMostPools = std::size_t{1} << 14;
constexpr std::size_t kMostOfARead = std::size_t{1} << 16;

bool is_equal(const Reading& one, const Reading& other) {
  const auto facts = [](const Reading& reading) {
    return std::make_tuple(reading.core, reading.site, reading.dma_site, reading.is_dma,
                           reading.element_bytes, reading.allocated.core, reading.allocated.site);
  };
  return facts(one) == facts(other) &&
         std::equal(one.window.begin(), one.window.end(), other.window.begin(), other.window.end(),
                    [](const Span& a, const Span& b) {
                      return a.start == b.start && a.stop == b.stop && a.extent == b.extent;
                    });
}

}  // namespace

Trail Trail::moved(int64_t from, int64_t to, int64_t size) const {
  Trail result = *this;
  const auto position = [&](int64_t old) { return to + (old - from) / unit * size; };
  result.begin = position(begin);
  result.end = position(end);
  result.anchor = position(anchor);
  result.unit = size;
  result.per = per == kAlways ? kAlways : std::max<int64_t>(per / unit, 1) * size;
  return result;
}

bool Trail::goes_on_as(const Trail& next) const {
  if (end != next.begin || writer != next.writer || unit != next.unit || pool != next.pool ||
      is_kept != next.is_kept) {
    return false;
  }
  if (pool >= 0 || (reading == kUnwritten && next.reading == kUnwritten)) return true;
  return reading == next.reading && step == next.step && per == next.per &&
         (end - anchor) % unit == 0 && source_at(end) == next.source_at(end) &&
         (per == kAlways || (next.anchor - anchor) % per == 0) &&
         meeting_at(end) == next.meeting_at(end);
}

int32_t Origins::number_of(const Reading& reading) {
  std::vector<int32_t>& same = known_[{reading.core, reading.site}];
  for (const int32_t number : same) {
    if (is_equal(readings_[number], reading)) return number;
  }
  readings_.push_back(reading);
  same.push_back(static_cast<int32_t>(readings_.size() - 1));
  return same.back();
}

int32_t Origins::add_pool(Origin origin) {
  if (pools_.size() >= kMostPools) {
    // Later ones are told with all others of their reading.
    for (std::size_t i = 0; i < pools_.size(); ++i) {
      Origin& known = pools_[i];
      if (known.reading != origin.reading) continue;
      known.is_exact = false;
      known.parts.add(origin.parts);
      known.meetings.add(origin.meetings);
      return static_cast<int32_t>(i);
    }
  }
  pools_.push_back(std::move(origin));
  return static_cast<int32_t>(pools_.size() - 1);
}

void Origins::erase(int64_t begin, int64_t end) {
  auto next = memory_.upper_bound(begin);
  if (next != memory_.begin()) --next;
  while (next != memory_.end() && next->first < end) {
    Trail& known = next->second;
    if (known.end <= begin) {
      ++next;
      continue;
    }
    if (known.end > end) {
      Trail rest = known;
      rest.begin = end;
      memory_.emplace(end, rest);
    }
    if (known.begin < begin) {
      known.end = begin;
      ++next;
    } else {
      next = memory_.erase(next);
    }
  }
}

void Origins::set(const Trail& trail) {
  erase(trail.begin, trail.end);
  auto next = memory_.lower_bound(trail.begin);
  if (next != memory_.begin()) {
    Trail& before = std::prev(next)->second;
    if (before.goes_on_as(trail)) {
      before.end = trail.end;
      return;
    }
  }
  if (memory_.size() >= kMostTrails) {
    is_full_ = true;
    return;
  }
  memory_.emplace_hint(next, trail.begin, trail);
}

void Origins::add_to(Origin& origin, const Trail& trail, int64_t begin, int64_t end) const {
  if (trail.pool >= 0) {
    const Origin& pool = pools_[trail.pool];
    origin.parts.add(pool.parts);
    origin.meetings.add(pool.meetings);
    origin.padding.add(pool.padding);
    origin.is_exact = origin.is_exact && pool.is_exact;
    return;
  }
  const int64_t size = readings_[trail.reading].element_bytes;
  const auto add_part = [&](int64_t first, int64_t last) {
    origin.parts.add(static_cast<uintptr_t>(first), static_cast<uintptr_t>(last));
  };
  const int64_t last = end - 1;
  if (trail.step == size || trail.step == 0) {
    add_part(trail.source_at(begin), trail.source_at(last) + size);
  } else {
    for (int64_t at = begin; at < end; at += trail.unit) {
      add_part(trail.source_at(at), trail.source_at(at) + size);
    }
  }
  origin.meetings.add(trail.meeting_at(begin), trail.meeting_at(last) + 1);
}

void Gathered::add(const Trail& trail, int64_t begin, int64_t end) {
  if (trail.pool >= 0) {
    from_pools_[trail.pool] += std::max<int64_t>((end - begin) / trail.unit, 1);
  } else {
    origins_->add_to(by_reading_[trail.reading], trail, begin, end);
  }
}

void Gathered::add(const Origin& origin) {
  Origin& known = by_reading_[origin.reading];
  known.parts.add(origin.parts);
  known.meetings.add(origin.meetings);
  known.padding.add(origin.padding);
  known.is_exact = known.is_exact && origin.is_exact;
}

std::vector<Origin> Gathered::all() const {
  Gathered whole(*origins_);
  whole.by_reading_ = by_reading_;
  for (const auto& [number, count] : from_pools_) {
    Origin origin = origins_->pool(number);
    origin.is_exact = origin.is_exact && count >= origin.shared;
    whole.add(origin);
  }
  std::vector<Origin> result;
  for (auto& [reading, origin] : whole.by_reading_) {
    origin.reading = reading;
    result.push_back(std::move(origin));
  }
  return result;
}

void UndefinedRead::add(const Trail& trail, Origins& origins) {
  if (trails.size() >= kMostOfARead) return;
  const auto next = at(trail.begin);
  if (next != trails.end()) {
    const auto index = next - trails.cbegin();
    if (next->begin >= trail.end) {
      trails.insert(next, trail);
      return;
    }
    const Trail known = *next;
    if (trail.end > known.end) {
      Trail part = trail;
      part.begin = known.end;
      add(part, origins);
      part = trail;
      part.end = known.end;
      return add(part, origins);
    }
    const int64_t source = known.source_at(trail.begin);
    if (known.pool < 0 && trail.pool < 0 && known.reading == trail.reading &&
        known.step == trail.step && source == trail.source_at(trail.begin)) {
      return;
    }
    // A wide element is asked for in pieces, one round after the other, and comes from all of them.
    Gathered both(origins);
    both.add(known, trail.begin, trail.end);
    both.add(trail);
    Trail whole = trail;
    whole.pool = origins.add_pool(both.all().front());
    std::vector<Trail> pieces{known, whole, known};
    pieces.front().end = trail.begin;
    pieces.back().begin = trail.end;
    const auto is_nothing = [](const Trail& piece) { return piece.begin >= piece.end; };
    pieces.erase(std::remove_if(pieces.begin(), pieces.end(), is_nothing), pieces.end());
    trails.erase(trails.begin() + index);
    trails.insert(trails.begin() + index, pieces.begin(), pieces.end());
    return;
  }
  if (!trails.empty()) {
    Trail& last = trails.back();
    const bool is_one_meeting = last.pool < 0 && trail.pool < 0 && last.meeting == trail.meeting &&
                                last.begin == last.anchor && trail.begin == trail.anchor &&
                                last.end - last.begin == last.per &&
                                trail.end - trail.begin == trail.per;
    if (is_one_meeting && last.end == trail.begin && last.reading == trail.reading &&
        last.unit == trail.unit && last.step == trail.step &&
        last.source_at(last.end) == trail.source) {
      last.end = trail.end;
      last.per = last.end - last.begin;
      return;
    }
    if (last.goes_on_as(trail)) {
      last.end = trail.end;
      return;
    }
  }
  trails.push_back(trail);
}

Origin UndefinedRead::with_padding(const Origins& origins) const {
  Origin result;
  for (const Trail& trail : trails) origins.add_to(result, trail, trail.begin, trail.end);
  result.reading = of_padding;
  result.padding = picked;
  result.meetings.add(meeting, meeting + 1);
  result.is_exact = true;
  return result;
}

std::vector<Trail>::const_iterator UndefinedRead::at(int64_t position) const {
  return std::upper_bound(trails.begin(), trails.end(), position,
                          [](int64_t place, const Trail& trail) { return place < trail.end; });
}

std::vector<Source> Source::all(const int64_t* words) {
  std::vector<Source> result;
  if (words == nullptr) return result;
  result.resize(static_cast<std::size_t>(*words++));
  for (Source& source : result) {
    source.number = static_cast<int32_t>(*words++);
    source.flags = *words++;
    source.base = *words++;
    source.rank = *words++;
    source.dimensions = words;
    words += 2 * source.rank;
    source.free_rank = *words++;
    source.free = words;
    words += 2 * source.free_rank;
  }
  return result;
}

int64_t Source::find(int64_t position, int64_t& stride, int64_t& length) const {
  stride = 0;
  length = Trail::kAlways;
  int64_t number = base;
  for (int64_t d = rank - 1; d >= 0; --d) {
    const int64_t extent = dimensions[2 * d];
    const int64_t index = position % extent;
    position /= extent;
    number += index * dimensions[2 * d + 1];
    if (d == rank - 1) {
      stride = dimensions[2 * d + 1];
      length = extent - index;
    }
  }
  return number;
}

}  // namespace cokernel::checked
