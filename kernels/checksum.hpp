// Canonical checksum: a sum over elements that is the same for every layout of a tensor; see mix.hpp.
#pragma once

#include "tables.hpp"

namespace hybridrl {

// Adds to sums[slot], which the caller sets to 0.
void checksum_cpu(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, int64_t itemsize, Cast cast,
                  int num_threads, uint64_t* sums);

// The same on a device; waits for `stream` (a cudaStream_t) and writes `num_slots` sums to host memory.
void checksum_cuda(const ChecksumSegment* segments, int64_t count, const Buffer* buffers, int64_t itemsize, Cast cast,
                   uintptr_t stream, uint64_t* sums, int64_t num_slots);

}  // namespace hybridrl
