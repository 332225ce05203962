/* Rung 4, vector: a lane loads 16 bytes at a time, and asks for four such words of W, and the four
   of x that go with them, before it uses the first. A load takes most of a microsecond to come
   back, so bandwidth is the bytes in flight over that time (Little's law): 4.7 TB/s need about 4 MB
   under way, 32 KB on each of 132 multiprocessors. Here up to five blocks share one, with 80 KB of
   W in flight.

   New since wide: the word, and the batch of loads, all of them ahead of the first use. Eight rows
   a block instead of 32, so that registers suffice. A word must start at a multiple of its size.
   Where cols or a pointer does not allow 16 bytes, compile with a smaller VEC, the elements in a
   word. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
#ifndef VEC
#define VEC (16 / sizeof(DTYPE))
#endif
using T = DTYPE;
constexpr int ROWS = 8, BATCH = 4; // rows of a block, one a warp: launch 32 * ROWS threads; words in flight
struct alignas(VEC * sizeof(T)) Word { T v[VEC]; };

extern "C" __global__ void __launch_bounds__(32 * ROWS, 4)
gemv(const T *W, const T *x, T *y, long long rows, long long cols) {
    __shared__ float sums[ROWS];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    long long first = (long long)blockIdx.x * ROWS, row = first + warp, words = cols / VEC;
    const Word *from = (const Word *)(W + row * cols), *xs = (const Word *)x;
    float sum = 0;
    if (row < rows)
        for (long long c = lane; c < words; c += 32 * BATCH) {
            Word w[BATCH] = {}, u[BATCH] = {}; // zeros past the end of the row
#pragma unroll
            for (int b = 0; b < BATCH; b++)
                if (c + 32 * b < words) w[b] = from[c + 32 * b], u[b] = xs[c + 32 * b];
#pragma unroll
            for (int b = 0; b < BATCH; b++)
#pragma unroll
                for (int i = 0; i < VEC; i++) sum += (float)w[b].v[i] * (float)u[b].v[i];
        }
    for (int far = 16; far > 0; far /= 2) sum += __shfl_xor_sync(0xffffffff, sum, far);
    if (lane == 0) sums[warp] = sum;
    __syncthreads();
    if (warp == 0 && lane < ROWS && first + lane < rows) y[first + lane] = (T)sums[lane];
}
