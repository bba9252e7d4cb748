// Which edges of a row a sampled SpMM takes. A row of more than `width` edges gives `width` draws, a shorter one all its edges.
//
//   kBucket    draw i is slot i                                      (ES-SpMM, Lin et al., 2021: "bucket")
//   kFastrand  draw i is slot (i * 577) mod nnz                      (the same: "fastrand")
//   kRandom    the row's slots, rotated by a random number, are cut into `width` runs of equal length (give or take one), and
//   of
//              each run one slot is drawn. Every edge is taken with probability width / nnz exactly, no edge twice; and since
//              the run that a slot lies in follows from its position, is_taken answers from either end of an edge.
//
// 577 is prime: draws of kFastrand repeat only where nnz is a multiple of 577 and then have nnz / 577 different slots, each
// taken width * 577 / nnz times (rounded up or down); both sums and means count them as often as they are drawn.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define GNNFAST_BOTH __host__ __device__
#else
#define GNNFAST_BOTH
#endif

namespace gnnfast {

enum SampleStrategy : int { kBucket, kFastrand, kRandom };

struct Draw {
  SampleStrategy strategy;
  uint32_t width;  // at least 1
  uint64_t seed;
};

GNNFAST_BOTH inline uint32_t draws_of(const Draw& draw, uint32_t nnz) { return nnz < draw.width ? nnz : draw.width; }

// The finaliser of SplitMix64 (Steele et al., OOPSLA 2014) over the seed, the row and the run.
GNNFAST_BOTH inline uint32_t hash(uint64_t seed, uint32_t row, uint32_t run) {
  uint64_t z = seed + ((uint64_t{row} << 32 | run) + 1) * 0x9e3779b97f4a7c15ull;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<uint32_t>((z ^ (z >> 31)) >> 32);
}

// A number below `count` from 32 random bits.
GNNFAST_BOTH inline uint32_t below(uint32_t bits, uint32_t count) {
  return static_cast<uint32_t>(uint64_t{bits} * count >> 32);
}

GNNFAST_BOTH inline uint32_t rotation(const Draw& draw, uint32_t row, uint32_t nnz) {
  return below(hash(draw.seed, row, 0xffffffffu), nnz);
}

// n / c where the result has 32 bits. On the device by a reciprocal in double and a correction: the compiler's own division of
// 64 bits is a call, around which the kernel keeps fewer gathers in registers.
GNNFAST_BOTH inline uint32_t divide(uint64_t n, uint32_t c) {
#if defined(__CUDA_ARCH__)
  double inverse = __fdividef(1.0f, static_cast<float>(c));
  for (int i = 0; i < 2; ++i) inverse *= fma(-static_cast<double>(c), inverse, 2.0);
  const uint32_t q = static_cast<uint32_t>(static_cast<double>(n) * inverse);
  const int64_t rest = static_cast<int64_t>(n - uint64_t{q} * c);
  return rest < 0 ? q - 1 : rest >= c ? q + 1 : q;
#else
  return static_cast<uint32_t>(n / c);
#endif
}

// The slot of run `run`, before rotation.
GNNFAST_BOTH inline uint32_t slot_in_run(const Draw& draw, uint32_t row, uint32_t run, uint32_t nnz) {
  const uint32_t first = divide(uint64_t{run} * nnz, draw.width), next = divide(uint64_t{run + 1} * nnz, draw.width);
  return first + below(hash(draw.seed, row, run), next - first);
}

// The position within its row of draw `i < draws_of(draw, nnz)`.
GNNFAST_BOTH inline uint32_t position_of(const Draw& draw, uint32_t row, uint32_t i, uint32_t nnz) {
  if (nnz <= draw.width || draw.strategy == kBucket) return i;
  if (draw.strategy == kFastrand) {
    const uint64_t product = uint64_t{i} * 577;  // below 577 nnz, for i < nnz
    return static_cast<uint32_t>(product - uint64_t{divide(product, nnz)} * nnz);
  }
  const uint64_t turned = uint64_t{slot_in_run(draw, row, i, nnz)} + rotation(draw, row, nnz);
  return static_cast<uint32_t>(turned < nnz ? turned : turned - nnz);
}

// Calls f(position) for each draw of a row in turn, without the divisions that position_of needs to find one by itself.
template <class F>
void for_each_draw(const Draw& draw, uint32_t row, uint32_t nnz, const F& f) {
  const uint32_t draws = draws_of(draw, nnz);
  if (draws == nnz || draw.strategy == kBucket) {
    for (uint32_t i = 0; i < draws; ++i) f(i);
  } else if (draw.strategy == kFastrand) {
    const uint32_t step = 577 % nnz;
    for (uint32_t i = 0, at = 0; i < draws; ++i) {
      f(at);
      at += step;
      if (at >= nnz) at -= nnz;
    }
  } else {
    const uint32_t turn = rotation(draw, row, nnz), quotient = nnz / draw.width, rest = nnz % draw.width;
    for (uint32_t run = 0, first = 0, carry = 0; run < draws; ++run) {
      carry += rest;
      const bool longer = carry >= draw.width;
      if (longer) carry -= draw.width;
      const uint32_t length = quotient + longer, turned = first + below(hash(draw.seed, row, run), length) + turn;
      f(turned < nnz ? turned : turned - nnz);
      first += length;
    }
  }
}

// Whether kRandom takes the edge at `position` of its row.
GNNFAST_BOTH inline bool is_taken(const Draw& draw, uint32_t row, uint32_t position, uint32_t nnz) {
  if (nnz <= draw.width) return true;
  const uint32_t turn = rotation(draw, row, nnz), slot = position >= turn ? position - turn : position + (nnz - turn);
  // The last run that begins at or before the slot: run * nnz / width < slot + 1.
  const uint32_t run = divide((uint64_t{slot} + 1) * draw.width - 1, nnz);
  return slot_in_run(draw, row, run, nnz) == slot;
}

}  // namespace gnnfast
