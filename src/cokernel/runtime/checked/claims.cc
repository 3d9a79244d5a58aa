// Claims: what a loop accesses is told once for all its iterations.
//
// A claim is taken only if the probes would have found nothing and left the very same shadow
// memory. The iterations of a loop that claims run with nobody else in between and in one epoch, so
// that in a cell only the order of the loop's own accesses matters: which read came last, and
// whether a read came before a write.
#include "checked/claims.h"

#include <algorithm>
#include <cstdlib>
#include <utility>

#include "checked/blocks.h"
#include "checked/state.h"
#include "launch.h"

namespace cokernel::checked {

namespace {

using Wide = __int128;

bool is_kept(const LimitWords& limit, int64_t trips) {
  const Wide last = Wide{limit.first} + Wide{limit.step} * (trips - 1);
  const Wide least = std::min<Wide>(limit.first, last);
  const Wide most = std::max<Wide>(limit.first, last);
  return least >= limit.low && most <= limit.high;
}

// False if the claim leaves its Ref in some iteration.
bool read_claim(const ClaimWords& words, int64_t trips, Claim& claim) {
  claim.site = static_cast<int32_t>(words.site);
  claim.kind = static_cast<AccessKind>(words.kind);
  claim.is_marked = words.is_marked != 0;
  claim.is_written = false;
  claim.address = static_cast<uintptr_t>(words.address);
  claim.step = trips == 1 ? 0 : words.step;
  claim.trips = trips;
  claim.element_bytes = words.element_bytes;
  claim.rank = static_cast<int>(words.rank);
  Wide below = 0;
  Wide above = words.element_bytes;
  for (int d = 0; d < claim.rank; ++d) {
    claim.extents[d] = words.extents_and_strides[2 * d];
    claim.strides[d] = words.extents_and_strides[2 * d + 1];
    const Wide reach = Wide{claim.strides[d]} * (claim.extents[d] - 1);
    (reach < 0 ? below : above) += reach;
  }
  const Wide walk = Wide{claim.step} * (trips - 1);
  const Wide low = Wide{words.address} + below + std::min<Wide>(walk, 0);
  const Wide high = Wide{words.address} + above + std::max<Wide>(walk, 0);
  if (low < words.ref_begin || high > Wide{words.ref_begin} + words.ref_bytes) return false;
  claim.low = static_cast<uintptr_t>(low);
  claim.high = static_cast<uintptr_t>(high);
  claim.run = claim.element_bytes;
  claim.pieces = 1;
  for (int d = claim.rank - 1; d >= 0; --d) {
    if (claim.pieces == 1 && claim.strides[d] == claim.run) {
      claim.run *= claim.extents[d];
    } else if (claim.extents[d] != 1) {
      claim.pieces *= claim.extents[d];
    }
  }
  // No two elements of any iteration are the same if each dimension steps over those within it.
  std::pair<int64_t, int64_t> dimensions[kClaimDimensions + 1];
  int count = 0;
  for (int d = 0; d < claim.rank; ++d) {
    if (claim.extents[d] != 1)
      dimensions[count++] = {std::llabs(claim.strides[d]), claim.extents[d]};
  }
  if (trips > 1) dimensions[count++] = {std::llabs(claim.step), trips};
  std::sort(dimensions, dimensions + count);
  Wide span = claim.element_bytes;
  claim.is_once = true;
  for (int d = 0; d < count; ++d) {
    claim.is_once = claim.is_once && dimensions[d].first >= span;
    span += Wide{dimensions[d].first} * (dimensions[d].second - 1);
  }
  return true;
}

bool is_same_sequence(const Claim& one, const Claim& other) {
  return one.address == other.address && one.step == other.step && one.rank == other.rank &&
         one.element_bytes == other.element_bytes &&
         std::equal(one.extents, one.extents + one.rank, other.extents) &&
         std::equal(one.strides, one.strides + one.rank, other.strides);
}

// Whether the accesses of two loops that take the same steps never meet.
bool run_apart(const Claim& one, const Claim& other) {
  if (one.high <= other.low || other.high <= one.low) return true;
  const int64_t step = std::llabs(one.step);
  if (one.pieces != 1 || other.pieces != 1 || step == 0 || std::llabs(other.step) != step) {
    return false;
  }
  int64_t ahead = static_cast<int64_t>(other.address - one.address) % step;
  if (ahead < 0) ahead += step;
  return ahead >= one.run && ahead + other.run <= step;
}

bool only_reads(AccessKind kind) { return kind == AccessKind::kRead; }

// Whether the loop may claim both, `one` in front of `other` in each iteration.
bool go_together(const Claim& one, Claim& other) {
  if (run_apart(one, other)) return true;
  if (is_same_sequence(one, other)) {
    // What is made undefined after the first of them, the second has to see.
    if (one.is_marked) return false;
    if (only_reads(one.kind) && only_reads(other.kind)) return true;
    if (one.kind == AccessKind::kWrite) other.is_written = true;
    return !other.is_marked || other.is_once;
  }
  // Of reads that follow each other through memory the one behind comes last; see claims_ in
  // `claim`.
  const int64_t step = std::llabs(one.step);
  return only_reads(one.kind) && only_reads(other.kind) && one.pieces == 1 && other.pieces == 1 &&
         one.run == other.run && one.step == other.step && step >= one.run &&
         static_cast<int64_t>(other.address - one.address) % step == 0;
}

// Calls visit(begin, end) for pieces that together are what is claimed, until it returns false.
template <typename Visit>
bool for_each_claimed(const Claim& claim, Visit visit) {
  const auto bytes = static_cast<uintptr_t>(claim.run);
  if (claim.pieces == 1 && std::llabs(claim.step) <= claim.run) {
    return visit(claim.low, claim.high);
  }
  bool goes_on = true;
  uintptr_t at = claim.address;
  for (int64_t i = 0; i < claim.trips && goes_on; ++i) {
    if (claim.pieces == 1) {
      goes_on = visit(at, at + bytes);
    } else {
      for_each_piece(claim.element_bytes, claim.rank, claim.extents, claim.strides, claim.strides,
                     [&](int64_t offset, int64_t, int64_t, int64_t size) {
                       const uintptr_t begin = at + static_cast<uintptr_t>(offset);
                       goes_on = goes_on && visit(begin, begin + static_cast<uintptr_t>(size));
                     });
    }
    at += static_cast<uintptr_t>(claim.step);
  }
  return goes_on;
}

}  // namespace

bool State::claim(Core* core, const int64_t* words, int64_t claims, int64_t others, int64_t limits,
                  int64_t trips) {
  // What the launch ends with is found in the middle of a loop.
  if (trips <= 0 || !takes_claims_ || dma_ != nullptr || options_.stop_at_first) return false;
  const auto* claim_words = reinterpret_cast<const ClaimWords*>(words);
  const auto* other_words = reinterpret_cast<const OtherWords*>(claim_words + claims);
  const auto* limit_words = reinterpret_cast<const LimitWords*>(other_words + others);
  for (int64_t i = 0; i < limits; ++i) {
    if (!is_kept(limit_words[i], trips)) return false;
  }
  claims_.resize(static_cast<std::size_t>(claims));
  for (int64_t i = 0; i < claims; ++i) {
    Claim& claim = claims_[static_cast<std::size_t>(i)];
    if (!read_claim(claim_words[i], trips, claim)) return false;
    claim.region = shadow_.find(claim.low);
    if (claim.region == nullptr || claim.high > claim.region->end) return false;
    if (claim.is_marked && !claim.is_once) return false;
    // Who raises a flag that others poll begins a new epoch.
    if (claim.kind != AccessKind::kRead && is_watched(claim.low, claim.high)) return false;
    for (int64_t j = 0; j < i; ++j) {
      if (!go_together(claims_[static_cast<std::size_t>(j)], claim)) return false;
    }
  }
  for (int64_t i = 0; i < others; ++i) {
    const auto begin = static_cast<uintptr_t>(other_words[i].begin);
    const uintptr_t end = begin + static_cast<uintptr_t>(other_words[i].bytes);
    const bool writes = static_cast<AccessKind>(other_words[i].kind) != AccessKind::kRead;
    if (writes && is_watched(begin, end)) return false;
    for (const Claim& claim : claims_) {
      if (claim.low < end && begin < claim.high) return false;
    }
  }
  const Agent& agent = agent_of(core);
  for (Claim& claim : claims_) {
    SiteCache& cache = cache_of(claim.site);
    claim.number = record_number(cache, agent, claim.site, claim.kind);
    if (!is_quiet(claim, {claim.kind, claim.number, &agent, claim.element_bytes, &cache.last})) {
      return false;
    }
  }
  const Executable::Program& program = launch_.executable.programs[core->program];
  int64_t accesses = 0;
  for (const Claim& claim : claims_) {
    const uintptr_t offset = claim.low - reinterpret_cast<uintptr_t>(core->memory);
    if (claim.kind != AccessKind::kRead &&
        offset >= static_cast<uintptr_t>(program.private_stride)) {
      changed();
      if (schedule_.record) note_written(claim);
    }
    accesses += claim.pieces * trips;
    last_probe_ = claim.number;
  }
  record.counts.accesses += accesses;
  record.claimed += accesses;
  event_ += static_cast<uint64_t>(claims * trips);
  // The claim that comes to an element last is taken last.
  const auto turn = [](const Claim& claim) {
    return claim.step < 0 ? claim.address : ~claim.address;
  };
  std::stable_sort(claims_.begin(), claims_.end(),
                   [&](const Claim& one, const Claim& other) { return turn(one) < turn(other); });
  for (const Claim& claim : claims_) {
    SiteCache& cache = cache_of(claim.site);
    // Numbers change when what is no longer used is forgotten.
    const uint32_t number = record_number(cache, agent, claim.site, claim.kind);
    take(claim, {claim.kind, number, &agent, claim.element_bytes, &cache.last});
  }
  return true;
}

bool State::is_quiet(const Claim& claim, const Access& access) {
  const bool is_defined = claim.kind == AccessKind::kWrite || claim.is_written;
  return for_each_claimed(claim, [&](uintptr_t begin, uintptr_t end) {
    return shadow_.is_quiet(*claim.region, access, begin, end, !is_defined);
  });
}

// What others see of it, as exactly as the probes tell it.
void State::note_written(const Claim& claim) {
  for_each_claimed(claim, [&](uintptr_t begin, uintptr_t end) {
    changed_at(begin, end);
    return true;
  });
}

void State::take(const Claim& claim, const Access& access) {
  for_each_claimed(claim, [&](uintptr_t begin, uintptr_t end) {
    shadow_.access(*claim.region, access, begin, end);
    return true;
  });
}

}  // namespace cokernel::checked
