/* Rung 3, shared: a block of 32 channels by 32 time slices has one head's 32 channels to itself. Warp s takes the
   tokens s, s + 32, s + 64, ...; the 32 sums of a channel meet in shared memory, and one warp adds them up in order.

   New since split: the split is over the warps of a block, and no longer over blocks. No atomics, nothing to zero, the
   results are stored once, 32 together, in their own type, and are the same bits in every run. What it loses: the card
   has only n_heads * ceil(head_dim / 32) blocks, however many tokens there are. And the compiler leaves room for a
   second block on a multiprocessor, which never comes: 32 registers a thread, so that few loads are under way at a
   time. With __launch_bounds__(32 * SLICES, 1) it would be 56 (rung 4, kernels/kv_cache/mix_fp32.cu).
   Launch: (32, 32) threads, (n_heads, ceil(head_dim / 32)) blocks. */
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
using T = DTYPE;
constexpr int SLICES = 32; // warps of a block

extern "C" __global__ void __launch_bounds__(32 * SLICES)
mix(const T *att, const T *v, T *out, int n_heads, int n_kv_heads, long long kv_len, int head_dim) {
    __shared__ float sums[SLICES][32];
    int lane = threadIdx.x, slice = threadIdx.y, h = blockIdx.x, d = blockIdx.y * 32 + lane;
    long long stride = (long long)n_kv_heads * head_dim; // from one token to the next
    long long kv_head = h / (n_heads / n_kv_heads);
    const T *shares = att + h * kv_len, *column = v + kv_head * head_dim + d;
    float sum = 0;
    if (d < head_dim) // lanes without a channel come to the barrier like the others
        for (long long t = slice; t < kv_len; t += SLICES) sum += (float)shares[t] * (float)column[t * stride];
    sums[slice][lane] = sum; // a row of 32 floats: one wavefront
    __syncthreads();
    if (slice > 0 || d >= head_dim) return;
    for (int s = 1; s < SLICES; s++) sum += sums[s][lane];
    out[(long long)h * head_dim + d] = (T)sum;
}
