// bfloat16 -> float8 e4m3 in blocks of 128 x 128, each with one float32 scale.
//
// A block whose largest magnitude is a has scale a / 448 and holds round(x * (448 / a)), 448 being e4m3's largest
// number. Blocks at the right and lower edge may be smaller.
#pragma once

#include "tables.hpp"

namespace hybridrl {

constexpr int64_t kQuantBlock = 128;
constexpr float kE4m3Max = 448.0f;
constexpr float kLeastMagnitude = 1e-30f;  // a smaller block counts as this large: its inverse must be finite

// Rows of bfloat16 to rows of e4m3, and to a table of scales; the segment begins at a block's corner. Offsets and
// pitches in bytes.
struct QuantizeSegment {
  int64_t src_buffer, src_offset, src_pitch;
  int64_t dst_buffer, dst_offset, dst_pitch;
  int64_t scale_buffer, scale_offset, scale_pitch;
  int64_t rows, row_elements;
};

inline int64_t num_blocks(int64_t elements) { return (elements + kQuantBlock - 1) / kQuantBlock; }

void check_quantize(const QuantizeSegment* segments, int64_t count, const Buffer* src, int64_t num_src,
                    const Buffer* dst, int64_t num_dst, const Buffer* scales, int64_t num_scales);

// Returns the first segment with a NaN or infinity, or -1. The scale of such a block is NaN.
int64_t block_quantize_cpu(const QuantizeSegment* segments, int64_t count, const Buffer* src, const Buffer* dst,
                           const Buffer* scales, int num_threads);

// The same on a device; waits for `stream` (a cudaStream_t).
int64_t block_quantize_cuda(const QuantizeSegment* segments, int64_t count, const Buffer* src, const Buffer* dst,
                            const Buffer* scales, uintptr_t stream);

}  // namespace hybridrl
