// Splits segments over threads by bytes. Threads are started per call, and only where each has enough to do: nothing
// lives on between calls that a fork could break.
#pragma once

#include <algorithm>
#include <cstdint>
#include <system_error>
#include <thread>
#include <vector>

namespace hybridrl {

constexpr int64_t kMinBytesPerThread = 1 << 20;
constexpr int64_t kCutUnits = 64;  // a segment is cut at multiples of this

// Of one segment, rows [row, row + rows), and of each row units [unit, unit + units).
struct Piece {
  int64_t segment, row, rows, unit, units;
};

// Calls `work` for units [begin, end) of one segment in row order: part of a row, whole rows, part of a row.
template <typename Work>
void visit_units(int64_t segment, int64_t row_units, int64_t begin, int64_t end, const Work& work) {
  int64_t row = begin / row_units;
  if (const int64_t unit = begin % row_units; unit > 0) {
    const int64_t units = std::min(row_units - unit, end - begin);
    work(Piece{segment, row++, 1, unit, units});
    begin += units;
  }
  const int64_t rows = (end - begin) / row_units, rest = (end - begin) % row_units;
  if (rows > 0) work(Piece{segment, row, rows, 0, row_units});
  if (rest > 0) work(Piece{segment, row + rows, 1, 0, rest});
}

// Calls `work` with pieces that cover every unit of every segment once, on up to `num_threads` threads (0: all cores).
template <typename Segment, typename RowUnits, typename Work>
void run_parallel(const Segment* segments, int64_t count, int num_threads, int64_t unit_bytes, RowUnits row_units,
                  Work work) {
  int64_t total = 0;
  for (int64_t i = 0; i < count; ++i) total += segments[i].rows * row_units(segments[i]);
  const int64_t wanted = num_threads > 0 ? num_threads : std::max(1u, std::thread::hardware_concurrency());
  const int64_t threads = std::max<int64_t>(1, std::min(wanted, total * unit_bytes / kMinBytesPerThread));

  const auto share = [&](int64_t thread) {
    const int64_t first = total / threads * thread;
    const int64_t last = thread + 1 == threads ? total : total / threads * (thread + 1);
    int64_t start = 0;
    for (int64_t i = 0; i < count && start < last; ++i) {
      const int64_t units = segments[i].rows * row_units(segments[i]);
      const auto cut = [&](int64_t at) {
        return at - start >= units ? units : std::max<int64_t>(0, at - start) / kCutUnits * kCutUnits;
      };
      const int64_t begin = cut(first), end = cut(last);
      if (begin < end) visit_units(i, row_units(segments[i]), begin, end, work);
      start += units;
    }
  };

  std::vector<std::thread> pool;
  for (int64_t thread = 1; thread < threads; ++thread) {
    try {
      pool.emplace_back(share, thread);
    } catch (const std::system_error&) {  // no more threads allowed: do the work here
      share(thread);
    }
  }
  share(0);
  for (auto& thread : pool) thread.join();
}

}  // namespace hybridrl
