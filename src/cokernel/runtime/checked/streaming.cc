#include "checked/streaming.h"

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace cokernel::checked {

#if defined(__SSE2__)

namespace {

// What a processor moves to and from memory at once.
constexpr std::size_t kLineBytes = 64;

}  // namespace

void stream(char* target, const char* source, std::size_t bytes) {
  const bool meet = target < source + bytes && source < target + bytes;
  if (bytes < 4 * kLineBytes || meet) {
    std::memmove(target, source, bytes);
    return;
  }
  // Up to the first whole line, then line by line, then what is left.
  const std::size_t front = -reinterpret_cast<uintptr_t>(target) % kLineBytes;
  std::memcpy(target, source, front);
  target += front;
  source += front;
  bytes -= front;
  for (; bytes >= kLineBytes; bytes -= kLineBytes) {
    const auto* from = reinterpret_cast<const __m128i*>(source);
    auto* to = reinterpret_cast<__m128i*>(target);
    const __m128i first = _mm_loadu_si128(from);
    const __m128i second = _mm_loadu_si128(from + 1);
    const __m128i third = _mm_loadu_si128(from + 2);
    const __m128i fourth = _mm_loadu_si128(from + 3);
    _mm_stream_si128(to, first);
    _mm_stream_si128(to + 1, second);
    _mm_stream_si128(to + 2, third);
    _mm_stream_si128(to + 3, fourth);
    target += kLineBytes;
    source += kLineBytes;
  }
  // Such stores are not ordered by themselves.
  _mm_sfence();
  std::memcpy(target, source, bytes);
}

#else

void stream(char* target, const char* source, std::size_t bytes) {
  std::memmove(target, source, bytes);
}

#endif

}  // namespace cokernel::checked
