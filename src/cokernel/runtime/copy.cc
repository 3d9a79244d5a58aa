// Copies of strided blocks.
#include <cstdint>
#include <cstring>
#include <vector>

#include "abi.h"

namespace cokernel {
namespace {

struct Dimension {
  int64_t extent;
  int64_t target;
  int64_t source;
};

template <typename Element>
void copy_elements(char* target, const char* source, const Dimension& dimension) {
  for (int64_t i = 0; i < dimension.extent; ++i) {
    Element element;
    std::memcpy(&element, source + i * dimension.source, sizeof(Element));
    std::memcpy(target + i * dimension.target, &element, sizeof(Element));
  }
}

struct Bytes16 {
  uint64_t halves[2];
};

void copy_row(char* target, const char* source, int64_t element_bytes, const Dimension& dimension) {
  switch (element_bytes) {
    case 1:
      return copy_elements<uint8_t>(target, source, dimension);
    case 2:
      return copy_elements<uint16_t>(target, source, dimension);
    case 4:
      return copy_elements<uint32_t>(target, source, dimension);
    case 8:
      return copy_elements<uint64_t>(target, source, dimension);
    case 16:
      return copy_elements<Bytes16>(target, source, dimension);
    default:
      for (int64_t i = 0; i < dimension.extent; ++i) {
        std::memmove(target + i * dimension.target, source + i * dimension.source, element_bytes);
      }
  }
}

// Copies dimensions [first, rank) of the block.
void copy_from(char* target, const char* source, int64_t element_bytes,
               const std::vector<Dimension>& dimensions, size_t first) {
  if (first + 1 == dimensions.size()) {
    copy_row(target, source, element_bytes, dimensions[first]);
    return;
  }
  const Dimension& dimension = dimensions[first];
  for (int64_t i = 0; i < dimension.extent; ++i) {
    copy_from(target + i * dimension.target, source + i * dimension.source, element_bytes,
              dimensions, first + 1);
  }
}

}  // namespace
}  // namespace cokernel

void cokernel_copy(void* target, const void* source, int64_t element_bytes, int64_t rank,
                   const int64_t* extents, const int64_t* target_strides,
                   const int64_t* source_strides) {
  using cokernel::Dimension;
  for (int64_t i = 0; i < rank; ++i) {
    if (extents[i] <= 0) return;
  }
  // Grow the element by the innermost dimensions that are contiguous on both sides, and merge
  // neighbouring dimensions that step alike. Built from the innermost outwards.
  std::vector<Dimension> inner_first;
  for (int64_t i = rank - 1; i >= 0; --i) {
    const Dimension next{extents[i], target_strides[i], source_strides[i]};
    if (next.extent == 1) continue;
    if (inner_first.empty() && next.target == element_bytes && next.source == element_bytes) {
      element_bytes *= next.extent;
      continue;
    }
    if (!inner_first.empty()) {
      Dimension& inner = inner_first.back();
      if (next.target == inner.target * inner.extent &&
          next.source == inner.source * inner.extent) {
        inner.extent *= next.extent;
        continue;
      }
    }
    inner_first.push_back(next);
  }
  char* to = static_cast<char*>(target);
  const char* from = static_cast<const char*>(source);
  if (inner_first.empty()) {
    std::memmove(to, from, element_bytes);
    return;
  }
  const std::vector<Dimension> dimensions(inner_first.rbegin(), inner_first.rend());
  cokernel::copy_from(to, from, element_bytes, dimensions, 0);
}
