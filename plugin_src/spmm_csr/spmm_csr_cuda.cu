// CUDA SpMM over CSR as it is given. A group of lanes covers the features with 16-byte loads. A team of groups, one where rows
// are short, shares the slots of a row; all groups of a block share those of a row that is long for a team; and where there is
// much to do, blocks that have equal ranges of the slots share those of rows that are long for a block, whose parts a second
// kernel adds up. Nobody counts the rows before: those of a block are far apart, so that rows sorted by length do not meet in
// one.
#include <torch/csrc/stable/library.h>

#include "common/ids.cuh"
#include "common/launch.cuh"
#include "common/vec.cuh"
#include "spmm_csr.h"

namespace gnnfast {
namespace {

constexpr int kMostThreads = 1024;       // of a block, where it is alone with its rows
constexpr int kLong = 128, kShare = 16;  // slots of a group: the most, and what it has in a row of mean length
constexpr int64_t kAlone = 1 << 17;      // slots times features, of which there are at least 16, up to which a block can be
constexpr int64_t kRanges = 512, kLeast = 1 << 14;  // of slots; the fewest slots times features of one

// How rows longer than a block takes are shared: parts [ranges][2][width], of the row that a range begins in and of one that
// begins there, whose number is in first [ranges], or -1.
struct Split {
  int64_t ranges, size, most;  // size: slots of a range; most: those of a row that a block takes, at least as many
  void* part;
  int64_t* first;
};

// Adds to sum the slots first, first + step, ... before end, of VEC features from f on. Columns are read a round ahead.
template <class T, class I, int VEC>
__device__ void add_slots(const SpmmCsrArgs& p, int64_t first, int64_t end, int step, int64_t f, acc_t<T> (&sum)[VEC],
                          longlong2* complaint) {
  constexpr int kFlight = VEC > 4 ? 2 : 4;
  const auto* col = static_cast<const I*>(p.col);
  const T *value = static_cast<const T*>(p.value), *x = static_cast<const T*>(p.x) + f;
  I column[kFlight], next[kFlight];
  auto read = [&](I(&to)[kFlight], int64_t s) {
#pragma unroll
    for (int k = 0; k < kFlight; ++k) to[k] = s + int64_t{k} * step < end ? __ldg(col + s + int64_t{k} * step) : I{0};
  };
  read(next, first);
  for (int64_t s = first; s < end; s += int64_t{step} * kFlight) {
    acc_t<T> v[kFlight][VEC], w[kFlight];
#pragma unroll
    for (int k = 0; k < kFlight; ++k) {
      column[k] = next[k];
      const int64_t slot = s + int64_t{k} * step;
      const bool good = slot < end && inside(column[k], p.num_cols);
      if (slot < end && !good) complain(complaint, column[k], p.num_cols);
      w[k] = good ? to_acc(__ldg(value + slot)) : acc_t<T>{0};
      if (good) {
        load_vector<VEC>(v[k], x + static_cast<int64_t>(column[k]) * p.width);
      } else {
#pragma unroll
        for (int i = 0; i < VEC; ++i) v[k][i] = 0;
      }
    }
    read(next, s + int64_t{step} * kFlight);
#pragma unroll
    for (int k = 0; k < kFlight; ++k)
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum[i] += w[k] * v[k][i];
  }
}

// The groups of a block, and what all kernels here do with a row.
template <class T, class I, int VEC>
struct Block {
  using A = acc_t<T>;
  const SpmmCsrArgs& p;
  const int lanes, thread, groups, group, lane;
  A* shared;  // [VEC][threads]

  __device__ Block(const SpmmCsrArgs& p, int lanes, A* shared)
      : p(p),
        lanes(lanes),
        thread(static_cast<int>(threadIdx.x)),
        groups(static_cast<int>(blockDim.x) / lanes),
        group(thread / lanes),
        lane(thread % lanes),
        shared(shared) {}

  // The slots of a row. Pointers are the user's, too: what they say is cut to what there is.
  __device__ longlong2 bounds(int64_t row) const {
    if (row < 0 || row >= p.num_rows) return longlong2{0, 0};
    const auto* rowptr = static_cast<const I*>(p.rowptr) + row;
    return {max(static_cast<int64_t>(__ldg(rowptr)), int64_t{0}), min(static_cast<int64_t>(__ldg(rowptr + 1)), p.num_edges)};
  }

  // The row that a slot is of.
  __device__ int64_t row_of(int64_t slot) const {
    const auto* rowptr = static_cast<const I*>(p.rowptr);
    int64_t low = 0, count = p.num_rows;
    while (count > 1) {  // each thread looks at one of as many pointers, evenly spaced
      const int64_t step = (count + blockDim.x - 1) / blockDim.x, at = thread * step;
      const int before = __syncthreads_count(at < count && static_cast<int64_t>(__ldg(rowptr + low + at)) <= slot);
      const int64_t skipped = max(before - 1, 0) * step;
      low += skipped;
      count = min(step, count - skipped);
    }
    return low;
  }

