// What the CUDA kernels share: error checks, tables on the device, and tiles of equal bytes.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace hybridrl {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(status));
}

// An array that lives on the device for the work of one stream.
template <typename T>
class StreamArray {
 public:
  StreamArray(const T* host, int64_t count, cudaStream_t stream) : stream_(stream) {
    check_cuda(cudaMallocAsync(&data_, count * sizeof(T), stream), "allocate kernel table");
    check_cuda(cudaMemcpyAsync(data_, host, count * sizeof(T), cudaMemcpyHostToDevice, stream), "copy kernel table");
  }
  ~StreamArray() { cudaFreeAsync(data_, stream_); }
  StreamArray(const StreamArray&) = delete;
  StreamArray& operator=(const StreamArray&) = delete;
  T* get() const { return data_; }

 private:
  T* data_ = nullptr;
  cudaStream_t stream_;
};

// first_tile[i] is the number of the first tile of segment i; the last entry is the number of tiles.
template <typename Segment, typename Units>
std::vector<int64_t> tile_starts(const Segment* segments, int64_t count, int64_t units_per_tile, Units units) {
  std::vector<int64_t> starts(count + 1, 0);
  for (int64_t i = 0; i < count; ++i)
    starts[i + 1] = starts[i] + (units(segments[i]) + units_per_tile - 1) / units_per_tile;
  return starts;
}

// The segment that holds a tile.
__device__ inline int64_t segment_of(const int64_t* starts, int64_t count, int64_t tile) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    const int64_t middle = (low + high) / 2;
    (starts[middle] <= tile ? low : high) = middle;
  }
  return low;
}

// Enough blocks to fill the device; each walks over tiles.
inline int persistent_blocks(int64_t tiles, int blocks_per_sm) {
  int device = 0, sms = 0;
  check_cuda(cudaGetDevice(&device), "find the device");
  check_cuda(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, device), "count the multiprocessors");
  const int64_t blocks = static_cast<int64_t>(sms) * blocks_per_sm;
  return static_cast<int>(tiles < blocks ? tiles : blocks);
}

}  // namespace hybridrl
