// The canonical checksum's mixing function, shared by the CPU and CUDA kernels.
//
// A canonical tensor is read as little-endian 32-bit words in index order. An element with bits b that begins at byte
// `shift` of word j (elements of 8 bytes count as two of 4) adds
//
//     u[seed, j / 1024] * t[j % 1024] * ((b + 1) << 8 shift)  mod 2^64,   u (64 bits), t (32 bits) odd and
//     pseudo-random
//
// Order does not matter and every term depends on its own element only, so any cut of a tensor into boxes, rows and
// threads gives the same sum. The form is what makes it fast: u leaves the inner loop, and elements that fill a word
// share one product of 32 bits by 32, for which every vector unit has an instruction.
//
// What changes the sum, with d_j the difference of word j (-2^32 < d_j < 2^32):
// - One word, hence one element: always. u * t is odd and d is not a multiple of 2^64.
// - Two words of a block swapped: always. (t_i - t_j) * (w_i - w_j) is less than 2^64 and not 0: no two t are equal.
// - An element left out or counted twice: always, zeros too, since b + 1 is at least 1 and at most 2^32.
// - Several words: let 2^k divide all d, 2^(k+1) not (k <= 31). Take a block where some d / 2^k is odd. There
//   E = sum t * d / 2^k is divisible by 2^v with a chance of at most 2^(1-v) over t for v <= 32, so E = 0 has at most
//   2^-31; when 2^v is all that divides E, sum u * E * 2^k = 0 for at most 2^(k+v-63) of u. Over all v: at most 2^-31 +
//   33 * 2^(k-62). That is below 2^-30 unless nothing but the highest bits of words differ, and below 2^-25 then.
//   Shifted rows and the values of another expert are such sets.
// The chances are over random t and u. They are fixed here, so they hold for damage that does not know them: faults,
// not forgers.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HYBRIDRL_HOST_DEVICE __host__ __device__
#else
#define HYBRIDRL_HOST_DEVICE
#endif

namespace hybridrl {

constexpr int64_t kMixBlock = 1024;  // words
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;

// Source: the output function of SplitMix64 (Steele, Lea, Flood 2014).
HYBRIDRL_HOST_DEVICE constexpr uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// t: the factor of a word inside its block.
HYBRIDRL_HOST_DEVICE constexpr uint32_t word_factor(uint64_t within) {
  return static_cast<uint32_t>(scramble((within + 1) * kGolden) >> 32) | 1;
}

// u: the factor of a block of a tensor, whose key is scramble(seed).
HYBRIDRL_HOST_DEVICE constexpr uint64_t block_factor(uint64_t key, uint64_t block) {
  return scramble(key + block * kGolden) | 1;
}

// What the "+ 1" of the elements of one word adds up to.
HYBRIDRL_HOST_DEVICE constexpr uint64_t ones_of_word(int64_t itemsize) {
  return itemsize == 1 ? 0x01010101u : itemsize == 2 ? 0x00010001u : 1u;
}

// Round to nearest even; every NaN becomes the quiet NaN 0x7FC0.
HYBRIDRL_HOST_DEVICE constexpr uint16_t to_bf16(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

}  // namespace hybridrl
