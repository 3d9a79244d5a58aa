// The movement of the benchmark kernels, written by hand.

#include <cstring>
#include <numeric>

#include "limits.h"

namespace {

using Lanes __attribute__((vector_size(64))) = float;

Lanes load(const float* from) {
  Lanes lanes;
  std::memcpy(&lanes, from, sizeof lanes);
  return lanes;
}

// Each lane with the sum of all lanes up to it.
Lanes prefix(Lanes lanes) {
  const Lanes zero{};
  // Index 0 to 15 is a lane of the first operand, 16 and above one of the second.
  lanes += __builtin_shufflevector(zero, lanes, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27,
                                   28, 29, 30);
  lanes += __builtin_shufflevector(zero, lanes, 0, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26,
                                   27, 28, 29);
  lanes += __builtin_shufflevector(zero, lanes, 0, 0, 0, 0, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25,
                                   26, 27);
  lanes +=
      __builtin_shufflevector(zero, lanes, 0, 0, 0, 0, 0, 0, 0, 0, 16, 17, 18, 19, 20, 21, 22, 23);
  return lanes;
}

}  // namespace

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

// out = x * factor by tiles of rows, which are copied into memory of the subcore's own and out of
// it.
double copy(const float* x, float* out, int64_t rows, int64_t columns, int64_t tile, float factor,
            int threads, int64_t repetitions) {
  const int64_t share = rows / kSubcores;
  const int64_t size = tile * columns;
  return run_on_subcores(
      threads, repetitions, rows * columns, out, [=](int64_t subcore, float* to) {
        thread_local std::vector<float> in, result;
        in.resize(size);
        result.resize(size);
        for (int64_t row = subcore * share; row < (subcore + 1) * share; row += tile) {
          std::memcpy(in.data(), x + row * columns, size * sizeof(float));
          const float* from = in.data();
          if (factor != 1) {
            for (int64_t i = 0; i < size; ++i) result[i] = in[i] * factor;
            from = result.data();
          }
          std::memcpy(to + row * columns, from, size * sizeof(float));
        }
      });
}

// out[indices[i]] += values[i], by windows, with a table for each thread, which are added up in the
// end.
double scatter_add(const float* values, const int32_t* indices, float* out, int64_t size,
                   int64_t bins, int64_t window, int threads, int64_t repetitions) {
  std::vector<std::vector<float>> tables(threads, std::vector<float>(bins));
  Team team(threads);
  return median_time(repetitions, [&] {
    float* to = out ? out : allocate(bins);
    team.run([&](int64_t thread) {
      if (thread >= threads) return;
      std::vector<float> amounts(window);
      std::vector<int32_t> places(window);
      float* table = tables[thread].data();
      std::fill_n(table, bins, 0.0f);
      const int64_t end = size * (thread + 1) / threads;
      for (int64_t at = size * thread / threads; at < end; at += window) {
        std::memcpy(amounts.data(), values + at, window * sizeof(float));
        std::memcpy(places.data(), indices + at, window * sizeof(int32_t));
        for (int64_t i = 0; i < window; ++i) table[places[i]] += amounts[i];
      }
    });
    std::memcpy(to, tables[0].data(), bins * sizeof(float));
    for (int thread = 1; thread < threads; ++thread) {
      for (int64_t i = 0; i < bins; ++i) to[i] += tables[thread][i];
    }
    if (!out) std::free(to);
  });
}

// The running sums of x, in pieces that are copied into memory of their own and out of it: first
// the sum of each, then the running sums of each.
double cumulative_sum(const float* x, float* out, int64_t size, int threads, int64_t repetitions) {
  constexpr int64_t kPieces = kSubcores / 2;
  const int64_t share = size / kPieces;
  std::vector<float> memory(size);
  Team team(threads);
  return median_time(repetitions, [&] {
    float* to = out ? out : allocate(size);
    float totals[kPieces];
    team.run([&](int64_t subcore) {
      if (subcore >= kPieces) return;
      float* piece = &memory[subcore * share];
      std::memcpy(piece, x + subcore * share, share * sizeof(float));
      Lanes sum{};
      for (int64_t i = 0; i < share; i += kLanes) sum += load(piece + i);
      totals[subcore] = prefix(sum)[kLanes - 1];
    });
    team.run([&](int64_t subcore) {
      if (subcore >= kPieces) return;
      float* piece = &memory[subcore * share];
      Lanes before = Lanes{} + std::accumulate(totals, totals + subcore, 0.0f);
      for (int64_t i = 0; i < share; i += kLanes) {
        const Lanes within = prefix(load(piece + i));
        const Lanes sums = within + before;
        std::memcpy(piece + i, &sums, sizeof sums);
        before += within[kLanes - 1];
      }
      std::memcpy(to + subcore * share, piece, share * sizeof(float));
    });
    if (!out) std::free(to);
  });
}

// The running sums of x one after the other, by windows.
double scalar_cumulative_sum(const float* x, float* out, int64_t size, int64_t window,
                             int64_t repetitions) {
  std::vector<float> in(window), sums(window);
  return median_time(repetitions, [&] {
    float* to = out ? out : allocate(size);
    float sum = 0;
    for (int64_t at = 0; at < size; at += window) {
      std::memcpy(in.data(), x + at, window * sizeof(float));
      for (int64_t i = 0; i < window; ++i) sums[i] = sum += in[i];
      std::memcpy(to + at, sums.data(), window * sizeof(float));
    }
    if (!out) std::free(to);
  });
}

// x in ascending order: a radix sort of its bits, eleven at a time, lowest first.
double sort(const float* x, float* out, int64_t size, int64_t repetitions) {
  constexpr int kBits = 11, kPasses = 3;
  constexpr uint32_t kDigits = 1u << kBits;
  std::vector<uint32_t> keys(size), other(size), places(kPasses * kDigits);
  return median_time(repetitions, [&] {
    float* to = out ? out : allocate(size);
    std::fill(places.begin(), places.end(), 0);
    for (int64_t i = 0; i < size; ++i) {
      uint32_t bits;
      std::memcpy(&bits, x + i, sizeof bits);
      // Negative numbers ascend as their bits descend.
      bits ^= static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
      keys[i] = bits;
      for (int pass = 0; pass < kPasses; ++pass) {
        ++places[pass * kDigits + (bits >> (pass * kBits)) % kDigits];
      }
    }
    for (int pass = 0; pass < kPasses; ++pass) {
      uint32_t* place = &places[pass * kDigits];
      std::exclusive_scan(place, place + kDigits, place, 0u);
      for (uint32_t key : keys) other[place[(key >> (pass * kBits)) % kDigits]++] = key;
      keys.swap(other);
    }
    for (int64_t i = 0; i < size; ++i) {
      uint32_t bits = keys[i];
      bits ^= static_cast<uint32_t>(~(static_cast<int32_t>(bits) >> 31)) | 0x80000000u;
      std::memcpy(to + i, &bits, sizeof bits);
    }
    if (!out) std::free(to);
  });
}

}  // extern "C"
