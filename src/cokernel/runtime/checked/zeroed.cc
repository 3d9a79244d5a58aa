#include "checked/zeroed.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <new>
#include <tuple>
#include <utility>
#include <vector>

namespace cokernel::checked {

namespace {

// Larger blocks are mostly never touched, and the system has zeroed memory at hand.
constexpr std::size_t kLargestKept = std::size_t{2} << 20;
constexpr std::size_t kMostKept = 4;

using Block = std::pair<std::size_t, void*>;

std::mutex mutex;
std::vector<Block> kept;

}  // namespace

Zeroed::Zeroed(std::size_t bytes) : capacity_(bytes) {
  if (bytes <= kLargestKept) {
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = std::find_if(kept.begin(), kept.end(),
                                    [&](const Block& block) { return block.first >= bytes; });
    if (found != kept.end()) {
      std::tie(capacity_, data_) = *found;
      kept.erase(found);
    }
  }
  if (data_ != nullptr) {
    std::memset(data_, 0, bytes);
    return;
  }
  data_ = std::calloc(bytes, 1);
  if (data_ == nullptr) throw std::bad_alloc();
}

Zeroed::~Zeroed() {
  if (data_ != nullptr && capacity_ <= kLargestKept) {
    const std::lock_guard<std::mutex> lock(mutex);
    if (kept.size() < kMostKept) {
      kept.emplace_back(capacity_, data_);
      // Who asks gets the smallest block that is large enough.
      std::sort(kept.begin(), kept.end());
      return;
    }
  }
  std::free(data_);
}

Zeroed::Zeroed(Zeroed&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), capacity_(other.capacity_) {}

Zeroed& Zeroed::operator=(Zeroed&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(capacity_, other.capacity_);
  return *this;
}

}  // namespace cokernel::checked
