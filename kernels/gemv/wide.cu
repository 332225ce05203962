/* Rung 3, wide: 32 warps work on 32 rows, and one warp stores all 32 results in one request. The
   results cross from "one per warp" to "one per lane" through shared memory: a transpose of 32
   numbers.

   New since warp: the end. Stores use every byte of their sectors; the price is one barrier, at
   which 31 warps wait for the slowest. y is a 1/cols part of the traffic, so the counters gain more
   than the clock. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
using T = DTYPE;
constexpr int ROWS = 32; // of a block, one a warp: launch 32 * ROWS threads

extern "C" __global__ void __launch_bounds__(32 * ROWS)
gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    __shared__ float sums[ROWS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long first = (long long)blockIdx.x * ROWS, row = first + warp;
    float sum = 0;
    if (row < rows) // a warp without a row comes to the barrier like the others
        for (long long c = lane; c < cols; c += 32) sum += (float)W[row * cols + c] * (float)x[c];
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp == 0 && first + lane < rows) y[first + lane] = (T)sums[lane];
}
