#include <torch/csrc/stable/library.h>

#include <cub/device/device_radix_sort.cuh>
#include <limits>
#include <mutex>

#include "common/ids.cuh"
#include "common/launch.cuh"
#include "convert.h"

namespace gnnfast {
namespace {

__device__ inline void warp_min_max(long long& lo, long long& hi) {
  for (int o = 1; o < kWarp; o <<= 1) {
    lo = min(lo, __shfl_xor_sync(kAllLanes, lo, o));
    hi = max(hi, __shfl_xor_sync(kAllLanes, hi, o));
  }
}

// A Bounds: smallest and largest row and column, and whether the rows ascend.
template <class I>
__global__ void __launch_bounds__(kBlock) bounds_kernel(const CooArgs p, long long* found) {
  const I *row = static_cast<const I*>(p.row), *col = static_cast<const I*>(p.column);
  long long r0 = LLONG_MAX, r1 = LLONG_MIN, c0 = LLONG_MAX, c1 = LLONG_MIN;
  bool sorted = true;
  for (int64_t e = int64_t{blockIdx.x} * kBlock + threadIdx.x; e < p.num_edges; e += int64_t{gridDim.x} * kBlock) {
    const long long r = row[e], c = col[e];
    r0 = min(r0, r), r1 = max(r1, r), c0 = min(c0, c), c1 = max(c1, c);
    sorted = sorted && (e == 0 || row[e - 1] <= row[e]);
  }
  warp_min_max(r0, r1);
  warp_min_max(c0, c1);
  sorted = __all_sync(kAllLanes, sorted);
  if (threadIdx.x % kWarp == 0) {
    atomicMin(found, r0), atomicMax(found + 1, r1), atomicMin(found + 2, c0), atomicMax(found + 3, c1);
    if (!sorted) atomicMin(found + 4, 0ll);
  }
}

__global__ void init_bounds_kernel(long long* found) {
  found[0] = found[2] = LLONG_MAX, found[1] = found[3] = LLONG_MIN, found[4] = 1;
}

Tensor find_facts(const CooArgs& p, const Tensor& ref, cudaStream_t stream) {
  Tensor facts = make_empty(ref, {5}, ScalarType::Long);
  long long* data = reinterpret_cast<long long*>(facts.mutable_data_ptr<int64_t>());
  init_bounds_kernel<<<1, 1, 0, stream>>>(data);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (p.num_edges == 0) return facts;
  const unsigned grid = static_cast<unsigned>(std::min<int64_t>(blocks_for(p.num_edges), 2048));
  dispatch_index("edge_index", p.index,
                 [&](auto type) { bounds_kernel<typename decltype(type)::type><<<grid, kBlock, 0, stream>>>(p, data); });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return facts;
}

// An edge that is not inside the matrix is sorted behind all others, where no row's slots are.
template <class I>
__global__ void __launch_bounds__(kBlock) keys_kernel(const CooArgs p, int32_t* key, int32_t* id, longlong2* complaint) {
  const int64_t e = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (e >= p.num_edges) return;
  const int64_t row = static_cast<const I*>(p.row)[e], column = static_cast<const I*>(p.column)[e];
  const bool good_row = inside(row, p.num_rows), good = good_row && inside(column, p.num_cols);
  if (!good) complain(complaint, good_row ? column : row, good_row ? p.num_cols : p.num_rows);
  key[e] = static_cast<int32_t>(good ? row : p.num_rows);
  id[e] = static_cast<int32_t>(e);
}

// From the sorted rows: where each row begins, and the columns in that order.
template <class I>
__global__ void __launch_bounds__(kBlock)
    fill_kernel(const CooArgs p, const int32_t* key, const int32_t* perm, int32_t* rowptr, int32_t* col) {
  const int64_t e = int64_t{blockIdx.x} * kBlock + threadIdx.x;
  if (e > p.num_edges) return;
  const int64_t from = e == 0 ? 0 : key[e - 1] + 1, to = e == p.num_edges ? p.num_rows : key[e];
  for (int64_t r = from; r <= to; ++r) rowptr[r] = static_cast<int32_t>(e);
  if (e >= p.num_edges) return;
  const int64_t column = static_cast<const I*>(p.column)[perm[e]];
  col[e] = static_cast<int32_t>(inside(column, p.num_cols) ? column : 0);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> coo_to_csr(const Tensor& row_, const Tensor& column_, int64_t num_rows,
                                                      int64_t num_cols) {
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  const CooArgs args = check_coo_input(row, column, num_rows, num_cols);
  const Launch launch(row);
  const int64_t edges = args.num_edges;
  auto scratch = [&](int64_t n, ScalarType t) { return make_empty(row, {n}, t); };
  Tensor col = scratch(edges, ScalarType::Int), perm = scratch(edges, ScalarType::Int);
  const Tensor facts = find_facts(args, row, launch.stream);
  if (edges == 0) return {torch::stable::new_zeros(row, {num_rows + 1}, ScalarType::Int), col, perm, facts};
  Tensor rowptr = scratch(num_rows + 1, ScalarType::Int);
  dispatch_index("edge_index", args.index, [&](auto type) {
    using I = typename decltype(type)::type;
    const unsigned grid = blocks_for(edges + 1);
    // Four buffers of E int32; col serves as one of them until it is filled.
    Tensor keys = scratch(edges, ScalarType::Int), keys_out = scratch(edges, ScalarType::Int);
    int32_t *key = keys.mutable_data_ptr<int32_t>(), *key_out = keys_out.mutable_data_ptr<int32_t>();
    int32_t *id = col.mutable_data_ptr<int32_t>(), *id_out = perm.mutable_data_ptr<int32_t>();
    keys_kernel<I><<<grid, kBlock, 0, launch.stream>>>(args, key, id, complaints());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    int bits = 1;
    while (bits < 31 && num_rows >> bits) ++bits;
    size_t bytes = 0;
    STD_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(nullptr, bytes, key, key_out, id, id_out, edges, 0, bits, launch.stream));
    Tensor temp = scratch(static_cast<int64_t>(bytes), ScalarType::Byte);
    STD_CUDA_CHECK(cub::DeviceRadixSort::SortPairs(temp.mutable_data_ptr(), bytes, key, key_out, id, id_out, edges, 0, bits,
                                                   launch.stream));
    fill_kernel<I><<<grid, kBlock, 0, launch.stream>>>(args, key_out, id_out, rowptr.mutable_data_ptr<int32_t>(),
                                                       col.mutable_data_ptr<int32_t>());
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  });
  return {rowptr, col, perm, facts};
}

Tensor coo_facts(const Tensor& row_, const Tensor& column_) {
  const Tensor row = as_contiguous(row_), column = as_contiguous(column_);
  const CooArgs args = check_coo_input(row, column, 0, 0);
  const Launch launch(row);
  return find_facts(args, row, launch.stream);
}

// The address of the complaints, for a device of CUDA.
int64_t id_complaints(const Tensor&) { return reinterpret_cast<int64_t>(complaints()); }

}  // namespace

longlong2* complaints() {
  static std::mutex lock;
  static longlong2* at = nullptr;
  std::lock_guard<std::mutex> guard(lock);
  if (at) return at;
  void* made = nullptr;
  // Refused while a CUDA graph is captured; the error must not stay behind.
  if (cudaHostAlloc(&made, sizeof(longlong2), cudaHostAllocPortable | cudaHostAllocMapped) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  at = static_cast<longlong2*>(made);
  *at = {0, 0};
  return at;
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("id_complaints", TORCH_BOX(&id_complaints));
  m.impl("coo_to_csr", TORCH_BOX(&coo_to_csr));
  m.impl("coo_facts", TORCH_BOX(&coo_facts));
}

}  // namespace gnnfast
