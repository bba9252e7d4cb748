// CUDA SpMM over CSR, after the degree bins of Accel-GCN (Xie et al., ICCAD 2023): common/walk.cuh goes over the work items,
// and here is the reducer. TPR lanes hold VEC features each (16-byte loads) of one row and gather from one edge at a time.
// Column ids and scalar weights are read once by the lanes and passed by shuffle; 4 gathers a lane are in flight. Partial
// results are combined by shuffle and through shared memory and stored once: no memset, no atomics. Pieces of rows too long for
// a block go to a workspace, which a second, small kernel combines.
//
// Slabs: blockIdx.y counts slabs of features, and blocks start in the order of blockIdx.x, so that the device works on one slab
// at a time and more of its X stays in L2, for the price of reading the indices once a slab (slab_bytes).
//
// Bytes that must move, per edge: 4 (col) + 4 (perm, with weights) + sizeof(weight), once a slab, and F * sizeof(T) (gather).
#pragma once

#include <limits>

#include "common/vec.cuh"
#include "common/walk.cuh"
#include "spmm_tuning.cuh"

namespace gnnfast {

constexpr bool is_max(int op) { return op == kMax || op == kMaxFirst || op == kMaxCount; }

// Takes `v`, attained by `aux_v` (first edge, or number of edges), into the running maximum.
template <int OP, class A>
__device__ inline void take_max(A& best, int32_t& aux, A v, int32_t aux_v) {
#if __CUDA_ARCH__ >= 800
  if constexpr (OP == kMax && sizeof(A) == 4) {
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(best) : "f"(best), "f"(v));
    return;
  }
#endif
  const bool better = v > best || (v != v && best == best);
  if constexpr (OP == kMaxFirst) {
    // Groups and pieces are merged in any order of edges: of equal values the first slot wins.
    const bool same = v == best || (v != v && best != best);
    if (better || (same && static_cast<uint32_t>(aux_v) < static_cast<uint32_t>(aux))) aux = aux_v;
  } else if constexpr (OP == kMaxCount) {
    aux = better ? aux_v : aux + (v == best ? aux_v : 0);
  }
  if (better) best = v;
}

// Workspace of the pieces: acc_t [num_pieces, F] and, for max and min, int32 [num_pieces, F].
struct Pieces {
  void* value;
  int32_t* aux;
};

// Sums N values over LANES lanes, both powers of two, with fewer shuffles than one sum after the other: while there are several
// values, half of the lanes hand half of the values to the others. Lane t ends with the sums of values first .. first + n - 1
// in v[0 .. n - 1], n = max(1, N / LANES).
template <int N, int LANES, class A>
__device__ inline int sum_many(A (&v)[N], int t) {
  int first = 0;
#pragma unroll
  for (int o = LANES / 2, n = N; o > 0; o /= 2) {
    if (n > 1) {
      n /= 2;
      const bool upper = t & o;
#pragma unroll
      for (int i = 0; i < n; ++i) {
        const A other = __shfl_xor_sync(kAllLanes, upper ? v[i] : v[i + n], o);
        v[i] = (upper ? v[i + n] : v[i]) + other;
      }
      first += upper ? n : 0;
    } else {
      v[0] += __shfl_xor_sync(kAllLanes, v[0], o);
    }
  }
  return first;
}

// Values, and what some maxima keep beside them: the slot of the first edge; or of the edges that attain it the column, or the
// slot where edges have weights, if they have one: else kSeveral. That means nothing where the value is NaN.
constexpr int32_t kSeveral = -1;

template <class A, int VEC, int OP>
struct Reduced {
  A acc[VEC];

  __device__ void start(int i, A value, int32_t) { acc[i] = value; }
  __device__ void merge(int i, const Reduced& other) { take(i, other.acc[i], 0); }
  __device__ void take(int i, A v, int32_t) {
    int32_t none = 0;
    take_max<OP>(acc[i], none, v, 0);
  }
};
template <class A, int VEC>
struct Reduced<A, VEC, kMaxFirst> {
  A acc[VEC];
  int32_t aux[VEC];

  __device__ void start(int i, A value, int32_t slot) { acc[i] = value, aux[i] = slot; }
  // Groups and pieces are merged in any order of edges: of equal values the first slot wins.
  __device__ void merge(int i, const Reduced& other) { take_max<kMaxFirst>(acc[i], aux[i], other.acc[i], other.aux[i]); }
  // A lane takes its edges in order.
  __device__ void take(int i, A v, int32_t slot) {
    if (!(v <= acc[i]) && acc[i] == acc[i]) aux[i] = slot;
    int32_t none = 0;
    take_max<kMax>(acc[i], none, v, 0);
  }
};
template <class A, int VEC>
struct Reduced<A, VEC, kMaxCount> {
  A acc[VEC];
  int32_t aux[VEC];

