#include "verified_copy.hpp"

#include "parallel.hpp"
#include "row_sum.hpp"
#include "word_sum.hpp"

namespace hybridrl {
namespace {

// The hardware prefetcher loses its way between strided rows.
constexpr int64_t kPrefetchBytes = 4096;

uint64_t copy_piece(const VerifiedSegment& s, const Piece& piece, const Buffer* src, const Buffer* dst,
                    int64_t itemsize, Side side) {
  const char* from =
      reinterpret_cast<const char*>(src[s.src_buffer].address) + s.src_offset + piece.row * s.src_pitch + piece.unit;
  char* to = reinterpret_cast<char*>(dst[s.dst_buffer].address) + s.dst_offset + piece.row * s.dst_pitch + piece.unit;
  const int64_t item = std::min<int64_t>(itemsize, 4), halves = itemsize / item;
  const int64_t ahead = std::max<int64_t>(1, kPrefetchBytes / piece.units);
  RowSum sum(static_cast<uint64_t>(s.seed), item);
  for (int64_t r = 0; r < piece.rows; ++r, from += s.src_pitch, to += s.dst_pitch) {
    const char* next = from + (std::min(r + ahead, piece.rows - 1) - r) * s.src_pitch;
    const char* summed = side == Side::kSource ? from : to;
    const int64_t index = s.index_start + (piece.row + r) * s.index_pitch + piece.unit / itemsize;
    sum.add(
        piece.units / item, static_cast<uint64_t>(index * halves),
        [&](int64_t at) {
          std::memcpy(to + at, from + at, item);
          return load_bits(summed + at, item);
        },
        [&](int64_t at, const uint32_t* factors, int64_t count) {
          return copy_word_sum(from + at, to + at, summed + at, next + at, factors, count);
        });
  }
  return sum.total();
}

}  // namespace

void verified_copy_cpu(const VerifiedSegment* segments, int64_t count, const Buffer* src, const Buffer* dst,
                       int64_t itemsize, Side side, int num_threads, uint64_t* sums) {
  run_parallel(
      segments, count, num_threads, 1, [](const VerifiedSegment& s) { return s.row_bytes; },
      [=](const Piece& piece) {
        const VerifiedSegment& segment = segments[piece.segment];
        const uint64_t sum = copy_piece(segment, piece, src, dst, itemsize, side);
        __atomic_fetch_add(&sums[segment.slot], sum, __ATOMIC_RELAXED);
      });
}

}  // namespace hybridrl
