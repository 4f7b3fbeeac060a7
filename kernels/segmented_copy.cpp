#include "segmented_copy.hpp"

#include <cstring>

#include "mix.hpp"
#include "parallel.hpp"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HYBRIDRL_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define HYBRIDRL_CLONES
#endif

namespace hybridrl {
namespace {

HYBRIDRL_CLONES void round_row(const char* from, char* to, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    uint32_t bits;
    std::memcpy(&bits, from + 4 * i, 4);
    const uint16_t half = to_bf16(bits);
    std::memcpy(to + 2 * i, &half, 2);
  }
}

HYBRIDRL_CLONES void widen_row(const char* from, char* to, int64_t elements) {
  for (int64_t i = 0; i < elements; ++i) {
    uint16_t half;
    std::memcpy(&half, from + 2 * i, 2);
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    std::memcpy(to + 4 * i, &bits, 4);
  }
}

// Rows of a length known at compile time: the copy is a few vector moves instead of a call.
template <int64_t kBytes>
void copy_fixed(const char* from, int64_t from_pitch, char* to, int64_t to_pitch, int64_t rows) {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_pitch, from + r * from_pitch, kBytes);
}

void copy_rows(const char* from, int64_t from_pitch, char* to, int64_t to_pitch, int64_t rows, int64_t row_bytes) {
  if (row_bytes == from_pitch && row_bytes == to_pitch) {
    std::memcpy(to, from, rows * row_bytes);
    return;
  }
  switch (row_bytes) {
    case 2:
      return copy_fixed<2>(from, from_pitch, to, to_pitch, rows);
    case 4:
      return copy_fixed<4>(from, from_pitch, to, to_pitch, rows);
    case 8:
      return copy_fixed<8>(from, from_pitch, to, to_pitch, rows);
    case 16:
      return copy_fixed<16>(from, from_pitch, to, to_pitch, rows);
    case 32:
      return copy_fixed<32>(from, from_pitch, to, to_pitch, rows);
    case 64:
      return copy_fixed<64>(from, from_pitch, to, to_pitch, rows);
    case 128:
      return copy_fixed<128>(from, from_pitch, to, to_pitch, rows);
    default:
      for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * to_pitch, from + r * from_pitch, row_bytes);
  }
}

void run_rows(const CopySegment& s, int64_t first, int64_t last, const Buffer* src, const Buffer* dst, Cast cast) {
  const char* from = reinterpret_cast<const char*>(src[s.src_buffer].address) + s.src_offset + first * s.src_pitch;
  char* to = reinterpret_cast<char*>(dst[s.dst_buffer].address) + s.dst_offset + first * s.dst_pitch;
  switch (cast) {
    case Cast::kNone:
      return copy_rows(from, s.src_pitch, to, s.dst_pitch, last - first, s.row_bytes);
    case Cast::kF32ToBf16:
      for (int64_t r = 0; r < last - first; ++r)
        round_row(from + r * s.src_pitch, to + r * s.dst_pitch, s.row_bytes / 4);
      return;
    case Cast::kBf16ToF32:
      for (int64_t r = 0; r < last - first; ++r)
        widen_row(from + r * s.src_pitch, to + r * s.dst_pitch, s.row_bytes / 2);
      return;
  }
}

}  // namespace

void segmented_copy_cpu(const CopySegment* segments, int64_t count, const Buffer* src, const Buffer* dst, Cast cast,
                        int num_threads) {
  parallel_rows(
      segments, count, num_threads, [](const CopySegment& s) { return s.row_bytes; },
      [&](int64_t, const RowRange* begin, const RowRange* end) {
        for (const RowRange* range = begin; range != end; ++range)
          run_rows(segments[range->segment], range->first, range->last, src, dst, cast);
      });
}

}  // namespace hybridrl