  __device__ void start(int i, A value, int32_t) { acc[i] = value, aux[i] = kSeveral; }
  __device__ void merge(int i, const Reduced& other) {
    tie(i, other.acc[i], other.aux[i]);
    take(i, other.acc[i], other.aux[i]);
  }
  __device__ void tie(int i, A v, int32_t id) {
    if (v == acc[i] && id != aux[i]) aux[i] = kSeveral;
  }
  __device__ void take(int i, A v, int32_t id) {
    if (!(v <= acc[i])) aux[i] = id;
    int32_t none = 0;
    take_max<kMax>(acc[i], none, v, 0);
  }
};

// The part of a row's reduction that one lane holds: VEC features of the edges that its group takes.
template <class T, int OP, int W, int VEC, int TPR>
struct Partial {
  using A = acc_t<T>;
  static constexpr int kTpr = TPR;
  static constexpr bool kNeedsId = (W != kNone) || OP == kSumWhereFirst || OP == kSumAndDot;
  static constexpr int kFlight = kSpmmFlight<OP, W>;
  static constexpr int kColumns = kFlight > TPR ? kFlight / TPR : 1;
  static constexpr bool kHot = is_hot(OP);
  static constexpr bool kReadAhead = kSpmmReadAhead<TPR>;
  static constexpr bool kAux = OP == kMaxFirst || OP == kMaxCount;
  using State = Reduced<A, VEC, OP>;

  const SpmmArgs& p;
  const Pieces& pieces;
  const int lane, t;
  const int64_t f, head;
  const bool active, first_slab;
  const char* x;
  const uint32_t row_bytes;
  State now;
  A self[VEC];

  __device__ Partial(const SpmmArgs& p, const Pieces& pieces, int lane, int64_t f, bool active, bool first_slab)
      : p(p),
        pieces(pieces),
        lane(lane),
        t(lane % TPR),
        f(f),
        head(W == kPerHead ? f / (p.width / p.heads) : 0),
        active(active),
        first_slab(first_slab),
        x(static_cast<const char*>(p.x) + f * sizeof(T)),
        row_bytes(static_cast<uint32_t>(p.width * sizeof(T))) {
    asm volatile("" : "+l"(x));  // else the sum is made again for each edge
  }

  __device__ void start(int row, int begin) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      now.start(i, is_max(OP) ? -std::numeric_limits<A>::infinity() : A{0}, begin);
      self[i] = 0;
    }
    if constexpr (OP == kSumWhereEqual || OP == kSumAndDot)
      load_vector<VEC>(self, static_cast<const T*>(p.self) + int64_t{row} * p.width + f);
  }

  // The indices and weights of a batch of edges, kColumns a lane.
  struct Edges {
    int col[kColumns], id[kColumns];
    A w[kColumns];

    template <int LANES>
    __device__ void read(const Partial& m, int first, int end) {
#pragma unroll
      for (int u = 0; u < kColumns; ++u) {
        const int slot = first + u * LANES + m.lane % LANES;
        col[u] = id[u] = 0;
        w[u] = 0;
        if (slot < end) {
          col[u] = __ldg(m.p.a.col + slot);
          if constexpr (kNeedsId) id[u] = m.p.a.perm ? __ldg(m.p.a.perm + slot) : slot;
          if constexpr (W == kScalar) w[u] = to_acc(__ldg(static_cast<const T*>(m.p.weight) + id[u]));
        }
      }
    }
  };

  // The group's edges j .. j + kFlight - 1 of a batch of `count`. `WHOLE`: all exist, so that no load needs a check.
  template <int LANES, bool WHOLE>
  __device__ void take(int j, int group, int count, int first_slot, const Edges& edges) {
    constexpr int G = LANES / TPR;
    A weight[kFlight], dot[kFlight];
    int edge[kFlight], column[kFlight];
    Raw<T, VEC> v[kFlight], full[kFlight], value[kFlight];
    int32_t arg[kFlight][VEC];
    auto exists = [&](int c) { return WHOLE || (j + c) * G + group < count; };
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      // An edge that does not exist is read as the last one that does, so that loads need no branch; what is read is not used.
      const int wanted = (j + c) * G + group, k = WHOLE ? wanted : max(min(wanted, count - 1), 0);
      column[c] = from_lane<LANES, TPR>(edges.col, k, c);
      const uint64_t row = static_cast<uint32_t>(column[c]);
      if constexpr (W == kPerHead || W == kPerElement || OP == kSumWhereFirst) edge[c] = from_lane<LANES, TPR>(edges.id, k, c);
      weight[c] = W == kScalar ? from_lane<LANES, TPR>(edges.w, k, c) : A{1};
      v[c].load(reinterpret_cast<const T*>(x + row * row_bytes));
      if constexpr (W == kPerHead)
        weight[c] = to_acc(__ldg(static_cast<const T*>(p.weight) + int64_t{edge[c]} * p.heads + head));
      if constexpr (W == kPerElement) full[c].load(static_cast<const T*>(p.weight) + int64_t{edge[c]} * p.width + f);
      if constexpr (OP == kSumWhereEqual) value[c].load(static_cast<const T*>(p.value) + row * p.width + f);
      if constexpr (OP == kSumWhereFirst) load_ints<VEC>(arg[c], p.arg + row * p.width + f);
    }
