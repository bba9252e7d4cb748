// For arithmetic that is written once for both devices.
#pragma once

#if defined(__CUDACC__)
#define GNNFAST_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define GNNFAST_HOST_DEVICE inline __attribute__((always_inline))
#endif
