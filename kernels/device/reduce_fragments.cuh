/* Sums and maxima over a row or a column of an mma's sums (mma.cuh), by shuffles: 4 lanes have a row, 8 a column. All
   lanes of the warp take part, and each gets the result of its own row or column. */
#pragma once

__device__ __forceinline__ float row_max(float v) {
#pragma unroll
    for (int lane_mask = 1; lane_mask < 4; lane_mask *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, lane_mask));
    return v;
}
__device__ __forceinline__ float column_max(float v) {
#pragma unroll
    for (int lane_mask = 4; lane_mask < 32; lane_mask *= 2) v = fmaxf(v, __shfl_xor_sync(~0u, v, lane_mask));
    return v;
}
__device__ __forceinline__ float column_sum(float v) {
#pragma unroll
    for (int lane_mask = 4; lane_mask < 32; lane_mask *= 2) v += __shfl_xor_sync(~0u, v, lane_mask);
    return v;
}
