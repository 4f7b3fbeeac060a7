#include "device.cuh"
#include "mix.hpp"
#include "segmented_copy.hpp"

namespace hybridrl {
namespace {

constexpr int64_t kUnitsPerTile = 4096;

// What one thread moves at once: a vector of bytes, or one or four elements with a cast.
enum class Unit : int { kBytes1, kBytes2, kBytes4, kBytes8, kBytes16, kRound1, kRound4, kWiden1, kWiden4 };

struct CopyTask {
  const char* from;
  char* to;
  int64_t from_pitch, to_pitch;
  int64_t rows, row_units;
  Unit unit;
};

template <typename T>
__device__ T convert(T value, T*) {
  return value;
}
__device__ uint16_t convert(uint32_t value, uint16_t*) { return to_bf16(value); }
__device__ uint32_t convert(uint16_t value, uint32_t*) { return static_cast<uint32_t>(value) << 16; }
__device__ ushort4 convert(uint4 v, ushort4*) {
  return make_ushort4(to_bf16(v.x), to_bf16(v.y), to_bf16(v.z), to_bf16(v.w));
}
__device__ uint4 convert(ushort4 v, uint4*) {
  return make_uint4(uint32_t{v.x} << 16, uint32_t{v.y} << 16, uint32_t{v.z} << 16, uint32_t{v.w} << 16);
}

template <typename From, typename To>
__device__ void copy_tile(const CopyTask& task, int64_t first, int64_t last) {
  visit_tile(first, last, task.row_units, [&](int64_t row, int64_t unit) {
    const From value = reinterpret_cast<const From*>(task.from + row * task.from_pitch)[unit];
    reinterpret_cast<To*>(task.to + row * task.to_pitch)[unit] = convert(value, static_cast<To*>(nullptr));
  });
}

__global__ void __launch_bounds__(kThreads)
    copy_kernel(const CopyTask* tasks, const int64_t* starts, int64_t count, int64_t num_tiles) {
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int64_t index = task_of(starts, count, tile);
    const CopyTask task = tasks[index];
    const int64_t first = (tile - starts[index]) * kUnitsPerTile, units = task.rows * task.row_units;
    const int64_t last = first + kUnitsPerTile < units ? first + kUnitsPerTile : units;
    switch (task.unit) {
      case Unit::kBytes1:
        copy_tile<uint8_t, uint8_t>(task, first, last);
        break;
      case Unit::kBytes2:
        copy_tile<uint16_t, uint16_t>(task, first, last);
        break;
      case Unit::kBytes4:
        copy_tile<uint32_t, uint32_t>(task, first, last);
        break;
      case Unit::kBytes8:
        copy_tile<uint2, uint2>(task, first, last);
        break;
      case Unit::kBytes16:
        copy_tile<uint4, uint4>(task, first, last);
        break;
      case Unit::kRound1:
        copy_tile<uint32_t, uint16_t>(task, first, last);
        break;
      case Unit::kRound4:
        copy_tile<uint4, ushort4>(task, first, last);
        break;
      case Unit::kWiden1:
        copy_tile<uint16_t, uint32_t>(task, first, last);
        break;
      case Unit::kWiden4:
        copy_tile<ushort4, uint4>(task, first, last);
        break;
    }
  }
}

// Reads of `from` bytes and writes of `to` bytes at once are aligned in every row.
bool is_aligned(const CopyTask& task, int64_t row_bytes, int64_t from, int64_t to) {
  const int64_t pitches_from = task.rows > 1 ? task.from_pitch : 0, pitches_to = task.rows > 1 ? task.to_pitch : 0;
  return alignment(reinterpret_cast<int64_t>(task.from) | pitches_from | row_bytes, from) == from &&
         alignment(reinterpret_cast<int64_t>(task.to) | pitches_to, to) == to;
}

CopyTask make_task(const CopySegment& s, const Buffer* src, const Buffer* dst, Cast cast) {
  CopyTask task{reinterpret_cast<const char*>(src[s.src_buffer].address) + s.src_offset,
                reinterpret_cast<char*>(dst[s.dst_buffer].address) + s.dst_offset,
                s.src_pitch,
                s.dst_pitch,
                s.rows,
                s.row_bytes,
                Unit::kBytes1};
  if (cast == Cast::kF32ToBf16) {
    const bool is_wide = is_aligned(task, s.row_bytes, 16, 8);
    task.unit = is_wide ? Unit::kRound4 : Unit::kRound1;
    task.row_units = s.row_bytes / (is_wide ? 16 : 4);
  } else if (cast == Cast::kBf16ToF32) {
    const bool is_wide = is_aligned(task, s.row_bytes, 8, 16);
    task.unit = is_wide ? Unit::kWiden4 : Unit::kWiden1;
    task.row_units = s.row_bytes / (is_wide ? 8 : 2);
  } else {
    constexpr Unit kUnits[] = {Unit::kBytes16, Unit::kBytes8, Unit::kBytes4, Unit::kBytes2};
    int64_t bytes = 16;
    for (const Unit unit : kUnits) {
      if (is_aligned(task, s.row_bytes, bytes, bytes)) {
        task.unit = unit;
        task.row_units = s.row_bytes / bytes;
        break;
      }
      bytes /= 2;
    }
  }
  return task;
}

}  // namespace

void segmented_copy_cuda(const CopySegment* segments, int64_t count, const Buffer* src, const Buffer* dst, Cast cast,
                         uintptr_t stream_handle) {
  const auto stream = reinterpret_cast<cudaStream_t>(stream_handle);
  std::vector<CopyTask> tasks;
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].rows > 0 && segments[i].row_bytes > 0) tasks.push_back(make_task(segments[i], src, dst, cast));
  }
  if (tasks.empty()) return;
  const auto starts = tile_starts(tasks, kUnitsPerTile);
  const auto num_tasks = static_cast<int64_t>(tasks.size());
  const StreamArray<CopyTask> device_tasks(tasks.data(), num_tasks, stream);
  const StreamArray<int64_t> device_starts(starts.data(), num_tasks + 1, stream);
  copy_kernel<<<persistent_blocks(starts.back()), kThreads, 0, stream>>>(device_tasks.get(), device_starts.get(),
                                                                         num_tasks, starts.back());
  check_cuda(cudaGetLastError(), "launch segmented_copy");
}

}  // namespace hybridrl
