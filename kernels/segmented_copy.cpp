#include "segmented_copy.hpp"

#include <algorithm>
#include <cstring>

#include "clones.hpp"
#include "mix.hpp"
#include "parallel.hpp"

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace hybridrl {
namespace {

// Up to here a loop of 32-byte moves beats a call of memcpy.
constexpr int64_t kShortRowBytes = 4096;

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

struct Strided {
  const char* from;
  int64_t from_pitch;
  char* to;
  int64_t to_pitch;
  int64_t rows;
};

template <int64_t kBytes>
void copy_narrow(const Strided& s) {
  for (int64_t r = 0; r < s.rows; ++r) std::memcpy(s.to + r * s.to_pitch, s.from + r * s.from_pitch, kBytes);
}

// The hardware prefetcher loses its way between strided rows, so they are fetched ahead of time.
constexpr int64_t kPrefetchBytes = 32768;

// At least 32 bytes: the last move overlaps the one before. `next` is a row to fetch.
HYBRIDRL_INLINE void copy_short(const char* from, char* to, int64_t bytes, const char* next) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
  for (int64_t i = 0; i + 32 <= bytes; i += 32) std::memcpy(to + i, from + i, 32);
  std::memcpy(to + bytes - 32, from + bytes - 32, 32);
}

#if defined(__SSE2__)

// What a large copy writes is not read again soon: storing past the caches saves reading each line first.
constexpr int64_t kStreamTotalBytes = 16 << 20;
constexpr int64_t kStreamRowBytes = 128;

void stream_rows(const Strided& s, int64_t row_bytes) {
  const int64_t ahead = std::max<int64_t>(1, kPrefetchBytes / row_bytes);
  for (int64_t r = 0; r < s.rows; ++r) {
    const char* from = s.from + r * s.from_pitch;
    const char* next = s.from + std::min(r + ahead, s.rows - 1) * s.from_pitch;
    char* to = s.to + r * s.to_pitch;
    const int64_t head = std::min<int64_t>(row_bytes, -reinterpret_cast<intptr_t>(to) & 63);
    if (head > 0) std::memcpy(to, from, head);
    int64_t i = head;
    for (; i + 64 <= row_bytes; i += 64) {
      _mm_prefetch(next + i, _MM_HINT_T1);
      __m128i line[4];
      for (int k = 0; k < 4; ++k) line[k] = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i + 16 * k));
      for (int k = 0; k < 4; ++k) _mm_stream_si128(reinterpret_cast<__m128i*>(to + i + 16 * k), line[k]);
    }
    if (i < row_bytes) std::memcpy(to + i, from + i, row_bytes - i);
  }
  _mm_sfence();
}

#else

constexpr int64_t kStreamTotalBytes = INT64_MAX;
constexpr int64_t kStreamRowBytes = INT64_MAX;
inline void stream_rows(const Strided&, int64_t) {}

#endif

void copy_rows(Strided s, int64_t row_bytes, bool is_large) {
  if (row_bytes == s.from_pitch && row_bytes == s.to_pitch) {
    row_bytes *= s.rows;
    s.rows = 1;
  }
  if (is_large && row_bytes >= kStreamRowBytes) return stream_rows(s, row_bytes);
  if (row_bytes >= 32 && row_bytes <= kShortRowBytes) {
    const int64_t ahead = std::max<int64_t>(1, kPrefetchBytes / row_bytes);
    for (int64_t r = 0; r < s.rows; ++r) {
      const char* from = s.from + r * s.from_pitch;
      copy_short(from, s.to + r * s.to_pitch, row_bytes, from + (std::min(r + ahead, s.rows - 1) - r) * s.from_pitch);
    }
    return;
  }
  switch (row_bytes) {
    case 1:
      return copy_narrow<1>(s);
    case 2:
      return copy_narrow<2>(s);
    case 4:
      return copy_narrow<4>(s);
    case 8:
      return copy_narrow<8>(s);
    case 16:
      return copy_narrow<16>(s);
    default:
      for (int64_t r = 0; r < s.rows; ++r) std::memcpy(s.to + r * s.to_pitch, s.from + r * s.from_pitch, row_bytes);
  }
}

void copy_piece(const CopySegment& s, const Piece& piece, const Buffer* src, const Buffer* dst, Cast cast,
                bool is_large) {
  const char* from =
      reinterpret_cast<const char*>(src[s.src_buffer].address) + s.src_offset + piece.row * s.src_pitch + piece.unit;
  char* to = reinterpret_cast<char*>(dst[s.dst_buffer].address) + s.dst_offset + piece.row * s.dst_pitch +
             destination_bytes(cast, piece.unit);
  switch (cast) {
    case Cast::kNone:
      return copy_rows({from, s.src_pitch, to, s.dst_pitch, piece.rows}, piece.units, is_large);
    case Cast::kF32ToBf16:
      for (int64_t r = 0; r < piece.rows; ++r) round_row(from + r * s.src_pitch, to + r * s.dst_pitch, piece.units / 4);
      return;
    case Cast::kBf16ToF32:
      for (int64_t r = 0; r < piece.rows; ++r) widen_row(from + r * s.src_pitch, to + r * s.dst_pitch, piece.units / 2);
      return;
  }
}

}  // namespace

void segmented_copy_cpu(const CopySegment* segments, int64_t count, const Buffer* src, const Buffer* dst, Cast cast,
                        int num_threads) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += segments[i].rows * segments[i].row_bytes;
  const bool is_large = total >= kStreamTotalBytes;
  run_parallel(
      segments, count, num_threads, 1, [](const CopySegment& s) { return s.row_bytes; },
      [=](const Piece& piece) { copy_piece(segments[piece.segment], piece, src, dst, cast, is_large); });
}

}  // namespace hybridrl
