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

// A copy segment, and the canonical indices of its rows as in ChecksumSegment.
struct VerifiedSegment : CopySegment {
  int64_t index_start, index_pitch;
  int64_t seed, slot;
};

// Whose memory a checksum reads.
enum class Side : int { kSource = 0, kDestination = 1 };

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

// Strided rows of one buffer, as a segment names them.
struct Rows {
  int64_t buffer, offset, pitch, rows, row_bytes;
};

// Throws unless every row lies inside its buffer. Computes in 128 bits: a table of nonsense must not wrap into range.
inline void check_rows(const char* side, int64_t segment, const Rows& r, const Buffer* buffers, int64_t num_buffers) {
  const bool is_known = r.buffer >= 0 && r.buffer < num_buffers;
  const int64_t size = is_known ? buffers[r.buffer].num_bytes : 0;
  const bool is_positive = r.offset >= 0 && r.pitch >= 0 && r.rows >= 0 && r.row_bytes >= 0;
  const auto last_row = r.rows > 0 ? static_cast<__int128>(r.rows - 1) * r.pitch : 0;
  if (is_known && is_positive && r.offset + last_row + r.row_bytes <= size) return;
  std::ostringstream text;
  text << "segment " << segment << ": " << side << " buffer " << r.buffer << " of " << num_buffers << " (" << size
       << " bytes), offset " << r.offset << ", pitch " << r.pitch << ", " << r.rows << " rows of " << r.row_bytes
       << " bytes do not fit";
  throw std::invalid_argument(text.str());
}

// Throws unless every element lies at a multiple of its size, which a device demands and a CPU does not.
inline void check_alignment(const char* side, int64_t segment, const Rows& r, const Buffer* buffers, int64_t itemsize) {
  const int64_t address = buffers[r.buffer].address + r.offset;
  if (address % itemsize == 0 && (r.rows <= 1 || r.pitch % itemsize == 0)) return;
  std::ostringstream text;
  text << "segment " << segment << ": " << side << " address " << address << " or pitch " << r.pitch
       << " is not a multiple of " << itemsize << " bytes, as CUDA needs for elements of that size";
  throw std::invalid_argument(text.str());
}

template <typename Segment>
void check_copy(const Segment* segments, int64_t count, const Buffer* src, int64_t num_src, const Buffer* dst,
                int64_t num_dst, Cast cast, bool is_cuda) {
  const int64_t itemsize = cast_source_itemsize(cast);
  for (int64_t i = 0; i < count; ++i) {
    const CopySegment& s = segments[i];
    if (s.row_bytes % itemsize != 0) {
      throw std::invalid_argument("segment " + std::to_string(i) + ": row_bytes " + std::to_string(s.row_bytes) +
                                  " is not a multiple of the source element size " + std::to_string(itemsize));
    }
    const Rows read{s.src_buffer, s.src_offset, s.src_pitch, s.rows, s.row_bytes};
    check_rows("source", i, read, src, num_src);
    const Rows write{s.dst_buffer, s.dst_offset, s.dst_pitch, s.rows, destination_bytes(cast, s.row_bytes)};
    check_rows("destination", i, write, dst, num_dst);
    if (write.rows > 1 && write.pitch < write.row_bytes) {
      throw std::invalid_argument("segment " + std::to_string(i) + ": destination rows of " +
                                  std::to_string(write.row_bytes) + " bytes overlap at pitch " +
                                  std::to_string(write.pitch));
    }
    if (is_cuda) {
      check_alignment("source", i, read, src, itemsize);
      check_alignment("destination", i, write, dst, destination_bytes(cast, itemsize));
    }
  }
}

inline void check_slot(int64_t segment, int64_t slot, int64_t num_slots) {
  if (slot >= 0 && slot < num_slots) return;
  throw std::invalid_argument("segment " + std::to_string(segment) + ": slot " + std::to_string(slot) +
                              " is not in [0, " + std::to_string(num_slots) + ")");
}

inline void check_itemsize(int64_t itemsize) {
  if (itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8) return;
  throw std::invalid_argument("itemsize is " + std::to_string(itemsize) + ", expected 1, 2, 4 or 8");
}

inline void check_verified(const VerifiedSegment* segments, int64_t count, int64_t itemsize, int64_t num_slots) {
  check_itemsize(itemsize);
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].row_bytes % itemsize != 0) {
      throw std::invalid_argument("segment " + std::to_string(i) + ": row_bytes " +
                                  std::to_string(segments[i].row_bytes) + " is not a multiple of itemsize " +
                                  std::to_string(itemsize));
    }
    check_slot(i, segments[i].slot, num_slots);
  }
}

inline void check_checksum(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, int64_t num_buffers,
                           int64_t itemsize, int64_t num_slots, Cast cast, bool is_cuda) {
  check_itemsize(itemsize);
  if (cast == Cast::kBf16ToF32 || (cast == Cast::kF32ToBf16 && itemsize != 4)) {
    throw std::invalid_argument("a checksum can only cast float32 to bfloat16, got cast " +
                                std::to_string(static_cast<int>(cast)) + " and itemsize " + std::to_string(itemsize));
  }
  for (int64_t i = 0; i < count; ++i) {
    const ChecksumSegment& s = segments[i];
    if (s.row_elements < 0 || s.row_elements > INT64_MAX / itemsize) {
      throw std::invalid_argument("segment " + std::to_string(i) + ": row_elements is " +
                                  std::to_string(s.row_elements));
    }
    const Rows read{s.buffer, s.offset, s.pitch, s.rows, s.row_elements * itemsize};
    check_rows("checksum", i, read, buffers, num_buffers);
    check_slot(i, s.slot, num_slots);
    if (is_cuda) check_alignment("checksum", i, read, buffers, itemsize);
  }
}

}  // namespace hybridrl
