/* Rung 6, half2: a lane loads two halves at a time, neighbouring channels of one token. 16 lanes have a token's 32
   channels, so a warp loads two tokens in one request: 128 bytes again, and half as many requests.

   att (n_heads, kv_len) fp32, v (kv_len, n_kv_heads, head_dim) fp16, head_dim even, out (n_heads, head_dim) fp32.

   New since fp16: the word; and at the end a shuffle, by which the two halves of a warp add up what they have.
   A word starts at a multiple of its size: v at a multiple of 4 bytes.
   Launch: (32, 32) threads, (n_heads, ceil(head_dim / 32)) blocks. */
#include <cuda_fp16.h>
#ifndef BLOCKS
#define BLOCKS 1 /* that should fit on a multiprocessor; 2 leaves 32 registers a thread */
#endif
constexpr int SLICES = 32; // warps of a block

extern "C" __global__ void __launch_bounds__(32 * SLICES, BLOCKS)
mix(const float *att, const __half *v, float *out, int n_heads, int n_kv_heads, long long kv_len, int head_dim) {
    __shared__ float sums[SLICES][32];
    int lane = threadIdx.x, slice = threadIdx.y, h = blockIdx.x, pair = lane % 16, d = blockIdx.y * 32 + 2 * pair;
    long long stride = (long long)n_kv_heads * head_dim; // from one token to the next
    const float *shares = att + h * kv_len;
    const __half *column = v + (long long)(h / (n_heads / n_kv_heads)) * head_dim + d;
    float2 sum = {0, 0};
    if (d < head_dim)
        for (long long t = 2 * slice + lane / 16; t < kv_len; t += 2 * SLICES) {
            float2 x = __half22float2(*(const __half2 *)(column + t * stride));
            sum.x += shares[t] * x.x;
            sum.y += shares[t] * x.y;
        }
    sum.x += __shfl_xor_sync(0xffffffff, sum.x, 16); // the other token's
    sum.y += __shfl_xor_sync(0xffffffff, sum.y, 16);
    if (lane < 16) *(float2 *)&sums[slice][2 * pair] = sum;
    __syncthreads();
    d = blockIdx.y * 32 + lane;
    if (slice > 0 || d >= head_dim) return;
    float total = 0;
    for (int s = 0; s < SLICES; s++) total += sums[s][lane];
    out[(long long)h * head_dim + d] = total;
}
