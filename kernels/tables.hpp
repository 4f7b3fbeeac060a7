// The kernels' tables, one int64 row per segment, and their checks at the boundary.
#pragma once

#include <cstdint>
#include <sstream>
#include <stdexcept>
#include <string>

namespace hybridrl {

// A piece of memory: address and size in bytes.
struct Buffer {
  int64_t address;
  int64_t num_bytes;
};

// `rows` rows of `row_bytes` (counted at the source) from one pitch to another.
struct CopySegment {
  int64_t src_buffer, src_offset, src_pitch;
  int64_t dst_buffer, dst_offset, dst_pitch;
  int64_t rows, row_bytes;
};

// `rows` rows of `row_elements`; row r holds canonical indices index_start + r * index_pitch and following.
struct ChecksumSegment {
  int64_t buffer, offset, pitch;
  int64_t rows, row_elements;
  int64_t index_start, index_pitch;
  int64_t seed, slot;
};

enum class Cast : int { kNone = 0, kF32ToBf16 = 1, kBf16ToF32 = 2 };

inline int64_t destination_bytes(Cast cast, int64_t source_bytes) {
  switch (cast) {
    case Cast::kF32ToBf16:
      return source_bytes / 2;
    case Cast::kBf16ToF32:
      return source_bytes * 2;
    default:
      return source_bytes;
  }
}

inline int64_t cast_source_itemsize(Cast cast) {
  return cast == Cast::kF32ToBf16 ? 4 : cast == Cast::kBf16ToF32 ? 2 : 1;
}

// Throws unless rows at `offset` and `pitch` lie inside the buffer.
inline void check_rows(const char* side, int64_t segment, const Buffer* buffers, int64_t num_buffers, int64_t buffer,
                       int64_t offset, int64_t pitch, int64_t rows, int64_t row_bytes) {
  const bool is_known = buffer >= 0 && buffer < num_buffers;
  const int64_t size = is_known ? buffers[buffer].num_bytes : 0;
  const int64_t last_row = rows > 0 ? (rows - 1) * pitch : 0;
  const bool fits = rows >= 0 && row_bytes >= 0 && pitch >= 0 && offset >= 0 && offset + last_row + row_bytes <= size;
  if (is_known && fits) return;
  std::ostringstream text;
  text << "segment " << segment << ": " << side << " buffer " << buffer << " of " << num_buffers << " (" << size
       << " bytes), offset " << offset << ", pitch " << pitch << ", " << rows << " rows of " << row_bytes
       << " bytes do not fit";
  throw std::invalid_argument(text.str());
}

inline void check_copy(const CopySegment* segments, int64_t count, const Buffer* src, int64_t num_src,
                       const Buffer* dst, int64_t num_dst, Cast cast) {
  for (int64_t i = 0; i < count; ++i) {
    const CopySegment& s = segments[i];
    if (s.row_bytes % cast_source_itemsize(cast) != 0) {
      throw std::invalid_argument("segment " + std::to_string(i) + ": row_bytes " + std::to_string(s.row_bytes) +
                                  " is not a multiple of the source element size " +
                                  std::to_string(cast_source_itemsize(cast)));
    }
    check_rows("source", i, src, num_src, s.src_buffer, s.src_offset, s.src_pitch, s.rows, s.row_bytes);
    check_rows("destination", i, dst, num_dst, s.dst_buffer, s.dst_offset, s.dst_pitch, s.rows,
               destination_bytes(cast, s.row_bytes));
  }
}

inline void check_checksum(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, int64_t num_buffers,
                           int64_t itemsize, int64_t num_slots, Cast cast) {
  if (itemsize != 1 && itemsize != 2 && itemsize != 4 && itemsize != 8) {
    throw std::invalid_argument("itemsize is " + std::to_string(itemsize) + ", expected 1, 2, 4 or 8");
  }
  if (cast == Cast::kBf16ToF32 || (cast == Cast::kF32ToBf16 && itemsize != 4)) {
    throw std::invalid_argument("a checksum can only cast float32 to bfloat16, got itemsize " +
                                std::to_string(itemsize));
  }
  for (int64_t i = 0; i < count; ++i) {
    const ChecksumSegment& s = segments[i];
    check_rows("checksum", i, buffers, num_buffers, s.buffer, s.offset, s.pitch, s.rows, s.row_elements * itemsize);
    if (s.slot < 0 || s.slot >= num_slots) {
      throw std::invalid_argument("segment " + std::to_string(i) + ": slot " + std::to_string(s.slot) +
                                  " is not in [0, " + std::to_string(num_slots) + ")");
    }
  }
}

}  // namespace hybridrl