#pragma unroll
    for (int c = 0; c < kFlight; ++c) {
      dot[c] = 0;
      A message[VEC];
      bool ties = false;
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const A e = v[c].get(i), we = W == kPerElement ? full[c].get(i) : weight[c];
        if constexpr (OP == kSum || OP == kSumAndDot) {
          if (exists(c)) now.acc[i] = W == kNone ? now.acc[i] + e : now.acc[i] + we * e;
          if (OP == kSumAndDot) dot[c] += self[i] * e;
        } else if constexpr (is_max(OP)) {
          const A product = W == kNone ? e : round_to<T>(we * e);
          message[i] = p.negate ? -product : product;
          if (OP == kMaxCount) ties |= message[i] == now.acc[i];
        } else if constexpr (OP == kSumWhereEqual) {
          const A message = W == kNone ? self[i] : round_to<T>(we * self[i]);
          if (exists(c)) now.acc[i] += share_of_best(message, value[c].get(i), W == kNone ? e : we * e);
        } else {
          if (exists(c) && arg[c][i] == edge[c]) now.acc[i] += W == kNone ? e : we * e;
        }
      }
      if (OP == kSumAndDot && !active) dot[c] = 0;  // the lane repeats the features of another
      if constexpr (is_max(OP)) {
        if (!exists(c)) continue;
        const int id = OP == kMaxCount && W == kNone ? column[c] : first_slot + (j + c) * G + group;
        if constexpr (OP == kMaxCount) {
          if (ties) {  // seldom, and comparisons are what this waits for
#pragma unroll
            for (int i = 0; i < VEC; ++i) now.tie(i, message[i], id);
          }
        }
#pragma unroll
        for (int i = 0; i < VEC; ++i) now.take(i, message[i], id);
      }
    }
    if constexpr (OP == kSumAndDot && W == kPerHead) {
      // Lanes of one head are neighbours and their number is a power of two (can_fuse_dot).
      const int lanes = static_cast<int>(p.width / p.heads) / VEC;
#pragma unroll
      for (int c = 0; c < kFlight; ++c) {
        for (int o = 1; o < lanes; o <<= 1) dot[c] += __shfl_xor_sync(kAllLanes, dot[c], o);
        if (active && exists(c) && t % lanes == 0)
          static_cast<T*>(p.dot)[int64_t{edge[c]} * p.heads + head] = from_acc<T>(dot[c]);
      }
    } else if constexpr (OP == kSumAndDot) {
      static_assert(kFlight <= TPR);
      const int mine = j + sum_many<kFlight, TPR>(dot, t), k = mine * G + group;
      const int id = p.a.perm ? __shfl_sync(kAllLanes, edges.id[0], k, LANES) : first_slot + k;
      if (t % (TPR / kFlight) == 0 && (WHOLE || k < count)) store_dot(id, dot[0]);
    }
  }

  __device__ void store_dot(int edge, A dot) const {
    T* at = static_cast<T*>(p.dot) + edge;
    *at = from_acc<T>(first_slab ? dot : to_acc(*at) + dot);
  }

  __device__ State& state() { return now; }

  __device__ void merge(const State& other) {
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      if constexpr (is_max(OP))
        now.merge(i, other);
      else
        now.acc[i] += other.acc[i];
    }
  }

  // Stores the finished values of one row.
  __device__ void store_row(int64_t row, int64_t degree) {
    if constexpr (is_max(OP)) {
#pragma unroll
      for (int i = 0; i < VEC; ++i) {
        const bool none = degree == 0 || (p.finite && isinf(now.acc[i]));
        now.acc[i] = none ? static_cast<A>(p.empty) : p.negate ? -now.acc[i] : now.acc[i];
        if constexpr (OP == kMaxFirst) {
          const int32_t slot = now.aux[i], edge = !none && !p.alone && p.a.perm ? p.a.perm[slot] : slot;
          p.aux[row * p.width + f + i] = p.alone ? (none ? 0 : ~slot) : none ? -1 : edge;
        }
        if constexpr (OP == kMaxCount) {
          const bool number = degree > 0 && now.acc[i] == now.acc[i], zero = p.count_zero && now.acc[i] == 0;
          const bool alone = p.alone && number && !zero && now.aux[i] != kSeveral;
          p.aux[row * p.width + f + i] = alone ? ~now.aux[i] : !number || zero;  // count_ties adds the edges
        }
      }
    } else {
      if (p.mean && degree > 0) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) now.acc[i] /= static_cast<A>(degree);
      }
      if (OP == kSum && p.scale) {
        const A scale = static_cast<A>(__ldg(p.scale + row));
#pragma unroll
        for (int i = 0; i < VEC; ++i) now.acc[i] *= scale;
      }
    }
    store_vector<VEC>(static_cast<T*>(p.out) + row * p.width + f, now.acc);
  }

  __device__ void store_piece(int64_t piece) {
    const int64_t at = piece * p.width + f;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
      static_cast<A*>(pieces.value)[at + i] = now.acc[i];
      if constexpr (kAux) pieces.aux[at + i] = now.aux[i];
    }
  }

  // One feature of what store_piece has stored.
  __device__ State load_piece(int64_t piece) const {
    State found;
    found.acc[0] = static_cast<const A*>(pieces.value)[piece * p.width + f];
    if constexpr (kAux) found.aux[0] = pieces.aux[piece * p.width + f];
    return found;
  }
};

