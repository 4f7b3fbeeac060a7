#include "checksum.hpp"

#include <cstring>

#include "clones.hpp"
#include "mix.hpp"
#include "parallel.hpp"
#include "row_sum.hpp"
#include "word_sum.hpp"

namespace hybridrl {
namespace {

HYBRIDRL_CLONES void round_elements(const char* from, uint16_t* to, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + 4 * i, 4);
    to[i] = to_bf16(bits);
  }
}

void add_row(RowSum& sum, const char* row, int64_t elements, int64_t itemsize, uint64_t index) {
  sum.add(
      elements, index, [&](int64_t at) { return load_bits(row + at, itemsize); },
      [&](int64_t at, const uint32_t* factors, int64_t count) { return word_sum(row + at, factors, count); });
}

// The same for float32 rows that count as bfloat16.
void add_rounded(RowSum& sum, const char* row, int64_t elements, uint64_t index) {
  constexpr int64_t kElements = 1024;
  uint16_t halves[kElements];
  for (int64_t done = 0; done < elements; done += kElements) {
    const int64_t part = std::min(kElements, elements - done);
    round_elements(row + 4 * done, halves, part);
    add_row(sum, reinterpret_cast<const char*>(halves), part, 2, index + static_cast<uint64_t>(done));
  }
}

uint64_t checksum_piece(const ChecksumSegment& s, const Piece& piece, const Buffer* buffers, int64_t itemsize,
                        Cast cast) {
  const char* base = reinterpret_cast<const char*>(buffers[s.buffer].address) + s.offset + piece.unit * itemsize;
  const int64_t halves = itemsize == 8 ? 2 : 1;
  RowSum sum(static_cast<uint64_t>(s.seed), cast == Cast::kF32ToBf16 ? 2 : itemsize / halves);
  for (int64_t r = piece.row; r < piece.row + piece.rows; ++r) {
    const auto index = static_cast<uint64_t>(s.index_start) + static_cast<uint64_t>(r) * s.index_pitch + piece.unit;
    if (cast == Cast::kF32ToBf16) {
      add_rounded(sum, base + r * s.pitch, piece.units, index);
    } else {
      add_row(sum, base + r * s.pitch, piece.units * halves, itemsize / halves, index * halves);
    }
  }
  return sum.total();
}

}  // namespace

void checksum_cpu(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, int64_t itemsize, Cast cast,
                  int num_threads, uint64_t* sums) {
  run_parallel(
      segments, count, num_threads, itemsize, [](const ChecksumSegment& s) { return s.row_elements; },
      [=](const Piece& piece) {
        const ChecksumSegment& segment = segments[piece.segment];
        const uint64_t sum = checksum_piece(segment, piece, buffers, itemsize, cast);
        __atomic_fetch_add(&sums[segment.slot], sum, __ATOMIC_RELAXED);
      });
}

}  // namespace hybridrl
