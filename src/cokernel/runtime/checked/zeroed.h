// Zeroed memory that is kept from one launch to the next.
#pragma once

#include <cstddef>

namespace cokernel::checked {

// A block of zeroed bytes. Memory of moderate size comes from earlier blocks, since pages that the
// system gives anew cost more than to clear those that are there.
class Zeroed {
 public:
  Zeroed() = default;
  explicit Zeroed(std::size_t bytes);
  ~Zeroed();
  Zeroed(Zeroed&& other) noexcept;
  Zeroed& operator=(Zeroed&& other) noexcept;
  Zeroed(const Zeroed&) = delete;
  Zeroed& operator=(const Zeroed&) = delete;

  void* data() const { return data_; }

 private:
  void* data_ = nullptr;
  std::size_t capacity_ = 0;
};

}  // namespace cokernel::checked
