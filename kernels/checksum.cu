#include "checksum.hpp"
#include "device.cuh"
#include "mix.hpp"

namespace hybridrl {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 8;
constexpr int64_t kElementsPerTile = 8192;

template <int kItemsize, bool kRound>
__device__ uint64_t element(const char* at, uint64_t key) {
  if constexpr (kItemsize == 8) {
    const auto* halves = reinterpret_cast<const uint32_t*>(at);
    return mix(key, halves[0]) + mix(key ^ kOther, halves[1]);
  } else if constexpr (kItemsize == 4) {
    const uint32_t bits = *reinterpret_cast<const uint32_t*>(at);
    return mix(key, kRound ? to_bf16(bits) : bits);
  } else if constexpr (kItemsize == 2) {
    return mix(key, *reinterpret_cast<const uint16_t*>(at));
  } else {
    return mix(key, *reinterpret_cast<const uint8_t*>(at));
  }
}

template <int kItemsize, bool kRound>
__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const ChecksumSegment* segments, const int64_t* starts, int64_t count, int64_t num_tiles,
                    const Buffer* buffers, unsigned long long* sums) {
  __shared__ unsigned long long warp_sums[kThreads / 32];
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int64_t index = segment_of(starts, count, tile);
    const ChecksumSegment s = segments[index];
    const int64_t first = (tile - starts[index]) * kElementsPerTile, elements = s.rows * s.row_elements;
    const int64_t last = first + kElementsPerTile < elements ? first + kElementsPerTile : elements;
    const char* base = reinterpret_cast<const char*>(buffers[s.buffer].address) + s.offset;
    const uint64_t start = key_start(static_cast<uint64_t>(s.seed));
    unsigned long long sum = 0;
    for (int64_t i = first + threadIdx.x; i < last; i += kThreads) {
      const int64_t row = i / s.row_elements, column = i - row * s.row_elements;
      const uint64_t canonical = static_cast<uint64_t>(s.index_start + row * s.index_pitch + column);
      sum += element<kItemsize, kRound>(base + row * s.pitch + column * kItemsize, start + canonical * kStep);
    }
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, offset);
    if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
      for (int warp = 1; warp < kThreads / 32; ++warp) sum += warp_sums[warp];
      atomicAdd(&sums[s.slot], sum);
    }
    __syncthreads();
  }
}

template <int kItemsize, bool kRound>
void launch(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, cudaStream_t stream, uint64_t* sums,
            int64_t num_slots) {
  const auto starts =
      tile_starts(segments, count, kElementsPerTile, [](const ChecksumSegment& s) { return s.rows * s.row_elements; });
  const int64_t num_tiles = starts.back();
  if (num_tiles == 0) return;
  int64_t num_buffers = 0;
  for (int64_t i = 0; i < count; ++i)
    num_buffers = segments[i].buffer >= num_buffers ? segments[i].buffer + 1 : num_buffers;
  const StreamArray<ChecksumSegment> device_segments(segments, count, stream);
  const StreamArray<int64_t> device_starts(starts.data(), count + 1, stream);
  const StreamArray<Buffer> device_buffers(buffers, num_buffers, stream);
  const StreamArray<uint64_t> device_sums(sums, num_slots, stream);
  checksum_kernel<kItemsize, kRound><<<persistent_blocks(num_tiles, kBlocksPerSm), kThreads, 0, stream>>>(
      device_segments.get(), device_starts.get(), count, num_tiles, device_buffers.get(),
      reinterpret_cast<unsigned long long*>(device_sums.get()));
  check_cuda(cudaGetLastError(), "launch canonical_checksum");
  check_cuda(cudaMemcpyAsync(sums, device_sums.get(), num_slots * sizeof(uint64_t), cudaMemcpyDeviceToHost, stream),
             "read checksums");
  check_cuda(cudaStreamSynchronize(stream), "wait for checksums");
}

}  // namespace

void checksum_cuda(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, int64_t itemsize, Cast cast,
                   uintptr_t stream_handle, uint64_t* sums, int64_t num_slots) {
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  if (cast == Cast::kF32ToBf16) return launch<4, true>(segments, count, buffers, stream, sums, num_slots);
  switch (itemsize) {
    case 8:
      return launch<8, false>(segments, count, buffers, stream, sums, num_slots);
    case 4:
      return launch<4, false>(segments, count, buffers, stream, sums, num_slots);
    case 2:
      return launch<2, false>(segments, count, buffers, stream, sums, num_slots);
    default:
      return launch<1, false>(segments, count, buffers, stream, sums, num_slots);
  }
}

}  // namespace hybridrl
