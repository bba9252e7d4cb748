// Random bits of dropout, the same on each device: Philox4x32-10 (Salmon et al., SC 2011) of a seed, an edge id and a number.
// Static: a copy that was compiled for other instructions must not be kept by the linker (common/types.h).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define GNNFAST_BOTH __host__ __device__
#else
#define GNNFAST_BOTH
#endif

namespace gnnfast {

struct Bits128 {
  uint32_t v[4];
};

GNNFAST_BOTH static inline Bits128 philox(uint64_t seed, uint32_t edge, uint32_t number) {
  uint32_t c0 = edge, c1 = number, c2 = 0, c3 = 0, k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53u} * c0, b = uint64_t{0xCD9E8D57u} * c2;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b), c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

constexpr int kMostDropHeads = 32;  // heads that dropout is drawn for

// Of 65,536 equally likely draws, those that keep an edge, and what the kept are multiplied by.
GNNFAST_BOTH static inline uint32_t kept_of_65536(double dropout) {
  const double kept = (1 - dropout) * 65536 + 0.5;
  return kept < 1 ? 1u : static_cast<uint32_t>(kept);
}
GNNFAST_BOTH static inline double kept_scale(double dropout) { return 65536.0 / kept_of_65536(dropout); }

// Bit h: whether head h of an edge is kept; 8 heads from one draw.
GNNFAST_BOTH static inline uint32_t kept_heads(uint64_t seed, uint32_t edge, int heads, uint32_t kept) {
  uint32_t mask = 0;
  for (int h0 = 0; h0 < heads; h0 += 8) {
    const Bits128 bits = philox(seed, edge, static_cast<uint32_t>(h0));
    for (int i = 0; i < 8; ++i) mask |= static_cast<uint32_t>(((bits.v[i / 2] >> (i % 2 * 16)) & 0xffffu) < kept) << (h0 + i);
  }
  return mask;
}

}  // namespace gnnfast
