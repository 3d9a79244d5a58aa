// The arithmetic of the benchmark kernels, written by hand, in vectors as wide as the registers.

#include <cmath>
#include <cstring>
#include <vector>

#include "limits.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

namespace {

typedef float Floats __attribute__((vector_size(kVectorBytes)));
typedef int32_t Words __attribute__((vector_size(kVectorBytes)));
constexpr int64_t kWidth = kVectorBytes / sizeof(float);

Floats load(const float* from) {
  Floats value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

Floats less(Floats one, Floats other) { return one < other ? one : other; }
Floats more(Floats one, Floats other) { return one > other ? one : other; }

// x = n log(2) + r; returns r, and n as an integer.
Floats reduce(Floats x, Words* number) {
  constexpr float kRound = 0x1.8p23f;
  const Floats shifted = x * 1.44269504f + kRound;
  const Floats whole = shifted - kRound;
  const Words bias = (Words)(Floats{} + kRound);
  *number = (Words)shifted - bias;
  return (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
}

Floats power_of_two(Words exponent) { return (Floats)((exponent + 127) << 23); }

Floats exponential(Floats x) {
  x = more(less(x, Floats{} + 90.0f), Floats{} - 104.0f);
  Words number;
  const Floats r = reduce(x, &number);
  Floats tail = Floats{} + 0.001381419f;
  for (float next : {0.008368914f, 0.041668408f, 0.1666652f, 0.49999994f}) tail = tail * r + next;
  const Floats value = (r + r * r * tail) + 1.0f;
  const Words half = number >> 1;
  return value * power_of_two(half) * power_of_two(number - half);
}

// exp(x) - 1 for x between 0 and 20.
Floats exponential_minus_one(Floats x) {
  Words number;
  const Floats r = reduce(x, &number);
  Floats tail = Floats{} + 0.000198459f;
  for (float next : {0.0013940915f, 0.00833339f, 0.04166636f, 0.16666666f, 0.5f}) {
    tail = tail * r + next;
  }
  const Floats scale = power_of_two(number);
  return (r + r * r * tail) * scale + (scale - 1.0f);
}

Floats hyperbolic_tangent(Floats x) {
  const Words sign = (Words)x & INT32_MIN;
  const Floats size = less((Floats)((Words)x ^ sign), Floats{} + 10.0f);
  const Floats grown = exponential_minus_one(size + size);
  return (Floats)((Words)(grown / (grown + 2.0f)) | sign);
}

Floats error_function(Floats x) {
  x = more(less(x, Floats{} + 3.95f), Floats{} - 3.95f);
  const Floats square = x * x;
  Floats above = Floats{} + 6.6585876e-06f, below = Floats{} + 2.5298033e-07f;
  for (float next : {0.00040765174f, 0.0042059603f, 0.0556413f, 0.19261467f, 1.1283792f}) {
    above = above * square + next;
  }
  for (float next : {7.1611154e-05f, 0.0014123289f, 0.016242269f, 0.11732147f, 0.50403374f, 1.0f}) {
    below = below * square + next;
  }
  return x * above / below;
}

// Applies a function to a share of the elements for each subcore.
template <Floats function(Floats)>
double apply(const float* x, float* out, int64_t size, int threads, int64_t repetitions) {
  const int64_t share = size / kSubcores;
  return run_on_subcores(threads, repetitions, size, out, [=](int64_t subcore, float* to) {
    const int64_t end = (subcore + 1) * share;
    for (int64_t i = subcore * share; i < end; i += kWidth) store(to + i, function(load(x + i)));
  });
}

float largest(Floats x) {
  float result = x[0];
  for (int i = 1; i < kWidth; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

float sum(Floats x) {
  float result = 0;
  for (int i = 0; i < kWidth; ++i) result += x[i];
  return result;
}

// exp(x - max(x)) of a row, with the sum of it.
float grow(const float* x, float* to, int64_t columns, float maximum) {
  Floats total{};
  for (int64_t i = 0; i < columns; i += kWidth) {
    const Floats value = exponential(load(x + i) - maximum);
    store(to + i, value);
    total += value;
  }
  return sum(total);
}

float largest_of_row(const float* x, int64_t columns) {
  Floats first = Floats{} - INFINITY, second = first;
  for (int64_t i = 0; i < columns; i += 2 * kWidth) {
    first = more(first, load(x + i));
    second = more(second, load(x + i + kWidth));
  }
  return largest(more(first, second));
}

}  // namespace

extern "C" {

double exponentials(const float* x, float* out, int64_t size, int threads, int64_t repetitions) {
  return apply<exponential>(x, out, size, threads, repetitions);
}

double hyperbolic_tangents(const float* x, float* out, int64_t size, int threads,
                           int64_t repetitions) {
  return apply<hyperbolic_tangent>(x, out, size, threads, repetitions);
}

double error_functions(const float* x, float* out, int64_t size, int threads, int64_t repetitions) {
  return apply<error_function>(x, out, size, threads, repetitions);
}

// Softmax along rows, each of which stays in the first-level cache.
double softmax(const float* x, float* out, int64_t rows, int64_t columns, int threads,
               int64_t repetitions) {
  const int64_t share = rows / kSubcores;
  return run_on_subcores(threads, repetitions, rows * columns, out, [=](int64_t core, float* to) {
    for (int64_t row = core * share; row < (core + 1) * share; ++row) {
      const float* from = x + row * columns;
      float* result = to + row * columns;
      const float total = grow(from, result, columns, largest_of_row(from, columns));
      for (int64_t i = 0; i < columns; i += kWidth) store(result + i, load(result + i) / total);
    }
  });
}

using Gemm = void (*)(const char*, const char*, const int*, const int*, const int*, const float*,
                      const float*, const int*, const float*, const int*, const float*, float*,
                      const int*);

// softmax(q k^T / sqrt(width)) v, a block of queries and a block of keys at a time, with the
// products by `gemm`, which uses the calling thread alone.
double attention(const float* q, const float* k, const float* v, float* out, int64_t queries,
                 int64_t keys, int64_t width, void* gemm, int threads, int64_t repetitions) {
  const Gemm multiply = reinterpret_cast<Gemm>(gemm);
  const int64_t share = queries / kSubcores;
  constexpr int64_t kKeys = 512;
  return run_on_subcores(threads, repetitions, queries * width, out, [=](int64_t core, float* to) {
    const int rows = static_cast<int>(share), columns = kKeys, wide = static_cast<int>(width);
    std::vector<float> scores(share * kKeys), most(share, -INFINITY), total(share);
    float* result = to + core * share * width;
    std::memset(result, 0, share * width * sizeof(float));
    const float scale = 1 / std::sqrt(static_cast<float>(width)), zero = 0, one = 1;
    for (int64_t key = 0; key < keys; key += kKeys) {
      // To BLAS, which counts columns first, each of our matrices is the transposed one.
      multiply("T", "N", &columns, &rows, &wide, &scale, k + key * width, &wide,
               q + core * share * width, &wide, &zero, scores.data(), &columns);
      for (int64_t row = 0; row < share; ++row) {
        float* of_row = &scores[row * kKeys];
        const float now = std::max(most[row], largest_of_row(of_row, kKeys));
        const float shrink = std::exp(most[row] - now);
        total[row] = total[row] * shrink + grow(of_row, of_row, kKeys, now);
        most[row] = now;
        for (int64_t i = 0; i < width; i += kWidth) {
          store(result + row * width + i, load(result + row * width + i) * shrink);
        }
      }
      multiply("N", "N", &wide, &rows, &columns, &one, v + key * width, &wide, scores.data(),
               &columns, &one, result, &wide);
    }
    for (int64_t row = 0; row < share; ++row) {
      for (int64_t i = 0; i < width; i += kWidth) {
        store(result + row * width + i, load(result + row * width + i) / total[row]);
      }
    }
  });
}

// Does `count` multiplications of bfloat16 with additions in float32 with all threads, in
// registers; where the processor has no instruction for them, those of float32.
double multiply_adds_bfloat16(int64_t count, int threads, int64_t repetitions) {
  constexpr int kSums = 12;
  using Vector __attribute__((vector_size(kVectorBytes))) = float;
  constexpr int64_t kWide = kVectorBytes / sizeof(float);
#if defined(__AVX512BF16__)
  constexpr int64_t kProducts = 2 * kWide;
#else
  constexpr int64_t kProducts = kWide;
#endif
  const int64_t steps = count / (kSubcores * kSums * kProducts);
  std::atomic<int> seen{0};
  return run_on_subcores(threads, repetitions, 0, nullptr, [&](int64_t, float*) {
    Vector sums[kSums] = {};
    Vector left = Vector{} + 0.5f, right = Vector{} + 1.0f;
    asm volatile("" : "+m"(left), "+m"(right));
    for (int64_t step = 0; step < steps; ++step) {
      for (Vector& total : sums) {
#if defined(__AVX512BF16__)
        total = (Vector)_mm512_dpbf16_ps((__m512)total, (__m512bh)left, (__m512bh)right);
#else
        total = total * left + right;
#endif
      }
    }
    Vector total{};
    for (Vector& part : sums) total += part;
    seen += static_cast<int>(total[0]);
  });
}

}  // extern "C"
