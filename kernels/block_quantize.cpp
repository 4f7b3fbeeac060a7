#include "block_quantize.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "clones.hpp"
#include "parallel.hpp"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace hybridrl {
namespace {

constexpr uint32_t kBf16Infinity = 0x7F80;

HYBRIDRL_INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

HYBRIDRL_INLINE float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Rounds float32 bits, of a magnitude below 464, to the nearest e4m3, ties to even. The spacing of e4m3 is 1/8 of the
// number's power of two, and never less than 2^-9. Adding 2^20 times that power, whose last mantissa bit is worth one
// spacing, lets the adder round: the sum's mantissa counts spacings, 8 to 16 of them in each binade. The exponent moves
// from bias 127 to bias 7 by a constant (-120 - 1) * 8, of which the last byte waits in the adder's mantissa. Only the
// last byte is of use.
constexpr uint32_t kMagnitude = 0x7FFFFFFF, kExponent = 0x7F800000, kSmallest = 121u << 23;
constexpr uint32_t kAdder = (20u << 23) + (-(121u << 3) & 0xFF);

HYBRIDRL_INLINE uint8_t round_e4m3(uint32_t bits) {
  const uint32_t power = std::max(bits & kExponent, kSmallest);
  const uint32_t spacings = bits_of(float_of(bits & kMagnitude) + float_of(power + kAdder));
  return static_cast<uint8_t>(((spacings + (power >> 20)) & 0x7F) | (bits >> 24 & 0x80));
}

// Blocks beside each other, read twice: for their magnitudes and to be quantised. Long rows keep the hardware's
// prefetcher busy, and the second reading finds the panel in cache.
constexpr int64_t kPanelBlocks = 64;
constexpr int64_t kPanelColumns = kPanelBlocks * kQuantBlock;

struct Panel {
  const char* from;
  int64_t from_pitch;
  char* to;
  int64_t to_pitch;
  float* scales;
  int64_t rows, columns;
};

// Keeps the largest magnitude of each column. Magnitudes of bfloat16 are in the order of their bits.
HYBRIDRL_CLONES void raise_most(const char* from, uint16_t* __restrict__ most, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) {
    uint16_t bits;
    std::memcpy(&bits, from + 2 * c, 2);
    most[c] = std::max<uint16_t>(most[c], bits & 0x7FFF);
  }
}

HYBRIDRL_CLONES void quantize_any(const char* from, char* to, const float* inverse, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) {
    uint16_t half;
    std::memcpy(&half, from + 2 * c, 2);
    to[c] = static_cast<char>(round_e4m3(bits_of(float_of(static_cast<uint32_t>(half) << 16) * inverse[c])));
  }
}

#if defined(__x86_64__) && defined(__GNUC__)

// The compiler's own version narrows too early and shuffles more.
__attribute__((target("avx512f,avx512dq"))) void quantize_avx512(const char* from, char* to, const float* inverse,
                                                                 int64_t columns) {
  const __m512i magnitude = _mm512_set1_epi32(kMagnitude), exponent = _mm512_set1_epi32(kExponent);
  const __m512i smallest = _mm512_set1_epi32(kSmallest), adder = _mm512_set1_epi32(kAdder);
  const __m512i sign = _mm512_set1_epi32(0x80);
  int64_t c = 0;
  for (; c + 16 <= columns; c += 16) {
    const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 2 * c));
    const __m512 value = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
    const __m512i bits = _mm512_castps_si512(_mm512_mul_ps(value, _mm512_loadu_ps(inverse + c)));
    const __m512i power = _mm512_max_epu32(_mm512_and_si512(bits, exponent), smallest);
    const __m512 spacings = _mm512_add_ps(_mm512_castsi512_ps(_mm512_and_si512(bits, magnitude)),
                                          _mm512_castsi512_ps(_mm512_add_epi32(power, adder)));
    const __m512i code = _mm512_add_epi32(_mm512_castps_si512(spacings), _mm512_srli_epi32(power, 20));
    const __m512i all = _mm512_mask_add_epi32(code, _mm512_movepi32_mask(bits), code, sign);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + c), _mm512_cvtepi32_epi8(all));
  }
  quantize_any(from + 2 * c, to + c, inverse + c, columns - c);
}

void quantize_row(const char* from, char* to, const float* inverse, int64_t columns) {
  static const bool is_wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
  (is_wide ? quantize_avx512 : quantize_any)(from, to, inverse, columns);
}

#else

void quantize_row(const char* from, char* to, const float* inverse, int64_t columns) {
  quantize_any(from, to, inverse, columns);
}

#endif

// Writes the scale of a block and returns its inverse, NaN when the block is not finite.
float choose_scale(uint32_t most, float* scale) {
  const float magnitude = std::max(float_of(most << 16), kLeastMagnitude);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  *scale = most < kBf16Infinity ? magnitude / kE4m3Max : nan;
  return most < kBf16Infinity ? kE4m3Max / magnitude : nan;
}

