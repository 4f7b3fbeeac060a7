#include <cuda_fp8.h>

#include "block_quantize.hpp"
#include "device.cuh"

namespace hybridrl {
namespace {

constexpr int kVector = 8;                         // elements that a thread reads at once
constexpr int kLanes = kQuantBlock / kVector;      // threads along a row
constexpr int kRowsAtOnce = kThreads / kLanes;     // rows that a thread block covers at once
constexpr int kSteps = kQuantBlock / kRowsAtOnce;  // until it has covered a tile
constexpr unsigned kBf16Infinity = 0x7F80;

struct QuantizeTask {
  const char* from;
  char* to;
  char* scales;
  int64_t from_pitch, to_pitch, scale_pitch;
  int64_t rows, row_units;  // in blocks
  int64_t num_rows, num_columns;
  int64_t segment;
  bool is_wide;
};

struct Tile {
  const char* from;
  char* to;
  int64_t rows, columns;
};

// Elements column .. column + 7 of a row of the tile; zeros outside of it.
__device__ uint4 load(const QuantizeTask& task, const Tile& tile, int row, int column) {
  uint4 out = make_uint4(0, 0, 0, 0);
  if (row >= tile.rows) return out;
  const char* at = tile.from + row * task.from_pitch + 2 * column;
  if (task.is_wide && column + kVector <= tile.columns) return *reinterpret_cast<const uint4*>(at);
  uint16_t halves[kVector] = {};
  for (int i = 0; i < kVector && column + i < tile.columns; ++i) halves[i] = reinterpret_cast<const uint16_t*>(at)[i];
  memcpy(&out, halves, sizeof(out));
  return out;
}

__device__ void store(const QuantizeTask& task, const Tile& tile, int row, int column, uint2 value) {
  if (row >= tile.rows) return;
  char* at = tile.to + row * task.to_pitch + column;
  if (task.is_wide && column + kVector <= tile.columns) {
    *reinterpret_cast<uint2*>(at) = value;
    return;
  }
  char bytes[kVector];
  memcpy(bytes, &value, sizeof(value));
  for (int i = 0; i < kVector && column + i < tile.columns; ++i) at[i] = bytes[i];
}

__device__ unsigned most_of(uint4 v) {
  unsigned most = 0;
  for (const unsigned pair : {v.x, v.y, v.z, v.w}) most = max(most, max(pair & 0x7FFF, pair >> 16 & 0x7FFF));
  return most;
}

__device__ unsigned convert_pair(unsigned pair, float inverse) {
  const float2 scaled =
      make_float2(__uint_as_float(pair << 16) * inverse, __uint_as_float(pair & 0xFFFF0000u) * inverse);
  return __nv_cvt_float2_to_fp8x2(scaled, __NV_SATFINITE, __NV_E4M3);
}

__device__ uint2 convert_vector(uint4 v, float inverse) {
  return make_uint2(convert_pair(v.x, inverse) | convert_pair(v.y, inverse) << 16,
                    convert_pair(v.z, inverse) | convert_pair(v.w, inverse) << 16);
}

// The largest of the block's values, on every thread.
__device__ unsigned block_max(unsigned value, unsigned* shared) {
  value = __reduce_max_sync(0xFFFFFFFFu, value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  unsigned most = 0;
  for (int i = 0; i < kThreads / 32; ++i) most = max(most, shared[i]);
  __syncthreads();
  return most;
}

__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const QuantizeTask* tasks, const int64_t* starts, int64_t count, int64_t num_tiles,
                    unsigned long long* damaged) {
  __shared__ unsigned shared[kThreads / 32];
  const int first_row = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kVector;
  for (int64_t tile_index = blockIdx.x; tile_index < num_tiles; tile_index += gridDim.x) {
    const int64_t index = task_of(starts, count, tile_index);
    const QuantizeTask& task = tasks[index];
    const int64_t within = tile_index - starts[index];
    const int64_t block_row = within / task.row_units, block_column = within % task.row_units;
    const int64_t r = block_row * kQuantBlock, c = block_column * kQuantBlock;
    const Tile tile{task.from + r * task.from_pitch + 2 * c, task.to + r * task.to_pitch + c,
                    min(kQuantBlock, task.num_rows - r), min(kQuantBlock, task.num_columns - c)};
    uint4 values[kSteps];
    unsigned most = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      values[i] = load(task, tile, first_row + i * kRowsAtOnce, column);
      most = max(most, most_of(values[i]));
    }
    most = block_max(most, shared);
    const bool is_finite = most < kBf16Infinity;
    const float magnitude = fmaxf(__uint_as_float(most << 16), kLeastMagnitude);
    const float inverse = __fdiv_rn(kE4m3Max, magnitude);
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint2 nan = make_uint2(0x7F7F7F7Fu, 0x7F7F7F7Fu);
      store(task, tile, first_row + i * kRowsAtOnce, column, is_finite ? convert_vector(values[i], inverse) : nan);
    }
    if (threadIdx.x == 0) {
      reinterpret_cast<float*>(task.scales + block_row * task.scale_pitch)[block_column] =
          is_finite ? __fdiv_rn(magnitude, kE4m3Max) : __uint_as_float(0x7FC00000u);
      if (!is_finite) atomicMin(damaged, static_cast<unsigned long long>(task.segment));
    }
  }
}

QuantizeTask make_task(const QuantizeSegment& s, int64_t segment, const Buffer* src, const Buffer* dst,
                       const Buffer* scales) {
  const int64_t from = src[s.src_buffer].address + s.src_offset, to = dst[s.dst_buffer].address + s.dst_offset;
  return {reinterpret_cast<const char*>(from),
          reinterpret_cast<char*>(to),
          reinterpret_cast<char*>(scales[s.scale_buffer].address + s.scale_offset),
          s.src_pitch,
          s.dst_pitch,
          s.scale_pitch,
          num_blocks(s.rows),
          num_blocks(s.row_elements),
          s.rows,
          s.row_elements,
          segment,
          alignment(from | s.src_pitch, 16) == 16 && alignment(to | s.dst_pitch, 8) == 8};
}

}  // namespace

int64_t block_quantize_cuda(const QuantizeSegment* segments, int64_t count, const Buffer* src, const Buffer* dst,
                            const Buffer* scales, uintptr_t stream_handle) {
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  std::vector<QuantizeTask> tasks;
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].rows > 0 && segments[i].row_elements > 0)
      tasks.push_back(make_task(segments[i], i, src, dst, scales));
  }
  if (tasks.empty()) return -1;
  const auto starts = tile_starts(tasks, 1);
  const auto num_tasks = static_cast<int64_t>(tasks.size());
  auto damaged = static_cast<unsigned long long>(count);
  const StreamArray<QuantizeTask> device_tasks(tasks.data(), num_tasks, stream);
  const StreamArray<int64_t> device_starts(starts.data(), num_tasks + 1, stream);
  const StreamArray<unsigned long long> device_damaged(&damaged, 1, stream);
  quantize_kernel<<<persistent_blocks(starts.back()), kThreads, 0, stream>>>(
      device_tasks.get(), device_starts.get(), num_tasks, starts.back(), device_damaged.get());
  check_cuda(cudaGetLastError(), "launch block_quantize");
  check_cuda(cudaMemcpyAsync(&damaged, device_damaged.get(), sizeof(damaged), cudaMemcpyDeviceToHost, stream),
             "read the state of block_quantize");
  check_cuda(cudaStreamSynchronize(stream), "wait for block_quantize");
  return static_cast<int64_t>(damaged) == count ? -1 : static_cast<int64_t>(damaged);
}

}  // namespace hybridrl
