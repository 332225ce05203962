/* How rungs 2 and 3 fill a stage: all threads copy, by cp.async, and compute addresses for it. */
#pragma once
#include "../device/copy.cuh"
#include "square_tile.cuh"

/* TILE rows of x or W, STEP numbers of each; zeros outside. */
__device__ __forceinline__ void load(unsigned char *to, const T *from, long long first, int begin, long long rows,
                                     int k) {
#pragma unroll
    for (int i = 0; i < TILE * 8 / THREADS; i++) {
        const int row = (i * THREADS + threadIdx.x) / 8, word = threadIdx.x % 8;
        const bool inside = first + row < rows && begin + word * 8 < k;
        copy_async_or_zero(shared_address(to + swizzled(row, word)),
                           inside ? from + (first + row) * k + begin + word * 8 : from, inside);
    }
}
