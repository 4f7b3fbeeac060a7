#include "device.cuh"
#include "mix.hpp"
#include "segmented_copy.hpp"

namespace hybridrl {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 8;
constexpr int64_t kUnitsPerTile = 2048;

struct alignas(16) Vec16 {
  uint4 value;
};

// One unit of work: a vector of `Unit` without a cast, one element with a cast.
template <typename From, typename To>
struct Convert {
  __device__ static To apply(From value) { return value; }
};

template <>
struct Convert<uint32_t, uint16_t> {
  __device__ static uint16_t apply(uint32_t value) { return to_bf16(value); }
};

template <>
struct Convert<uint16_t, uint32_t> {
  __device__ static uint32_t apply(uint16_t value) { return static_cast<uint32_t>(value) << 16; }
};

template <typename From, typename To>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const CopySegment* segments, const int64_t* starts, int64_t count, int64_t num_tiles, const Buffer* src,
                const Buffer* dst) {
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int64_t index = segment_of(starts, count, tile);
    const CopySegment s = segments[index];
    const int64_t units_per_row = s.row_bytes / static_cast<int64_t>(sizeof(From));
    const int64_t first = (tile - starts[index]) * kUnitsPerTile;
    const int64_t units = units_per_row * s.rows;
    const int64_t last = first + kUnitsPerTile < units ? first + kUnitsPerTile : units;
    const char* from = reinterpret_cast<const char*>(src[s.src_buffer].address) + s.src_offset;
    char* to = reinterpret_cast<char*>(dst[s.dst_buffer].address) + s.dst_offset;
    for (int64_t unit = first + threadIdx.x; unit < last; unit += kThreads) {
      const int64_t row = unit / units_per_row, column = unit - row * units_per_row;
      const From value = *reinterpret_cast<const From*>(from + row * s.src_pitch + column * sizeof(From));
      *reinterpret_cast<To*>(to + row * s.dst_pitch + column * sizeof(To)) = Convert<From, To>::apply(value);
    }
  }
}

template <typename From, typename To>
void launch(const CopySegment* segments, int64_t count, const Buffer* src, const Buffer* dst, cudaStream_t stream) {
  const auto starts = tile_starts(segments, count, kUnitsPerTile, [](const CopySegment& s) {
    return s.rows * (s.row_bytes / static_cast<int64_t>(sizeof(From)));
  });
  const int64_t num_tiles = starts.back();
  if (num_tiles == 0) return;
  int64_t num_src = 0, num_dst = 0;
  for (int64_t i = 0; i < count; ++i) {
    num_src = segments[i].src_buffer >= num_src ? segments[i].src_buffer + 1 : num_src;
    num_dst = segments[i].dst_buffer >= num_dst ? segments[i].dst_buffer + 1 : num_dst;
  }
  const StreamArray<CopySegment> device_segments(segments, count, stream);
  const StreamArray<int64_t> device_starts(starts.data(), count + 1, stream);
  const StreamArray<Buffer> device_src(src, num_src, stream), device_dst(dst, num_dst, stream);
  copy_kernel<From, To><<<persistent_blocks(num_tiles, kBlocksPerSm), kThreads, 0, stream>>>(
      device_segments.get(), device_starts.get(), count, num_tiles, device_src.get(), device_dst.get());
  check_cuda(cudaGetLastError(), "launch segmented_copy");
}

// The largest power of two, 16 at most, that divides every address, pitch and row length.
int64_t common_alignment(const CopySegment* segments, int64_t count, const Buffer* src, const Buffer* dst) {
  int64_t bits = 16;
  for (int64_t i = 0; i < count; ++i) {
    const CopySegment& s = segments[i];
    bits |= (src[s.src_buffer].address + s.src_offset) | (dst[s.dst_buffer].address + s.dst_offset) | s.row_bytes;
    if (s.rows > 1) bits |= s.src_pitch | s.dst_pitch;
  }
  return bits & -bits;
}

}  // namespace

void segmented_copy_cuda(const CopySegment* segments, int64_t count, const Buffer* src, const Buffer* dst, Cast cast,
                         uintptr_t stream_handle) {
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  if (cast == Cast::kF32ToBf16) return launch<uint32_t, uint16_t>(segments, count, src, dst, stream);
  if (cast == Cast::kBf16ToF32) return launch<uint16_t, uint32_t>(segments, count, src, dst, stream);
  switch (common_alignment(segments, count, src, dst)) {
    case 16:
      return launch<Vec16, Vec16>(segments, count, src, dst, stream);
    case 8:
      return launch<uint64_t, uint64_t>(segments, count, src, dst, stream);
    case 4:
      return launch<uint32_t, uint32_t>(segments, count, src, dst, stream);
    case 2:
      return launch<uint16_t, uint16_t>(segments, count, src, dst, stream);
    default:
      return launch<uint8_t, uint8_t>(segments, count, src, dst, stream);
  }
}

}  // namespace hybridrl