  // Calls add(sum, f) of the threads that `add`, for the features from f on that each has, and gives done(sum, f) the sums over
  // the groups that are `index` of `count`. All threads of the block take part.
  template <class Add, class Done>
  __device__ void over_features(bool adds, int index, int count, const Add& add, const Done& done) const {
    for (int64_t slab = 0; slab < p.width; slab += int64_t{lanes} * VEC) {
      const int64_t f = slab + int64_t{lane} * VEC;
      const bool mine = adds && f < p.width;
      A sum[VEC] = {};
      if (mine) add(sum, f);
      for (int half = count / 2; half > 0; half /= 2) {  // those of the groups from `half` on to those before
#pragma unroll
        for (int i = 0; i < VEC; ++i) shared[i * blockDim.x + thread] = sum[i];
        __syncthreads();
        if (index < half) {
#pragma unroll
          for (int i = 0; i < VEC; ++i) sum[i] += shared[i * blockDim.x + thread + half * lanes];
        }
        __syncthreads();
      }
      if (mine && index == 0) done(sum, f);
    }
  }

  __device__ void store(int64_t row, longlong2 own, A (&sum)[VEC], int64_t f) const {
    if (p.mean) {
      const A share = static_cast<A>(max(own.y - own.x, 1LL));
#pragma unroll
      for (int i = 0; i < VEC; ++i) sum[i] /= share;
    }
    store_vector<VEC>(static_cast<T*>(p.out) + row * p.width + f, sum);
  }