template <class T, int OP, int W, int VEC, int TPR>
__global__ void __launch_bounds__(kBlock, kSpmmResident<T, OP, W, TPR>)
    spmm_kernel(const SpmmArgs p, const Pieces pieces, int slab_lanes, int first_slab, int short_rows) {
  const int lane = threadIdx.x % kWarp, t = lane % TPR;
  // Lanes without features of their own repeat the last ones, so that no load needs a check, and store nothing.
  const int64_t wanted = (int64_t{blockIdx.y + first_slab} * slab_lanes + t) * VEC;
  const bool active = t < slab_lanes && wanted < p.width;
  const int64_t f = active ? wanted : min((int64_t{blockIdx.y + first_slab} + 1) * slab_lanes * VEC, p.width) - VEC;
  Partial<T, OP, W, VEC, TPR> mine(p, pieces, lane, f, active, first_slab == 0);
  walk_items(mine, p.a, short_rows);
}

template <class T, int OP>
__global__ void __launch_bounds__(kBlock) combine_kernel(const SpmmArgs p, const Pieces pieces) {
  using R = Partial<T, OP, kNone, 1, kWarp>;
  auto make = [&](int64_t f) { return R(p, pieces, threadIdx.x % kWarp, f, true, true); };
  combine_items<R>(p.a, p.width, make, [&](const R& row, int64_t piece) { return row.load_piece(piece); });
}

