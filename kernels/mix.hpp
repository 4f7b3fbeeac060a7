// The canonical checksum's mixing function, shared by the CPU and CUDA kernels.
//
// An element with canonical index i and bits b (b < 2^32; wider elements count as two halves) adds
//
//     mix(seed, i, b) = u[seed, i / 1024] * t[i % 1024] * (b + 1)  mod 2^64,   u and t odd and pseudo-random
//
// Order does not matter and every term depends on its own element only, so any cut of a tensor into boxes, rows and
// threads gives the same sum. The product form is what makes it fast: u leaves the inner loop, which is one
// multiply-add per element against a table in L1 and needs no instruction that a compiler could not vectorise.
//
// What changes the sum, with d_i the difference of the bits at index i (-2^32 < d_i < 2^32):
// - One element: always. u * t is odd and d is not a multiple of 2^64.
// - An element left out or counted twice: always, zeros too, since b + 1 lies in [1, 2^32].
// - Several elements: let 2^k divide all d, 2^(k+1) not (k <= 31). Take a block where some d / 2^k is odd. There
//   E = sum t * d / 2^k is divisible by 2^v with a chance of at most 2^(1-v) over t, and when 2^v is all that divides
//   it, sum u * E * 2^k = 0 for at most 2^(k+v-63) of u. Over all v: at most (65 - k) * 2^(k-62). That is below 2^-55
//   where one difference is odd, below 2^-41 for 16-bit elements, and below 2^-25 where nothing but sign bits of 32-bit
//   elements differ. Swapped elements, shifted rows and the values of another expert are such sets.
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

constexpr int64_t kMixBlock = 1024;
constexpr uint64_t kGolden = 0x9E3779B97F4A7C15ull;
constexpr uint64_t kUpperHalf =
    0xD1B54A32D192ED03ull;  // what distinguishes the seed of the upper halves of 8-byte elements

// Source: the output function of SplitMix64 (Steele, Lea, Flood 2014).
HYBRIDRL_HOST_DEVICE constexpr uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// t: the factor of an index inside its block.
HYBRIDRL_HOST_DEVICE constexpr uint64_t index_factor(uint64_t within) { return scramble((within + 1) * kGolden) | 1; }

// u: the factor of a block of a tensor.
HYBRIDRL_HOST_DEVICE constexpr uint64_t block_factor(uint64_t seed, uint64_t block) {
  return scramble(scramble(seed) + block * kGolden) | 1;
}

// Round to nearest even; every NaN becomes the quiet NaN 0x7FC0.
HYBRIDRL_HOST_DEVICE constexpr uint16_t to_bf16(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

}  // namespace hybridrl
