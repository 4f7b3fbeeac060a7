// Sum of 32-bit words times 32-bit factors: the inner loop of the checksum, for the vector unit at hand.
#pragma once

#include <cstdint>

namespace hybridrl {

// sum words[i] * factors[i] mod 2^64; neither side needs to be aligned.
uint64_t word_sum(const char* words, const uint32_t* factors, int64_t count);

// Copies words and sums them from `summed`, which is `from` or `to`: each is read there after it was written. Waiting
// for memory leaves the processor time for the sum. Fetches `next`, as long as `from`, ahead of time.
uint64_t copy_word_sum(const char* from, char* to, const char* summed, const char* next, const uint32_t* factors,
                       int64_t count);

}  // namespace hybridrl
