/* Rung 2, online softmax: one kernel, one walk along the tokens, no scores in memory.

   Shapes, types and kv_lens as in two_pass.cu. New since two_pass: a warp carries along, of the
   tokens that it has seen, the largest score m, the total of 2^(score - m), and acc, the sum of
   2^(score - m) * v. A larger score makes all that was summed before worth less, by a correction.

   1. score         s = q . k[t]
   2. maximum       m_new = max(m, s)
   3. correction    c = 2^(m - m_new), 1 where the maximum stays
   4. weight        p = 2^(s - m_new)
   5. sum           total = c * total + p
   6. mix           acc = c * acc + p * v[t]
   7. at the end    out = acc / total

   Powers of 2, since that is what the hardware has: log2(e) is in q's scale. A block for each (head,
   sequence). Its warps take turns at the tokens and are merged in the end, as if each had been an
   attention of its own (`merge` in ref/attention.py).

   Moves what it must, but each query head still reads K and V for itself. Still lost: with few heads
   and sequences most multiprocessors have no block. Launch grid (n_heads, batch). */
#include "../device/math.cuh"
#include "../device/reduce.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>
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

extern "C" __global__ void __launch_bounds__(32 * WARPS)
online(const T *q, const T *k, const T *v, const int *kv_lens, T *out, long long kv_len,
       int n_kv_heads, float scale) {
    __shared__ float ms[WARPS], totals[WARPS], accs[WARPS][HEAD_DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.x, n_heads = gridDim.x, b = blockIdx.y;
    const int kv_head = head / (n_heads / n_kv_heads);
    const long long row = (long long)b * n_heads + head; // of q and of out
    const long long len = kv_lens ? min(max((long long)kv_lens[b], 0LL), kv_len) : kv_len;

    float query[CHANNELS] = {}, acc[CHANNELS] = {}, m = LOWEST, total = 0;
    for (int i = 0, c = lane; c < HEAD_DIM; i++, c += 32)
        query[i] = (float)q[row * HEAD_DIM + c] * scale * LOG2_E;
    for (long long t = warp; t < len; t += WARPS) {
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
    for (int c = threadIdx.x; c < HEAD_DIM; c += 32 * WARPS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += exp2f(ms[w] - m) * accs[w][c];
        out[row * HEAD_DIM + c] = (T)(total == 0 ? 0 : sum / total); // 7
    }
}
