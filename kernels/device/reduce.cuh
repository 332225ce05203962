/* Sums over the 32 lanes of a warp, by shuffles: five steps, each of which halves what is left to do. All lanes take
   part, and all get the result. A lane that has left would give a value that nobody knows. */
#pragma once

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
    for (int lane_mask = 16; lane_mask; lane_mask /= 2) v += __shfl_xor_sync(~0u, v, lane_mask);
    return v;
}

/* N sums at once, N a power of two: lane l returns the total of v[l / (32 / N)]. Each of the first steps hands half of
   the sums to the other half of the lanes, so that N = 4 takes 2 + 1 + 3 shuffles instead of 4 * 5. */
template <int N> __device__ __forceinline__ float warp_sums(float (&v)[N], int lane) {
    int lane_mask = 16;
#pragma unroll
    for (int n = N / 2; n > 0; n /= 2, lane_mask /= 2) {
        bool upper = lane & lane_mask;
#pragma unroll
        for (int r = 0; r < n; r++) {
            float mine = upper ? v[r + n] : v[r], yours = upper ? v[r] : v[r + n];
            v[r] = mine + __shfl_xor_sync(~0u, yours, lane_mask);
        }
    }
    for (; lane_mask > 0; lane_mask /= 2) v[0] += __shfl_xor_sync(~0u, v[0], lane_mask);
    return v[0];
}
