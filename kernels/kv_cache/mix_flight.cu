/* Rung 7, flight: words of 16 bytes, eight neighbouring channels, and BATCH of them asked for before the first is used.
   4 lanes have a token's 32 channels, so one request of a warp is 8 tokens, 512 bytes.

   att (n_heads, kv_len) fp32, v (kv_len, n_kv_heads, head_dim) fp16, out (n_heads, head_dim) fp32.

   New since half2: the word is wider, and the loop that loads is apart from the loop that uses, so that the order does
   not hang on how the compiler unrolls: 8 words of a warp are 4 KB in flight, 128 KB on a multiprocessor. The last
   batch of a thread may be short: each of its loads asks first whether the token is there, and a token that is not
   counts 0. Whole batches do not ask.
   A word starts at a multiple of its size. Where head_dim or v does not allow 16 bytes, compile with a smaller VEC, the
   halves in a word.
   Launch: (32, 32) threads, (n_heads, ceil(head_dim / 32)) blocks. */
#include <cuda_fp16.h>
#ifndef BLOCKS
#define BLOCKS 1 /* that should fit on a multiprocessor; 2 leaves 32 registers a thread */
#endif
#ifndef VEC
#define VEC 8
#endif
#ifndef BATCH
#define BATCH 8
#endif
constexpr int SLICES = 32, LANES = 32 / VEC; // warps of a block; lanes that share a token
constexpr int STEP = SLICES * VEC;           // tokens that a block loads at once
struct alignas(2 * VEC) Word { __half v[VEC]; };

/* Load up to BATCH words, `left` of which are there, and then use them. ALL says that they all are. */
template <bool ALL>
__device__ __forceinline__ void batch(const float *shares, const __half *column, long long stride, int left,
                                      float (&sum)[VEC]) {
    float a[BATCH] = {};
    Word word[BATCH] = {};
#pragma unroll
    for (int b = 0; b < BATCH; b++)
        if (ALL || b < left) a[b] = shares[b * STEP], word[b] = *(const Word *)(column + b * STEP * stride);
#pragma unroll
    for (int b = 0; b < BATCH; b++)
#pragma unroll
        for (int i = 0; i < VEC; i++) sum[i] += a[b] * (float)word[b].v[i];
}

extern "C" __global__ void __launch_bounds__(32 * SLICES, BLOCKS)
mix(const float *att, const __half *v, float *out, int n_heads, int n_kv_heads, long long kv_len, int head_dim) {
    __shared__ float sums[SLICES][32];
    int lane = threadIdx.x, slice = threadIdx.y, h = blockIdx.x, d = blockIdx.y * 32 + lane % LANES * VEC;
    long long stride = (long long)n_kv_heads * head_dim, first = slice * VEC + lane / LANES;
    const float *shares = att + h * kv_len + first;
    const __half *column = v + (long long)(h / (n_heads / n_kv_heads)) * head_dim + d + first * stride;
    float sum[VEC] = {};
    if (d < head_dim) {
        long long left = (kv_len - first + STEP - 1) / STEP; // tokens of this thread; may be negative
        for (; left >= BATCH; left -= BATCH) {
            batch<true>(shares, column, stride, BATCH, sum);
            shares += BATCH * STEP, column += BATCH * STEP * stride;
        }
        if (left > 0) batch<false>(shares, column, stride, (int)left, sum);
    }
#pragma unroll
    for (int i = 0; i < VEC; i++) {
        for (int lane_mask = 16; lane_mask >= LANES; lane_mask /= 2)
            sum[i] += __shfl_xor_sync(0xffffffff, sum[i], lane_mask);
        if (lane < LANES) sums[slice][lane * VEC + i] = sum[i];
    }
    __syncthreads();
    d = blockIdx.y * 32 + lane;
    if (slice > 0 || d >= head_dim) return;
    float total = 0;
    for (int s = 0; s < SLICES; s++) total += sums[s][lane];
    out[(long long)h * head_dim + d] = total;
}
