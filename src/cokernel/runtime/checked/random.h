// Random numbers that are the same on every machine.
#pragma once

#include <cstdint>

namespace cokernel::checked {

// A step of SplitMix64, which also serves to mix numbers.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

inline uint64_t mix(uint64_t a, uint64_t b) { return mix(mix(a) ^ b); }

// xoshiro256**.
class Random {
 public:
  explicit Random(uint64_t seed) {
    for (uint64_t& word : state_) word = seed = mix(seed);
  }

  uint64_t next() {
    const uint64_t result = rotate(state_[1] * 5, 7) * 9;
    const uint64_t shifted = state_[1] << 17;
    state_[2] ^= state_[0];
    state_[3] ^= state_[1];
    state_[1] ^= state_[2];
    state_[0] ^= state_[3];
    state_[2] ^= shifted;
    state_[3] = rotate(state_[3], 45);
    return result;
  }

  // From 0 to count - 1.
  uint32_t below(uint32_t count) {
    return static_cast<uint32_t>(((next() >> 32) * uint64_t{count}) >> 32);
  }

  // True `parts` times out of 1024.
  bool chance(uint32_t parts) { return (next() >> 54) < parts; }

 private:
  static uint64_t rotate(uint64_t x, int bits) { return (x << bits) | (x >> (64 - bits)); }
  uint64_t state_[4];
};

}  // namespace cokernel::checked
