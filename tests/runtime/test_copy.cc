// Strided copies against a plain loop over all indices.
#include <cstring>
#include <numeric>
#include <random>

#include "support.h"

namespace cokernel::testing {
namespace {

struct Case {
  int64_t element_bytes;
  std::vector<int64_t> extents, target_strides, source_strides;
};

// The bytes that a block with these strides reaches.
int64_t span_of(const Case& c, const std::vector<int64_t>& strides) {
  int64_t span = c.element_bytes;
  for (size_t i = 0; i < strides.size(); ++i) span += (c.extents[i] - 1) * strides[i];
  return span;
}

void expect_like_a_loop(const Case& c) {
  const size_t rank = c.extents.size();
  std::vector<unsigned char> source(span_of(c, c.source_strides));
  std::iota(source.begin(), source.end(), 1);
  std::vector<unsigned char> target(span_of(c, c.target_strides), 0xee);
  std::vector<unsigned char> expected = target;
  int64_t total = 1;
  for (const int64_t extent : c.extents) total *= extent;
  for (int64_t flat = 0; flat < total; ++flat) {
    int64_t rest = flat, to = 0, from = 0;
    for (size_t axis = rank; axis-- > 0;) {
      const int64_t index = rest % c.extents[axis];
      rest /= c.extents[axis];
      to += index * c.target_strides[axis];
      from += index * c.source_strides[axis];
    }
    std::memcpy(&expected[to], &source[from], c.element_bytes);
  }
  cokernel_copy(target.data(), source.data(), c.element_bytes, static_cast<int64_t>(rank),
                c.extents.data(), c.target_strides.data(), c.source_strides.data());
  CHECK(target == expected);
}

void random_blocks() {
  std::mt19937 random(1);
  const auto pick = [&random](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  for (int round = 0; round < 3000; ++round) {
    Case c;
    c.element_bytes = pick(0, 1) ? int64_t{1} << pick(0, 4) : pick(1, 12);
    const int64_t rank = pick(0, 4);
    for (int64_t i = 0; i < rank; ++i) c.extents.push_back(pick(1, 5));
    for (auto* strides : {&c.target_strides, &c.source_strides}) {
      strides->resize(rank);
      int64_t step = c.element_bytes;
      for (int64_t i = rank; i-- > 0;) {
        if (pick(0, 2) == 0) step += c.element_bytes * pick(1, 3);
        (*strides)[i] = step;
        step *= c.extents[i];
      }
    }
    expect_like_a_loop(c);
  }
}

void an_empty_block_copies_nothing() {
  const int64_t extents[] = {3, 0}, strides[] = {4, 4};
  cokernel_copy(nullptr, nullptr, 4, 2, extents, strides, strides);
}

void a_stride_of_zero_repeats() {
  const int32_t source = 7;
  int32_t target[5] = {};
  const int64_t extents[] = {5}, to[] = {4}, from[] = {0};
  cokernel_copy(target, &source, 4, 1, extents, to, from);
  for (const int32_t element : target) CHECK_EQUAL(element, 7);
}

void a_negative_stride_reverses() {
  const int16_t source[] = {1, 2, 3};
  int16_t target[3] = {};
  const int64_t extents[] = {3}, to[] = {2}, from[] = {-2};
  cokernel_copy(target, source + 2, 2, 1, extents, to, from);
  CHECK_EQUAL(target[0], 3);
  CHECK_EQUAL(target[2], 1);
}

}  // namespace
}  // namespace cokernel::testing

int main() {
  using namespace cokernel::testing;
  random_blocks();
  an_empty_block_copies_nothing();
  a_stride_of_zero_repeats();
  a_negative_stride_reverses();
}
