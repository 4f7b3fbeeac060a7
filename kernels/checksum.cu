#include "checksum.hpp"
#include "device.cuh"
#include "mix.hpp"

namespace hybridrl {
namespace {

constexpr int64_t kUnitsPerTile = 4096;
constexpr int kVectorBytes = 16;

struct ChecksumTask {
  const char* base;
  int64_t pitch;
  int64_t rows, row_units;
  uint64_t index_start, index_pitch;
  uint64_t seed;
  int64_t slot;
  bool is_wide;  // a unit is a 16-byte vector of elements, not one element
};

// The sum over one unit, which begins at `index`. The factors of a word's elements are that of the word, shifted to
// their place.
template <typename Stored, bool kRound, int kCount>
__device__ uint64_t sum_unit(const Stored (&values)[kCount], uint64_t index, uint64_t key, const uint32_t* factors) {
  constexpr uint64_t kItem = kRound ? 2 : sizeof(Stored);
  uint64_t sum = 0, run = 0, block = index * kItem / 4 / kMixBlock;
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const uint64_t byte = (index + i) * kItem, word = byte / 4;
    if (word / kMixBlock != block) {
      sum += block_factor(key, block) * run;
      run = 0;
      block = word / kMixBlock;
    }
    const uint64_t bits = kRound ? to_bf16(static_cast<uint32_t>(values[i])) : values[i];
    if constexpr (kItem == 8) {  // both words lie in one block
      run += factors[word % kMixBlock] * ((bits & 0xFFFFFFFFull) + 1);
      run += factors[word % kMixBlock + 1] * ((bits >> 32) + 1);
    } else {
      run += (uint64_t{factors[word % kMixBlock]} << (8 * (byte % 4))) * (bits + 1);
    }
  }
  return sum + block_factor(key, block) * run;
}

template <typename Stored, bool kRound, typename Vector>
__device__ uint64_t sum_tile(const ChecksumTask& task, int64_t first, int64_t last, const uint32_t* factors) {
  constexpr int kCount = sizeof(Vector) / sizeof(Stored);
  const uint64_t key = scramble(task.seed);
  uint64_t sum = 0;
  visit_tile(first, last, task.row_units, [&](int64_t row, int64_t unit) {
    const Vector vector = reinterpret_cast<const Vector*>(task.base + row * task.pitch)[unit];
    Stored values[kCount];
    memcpy(values, &vector, sizeof(Vector));
    const uint64_t index = task.index_start + row * task.index_pitch + unit * kCount;
    sum += sum_unit<Stored, kRound>(values, index, key, factors);
  });
  return sum;
}

template <typename Stored, bool kRound>
__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const ChecksumTask* tasks, const int64_t* starts, int64_t count, int64_t num_tiles,
                    unsigned long long* sums) {
  __shared__ uint32_t factors[kMixBlock];
  for (int i = threadIdx.x; i < kMixBlock; i += kThreads) factors[i] = word_factor(i);
  __syncthreads();
  for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
    const int64_t index = task_of(starts, count, tile);
    const ChecksumTask task = tasks[index];
    const int64_t first = (tile - starts[index]) * kUnitsPerTile, units = task.rows * task.row_units;
    const int64_t last = first + kUnitsPerTile < units ? first + kUnitsPerTile : units;
    unsigned long long sum = task.is_wide ? sum_tile<Stored, kRound, uint4>(task, first, last, factors)
                                          : sum_tile<Stored, kRound, Stored>(task, first, last, factors);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(0xFFFFFFFFu, sum, offset);
    if (threadIdx.x % 32 == 0) atomicAdd(&sums[task.slot], sum);
  }
}

ChecksumTask make_task(const ChecksumSegment& s, const Buffer* buffers, int64_t itemsize) {
  const int64_t address = buffers[s.buffer].address + s.offset, row_bytes = s.row_elements * itemsize;
  const bool is_wide = alignment(address | row_bytes | (s.rows > 1 ? s.pitch : 0), kVectorBytes) == kVectorBytes;
  return {reinterpret_cast<const char*>(address),
          s.pitch,
          s.rows,
          row_bytes / (is_wide ? kVectorBytes : itemsize),
          static_cast<uint64_t>(s.index_start),
          static_cast<uint64_t>(s.index_pitch),
          static_cast<uint64_t>(s.seed),
          s.slot,
          is_wide};
}

template <typename Stored, bool kRound = false>
void launch(const std::vector<ChecksumTask>& tasks, cudaStream_t stream, uint64_t* sums, int64_t num_slots) {
  const auto starts = tile_starts(tasks, kUnitsPerTile);
  const auto num_tasks = static_cast<int64_t>(tasks.size());
  const StreamArray<ChecksumTask> device_tasks(tasks.data(), num_tasks, stream);
  const StreamArray<int64_t> device_starts(starts.data(), num_tasks + 1, stream);
  const StreamArray<uint64_t> device_sums(sums, num_slots, stream);
  checksum_kernel<Stored, kRound><<<persistent_blocks(starts.back()), kThreads, 0, stream>>>(
      device_tasks.get(), device_starts.get(), num_tasks, starts.back(),
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
  std::vector<ChecksumTask> tasks;
  for (int64_t i = 0; i < count; ++i) {
    if (segments[i].rows > 0 && segments[i].row_elements > 0)
      tasks.push_back(make_task(segments[i], buffers, itemsize));
  }
  if (tasks.empty()) return;
  if (cast == Cast::kF32ToBf16) return launch<uint32_t, true>(tasks, stream, sums, num_slots);
  switch (itemsize) {
    case 8:
      return launch<uint64_t>(tasks, stream, sums, num_slots);
    case 4:
      return launch<uint32_t>(tasks, stream, sums, num_slots);
    case 2:
      return launch<uint16_t>(tasks, stream, sums, num_slots);
    default:
      return launch<uint8_t>(tasks, stream, sums, num_slots);
  }
}

}  // namespace hybridrl
