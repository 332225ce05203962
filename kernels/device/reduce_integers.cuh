/* Whole numbers over the 32 lanes of a warp, by shuffles, as in reduce.cuh: all lanes take part, and all get the
   result. */
#pragma once

__device__ __forceinline__ int warp_sum(int v) {
#pragma unroll
    for (int lane_mask = 16; lane_mask; lane_mask /= 2) v += __shfl_xor_sync(~0u, v, lane_mask);
    return v;
}

/* The sum of the values of all lanes up to this one, its own too. */
__device__ __forceinline__ unsigned warp_sum_up_to(unsigned v, int lane) {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        unsigned before = __shfl_up_sync(~0u, v, distance);
        if (lane >= distance) v += before;
    }
    return v;
}

/* The largest of both halves of a register, each for itself. */
__device__ __forceinline__ unsigned warp_max_u16x2(unsigned v) {
#pragma unroll
    for (int lane_mask = 16; lane_mask; lane_mask /= 2) v = __vmaxu2(v, __shfl_xor_sync(~0u, v, lane_mask));
    return v;
}

#if __CUDA_ARCH__ < 800 // which has no instruction for it: CUDA's own names, for a whole warp
__device__ __forceinline__ int __reduce_add_sync(unsigned, int v) { return warp_sum(v); }
__device__ __forceinline__ unsigned __reduce_max_sync(unsigned, unsigned v) {
#pragma unroll
    for (int lane_mask = 16; lane_mask; lane_mask /= 2) v = max(v, __shfl_xor_sync(~0u, v, lane_mask));
    return v;
}
#endif
