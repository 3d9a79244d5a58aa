// The movement of the benchmark kernels, written by hand.

#include <cstring>

#include "limits.h"

extern "C" {

// out[i] = table[indices[i]], by windows of rows that are first collected in memory of the
// subcore's own.
double gather(const float* table, const int32_t* indices, float* out, int64_t rows, int64_t width,
              int64_t window, int threads, int64_t repetitions) {
  const int64_t share = rows / kSubcores;
  return run_on_subcores(threads, repetitions, rows * width, out, [=](int64_t subcore, float* to) {
    std::vector<int32_t> chosen(window);
    std::vector<float> collected(window * width);
    for (int64_t row = subcore * share; row < (subcore + 1) * share; row += window) {
      std::memcpy(chosen.data(), indices + row, window * sizeof(int32_t));
      for (int64_t i = 0; i < window; ++i) {
        std::memcpy(&collected[i * width], table + chosen[i] * width, width * sizeof(float));
      }
      std::memcpy(to + row * width, collected.data(), window * width * sizeof(float));
    }
  });
}

// out = x * 2 + 1, by windows that are copied into memory of the subcore's own and out of it.
double affine(const float* x, float* out, int64_t size, int64_t window, int threads,
              int64_t repetitions) {
  const int64_t share = size / kSubcores;
  return run_on_subcores(threads, repetitions, size, out, [=](int64_t subcore, float* to) {
    std::vector<float> in(window), result(window);
    for (int64_t at = subcore * share; at < (subcore + 1) * share; at += window) {
      std::memcpy(in.data(), x + at, window * sizeof(float));
      for (int64_t i = 0; i < window; ++i) result[i] = in[i] * 2 + 1;
      std::memcpy(to + at, result.data(), window * sizeof(float));
    }
  });
}

}  // extern "C"
