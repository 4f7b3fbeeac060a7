// Python module hybridrl._C: raw addresses and int64 tables in, checked once here. No torch headers.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include "block_quantize.hpp"
#include "checksum.hpp"
#include "segmented_copy.hpp"
#include "verified_copy.hpp"

namespace py = pybind11;
using Table = py::array_t<int64_t, py::array::c_style>;

namespace {

#ifdef HYBRIDRL_WITH_CUDA
constexpr bool kHasCuda = true;
#else
constexpr bool kHasCuda = false;
#endif

// Reads a [n, width] table in place.
template <typename Row>
std::pair<const Row*, int64_t> rows_of(const Table& table, const char* name) {
  constexpr int64_t kWidth = sizeof(Row) / sizeof(int64_t);
  if (table.ndim() != 2 || table.shape(1) != kWidth) {
    std::string shape;
    for (py::ssize_t d = 0; d < table.ndim(); ++d) shape += (d > 0 ? ", " : "") + std::to_string(table.shape(d));
    throw std::invalid_argument(std::string(name) + " has shape [" + shape + "], expected int64 [n, " +
                                std::to_string(kWidth) + "]");
  }
  return {reinterpret_cast<const Row*>(table.data()), table.shape(0)};
}

void require_cuda() {
  if (!kHasCuda) throw std::runtime_error("this build has no CUDA kernels; build again with HYBRIDRL_BUILD_CUDA=1");
}

void segmented_copy(const Table& segments, const Table& sources, const Table& destinations, int cast_code,
                    int num_threads, bool on_cuda, [[maybe_unused]] uintptr_t stream) {
  using namespace hybridrl;
  const auto cast = static_cast<Cast>(cast_code);
  const auto [rows, count] = rows_of<CopySegment>(segments, "segments");
  const auto [src, num_src] = rows_of<Buffer>(sources, "sources");
  const auto [dst, num_dst] = rows_of<Buffer>(destinations, "destinations");
  check_copy(rows, count, src, num_src, dst, num_dst, cast, on_cuda);
  const py::gil_scoped_release release;
  if (!on_cuda) return segmented_copy_cpu(rows, count, src, dst, cast, num_threads);
  require_cuda();
#ifdef HYBRIDRL_WITH_CUDA
  segmented_copy_cuda(rows, count, src, dst, cast, stream);
#endif
}

py::array_t<uint64_t> canonical_checksum(const Table& segments, const Table& buffers, int64_t itemsize,
                                         int64_t num_slots, int cast_code, int num_threads, bool on_cuda,
                                         [[maybe_unused]] uintptr_t stream) {
  using namespace hybridrl;
  const auto cast = static_cast<Cast>(cast_code);
  const auto [rows, count] = rows_of<ChecksumSegment>(segments, "segments");
  const auto [table, num_buffers] = rows_of<Buffer>(buffers, "buffers");
  check_checksum(rows, count, table, num_buffers, itemsize, num_slots, cast, on_cuda);
  py::array_t<uint64_t> sums(num_slots);
  uint64_t* out = sums.mutable_data();
  std::fill(out, out + num_slots, 0);
  const py::gil_scoped_release release;
  if (!on_cuda) {
    checksum_cpu(rows, count, table, itemsize, cast, num_threads, out);
    return sums;
  }
  require_cuda();
#ifdef HYBRIDRL_WITH_CUDA
  checksum_cuda(rows, count, table, itemsize, cast, stream, out, num_slots);
#endif
  return sums;
}

py::array_t<uint64_t> verified_copy(const Table& segments, const Table& sources, const Table& destinations,
                                    int64_t itemsize, int64_t num_slots, int side_code, int num_threads) {
  using namespace hybridrl;
  const auto [rows, count] = rows_of<VerifiedSegment>(segments, "segments");
  const auto [src, num_src] = rows_of<Buffer>(sources, "sources");
  const auto [dst, num_dst] = rows_of<Buffer>(destinations, "destinations");
  check_copy(rows, count, src, num_src, dst, num_dst, Cast::kNone, false);
  check_verified(rows, count, itemsize, num_slots);
  py::array_t<uint64_t> sums(num_slots);
  uint64_t* out = sums.mutable_data();
  std::fill(out, out + num_slots, 0);
  const py::gil_scoped_release release;
  verified_copy_cpu(rows, count, src, dst, itemsize, static_cast<Side>(side_code), num_threads, out);
  return sums;
}

// Returns the first segment with a NaN or infinity, or -1.
int64_t block_quantize(const Table& segments, const Table& sources, const Table& destinations, const Table& scales,
                       int num_threads, bool on_cuda, [[maybe_unused]] uintptr_t stream) {
  using namespace hybridrl;
  const auto [rows, count] = rows_of<QuantizeSegment>(segments, "segments");
  const auto [src, num_src] = rows_of<Buffer>(sources, "sources");
  const auto [dst, num_dst] = rows_of<Buffer>(destinations, "destinations");
  const auto [out, num_out] = rows_of<Buffer>(scales, "scales");
  check_quantize(rows, count, src, num_src, dst, num_dst, out, num_out);
  const py::gil_scoped_release release;
  if (!on_cuda) return block_quantize_cpu(rows, count, src, dst, out, num_threads);
  require_cuda();
#ifdef HYBRIDRL_WITH_CUDA
  return block_quantize_cuda(rows, count, src, dst, out, stream);
#else
  return -1;
#endif
}

// Shared-memory flags: a reader that sees a stored value sees everything that was written before it.
int64_t load_acquire(uintptr_t address) {
  return __atomic_load_n(reinterpret_cast<const int64_t*>(address), __ATOMIC_ACQUIRE);
}
void store_release(uintptr_t address, int64_t value) {
  __atomic_store_n(reinterpret_cast<int64_t*>(address), value, __ATOMIC_RELEASE);
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("has_cuda") = kHasCuda;
  module.def("segmented_copy", &segmented_copy);
  module.def("canonical_checksum", &canonical_checksum);
  module.def("verified_copy", &verified_copy);
  module.def("block_quantize", &block_quantize);
  module.def("load_acquire", &load_acquire);
  module.def("store_release", &store_release);
}