// Returns whether all elements are finite.
bool quantize_panel(const Panel& p) {
  uint16_t most[kPanelColumns] = {}, largest = 0;
  float inverse[kPanelColumns];
  for (int64_t r = 0; r < p.rows; ++r) raise_most(p.from + r * p.from_pitch, most, p.columns);
  for (int64_t b = 0; b < num_blocks(p.columns); ++b) {
    const int64_t start = b * kQuantBlock, stop = std::min(start + kQuantBlock, p.columns);
    const uint16_t of_block = *std::max_element(most + start, most + stop);
    std::fill(inverse + start, inverse + stop, choose_scale(of_block, p.scales + b));
    largest = std::max(largest, of_block);
  }
  for (int64_t r = 0; r < p.rows; ++r)
    quantize_row(p.from + r * p.from_pitch, p.to + r * p.to_pitch, inverse, p.columns);
  return largest < kBf16Infinity;
}

// A segment in units of blocks, for run_parallel.
struct BlockRows {
  int64_t rows, blocks;
};

void fail(int64_t segment, const char* what, int64_t value) {
  throw std::invalid_argument("segment " + std::to_string(segment) + ": " + what + " " + std::to_string(value));
}

}  // namespace

void check_quantize(const QuantizeSegment* segments, int64_t count, const Buffer* src, int64_t num_src,
                    const Buffer* dst, int64_t num_dst, const Buffer* scales, int64_t num_scales) {
  for (int64_t i = 0; i < count; ++i) {
    const QuantizeSegment& s = segments[i];
    if (s.row_elements < 0 || s.row_elements > INT64_MAX / 4) fail(i, "row_elements is", s.row_elements);
    check_rows("source", i, {s.src_buffer, s.src_offset, s.src_pitch, s.rows, 2 * s.row_elements}, src, num_src);
    check_rows("destination", i, {s.dst_buffer, s.dst_offset, s.dst_pitch, s.rows, s.row_elements}, dst, num_dst);
    const Rows scale{s.scale_buffer, s.scale_offset, s.scale_pitch, num_blocks(s.rows), 4 * num_blocks(s.row_elements)};
    check_rows("scale", i, scale, scales, num_scales);
    check_alignment("source", i, {s.src_buffer, s.src_offset, s.src_pitch, s.rows, 0}, src, 2);
    check_alignment("scale", i, scale, scales, 4);
    if (s.rows > 1 && s.dst_pitch < s.row_elements) fail(i, "destination rows overlap at pitch", s.dst_pitch);
    if (scale.rows > 1 && s.scale_pitch < scale.row_bytes) fail(i, "scale rows overlap at pitch", s.scale_pitch);
  }
}

int64_t block_quantize_cpu(const QuantizeSegment* segments, int64_t count, const Buffer* src, const Buffer* dst,
                           const Buffer* scales, int num_threads) {
  std::vector<BlockRows> grid;
  for (int64_t i = 0; i < count; ++i)
    grid.push_back({num_blocks(segments[i].rows), num_blocks(segments[i].row_elements)});
  std::atomic<int64_t> damaged{count};
  const auto panel_of = [&](int64_t segment, int64_t row, int64_t column, int64_t blocks) {
    const QuantizeSegment& s = segments[segment];
    const int64_t r = row * kQuantBlock, c = column * kQuantBlock;
    char* scale = reinterpret_cast<char*>(scales[s.scale_buffer].address) + s.scale_offset + row * s.scale_pitch;
    return Panel{reinterpret_cast<const char*>(src[s.src_buffer].address) + s.src_offset + r * s.src_pitch + 2 * c,
                 s.src_pitch,
                 reinterpret_cast<char*>(dst[s.dst_buffer].address) + s.dst_offset + r * s.dst_pitch + c,
                 s.dst_pitch,
                 reinterpret_cast<float*>(scale) + column,
                 std::min(kQuantBlock, s.rows - r),
                 std::min(blocks * kQuantBlock, s.row_elements - c)};
  };
  const auto note_damage = [&](int64_t segment) {
    int64_t known = damaged;
    while (segment < known && !damaged.compare_exchange_weak(known, segment)) {
    }
  };
  run_parallel(
      grid.data(), count, num_threads, 2 * kQuantBlock * kQuantBlock, [](const BlockRows& b) { return b.blocks; },
      [&](const Piece& piece) {
        for (int64_t r = 0; r < piece.rows; ++r) {
          for (int64_t c = 0; c < piece.units; c += kPanelBlocks) {
            const int64_t blocks = std::min(kPanelBlocks, piece.units - c);
            const Panel panel = panel_of(piece.segment, piece.row + r, piece.unit + c, blocks);
            if (!quantize_panel(panel)) note_damage(piece.segment);
          }
        }
      });
  return damaged == count ? -1 : damaged.load();
}

}  // namespace hybridrl
