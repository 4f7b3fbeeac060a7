// A segmented copy that takes the canonical checksum of one of its sides along the way.
#pragma once

#include "tables.hpp"

namespace hybridrl {

// Adds to sums[slot], which the caller sets to 0; `itemsize` is that of the elements. Every word is read from the named
// side's own memory, after it was copied.
void verified_copy_cpu(const VerifiedSegment* segments, int64_t count, const Buffer* src, const Buffer* dst,
                       int64_t itemsize, Side side, int num_threads, uint64_t* sums);

}  // namespace hybridrl