  __device__ A* part(const Split& split, int64_t range, bool begins) const {
    return static_cast<A*>(split.part) + (2 * range + begins) * p.width;
  }
};

template <class A>
__device__ A* shared_of_block() {
  extern __shared__ uint4 memory[];
  return reinterpret_cast<A*>(memory);
}

template <class T, class I, int VEC>
__device__ void sum_rows(const Block<T, I, VEC>& b, int64_t nth, int64_t blocks, int team_groups, int64_t most,
                         longlong2* complaint) {
  using A = acc_t<T>;
  __shared__ bool is_long[kMostThreads];
  const int team = b.group / team_groups, member = b.group % team_groups;
  auto row_of = [&](int t) { return nth + t * blocks; };
  auto sum_row = [&](int64_t row, longlong2 own, bool adds, int index, int count) {
    b.over_features(
        adds, index, count,
        [&](A(&sum)[VEC], int64_t f) { add_slots<T, I, VEC>(b.p, own.x + index, own.y, count, f, sum, complaint); },
        [&](A(&sum)[VEC], int64_t f) { b.store(row, own, sum, f); });
  };
  const int64_t mine = row_of(team);
  const longlong2 own = b.bounds(mine);
  const bool not_for_team = own.y - own.x > int64_t{kLong} * team_groups, for_all = not_for_team && own.y - own.x <= most;
  if (member == 0 && b.lane == 0) is_long[team] = for_all;
  sum_row(mine, own, mine < b.p.num_rows && !not_for_team, member, team_groups);
  if (!__syncthreads_or(for_all)) return;
  for (int t = 0; t < b.groups / team_groups; ++t)
    if (is_long[t]) sum_row(row_of(t), b.bounds(row_of(t)), true, b.group, b.groups);
}

// Parts of the at most two rows that are long for a block and so for a range, which they meet: one is there at its first slot,
// one goes on after its last.
template <class T, class I, int VEC>
__device__ void sum_parts(const Block<T, I, VEC>& b, const Split& split, int64_t range, longlong2* complaint) {
  using A = acc_t<T>;
  const long long begin = range * split.size, end = min(begin + split.size, static_cast<long long>(b.p.num_edges));
  int64_t row = b.row_of(begin), first = -1;
  for (int nth = 0; nth < 2; ++nth) {
    const longlong2 own = b.bounds(row);
    if (own.y - own.x > split.most) {
      const bool begins = own.x >= begin;
      if (begins) first = row;
      b.over_features(
          true, b.group, b.groups,
          [&](A(&sum)[VEC], int64_t f) {
            add_slots<T, I, VEC>(b.p, max(own.x, begin) + b.group, min(own.y, end), b.groups, f, sum, complaint);
          },
          [&](A(&sum)[VEC], int64_t f) {
#pragma unroll
            for (int i = 0; i < VEC; ++i) b.part(split, range, begins)[f + i] = sum[i];
          });
    }
    if (own.y >= end) break;
    row = b.row_of(end - 1);
  }
  if (b.thread == 0) split.first[range] = first;
}

template <class T, class I, int VEC>
__global__ void __launch_bounds__(kMostThreads)
    spmm_csr_kernel(const SpmmCsrArgs p, const Split split, int lanes, int team_groups, longlong2* complaint) {
  const Block<T, I, VEC> block(p, lanes, shared_of_block<acc_t<T>>());
  const int64_t nth = blockIdx.x - split.ranges;  // of rows; parts come first, as they take longest
  if (nth < 0)
    sum_parts(block, split, blockIdx.x, complaint);
  else
    sum_rows(block, nth, gridDim.x - split.ranges, team_groups, split.most, complaint);
}

// Adds up the parts of the row that begins in a range.
template <class T, class I, int VEC>
__global__ void __launch_bounds__(kBlock) add_parts_kernel(const SpmmCsrArgs p, const Split split, int lanes) {
  using A = acc_t<T>;
  const Block<T, I, VEC> b(p, lanes, shared_of_block<A>());
  const int64_t range = blockIdx.x, row = split.first[range];
  if (row < 0) return;
  const longlong2 own = b.bounds(row);
  b.over_features(
      true, b.group, b.groups,
      [&](A(&sum)[VEC], int64_t f) {
        for (int64_t r = range + b.group; r * split.size < own.y; r += b.groups)
#pragma unroll
          for (int i = 0; i < VEC; ++i) sum[i] += b.part(split, r, r == range)[f + i];
      },
      [&](A(&sum)[VEC], int64_t f) { b.store(row, own, sum, f); });
}

template <class T, class I, int VEC>
void launch_csr(const SpmmCsrArgs& p, const Tensor& x, cudaStream_t stream) {
  using A = acc_t<T>;
  const bool alone = p.num_edges * std::max<int64_t>(p.width, 16) <= kAlone;
  const int threads = alone ? kMostThreads : kBlock;
  int lanes = 1, team_groups = 1;
  while (lanes < kWarp && lanes * VEC < p.width) lanes *= 2;
  const int groups = threads / lanes;
  while (team_groups < groups && team_groups * kShare * p.num_rows <= p.num_edges) team_groups *= 2;
  Split split{0, p.num_edges, p.num_edges, nullptr, nullptr};
  Tensor parts;
  if (!alone) {
    split.size = std::max((p.num_edges + kRanges - 1) / kRanges, std::max(kLeast / p.width, int64_t{kLong}));
    split.ranges = (p.num_edges + split.size - 1) / split.size;
    split.most = std::max(split.size, int64_t{kLong} * team_groups);  // what a team takes has no parts
    const auto size = static_cast<int64_t>(2 * sizeof(A)) * p.width;  // of a range
    parts = make_empty(x, {split.ranges * (size + static_cast<int64_t>(sizeof(int64_t)))}, ScalarType::Byte);
    split.first = static_cast<int64_t*>(parts.mutable_data_ptr());
    split.part = split.first + split.ranges;
  }
  const int64_t teams = groups / team_groups, blocks = (p.num_rows + teams - 1) / teams + split.ranges;
  GNNFAST_CHECK(blocks <= 2147483647, p.num_rows, " rows are more than one CUDA launch can take");
  const size_t shared = threads * VEC * sizeof(A);
  spmm_csr_kernel<T, I, VEC>
      <<<static_cast<unsigned>(blocks), threads, shared, stream>>>(p, split, lanes, team_groups, complaints());
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  if (alone) return;
  add_parts_kernel<T, I, VEC><<<static_cast<unsigned>(split.ranges), kBlock, shared, stream>>>(p, split, lanes);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

Tensor spmm_csr(const Tensor& rowptr_, const Tensor& col_, const Tensor& value_, const Tensor& x_, bool mean) {
  const Tensor rowptr = as_contiguous(rowptr_), col = as_contiguous(col_), value = as_contiguous(value_);
  const Tensor x = check_features("x", x_, -1);
  SpmmCsrArgs args;
  Tensor out = check_spmm_csr(args, rowptr, col, value, x, mean);
  if (args.num_rows * args.width == 0) return out;
  const Launch launch(x);
  dispatch_cuda(dtype_of("x", x), [&](auto type) {
    using T = typename decltype(type)::type;
    const bool vectors = args.width % kVec<T> == 0 && aligned16(args.x);
    dispatch_index("rowptr", rowptr.scalar_type(), [&](auto index) {
      using I = typename decltype(index)::type;
      vectors ? launch_csr<T, I, kVec<T>>(args, x, launch.stream) : launch_csr<T, I, 1>(args, x, launch.stream);
    });
  });
  return out;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(gnnfast, CUDA, m) { m.impl("spmm_csr", TORCH_BOX(&spmm_csr)); }

}  // namespace gnnfast
