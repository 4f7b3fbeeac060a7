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
// spacing, lets the adder round: the sum's mantissa counts spacings, 8 to 16 of them in each binade. What the mantissa
// of the added number holds beforehand, 8 for each binade above the smallest, makes the sum's the code.
constexpr uint32_t kMagnitude = 0x7FFFFFFF, kExponent = 0x7F800000, kSmallest = 121u << 23;

HYBRIDRL_INLINE constexpr uint32_t adder_of(uint32_t power) {
  return power + (20u << 23) + ((power - kSmallest) >> 20);
}

HYBRIDRL_INLINE uint8_t round_e4m3(uint32_t bits) {
  const uint32_t power = std::max(bits & kExponent, kSmallest);
  const uint32_t code = bits_of(float_of(bits & kMagnitude) + float_of(adder_of(power)));
  return static_cast<uint8_t>((code & 0x7F) | (bits >> 24 & 0x80));
}

// Blocks beside each other, read twice: for their magnitudes and to be quantised. Two panels, one at work and one on
// its way, are to fit in half of a core's second cache; a row of a panel is long enough to keep a memory page busy.
constexpr int64_t kPanelBlocks = 8;
constexpr int64_t kLineBytes = 64;

struct Panel {
  const char* from;
  int64_t from_pitch;
  char* to;
  int64_t to_pitch;
  float* scales;
  int64_t rows, columns;
};

// Returns the bits of the largest magnitude of a block. Magnitudes of bfloat16 are in the order of their bits.
HYBRIDRL_CLONES uint16_t largest_magnitude(const Panel& p) {
  uint16_t most[kQuantBlock] = {};
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t c = 0; c < p.columns; ++c) {
      uint16_t bits;
      std::memcpy(&bits, p.from + r * p.from_pitch + 2 * c, 2);
      most[c] = std::max<uint16_t>(most[c], bits & 0x7FFF);
    }
  }
  return *std::max_element(most, most + kQuantBlock);
}

HYBRIDRL_CLONES void quantize_any(const Panel& p, float inverse) {
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int64_t c = 0; c < p.columns; ++c) {
      uint16_t half;
      std::memcpy(&half, p.from + r * p.from_pitch + 2 * c, 2);
      const uint32_t bits = static_cast<uint32_t>(half) << 16;
      p.to[r * p.to_pitch + c] = static_cast<char>(round_e4m3(bits_of(float_of(bits) * inverse)));
    }
  }
}

#if defined(__x86_64__) && defined(__GNUC__)
#define HYBRIDRL_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq")))

// The numbers to add for each power of two that occurs, in the places that the last four bits of its exponent tell.
HYBRIDRL_AVX512 HYBRIDRL_INLINE __m512 adders() {
  uint32_t of_power[16];
  for (uint32_t exponent = kSmallest >> 23; exponent < (kSmallest >> 23) + 16; ++exponent)
    of_power[exponent % 16] = adder_of(exponent << 23);
  return _mm512_loadu_ps(of_power);
}

// The low half of each lane is the code of a magnitude, as round_e4m3 makes it.
HYBRIDRL_AVX512 HYBRIDRL_INLINE __m512i round_magnitudes(__m512i bits, __m512 inverse, __m512 adders) {
  const __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(bits), inverse);
  const __m512i clamped = _mm512_max_epu32(_mm512_castps_si512(value), _mm512_set1_epi32(kSmallest));
  const __m512 adder = _mm512_permutexvar_ps(_mm512_srli_epi32(clamped, 23), adders);
  return _mm512_castps_si512(_mm512_add_ps(value, adder));
}

// Quantises 32 elements: those at even places in the low halves of the lanes, those at odd places in the high ones.
HYBRIDRL_AVX512 HYBRIDRL_INLINE __m256i round_32(const char* from, __m512 inverse, __m512 adders) {
  const __m512i halves = _mm512_loadu_si512(from), magnitudes = _mm512_set1_epi16(0x7FFF);
  const __m512i even = _mm512_slli_epi32(_mm512_and_si512(halves, magnitudes), 16);
  const __m512i odd = _mm512_and_si512(halves, _mm512_set1_epi32(0x7FFF0000));
  const __m512i codes = _mm512_mask_blend_epi16(0xAAAAAAAA, round_magnitudes(even, inverse, adders),
                                                _mm512_slli_epi32(round_magnitudes(odd, inverse, adders), 16));
  const __m512i signs = _mm512_srli_epi16(halves, 8);
  constexpr int kFirstUnlessMask = 0xD8;  // bit by bit: mask ? second : first
  return _mm512_cvtepi16_epi8(_mm512_ternarylogic_epi32(signs, codes, _mm512_set1_epi16(0x7F), kFirstUnlessMask));
}

