/* Rung 3, split-KV: the tokens of a row go to several blocks, and a second kernel merges.

   Shapes, types and kv_lens as in two_pass.cu. Partial results are fp32:

   partial (batch, splits, n_heads, HEAD_DIM)   softmax-weighted mean of the split's values
   lse     (batch, splits, n_heads)             log2 of the sum of 2^score; -infinity: no token

   New since online: a block's tokens are those from len * split / splits up to len * (split + 1) /
   splits, so that none is lost and splits differ by one token at most. It ends with a partial result
   where online had the result. `merge` is the online softmax once more, over splits, BATCH at a time:

   1. maximum       m_new = max(m, lse of the batch)
   2. correction    2^(m - m_new), for both sums
   3. weight        w = 2^(lse - m_new), 0 for a split without a token
   4. sums          total += w, sum += w * partial
   5. at the end    out = sum / total

   always in the same order, whichever block was done first: so results are the same, bit for bit.

   Moves besides, written once and read once: 4 * batch * splits * n_heads * (HEAD_DIM + 1) bytes. */
#include "../device/math.cuh"
#include "../device/reduce.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math.h> // INFINITY
#ifndef DTYPE
#define DTYPE float /* or __half, __nv_bfloat16 */
#endif
#ifndef HEAD_DIM
#define HEAD_DIM 128
#endif
using T = DTYPE;
constexpr int WARPS = 8;                       // of a block: launch 32 * WARPS threads
constexpr int CHANNELS = (HEAD_DIM + 31) / 32; // of a lane: lane, lane + 32, ...
constexpr float LOWEST = -3.402823466e38f;     // a maximum before there is one; -INF - -INF is NaN
constexpr int BATCH = 16;                      // splits that `merge` asks for at once

/* grid (n_heads, splits, batch) */
extern "C" __global__ void __launch_bounds__(32 * WARPS)
split(const T *q, const T *k, const T *v, const int *kv_lens, float *partial, float *lse,
      long long kv_len, int n_kv_heads, float scale) {
    __shared__ float ms[WARPS], totals[WARPS], accs[WARPS][HEAD_DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.x, n_heads = gridDim.x, b = blockIdx.z;
    const int kv_head = head / (n_heads / n_kv_heads);
    const long long row = (long long)b * n_heads + head; // of q
    const long long len = kv_lens ? min(max((long long)kv_lens[b], 0LL), kv_len) : kv_len;
    const long long first = len * blockIdx.y / gridDim.y;
    const long long last = len * (blockIdx.y + 1) / gridDim.y;

    float query[CHANNELS] = {}, acc[CHANNELS] = {}, m = LOWEST, total = 0;
    for (int i = 0, c = lane; c < HEAD_DIM; i++, c += 32)
        query[i] = (float)q[row * HEAD_DIM + c] * scale * LOG2_E;
    for (long long t = first + warp; t < last; t += WARPS) {
        const long long at = ((b * kv_len + t) * n_kv_heads + kv_head) * HEAD_DIM;
        float key[CHANNELS] = {}, value[CHANNELS] = {}, s = 0;
        for (int i = 0, c = lane; c < HEAD_DIM; i++, c += 32)
            key[i] = (float)k[at + c], value[i] = (float)v[at + c];
        for (int i = 0; i < CHANNELS; i++) s += query[i] * key[i]; // 1
        s = warp_sum(s);
        const float m_new = fmaxf(m, s); // 2
        const float correction = exp2f(m - m_new), p = exp2f(s - m_new); // 3, 4
        total = correction * total + p; // 5
        for (int i = 0; i < CHANNELS; i++) acc[i] = correction * acc[i] + p * value[i]; // 6
        m = m_new;
    }

    ms[warp] = m, totals[warp] = total; // all lanes have the same
    for (int i = 0, c = lane; c < HEAD_DIM; i++, c += 32) accs[warp][c] = acc[i];
    __syncthreads();
    m = LOWEST, total = 0; // merge the warps; every thread does it for itself
    for (int w = 0; w < WARPS; w++) m = fmaxf(m, ms[w]);
    for (int w = 0; w < WARPS; w++) total += exp2f(ms[w] - m) * totals[w];
    const long long to = ((long long)b * gridDim.y + blockIdx.y) * n_heads + head; // of the two
    for (int c = threadIdx.x; c < HEAD_DIM; c += 32 * WARPS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += exp2f(ms[w] - m) * accs[w][c];
        partial[to * HEAD_DIM + c] = total == 0 ? 0 : sum / total; // 7
    }
    if (threadIdx.x == 0) lse[to] = m + log2f(total); // log2f(0) is -infinity
}

/* grid (n_heads, batch), HEAD_DIM threads: a thread for each channel */
extern "C" __global__ void __launch_bounds__(HEAD_DIM)
merge(const float *partial, const float *lse, T *out, int splits) {
    const int head = blockIdx.x, n_heads = gridDim.x, b = blockIdx.y, c = threadIdx.x;
    float m = LOWEST, total = 0, sum = 0;
    for (int first = 0; first < splits; first += BATCH) {
        float part[BATCH], part_lse[BATCH], m_new = m;
#pragma unroll
        for (int i = 0; i < BATCH; i++) { // all loads of a batch are on their way together
            const long long from = ((long long)b * splits + first + i) * n_heads + head;
            const bool there = first + i < splits;
            part_lse[i] = there ? lse[from] : -INFINITY;
            part[i] = there ? partial[from * HEAD_DIM + c] : 0;
        }
        for (int i = 0; i < BATCH; i++) m_new = fmaxf(m_new, part_lse[i]); // 1
        const float correction = exp2f(m - m_new); // 2
        total *= correction, sum *= correction;
        for (int i = 0; i < BATCH; i++) {
            const float w = exp2f(part_lse[i] - m_new); // 3
            total += w, sum += w * part[i]; // 4
        }
        m = m_new;
    }
    out[((long long)b * n_heads + head) * HEAD_DIM + c] = (T)(total == 0 ? 0 : sum / total); // 5
}
