// Segmented strided copy: packs, unpacks and moves between layouts, optionally converting float32 <-> bfloat16.
#pragma once

#include "tables.hpp"

namespace hybridrl {

void segmented_copy_cpu(const CopySegment* segments, int64_t count, const Buffer* src, const Buffer* dst, Cast cast,
                        int num_threads);

// Enqueues on `stream` (a cudaStream_t); throws std::runtime_error with the CUDA message on failure.
void segmented_copy_cuda(const CopySegment* segments, int64_t count, const Buffer* src, const Buffer* dst, Cast cast,
                         uintptr_t stream);

}  // namespace hybridrl
