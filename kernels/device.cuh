// What the CUDA kernels share: error checks, tables on the device, tiles of equal size, and how a block walks over one.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybridrl {

constexpr int kThreads = 256;
constexpr int kBlocksPerSm = 5;  // as many as the registers of 48 per thread allow

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// An array that lives on the device for the work of one stream. The host array may go once the constructor returns: the
// runtime has staged pageable memory by then.
template <typename T>
class StreamArray {
 public:
  StreamArray(const T* host, int64_t count, cudaStream_t stream) : stream_(stream) {
    check_cuda(cudaMallocAsync(&data_, count * sizeof(T), stream), "allocate kernel table");
    const cudaError_t status = cudaMemcpyAsync(data_, host, count * sizeof(T), cudaMemcpyHostToDevice, stream);
    if (status != cudaSuccess) cudaFreeAsync(data_, stream);
    check_cuda(status, "copy kernel table");
  }
  ~StreamArray() { cudaFreeAsync(data_, stream_); }
  StreamArray(const StreamArray&) = delete;
  StreamArray& operator=(const StreamArray&) = delete;
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  cudaStream_t stream_;
};

// Cuts tasks of `num_units` units into tiles. starts[i] is the number of task i's first tile, the last entry their
// total.
template <typename Task>
std::vector<int64_t> tile_starts(const std::vector<Task>& tasks, int64_t units_per_tile) {
  std::vector<int64_t> starts(tasks.size() + 1, 0);
  for (size_t i = 0; i < tasks.size(); ++i) {
    starts[i + 1] = starts[i] + (tasks[i].rows * tasks[i].row_units + units_per_tile - 1) / units_per_tile;
  }
  return starts;
}

// The task that holds a tile.
__device__ inline int64_t task_of(const int64_t* starts, int64_t count, int64_t tile) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (starts[middle] <= tile ? low : high) = middle;
  }
  return low;
}

// Calls visit(row, unit) for this thread's part of units [first, last), in row order. Divides once, not once per unit.
template <typename Visit>
__device__ void visit_tile(int64_t first, int64_t last, int64_t row_units, Visit visit) {
  const int64_t step_rows = kThreads / row_units, step_units = kThreads % row_units;
  const int64_t start = first + threadIdx.x;
  int64_t row = start / row_units, unit = start % row_units;
  for (int64_t at = start; at < last; at += kThreads) {
    visit(row, unit);
    row += step_rows;
    unit += step_units;
    if (unit >= row_units) {
      unit -= row_units;
      ++row;
    }
  }
}

// Enough blocks to fill the device; each walks over tiles.
inline int persistent_blocks(int64_t tiles) {
  int device = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), "find the device");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "count the multiprocessors");
  const int64_t blocks = static_cast<int64_t>(sms) * kBlocksPerSm;
  return static_cast<int>(tiles < blocks ? tiles : blocks);
}

// The largest power of two, `most` at most, that divides every value or-ed into `bits`.
inline int64_t alignment(int64_t bits, int64_t most) {
  bits |= most;
  return bits & -bits;
}

}  // namespace hybridrl