template <class T, int OP, int W, int VEC, int TPR>
void launch_spmm(const SpmmArgs& p, const Pieces& pieces, int slab_lanes, cudaStream_t stream) {
  const ItemGrid items = item_grid<TPR>(p.a);
  const int64_t per_slab = int64_t{slab_lanes} * VEC, slabs = (p.width + per_slab - 1) / per_slab;
  // Dot products are added up over the slabs, so those come one after the other.
  const unsigned at_once = OP == kSumAndDot ? 1 : static_cast<unsigned>(slabs);
  for (int slab = 0; slab < slabs; slab += at_once) {
    const dim3 grid(items.blocks, at_once);
    spmm_kernel<T, OP, W, VEC, TPR><<<grid, kBlock, 0, stream>>>(p, pieces, slab_lanes, slab, items.short_rows);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
  if (p.a.num_pieces > 0) {
    combine_kernel<T, OP><<<blocks_for(p.a.num_pieces * kWarp), kBlock, 0, stream>>>(p, pieces);
    STD_CUDA_KERNEL_LAUNCH_CHECK();
  }
}

// The fewest lanes that cover a slab, so that the others can take further edges. Only the plain sum has all of them.
template <class T, int OP, int W, int VEC>
void launch_lanes(const SpmmArgs& p, const Pieces& pieces, cudaStream_t stream) {
  const int64_t lanes = (p.width + VEC - 1) / VEC, bytes = VEC * sizeof(T);
  const int64_t most = std::min<int64_t>(std::max<int64_t>(slab_bytes(p, p.width * sizeof(T)) / bytes, 1), kWarp);
  const int64_t slabs = (lanes + most - 1) / most;
  const int slab = static_cast<int>((lanes + slabs - 1) / slabs);  // slabs of equal width
  constexpr bool kPlain = is_hot(OP) && VEC == kVec<T> && sizeof(T) < 8, kUniform = W == kNone || W == kScalar;
  if constexpr (kPlain && OP == kSum && kUniform) {
    if (slab <= 2) return launch_spmm<T, OP, W, VEC, 2>(p, pieces, slab, stream);
    if (slab <= 4) return launch_spmm<T, OP, W, VEC, 4>(p, pieces, slab, stream);
  }
  if constexpr (VEC == kVec<T> || (OP == kSum && kUniform))
    if (slab <= 8) return launch_spmm<T, OP, W, VEC, 8>(p, pieces, slab, stream);
  if constexpr (kPlain)
    if (slab <= 16) return launch_spmm<T, OP, W, VEC, 16>(p, pieces, slab, stream);
  return launch_spmm<T, OP, W, VEC, 32>(p, pieces, slab, stream);
}

// The widest loads that the number of features and the addresses allow.
template <class T, int OP, int W>
void launch_vectors(const SpmmArgs& p, const Pieces& pieces, cudaStream_t stream) {
  auto fits = [&](int64_t vec) {
    auto aligned = [&](const void* at, int64_t size) { return reinterpret_cast<uintptr_t>(at) % (vec * size) == 0; };
    constexpr int64_t kSize = sizeof(T);
    return p.width % vec == 0 && (W != kPerHead || p.width / p.heads % vec == 0) && aligned(p.x, kSize) &&
           (W != kPerElement || aligned(p.weight, kSize)) && aligned(p.self, kSize) && aligned(p.value, kSize) &&
           aligned(p.arg, sizeof(int32_t));
  };
  if (OP == kSumAndDot || fits(kVec<T>)) return launch_lanes<T, OP, W, kVec<T>>(p, pieces, stream);  // can_fuse_dot
  if constexpr (OP == kSum && kVec<T> > 2 && (W == kNone || W == kScalar))
    if (fits(kVec<T> / 2)) return launch_lanes<T, OP, W, kVec<T> / 2>(p, pieces, stream);
  if constexpr (OP != kSumAndDot) return launch_lanes<T, OP, W, 1>(p, pieces, stream);
}

template <class T, int OP>
void launch_weight(const SpmmArgs& p, const Pieces& pieces, cudaStream_t stream) {
  if constexpr (OP == kSum)
    if (p.mode == kElementWeight) return launch_vectors<T, OP, kPerElement>(p, pieces, stream);
  if constexpr (OP != kSumAndDot)  // which is never without weights
    if (p.mode == kNoWeight) return launch_vectors<T, OP, kNone>(p, pieces, stream);
  if (p.heads == 1) return launch_vectors<T, OP, kScalar>(p, pieces, stream);
  return launch_vectors<T, OP, kPerHead>(p, pieces, stream);  // a weight for each feature is one of heads of one feature
}

template <class T>
void launch_op(const SpmmArgs& p, const Pieces& pieces, cudaStream_t stream) {
  switch (p.op) {
    case kSum:
      return launch_weight<T, kSum>(p, pieces, stream);
    case kMax:
      return launch_weight<T, kMax>(p, pieces, stream);
    case kMaxFirst:
      return launch_weight<T, kMaxFirst>(p, pieces, stream);
    case kMaxCount:
      return launch_weight<T, kMaxCount>(p, pieces, stream);
    case kSumWhereEqual:
      return launch_weight<T, kSumWhereEqual>(p, pieces, stream);
    case kSumWhereFirst:
      return launch_weight<T, kSumWhereFirst>(p, pieces, stream);
    case kSumAndDot:
      return launch_weight<T, kSumAndDot>(p, pieces, stream);
  }
}

// One translation unit per dtype (spmm_cuda_*.cu), so that they compile in parallel.
#define GNNFAST_SPMM_EXTERN(PREFIX, T) PREFIX template void launch_op<T>(const SpmmArgs&, const Pieces&, cudaStream_t);

}  // namespace gnnfast
