// Strided blocks of memory, as the contiguous pieces they consist of.
#pragma once

#include <cstdint>

namespace cokernel::checked {

constexpr int kMostDimensions = 32;

// Calls visit(offset, other offset, first, bytes) for each contiguous piece of a block, row-major;
// `first` is the number of its first element. `strides` and `other_strides` (the same ones, if
// there is one block) are in bytes. At most kMostDimensions dimensions.
template <typename Visit>
void for_each_piece(int64_t element_bytes, int64_t rank, const int64_t* extents,
                    const int64_t* strides, const int64_t* other_strides, Visit visit) {
  int64_t outer = 0;  // Dimensions that are not part of a piece, innermost first.
  int64_t extent[kMostDimensions];
  int64_t stride[kMostDimensions];
  int64_t other[kMostDimensions];
  int64_t piece = 1;
  for (int64_t i = rank - 1; i >= 0; --i) {
    if (extents[i] <= 0) return;
    if (extents[i] == 1) continue;
    const int64_t run = piece * element_bytes;
    if (outer == 0 && strides[i] == run && other_strides[i] == run) {
      piece *= extents[i];
      continue;
    }
    extent[outer] = extents[i];
    stride[outer] = strides[i];
    other[outer] = other_strides[i];
    ++outer;
  }
  int64_t index[kMostDimensions] = {};
  int64_t offset = 0;
  int64_t other_offset = 0;
  for (int64_t first = 0;; first += piece) {
    visit(offset, other_offset, first, piece * element_bytes);
    int64_t d = 0;
    for (; d < outer; ++d) {
      offset += stride[d];
      other_offset += other[d];
      if (++index[d] < extent[d]) break;
      offset -= stride[d] * extent[d];
      other_offset -= other[d] * extent[d];
      index[d] = 0;
    }
    if (d == outer) return;
  }
}

}  // namespace cokernel::checked
