#include "checksum.hpp"

#include <cstring>
#include <mutex>
#include <vector>

#include "mix.hpp"
#include "parallel.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace hybridrl {
namespace {

struct Plain16 {
  static constexpr int64_t kBytes = 2;
  static uint64_t bits(const char* at) {
    uint16_t value;
    std::memcpy(&value, at, 2);
    return value;
  }
};

struct Plain8 {
  static constexpr int64_t kBytes = 1;
  static uint64_t bits(const char* at) { return static_cast<uint8_t>(*at); }
};

struct Plain32 {
  static constexpr int64_t kBytes = 4;
  static uint64_t bits(const char* at) {
    uint32_t value;
    std::memcpy(&value, at, 4);
    return value;
  }
};

struct Rounded32 {
  static constexpr int64_t kBytes = 4;
  static uint64_t bits(const char* at) { return to_bf16(static_cast<uint32_t>(Plain32::bits(at))); }
};

template <typename Element>
uint64_t sum_row(const char* row, int64_t elements, uint64_t key) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < elements; ++i, key += kStep) sum += mix(key, Element::bits(row + i * Element::kBytes));
  return sum;
}

uint64_t sum_row_8bytes(const char* row, int64_t elements, uint64_t key) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < elements; ++i, key += kStep) {
    sum += mix(key, Plain32::bits(row + 8 * i)) + mix(key ^ kOther, Plain32::bits(row + 8 * i + 4));
  }
  return sum;
}

#if defined(__x86_64__)

struct Load512 {
  __attribute__((target("avx512f"))) static __m512i bits(const Plain32&, const char* at) {
    return _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)));
  }
  __attribute__((target("avx512f"))) static __m512i bits(const Plain16&, const char* at) {
    return _mm512_cvtepu16_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
  }
  __attribute__((target("avx512f"))) static __m512i bits(const Rounded32&, const char* at) {
    const __m512i raw = bits(Plain32{}, at);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi64(raw, 16), _mm512_set1_epi64(1));
    const __m512i rounded =
        _mm512_srli_epi64(_mm512_add_epi64(raw, _mm512_add_epi64(odd, _mm512_set1_epi64(0x7FFF))), 16);
    const __m512i magnitude = _mm512_and_si512(raw, _mm512_set1_epi64(0x7FFFFFFF));
    const __mmask8 is_nan = _mm512_cmpgt_epu64_mask(magnitude, _mm512_set1_epi64(0x7F800000));
    return _mm512_mask_mov_epi64(_mm512_and_si512(rounded, _mm512_set1_epi64(0xFFFF)), is_nan,
                                 _mm512_set1_epi64(0x7FC0));
  }
};

__attribute__((target("avx512f"))) inline __m512i mix512(__m512i key, __m512i bits) {
  const __m512i one = _mm512_set1_epi64(1), low = _mm512_set1_epi64(0xFFFFFFFFll);
  const __m512i p = _mm512_xor_si512(_mm512_mul_epu32(key, _mm512_or_si512(_mm512_srli_epi64(key, 32), one)), key);
  const __m512i q =
      _mm512_xor_si512(_mm512_mul_epu32(_mm512_srli_epi64(p, 32), _mm512_or_si512(p, one)), _mm512_ror_epi64(p, 32));
  const __m512i left = _mm512_add_epi64(bits, _mm512_and_si512(q, low));
  const __m512i factor = _mm512_or_si512(_mm512_srli_epi64(q, 32), one);
  // left has up to 33 bits: its low half times the factor, plus the factor shifted up where the 33rd bit is set.
  return _mm512_add_epi64(_mm512_mul_epu32(left, factor),
                          _mm512_slli_epi64(_mm512_mul_epu32(_mm512_srli_epi64(left, 32), factor), 32));
}

template <typename Element>
__attribute__((target("avx512f"))) uint64_t sum_row_512(const char* row, int64_t elements, uint64_t key) {
  alignas(64) uint64_t keys[8];
  for (int lane = 0; lane < 8; ++lane) keys[lane] = key + lane * kStep;
  __m512i lanes = _mm512_load_si512(keys), total = _mm512_setzero_si512();
  const __m512i step = _mm512_set1_epi64(static_cast<long long>(8 * kStep));
  int64_t i = 0;
  for (; i + 8 <= elements; i += 8) {
    total = _mm512_add_epi64(total, mix512(lanes, Load512::bits(Element{}, row + i * Element::kBytes)));
    lanes = _mm512_add_epi64(lanes, step);
  }
  alignas(64) uint64_t sums[8];
  _mm512_store_si512(sums, total);
  uint64_t sum = 0;
  for (uint64_t part : sums) sum += part;
  return sum + sum_row<Element>(row + i * Element::kBytes, elements - i, key + i * kStep);
}

const bool kHasAvx512 = __builtin_cpu_supports("avx512f");

#endif

using SumRow = uint64_t (*)(const char*, int64_t, uint64_t);

SumRow choose(int64_t itemsize, Cast cast) {
#if defined(__x86_64__)
  if (kHasAvx512) {
    if (cast == Cast::kF32ToBf16) return sum_row_512<Rounded32>;
    if (itemsize == 4) return sum_row_512<Plain32>;
    if (itemsize == 2) return sum_row_512<Plain16>;
  }
#endif
  if (cast == Cast::kF32ToBf16) return sum_row<Rounded32>;
  if (itemsize == 8) return sum_row_8bytes;
  if (itemsize == 4) return sum_row<Plain32>;
  return itemsize == 2 ? sum_row<Plain16> : sum_row<Plain8>;
}

}  // namespace

void checksum_cpu(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, int64_t itemsize, Cast cast,
                  int num_threads, uint64_t* sums, int64_t num_slots) {
  const SumRow sum_row = choose(itemsize, cast);
  std::mutex mutex;
  parallel_rows(
      segments, count, num_threads, [itemsize](const ChecksumSegment& s) { return s.row_elements * itemsize; },
      [&](int64_t, const RowRange* begin, const RowRange* end) {
        std::vector<uint64_t> own(num_slots, 0);
        for (const RowRange* range = begin; range != end; ++range) {
          const ChecksumSegment& s = segments[range->segment];
          const char* base = reinterpret_cast<const char*>(buffers[s.buffer].address) + s.offset;
          const uint64_t start = key_start(static_cast<uint64_t>(s.seed));
          for (int64_t r = range->first; r < range->last; ++r) {
            const uint64_t index = static_cast<uint64_t>(s.index_start + r * s.index_pitch);
            own[s.slot] += sum_row(base + r * s.pitch, s.row_elements, start + index * kStep);
          }
        }
        const std::lock_guard<std::mutex> lock(mutex);
        for (int64_t slot = 0; slot < num_slots; ++slot) sums[slot] += own[slot];
      });
}

}  // namespace hybridrl
