// Which reads the undefined values of a mask come from.
#include <algorithm>
#include <utility>

#include "checked/origins.h"

namespace cokernel::checked {

Resolver::Resolver(Origins& origins, const std::unordered_map<int32_t, UndefinedRead>& reads,
                   const int64_t* words, const Runs& runs)
    : origins_(origins), runs_(runs) {
  for (const auto& [begin, end] : runs) count_ += end - begin;
  for (const Source& source : Source::all(words)) {
    const auto entry = reads.find(source.number);
    if (entry == reads.end() || entry->second.serial == 0) continue;
    candidates_.push_back({source, &entry->second, -1});
  }
  if (!candidates_.empty() || words != nullptr) return;
  // Too many to be told apart: it may be any, and the last one goes for all others.
  for (const auto& [number, read] : reads) {
    if (read.serial == 0) continue;
    if (candidates_.empty()) candidates_.emplace_back();
    Candidate& last = candidates_.front();
    if (last.read == nullptr || read.serial > last.read->serial) last.read = &read;
  }
}

// Where elements lie in the padding it is not followed which those are.
bool Resolver::is_pooled(const Candidate& candidate) {
  const Source& source = candidate.source;
  return !source.is(Source::kKnown) || source.is(Source::kEarlier) ||
         candidate.read->of_padding >= 0;
}

Resolver::Match Resolver::match(const Candidate& candidate, int64_t position) const {
  const Source& source = candidate.source;
  const UndefinedRead& read = *candidate.read;
  Match result;
  result.length = Trail::kAlways;
  if (is_pooled(candidate)) {
    result.is_found = !read.trails.empty() || !read.history.empty() || read.of_padding >= 0;
    return result;
  }
  result.number = source.find(position, result.stride, result.length);
  if (result.stride > 1 || result.stride < 0) result.length = 1;
  if (source.free_rank > 0) {
    if (result.stride != 0) result.length = 1;
    source.for_each_free(result.number, [&](int64_t first, int64_t count) {
      const auto next = read.at(first);
      result.is_found |= next != read.trails.end() && next->begin < first + count;
    });
    return result;
  }
  const auto next = read.at(result.number);
  if (next == read.trails.end()) return result;
  result.is_found = next->begin <= result.number;
  if (result.is_found) result.trail = &*next;
  if (result.stride == 1) {
    const int64_t change = result.is_found ? next->end : next->begin;
    result.length = std::min(result.length, change - result.number);
  }
  return result;
}

// Of several reads the last one is told of those whose values are known to have come there.
Trail Resolver::next(int64_t begin, int64_t end) {
  Candidate* best = nullptr;
  Match found;
  int64_t count = 0;
  int64_t length = end - begin;
  for (Candidate& candidate : candidates_) {
    const Match match = this->match(candidate, begin);
    length = std::min(length, match.length);
    if (!match.is_found) continue;
    ++count;
    const auto rank = [](const Candidate& one) {
      return std::pair(one.source.is(Source::kSure), one.read->serial);
    };
    if (best != nullptr && rank(candidate) < rank(*best)) continue;
    best = &candidate;
    found = match;
  }
  const int64_t stop = begin + length;
  if (best != nullptr) {
    const Trail trail = taken(*best, found, begin, stop);
    if (count == 1 || best->source.is(Source::kSure)) return trail;
    return shared(inexact(trail, begin, stop), begin, stop);
  }
  // It lies in the padding, or the runtime has lost its trail.
  for (Candidate& candidate : candidates_) {
    if (best == nullptr || candidate.read->serial > best->read->serial) best = &candidate;
  }
  if (best == nullptr) return Trail();
  return shared(pool_of(*best), begin, stop);
}

Trail Resolver::shared(int32_t pool, int64_t begin, int64_t end) const {
  Trail result;
  result.begin = result.anchor = begin;
  result.end = end;
  result.pool = pool;
  return result;
}

int32_t Resolver::inexact(const Trail& trail, int64_t begin, int64_t end) {
  Gathered gathered(origins_);
  gathered.add(trail, begin, end);
  Origin origin = gathered.all().front();
  origin.is_exact = false;
  return origins_.add_pool(std::move(origin));
}

Trail Resolver::taken(Candidate& candidate, const Match& match, int64_t begin, int64_t end) {
  const Source& source = candidate.source;
  if (is_pooled(candidate)) {
    return shared(pool_of(candidate), begin, end);
  }
  if (source.free_rank > 0) {
    if (const Trail* whole = all_of(candidate, match); whole != nullptr) {
      Trail result = *whole;
      result.source = whole->source_at(match.number);
      result.meeting = whole->meeting_at(match.number);
      result.begin = result.anchor = begin;
      result.end = end;
      result.step = 0;
      result.per = Trail::kAlways;
      return result;
    }
    Gathered gathered(origins_);
    source.for_each_free(match.number, [&](int64_t first, int64_t count) {
      for (auto next = candidate.read->at(first);
           next != candidate.read->trails.end() && next->begin < first + count; ++next) {
        gathered.add(*next, std::max(next->begin, first), std::min(next->end, first + count));
      }
    });
    return shared(origins_.add_pool(gathered.all().front()), begin, end);
  }
  const Trail& trail = *match.trail;
  Trail result;
  if (match.stride == 1) {
    result = trail.moved(match.number, begin, 1);
  } else if (trail.pool >= 0 && end - begin > 1 && origins_.pool(trail.pool).shared > 1) {
    result.pool = inexact(trail, match.number, match.number + 1);
  } else {
    result = trail;
    result.anchor = begin;
    result.source = trail.source_at(match.number);
    result.step = trail.step * match.stride;
    result.meeting = trail.meeting_at(match.number);
    result.per = Trail::kAlways;
  }
  result.begin = begin;
  result.end = end;
  result.is_kept = result.pool < 0 && (trail.is_kept || source.is(Source::kKept));
  return result;
}

// Of a wide element whose parts were all written back as they were, one of them.
const Trail* Resolver::all_of(const Candidate& candidate, const Match& match) {
  const Trail* found = nullptr;
  int64_t source = 0;
  bool is_one = true;
  candidate.source.for_each_free(match.number, [&](int64_t first, int64_t count) {
    const auto next = candidate.read->at(first);
    if (count > 1 || next == candidate.read->trails.end() || next->begin > first ||
        !next->is_kept) {
      is_one = false;
      return;
    }
    if (found == nullptr) source = next->source_at(first);
    is_one = is_one && next->source_at(first) == source;
    found = found == nullptr ? &*next : found;
  });
  return is_one ? found : nullptr;
}

// All that a read has met, for values that may come from any of it.
int32_t Resolver::pool_of(Candidate& candidate) {
  if (candidate.pool >= 0) return candidate.pool;
  const UndefinedRead& read = *candidate.read;
  const Source& source = candidate.source;
  Gathered gathered(origins_);
  int64_t count = 0;
  for (const Trail& trail : read.trails) {
    gathered.add(trail);
    count += trail.end - trail.begin;
  }
  const bool is_earlier = source.is(Source::kEarlier);
  const bool is_moved = !source.is(Source::kKnown) && source.is(Source::kMoved);
  if (is_earlier) {
    for (const Origin& origin : read.history) gathered.add(origin);
  }
  std::vector<Origin> all = gathered.all();
  Origin origin;
  if (read.of_padding >= 0) {
    origin = read.with_padding(origins_);
  } else {
    // What was copied here has been read elsewhere first, and that is told.
    origin = all.front();
    const bool is_all = is_earlier ? source.is(Source::kSure) && covers(candidate)
                                   : count == 1 || (is_moved && count_ == count);
    origin.is_exact = origin.is_exact && is_all;
  }
  origin.shared = count_;
  candidate.pool = origins_.add_pool(std::move(origin));
  return candidate.pool;
}

// Whether the values together come from all positions at which the read has met something.
bool Resolver::covers(const Candidate& candidate) const {
  if (!candidate.source.is(Source::kKnown)) return false;
  Parts<int64_t> covered;
  for (const auto& [begin, end] : runs_) {
    int64_t length = 1;
    for (int64_t at = begin; at < end; at += length) {
      int64_t stride = 0;
      const int64_t number = candidate.source.find(at, stride, length);
      length = stride == 1 || stride == 0 ? std::min(length, end - at) : 1;
      const int64_t reached = stride == 1 ? length : 1;
      candidate.source.for_each_free(number, [&](int64_t first, int64_t count) {
        covered.add(first, first + count + reached - 1);
      });
    }
  }
  Parts<int64_t> all = candidate.read->positions;
  for (const Trail& trail : candidate.read->trails) all.add(trail.begin, trail.end);
  if (all.is_cut_off() || covered.is_cut_off()) return false;
  return std::all_of(all.all().begin(), all.all().end(), [&](const auto& part) {
    return std::any_of(covered.all().begin(), covered.all().end(), [&](const auto& other) {
      return other.first <= part.first && part.second <= other.second;
    });
  });
}

}  // namespace cokernel::checked
