/* Rung 2, warp: a whole warp works on one row. Its 32 lanes read 32 neighbouring weights, so that
   one load touches as few sectors as there can be, and a shuffle reduction adds the lanes' sums up
   in five steps.

   New since naive: the loop's stride, and the reduction. Still lost: lane 0 alone stores its row's
   result, 2 or 4 bytes of a sector of 32. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
using T = DTYPE;

extern "C" __global__ void gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long row = (long long)blockIdx.x * (blockDim.x / 32) + warp;
    if (row >= rows) return; // the whole warp leaves: a row has one warp
    float sum = 0;
    for (long long c = lane; c < cols; c += 32) sum += (float)W[row * cols + c] * (float)x[c];
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) y[row] = (T)sum;
}
