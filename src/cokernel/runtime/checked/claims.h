// What a loop claims: an access that each of its iterations makes, told at once.
#pragma once

#include <cstdint>

#include "checked/accesses.h"

namespace cokernel::checked {

struct Region;

constexpr int kClaimDimensions = 3;

// As compiled code writes it: see `_row` in compiler/claims.py.
struct ClaimWords {
  int64_t site;
  int64_t kind;
  int64_t is_marked;  // Whether elements of it may be made undefined after the access.
  int64_t address;    // In the first iteration,
  int64_t step;       // and how far it moves from one to the next.
  int64_t element_bytes;
  int64_t ref_begin;  // The Ref that it may not leave.
  int64_t ref_bytes;
  int64_t rank;
  int64_t extents_and_strides[2 * kClaimDimensions];
};

// A range that the loop accesses besides.
struct OtherWords {
  int64_t kind;
  int64_t begin;
  int64_t bytes;
};

// What has to stay within limits for the claims to hold.
struct LimitWords {
  int64_t first;
  int64_t step;
  int64_t low;
  int64_t high;
};

struct Claim {
  int32_t site = -1;
  AccessKind kind = AccessKind::kRead;
  bool is_marked = false;
  // Whether an earlier claim of the same iteration has written all of it.
  bool is_written = false;
  // Whether no element is accessed in two iterations.
  bool is_once = false;
  uintptr_t address = 0;
  int64_t step = 0;
  int64_t trips = 0;
  int64_t element_bytes = 1;
  // Of one iteration.
  int rank = 0;
  int64_t extents[kClaimDimensions] = {};
  int64_t strides[kClaimDimensions] = {};
  int64_t run = 0;     // The bytes of each piece that lies together,
  int64_t pieces = 1;  // and how many there are.
  // Of all iterations.
  uintptr_t low = 0;
  uintptr_t high = 0;
  Region* region = nullptr;
  uint32_t number = 0;  // Of the record.
};

}  // namespace cokernel::checked
