#include "checksum.hpp"

#include <array>
#include <cstring>

#include "clones.hpp"
#include "mix.hpp"
#include "parallel.hpp"

namespace hybridrl {
namespace {

// The factors t, cut into 32-bit halves so that a product is one widening multiplication, and their running sums.
struct Factors {
  std::array<uint32_t, kMixBlock> low{}, high{};
  std::array<uint64_t, kMixBlock + 1> sums{};
};

constexpr Factors make_factors() {
  Factors factors;
  for (int64_t i = 0; i < kMixBlock; ++i) {
    const uint64_t factor = index_factor(static_cast<uint64_t>(i));
    factors.low[i] = static_cast<uint32_t>(factor);
    factors.high[i] = static_cast<uint32_t>(factor >> 32);
    factors.sums[i + 1] = factors.sums[i] + factor;
  }
  return factors;
}

constexpr Factors kFactors = make_factors();

template <typename Stored>
HYBRIDRL_INLINE uint32_t plain(const char* at) {
  Stored value;
  std::memcpy(&value, at, sizeof(Stored));
  return value;
}

HYBRIDRL_INLINE uint32_t rounded(const char* at) { return to_bf16(plain<uint32_t>(at)); }

// Sum of t * b over consecutive elements of one block, the first at index `within`.
template <int64_t kStride, uint32_t (*kBits)(const char*)>
HYBRIDRL_INLINE uint64_t sum_products(const char* row, int64_t within, int64_t elements) {
  uint64_t low = 0, high = 0;
  for (int64_t i = 0; i < elements; ++i) {
    const uint64_t bits = kBits(row + i * kStride);
    low += bits * kFactors.low[within + i];
    high += bits * kFactors.high[within + i];
  }
  return low + (high << 32);
}

using SumProducts = uint64_t (*)(const char*, int64_t, int64_t);

HYBRIDRL_CLONES uint64_t sum_bytes(const char* row, int64_t within, int64_t elements) {
  return sum_products<1, plain<uint8_t>>(row, within, elements);
}
HYBRIDRL_CLONES uint64_t sum_halves(const char* row, int64_t within, int64_t elements) {
  return sum_products<2, plain<uint16_t>>(row, within, elements);
}
HYBRIDRL_CLONES uint64_t sum_words(const char* row, int64_t within, int64_t elements) {
  return sum_products<4, plain<uint32_t>>(row, within, elements);
}
HYBRIDRL_CLONES uint64_t sum_rounded(const char* row, int64_t within, int64_t elements) {
  return sum_products<4, rounded>(row, within, elements);
}
// The 32-bit half at `row` of consecutive 8-byte elements.
HYBRIDRL_CLONES uint64_t sum_wide(const char* row, int64_t within, int64_t elements) {
  return sum_products<8, plain<uint32_t>>(row, within, elements);
}

SumProducts choose(int64_t itemsize, Cast cast) {
  if (cast == Cast::kF32ToBf16) return sum_rounded;
  if (itemsize == 8) return sum_wide;
  if (itemsize == 4) return sum_words;
  return itemsize == 2 ? sum_halves : sum_bytes;
}

uint64_t sum_row(const char* row, int64_t elements, int64_t itemsize, uint64_t seed, uint64_t index,
                 SumProducts sum_products) {
  uint64_t sum = 0;
  while (elements > 0) {
    const int64_t within = static_cast<int64_t>(index % kMixBlock);
    const int64_t run = std::min(elements, kMixBlock - within);
    sum += block_factor(seed, index / kMixBlock) *
           (sum_products(row, within, run) + kFactors.sums[within + run] - kFactors.sums[within]);
    row += run * itemsize;
    index += static_cast<uint64_t>(run);
    elements -= run;
  }
  return sum;
}

}  // namespace

void checksum_cpu(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, int64_t itemsize, Cast cast,
                  int num_threads, uint64_t* sums) {
  const SumProducts sum_products = choose(itemsize, cast);
  run_parallel(
      segments, count, num_threads, itemsize, [](const ChecksumSegment& s) { return s.row_elements; },
      [=](const Piece& piece) {
        const ChecksumSegment& s = segments[piece.segment];
        const char* base = reinterpret_cast<const char*>(buffers[s.buffer].address) + s.offset + piece.unit * itemsize;
        const auto seed = static_cast<uint64_t>(s.seed);
        uint64_t sum = 0;
        for (int64_t r = piece.row; r < piece.row + piece.rows; ++r) {
          const auto index =
              static_cast<uint64_t>(s.index_start) + static_cast<uint64_t>(r) * s.index_pitch + piece.unit;
          const char* row = base + r * s.pitch;
          sum += sum_row(row, piece.units, itemsize, seed, index, sum_products);
          if (itemsize == 8) sum += sum_row(row + 4, piece.units, itemsize, seed ^ kUpperHalf, index, sum_products);
        }
        __atomic_fetch_add(&sums[s.slot], sum, __ATOMIC_RELAXED);
      });
}

}  // namespace hybridrl
