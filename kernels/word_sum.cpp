#include "word_sum.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define HYBRIDRL_X86 1
#endif

namespace hybridrl {
namespace {

// What a loop over words does besides summing them.
struct NoCopy {};
struct Copy {
  const char* from;
  char* to;
  const char* next;
};

using Bytes = const char*;
using Factor = const uint32_t*;

inline void move_word(const NoCopy&, int64_t) {}
inline void move_word(const Copy& copy, int64_t at) { std::memcpy(copy.to + at, copy.from + at, 4); }

template <typename Move>
uint64_t sum_portable(const Move& move, Bytes summed, Factor factors, int64_t start, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = start; i < count; ++i) {
    move_word(move, 4 * i);
    uint32_t word;
    std::memcpy(&word, summed + 4 * i, 4);
    sum += static_cast<uint64_t>(word) * factors[i];
  }
  return sum;
}

#ifdef HYBRIDRL_X86

// How far the copy runs ahead of the sum. Reading what was stored just now would wait for the store.
constexpr int64_t kLeadWords = 128;

// A multiplication takes the lower words of 64-bit lanes, so even and odd words go in turn. Compilers widen the words
// instead, which takes twice as long.

__attribute__((target("avx512f"))) inline void move_64(const NoCopy&, int64_t) {}
__attribute__((target("avx512f"))) inline void move_64(const Copy& copy, int64_t at) {
  _mm_prefetch(copy.next + at, _MM_HINT_T0);
  _mm512_storeu_si512(copy.to + at, _mm512_loadu_si512(copy.from + at));
}

template <typename Move>
__attribute__((target("avx512f"))) uint64_t sum_avx512(const Move& move, Bytes summed, Factor factors, int64_t count) {
  __m512i even = _mm512_setzero_si512(), odd = even;
  int64_t i = 0;
  const int64_t lead = std::min(kLeadWords, count / 16 * 16);
  for (; i < lead; i += 16) move_64(move, 4 * i);
  for (i = 0; i + 16 <= count; i += 16) {
    if (i + lead + 16 <= count) move_64(move, 4 * (i + lead));
    const __m512i w = _mm512_loadu_si512(summed + 4 * i), f = _mm512_loadu_si512(factors + i);
    even = _mm512_add_epi64(even, _mm512_mul_epu32(w, f));
    odd = _mm512_add_epi64(odd, _mm512_mul_epu32(_mm512_srli_epi64(w, 32), _mm512_srli_epi64(f, 32)));
  }
  uint64_t lanes[8], sum = 0;
  _mm512_storeu_si512(lanes, _mm512_add_epi64(even, odd));
  for (const uint64_t lane : lanes) sum += lane;
  return sum + sum_portable(move, summed, factors, i, count);
}

__attribute__((target("avx2"))) inline void move_32(const NoCopy&, int64_t) {}
__attribute__((target("avx2"))) inline void move_32(const Copy& copy, int64_t at) {
  _mm_prefetch(copy.next + at, _MM_HINT_T0);
  const __m256i value = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(copy.from + at));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(copy.to + at), value);
}

template <typename Move>
__attribute__((target("avx2"))) uint64_t sum_avx2(const Move& move, Bytes summed, Factor factors, int64_t count) {
  __m256i even = _mm256_setzero_si256(), odd = even;
  int64_t i = 0;
  const int64_t lead = std::min(kLeadWords, count / 8 * 8);
  for (; i < lead; i += 8) move_32(move, 4 * i);
  for (i = 0; i + 8 <= count; i += 8) {
    if (i + lead + 8 <= count) move_32(move, 4 * (i + lead));
    const __m256i w = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(summed + 4 * i));
    const __m256i f = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(factors + i));
    even = _mm256_add_epi64(even, _mm256_mul_epu32(w, f));
    odd = _mm256_add_epi64(odd, _mm256_mul_epu32(_mm256_srli_epi64(w, 32), _mm256_srli_epi64(f, 32)));
  }
  uint64_t lanes[4];
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(lanes), _mm256_add_epi64(even, odd));
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + sum_portable(move, summed, factors, i, count);
}

enum class Vectors { kNone, kAvx2, kAvx512 };

Vectors best_vectors() {
  static const Vectors best = __builtin_cpu_supports("avx512f") ? Vectors::kAvx512
                              : __builtin_cpu_supports("avx2")  ? Vectors::kAvx2
                                                                : Vectors::kNone;
  return best;
}

template <typename Move>
uint64_t sum_best(const Move& move, Bytes summed, Factor factors, int64_t count) {
  switch (best_vectors()) {
    case Vectors::kAvx512:
      return sum_avx512(move, summed, factors, count);
    case Vectors::kAvx2:
      return sum_avx2(move, summed, factors, count);
    default:
      return sum_portable(move, summed, factors, 0, count);
  }
}

#else

template <typename Move>
uint64_t sum_best(const Move& move, Bytes summed, Factor factors, int64_t count) {
  return sum_portable(move, summed, factors, 0, count);
}

#endif

}  // namespace

uint64_t word_sum(const char* words, const uint32_t* factors, int64_t count) {
  return sum_best(NoCopy{}, words, factors, count);
}

uint64_t copy_word_sum(const char* from, char* to, const char* summed, const char* next, const uint32_t* factors,
                       int64_t count) {
  return sum_best(Copy{from, to, next}, summed, factors, count);
}

}  // namespace hybridrl
