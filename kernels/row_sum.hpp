// The checksum of rows, word by word; see mix.hpp for its definition.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>

#include "mix.hpp"

namespace hybridrl {

// The factors t and their running sums.
struct Factors {
  std::array<uint32_t, kMixBlock> of_word{};
  std::array<uint64_t, kMixBlock + 1> sums{};
};

constexpr Factors make_factors() {
  Factors factors;
  for (int64_t i = 0; i < kMixBlock; ++i) {
    factors.of_word[i] = word_factor(static_cast<uint64_t>(i));
    factors.sums[i + 1] = factors.sums[i] + factors.of_word[i];
  }
  return factors;
}

inline constexpr Factors kFactors = make_factors();

// Sums rows of one tensor. Elements of 8 bytes come as two of 4. Remembers the factor of the last block: short rows
// share it.
class RowSum {
 public:
  RowSum(uint64_t seed, int64_t itemsize) : key_(scramble(seed)), itemsize_(itemsize) {}

  // Adds `elements` from canonical `index` on. `element(at)` returns the bits of the element at byte `at` of the row,
  // `words(at, factors, count)` the sum over whole words from there.
  template <typename Element, typename Words>
  void add(int64_t elements, uint64_t index, const Element& element, const Words& words) {
    const int64_t bytes = elements * itemsize_;
    for (int64_t at = 0; at < bytes;) {
      const uint64_t byte = index * static_cast<uint64_t>(itemsize_) + static_cast<uint64_t>(at);
      const uint64_t word = byte / 4, factor = block_factor_of(word / kMixBlock);
      const auto within = static_cast<int64_t>(word % kMixBlock);
      if (byte % 4 != 0 || bytes - at < 4) {  // shares its word with elements outside of the row
        sum_ += factor * kFactors.of_word[within] * ((uint64_t{element(at)} + 1) << (8 * (byte % 4)));
        at += itemsize_;
      } else {
        const int64_t count = std::min((bytes - at) / 4, kMixBlock - within);
        const uint64_t ones = ones_of_word(itemsize_) * (kFactors.sums[within + count] - kFactors.sums[within]);
        sum_ += factor * (words(at, &kFactors.of_word[within], count) + ones);
        at += 4 * count;
      }
    }
  }

  uint64_t total() const { return sum_; }

 private:
  uint64_t block_factor_of(uint64_t block) {
    if (block != block_) {
      block_ = block;
      factor_ = block_factor(key_, block);
    }
    return factor_;
  }

  uint64_t key_, sum_ = 0, block_ = ~0ull, factor_ = 0;
  int64_t itemsize_;
};

// The bits of one element of at most 4 bytes.
inline uint32_t load_bits(const char* at, int64_t itemsize) {
  uint32_t bits = 0;
  std::memcpy(&bits, at, itemsize);
  return bits;
}

}  // namespace hybridrl
