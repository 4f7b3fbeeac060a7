// Splits segments over threads by bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <thread>
#include <vector>

namespace hybridrl {

constexpr int64_t kMinBytesPerThread = 1 << 20;

// A run of rows: rows [first, last) of one segment.
struct RowRange {
  int64_t segment, first, last;
};

// Calls `work(thread, begin, end)` with ranges of about equal bytes on up to `num_threads` threads (0: all cores).
template <typename Segment, typename RowBytes, typename Work>
void parallel_rows(const Segment* segments, int64_t count, int num_threads, RowBytes row_bytes, Work work) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += segments[i].rows * row_bytes(segments[i]);
  int64_t threads = num_threads > 0 ? num_threads : std::max(1u, std::thread::hardware_concurrency());
  threads = std::max<int64_t>(1, std::min(threads, total / kMinBytesPerThread));
  std::vector<std::vector<RowRange>> shares(threads);
  const int64_t share_bytes = total / threads + 1;
  int64_t done = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t bytes = std::max<int64_t>(1, row_bytes(segments[i]));
    for (int64_t first = 0; first < segments[i].rows;) {
      const int64_t thread = std::min(threads - 1, done / share_bytes);
      const int64_t room =
          thread == threads - 1 ? segments[i].rows : ((thread + 1) * share_bytes - done + bytes - 1) / bytes;
      const int64_t last = std::min(segments[i].rows, first + std::max<int64_t>(1, room));
      shares[thread].push_back({i, first, last});
      done += (last - first) * bytes;
      first = last;
    }
  }
  std::vector<std::thread> pool;
  for (int64_t t = 1; t < threads; ++t)
    pool.emplace_back([&, t] { work(t, shares[t].data(), shares[t].data() + shares[t].size()); });
  work(0, shares[0].data(), shares[0].data() + shares[0].size());
  for (auto& thread : pool) thread.join();
}

}  // namespace hybridrl
