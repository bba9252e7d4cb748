// CUDA kernels of head_dots. Bytes that must move: N * F * sizeof(T) forward and for sums of columns, twice that backward.
#include <torch/csrc/stable/library.h>

#include "common/launch.cuh"
#include "common/vec.cuh"
#include "head_dots.h"

namespace gnnfast {
namespace {

// `lanes` lanes for one row and head, whose features lie side by side.
template <class T, int VEC, int K>
__global__ void __launch_bounds__(kBlock) head_dots_kernel(const HeadDotsArgs p, int lanes) {
  using A = acc_t<T>;
  const int64_t thread = int64_t{blockIdx.x} * kBlock + threadIdx.x, pairs = p.num_rows * p.heads;
  const int64_t pair = min(thread / lanes, pairs - 1), segment = p.width / p.heads;
  const T *x = static_cast<const T*>(p.x) + pair * segment, *a = static_cast<const T*>(p.a) + pair % p.heads * segment;
  A sum[K] = {};
  for (int64_t f = thread % lanes * VEC; f < segment; f += int64_t{lanes} * VEC) {
    A v[VEC];
    load_vector<VEC>(v, x + f);
#pragma unroll
    for (int k = 0; k < K; ++k) {
      A w[VEC];
      load_vector<VEC>(w, a + k * p.width + f);
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum[k] += v[i] * w[i];
    }
  }
#pragma unroll
  for (int k = 0; k < K; ++k) {
    for (int o = 1; o < lanes; o <<= 1) sum[k] += __shfl_xor_sync(kAllLanes, sum[k], o);
    if (thread % lanes == 0 && thread / lanes < pairs) static_cast<T*>(p.out)[k * pairs + pair] = from_acc<T>(sum[k]);
  }
}

// A thread has VEC features, and every so many rows. What its block adds up for the gradient of a is one part. With K = 0 there
// are no a and g: rows as they are.
template <class T, int VEC, int K>
__global__ void __launch_bounds__(kBlock) head_dots_backward_kernel(const HeadDotsArgs p, acc_t<T>* parts, int columns) {
  using A = acc_t<T>;
  constexpr int kSums = K == 0 ? 1 : K;
  __shared__ A shared[kBlock][kSums * VEC];
  const int groups = kBlock / columns, group = threadIdx.x / columns;
  const int64_t f = (int64_t{blockIdx.y} * columns + threadIdx.x % columns) * VEC, pairs = p.num_rows * p.heads;
  const bool active = group < groups && f < p.width;
  A sum[kSums][VEC] = {};
  if (active) {
    const int64_t first = int64_t{blockIdx.x} * groups + group, step = int64_t{gridDim.x} * groups;
    const T* x = static_cast<const T*>(p.x) + f;
    if constexpr (K == 0) {
#pragma unroll 4
      for (int64_t row = first; row < p.num_rows; row += step) {
        A v[VEC];
        load_vector<VEC>(v, x + row * p.width);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum[0][i] += v[i];
      }
    } else {
      const T* g = static_cast<const T*>(p.grad) + f / (p.width / p.heads);
      A w[kSums][VEC];
#pragma unroll
      for (int k = 0; k < K; ++k) load_vector<VEC>(w[k], static_cast<const T*>(p.a) + k * p.width + f);
#pragma unroll 2
      for (int64_t row = first; row < p.num_rows; row += step) {
        A v[VEC], to_x[VEC] = {};
        load_vector<VEC>(v, x + row * p.width);
#pragma unroll
        for (int k = 0; k < K; ++k) {
          const A of_head = to_acc(__ldg(g + k * pairs + row * p.heads));
#pragma unroll
          for (int i = 0; i < VEC; ++i) {
            sum[k][i] += of_head * v[i];
            to_x[i] += of_head * w[k][i];
          }
        }
        if (p.to_x) store_vector<VEC>(static_cast<T*>(p.to_x) + row * p.width + f, to_x);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kSums * VEC; ++i) shared[threadIdx.x][i] = sum[i / VEC][i % VEC];
  __syncthreads();
  if (!active || group > 0) return;
#pragma unroll
  for (int i = 0; i < kSums * VEC; ++i) {
    A total = 0;
    for (int other = 0; other < groups; ++other) total += shared[threadIdx.x + other * columns][i];
    parts[(int64_t{blockIdx.x} * kSums + i / VEC) * p.width + f + i % VEC] = total;
  }
}

// Adds up the parts of 32 of the `size` numbers, and what is in rows that belong to none.
template <class T>
__global__ void __launch_bounds__(1024)
    head_dots_combine_kernel(T* out, int64_t size, const acc_t<T>* parts, int64_t num_parts, const T* rows, int num_rows) {
  using A = acc_t<T>;
  __shared__ A shared[kWarp][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t at = int64_t{blockIdx.x} * kWarp + lane;
  A sum = 0;
  if (at < size) {
#pragma unroll 8
    for (int64_t part = warp; part < num_parts; part += kWarp) sum += parts[part * size + at];
    if (warp < num_rows) sum += to_acc(rows[warp * size + at]);
  }
  shared[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || at >= size) return;
  A total = 0;
  for (int w = 0; w < kWarp; ++w) total += shared[w][lane];
  out[at] = from_acc<T>(total);
}

// The widest loads that heads and addresses allow.
template <class F>
void dispatch_vectors(const HeadDotsArgs& p, DType dtype, const F& f) {
  dispatch_cuda(dtype, [&](auto type) {
    using T = typename decltype(type)::type;
    const bool fits = p.width / p.heads % kVec<T> == 0 && aligned16(p.x) && aligned16(p.a);
    auto of_vectors = [&](auto vectors) { fits ? f(type, Int<kVec<T>>{}, vectors) : f(type, Int<1>{}, vectors); };
    p.vectors == 1 ? of_vectors(Int<1>{}) : of_vectors(Int<2>{});
  });
}

}  // namespace

void Cuda::head_dots(const HeadDotsArgs& p, const Tensor& x) {
  const Launch launch(x);
  dispatch_vectors(p, dtype_of("x", x), [&](auto type, auto vec, auto vectors) {
    using T = typename decltype(type)::type;
    constexpr int VEC = decltype(vec)::value, K = decltype(vectors)::value;
    int lanes = 1;
    while (lanes < kWarp && lanes * VEC < p.width / p.heads) lanes *= 2;
    head_dots_kernel<T, VEC, K><<<blocks_for(p.num_rows * p.heads * lanes), kBlock, 0, launch.stream>>>(p, lanes);
  });
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

namespace {

template <class T, int VEC, int K>
void launch_backward(const HeadDotsArgs& p, const Tensor& x, int64_t size, const T* rows, int num_rows, cudaStream_t stream) {
  constexpr int64_t kMostParts = K == 0 ? 264 * 2 : 264 * 4, kFewestRows = 4;  // of a thread
  const int64_t whole = (p.width + VEC - 1) / VEC, columns = std::min<int64_t>(whole, kBlock);
  const int64_t tiles = (whole + columns - 1) / columns, per_block = kBlock / columns * kFewestRows;
  const int64_t blocks = std::min((p.num_rows + per_block - 1) / per_block, kMostParts);
  const int64_t in_all = std::max(K, 1) * p.width;
  const Tensor parts = make_empty(x, {blocks, in_all}, acc_dtype(x.scalar_type()));
  acc_t<T>* at = static_cast<acc_t<T>*>(parts.mutable_data_ptr());
  if (blocks > 0) {
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(tiles));
    head_dots_backward_kernel<T, VEC, K><<<grid, kBlock, 0, stream>>>(p, at, static_cast<int>(columns));
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  head_dots_combine_kernel<T><<<static_cast<unsigned>((size + kWarp - 1) / kWarp), 1024, 0, stream>>>(
      static_cast<T*>(p.to_a), size, at, blocks * in_all / size, rows, num_rows);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

}  // namespace

void Cuda::head_dots_backward(const HeadDotsArgs& p, const Tensor& x) {
  const Launch launch(x);
  dispatch_vectors(p, dtype_of("x", x), [&](auto type, auto vec, auto vectors) {
    using T = typename decltype(type)::type;
    constexpr int VEC = decltype(vec)::value, K = decltype(vectors)::value;
    launch_backward<T, VEC, K>(p, x, K * p.width, nullptr, 0, launch.stream);
  });
}

// Rows of a width that no vector divides are taken several at a time, as one: what is added up is then as many parts more.
void Cuda::column_sums(const HeadDotsArgs& args, const Tensor& x) {
  const Launch launch(x);
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    using T = typename decltype(type)::type;
    HeadDotsArgs p = args;
    int64_t rows = 1;  // in one
    while (rows * p.width % kVec<T> != 0) rows *= 2;
    if (!aligned16(p.x)) return launch_backward<T, 1, 0>(p, x, p.width, nullptr, 0, launch.stream);
    const int64_t taken = p.num_rows / rows;
    const T* rest = static_cast<const T*>(p.x) + taken * rows * p.width;
    const int num_rest = static_cast<int>(p.num_rows - taken * rows);
    p.num_rows = taken, p.width *= rows;
    launch_backward<T, kVec<T>, 0>(p, x, args.width, rest, num_rest, launch.stream);
  });
}

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) {
  m.impl("head_dots", TORCH_BOX(&head_dots<Cuda>));
  m.impl("head_dots_backward", TORCH_BOX(&head_dots_backward<Cuda>));
  m.impl("column_sums", TORCH_BOX(&column_sums<Cuda>));
}

}  // namespace gnnfast
