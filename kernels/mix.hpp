// The canonical checksum's mixing function, shared by the CPU and CUDA kernels.
//
// An element with canonical index i and bits b (32 at most; wider elements count as two) adds
//
//     (b + a_i) * m_i  mod 2^64,   m_i odd and below 2^32, a_i below 2^32, both pseudo-random in (seed, i)
//
// Bits below 2^32 times m_i below 2^32 do not wrap, so a single changed element always changes the sum. For any fixed
// set of several errors the sum stays only if one key hits one value out of 2^31, given the others: a chance of at most
// 2^-30. Swapped rows, an element of another expert and a shifted range change many (index, bits) pairs and are such
// sets. The sum does not depend on order, so any cut into boxes gives the same value.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define HYBRIDRL_HOST_DEVICE __host__ __device__
#else
#define HYBRIDRL_HOST_DEVICE
#endif

namespace hybridrl {

constexpr uint64_t kStep = 0x9E3779B97F4A7C15ull;   // odd, close to 2^64 / golden ratio: spreads consecutive indices
constexpr uint64_t kOther = 0xD1B54A32D192ED03ull;  // odd; start of the upper halves of 8-byte elements

// Position of index 0 of a tensor; index i is at key_start + i * kStep.
HYBRIDRL_HOST_DEVICE inline uint64_t key_start(uint64_t seed) {
  uint64_t x = seed + kStep;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

// Two rounds of a 32 x 32 -> 64 bit product: non-linear in the key, and one instruction per lane on every vector unit.
HYBRIDRL_HOST_DEVICE inline uint64_t spread(uint64_t key) {
  uint64_t p = (key & 0xFFFFFFFFull) * ((key >> 32) | 1) ^ key;
  return ((p >> 32) * ((p & 0xFFFFFFFFull) | 1)) ^ (p << 32 | p >> 32);
}

HYBRIDRL_HOST_DEVICE inline uint64_t mix(uint64_t key, uint64_t bits) {
  const uint64_t p = spread(key);
  return (bits + (p & 0xFFFFFFFFull)) * ((p >> 32) | 1);
}

// Round to nearest even; every NaN becomes the quiet NaN 0x7FC0.
HYBRIDRL_HOST_DEVICE inline uint16_t to_bf16(uint32_t bits) {
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const bool is_nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
  return static_cast<uint16_t>(is_nan ? 0x7FC0u : rounded);
}

}  // namespace hybridrl
