/* Rung 5, fp16: the same kernel, for values of 16 bits. One letter of the type has changed.

   att (n_heads, kv_len) fp32, v (kv_len, n_kv_heads, head_dim) fp16, out (n_heads, head_dim) fp32.
   Reads 2 * kv_len * n_kv_heads * head_dim bytes of v, half as many as before.

   New since fp32: T, and a conversion for each value. As many loads as before, each of 64 bytes a warp in place of
   128: with the same number of loads in flight, half the bytes are in flight.
   Launch: (32, 32) threads, (n_heads, ceil(head_dim / 32)) blocks. */
#include <cuda_fp16.h>
#ifndef BLOCKS
#define BLOCKS 1 /* that should fit on a multiprocessor; 2 leaves 32 registers a thread */
#endif
using T = __half;
constexpr int SLICES = 32; // warps of a block

extern "C" __global__ void __launch_bounds__(32 * SLICES, BLOCKS)
mix(const float *att, const T *v, float *out, int n_heads, int n_kv_heads, long long kv_len, int head_dim) {
    __shared__ float sums[SLICES][32];
    int lane = threadIdx.x, slice = threadIdx.y, h = blockIdx.x, d = blockIdx.y * 32 + lane;
    long long stride = (long long)n_kv_heads * head_dim; // from one token to the next
    const float *shares = att + h * kv_len;
    const T *column = v + (long long)(h / (n_heads / n_kv_heads)) * head_dim + d;
    float sum = 0;
    if (d < head_dim) // lanes without a channel come to the barrier like the others
        for (long long t = slice; t < kv_len; t += SLICES) sum += shares[t] * (float)column[t * stride];
    sums[slice][lane] = sum;
    __syncthreads();
    if (slice > 0 || d >= head_dim) return;
    for (int s = 1; s < SLICES; s++) sum += sums[s][lane];
    out[(long long)h * head_dim + d] = sum;
}