// Writes past the caches, where the destination's alignment allows: they are needed for what is read twice.
HYBRIDRL_AVX512 void quantize_avx512(const Panel& p, float inverse) {
  const __m512 factor = _mm512_set1_ps(inverse), table = adders();
  const bool is_aligned = (reinterpret_cast<uintptr_t>(p.to) | p.to_pitch) % kLineBytes == 0;
  const int64_t whole = p.columns / kLineBytes * kLineBytes;
  for (int64_t r = 0; r < p.rows; ++r) {
    const char* from = p.from + r * p.from_pitch;
    char* to = p.to + r * p.to_pitch;
    for (int64_t c = 0; c < whole; c += kLineBytes) {
      const __m512i low = _mm512_castsi256_si512(round_32(from + 2 * c, factor, table));
      const __m512i line = _mm512_inserti64x4(low, round_32(from + 2 * c + 64, factor, table), 1);
      if (is_aligned) {
        _mm512_stream_si512(reinterpret_cast<__m512i*>(to + c), line);
      } else {
        _mm512_storeu_si512(to + c, line);
      }
    }
  }
  quantize_any({p.from + 2 * whole, p.from_pitch, p.to + whole, p.to_pitch, nullptr, p.rows, p.columns - whole},
               inverse);
}

void quantize(const Panel& p, float inverse) {
  static const bool is_wide = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  (is_wide ? quantize_avx512 : quantize_any)(p, inverse);
}

void finish_stores() { _mm_sfence(); }

#else

void quantize(const Panel& p, float inverse) { quantize_any(p, inverse); }

void finish_stores() {}

#endif

// Writes the scale of a block and returns its inverse, NaN when the block is not finite.
float choose_scale(uint32_t most, float* scale) {
  const float magnitude = std::max(float_of(most << 16), kLeastMagnitude);
  const float nan = std::numeric_limits<float>::quiet_NaN();
  *scale = most < kBf16Infinity ? magnitude / kE4m3Max : nan;
  return most < kBf16Infinity ? kE4m3Max / magnitude : nan;
}

// Returns rows [row, row + rows) and columns [column, column + columns), or what there is of them.
Panel part_of(const Panel& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  return {p.from + row * p.from_pitch + 2 * column, p.from_pitch,
          p.to + row * p.to_pitch + column,         p.to_pitch,
          p.scales + column / kQuantBlock,          std::min(rows, p.rows - row),
          std::min(columns, p.columns - column)};
}

void fetch_row(const Panel& p, int64_t row) {
  if (row >= p.rows) return;
  for (int64_t byte = 0; byte < 2 * p.columns; byte += kLineBytes)
    __builtin_prefetch(p.from + row * p.from_pitch + byte, 0, 2);
}

// Quantises a panel, and fetches the rows of the next one while it computes. Returns whether all elements are finite.
bool quantize_panel(const Panel& p, const Panel& next) {
  uint16_t largest = 0;
  int64_t fetched = 0;
  for (int64_t column = 0; column < p.columns; column += kQuantBlock) {
    const Panel block = part_of(p, 0, p.rows, column, kQuantBlock);
    const uint16_t most = largest_magnitude(block);
    const float inverse = choose_scale(most, block.scales);
    for (int64_t row = 0; row < p.rows; row += kPanelBlocks) {
      fetch_row(next, fetched++);
      quantize(part_of(block, row, kPanelBlocks, 0, kQuantBlock), inverse);
    }
    largest = std::max(largest, most);
  }
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
  const auto after = [&](const Piece& piece, int64_t r, int64_t c) {
    c += kPanelBlocks;
    if (c >= piece.units) ++r, c = 0;
    return r < piece.rows
               ? panel_of(piece.segment, piece.row + r, piece.unit + c, std::min(kPanelBlocks, piece.units - c))
               : Panel{};
  };
  run_parallel(
      grid.data(), count, num_threads, 2 * kQuantBlock * kQuantBlock, [](const BlockRows& b) { return b.blocks; },
      [&](const Piece& piece) {
        for (int64_t r = 0; r < piece.rows; ++r) {
          for (int64_t c = 0; c < piece.units; c += kPanelBlocks) {
            const int64_t blocks = std::min(kPanelBlocks, piece.units - c);
            const Panel panel = panel_of(piece.segment, piece.row + r, piece.unit + c, blocks);
            if (!quantize_panel(panel, after(piece, r, c))) note_damage(piece.segment);
          }
        }
        finish_stores();
      });
  return damaged == count ? -1 : damaged.load();
}

}  // namespace hybridrl
