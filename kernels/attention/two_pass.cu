/* Rung 1, two passes over the scores: attention as it is defined, in three kernels.

   q (batch, n_heads, HEAD_DIM), k and v (batch, kv_len, n_kv_heads, HEAD_DIM), out like q, all of
   one type T; scores (batch, n_heads, kv_len) and all sums are fp32. kv_lens (batch,): tokens of
   each sequence that count, or null for all.

   scores     1. s[t] = scale * q . k[t]                              a warp for each score
   softmax    2. m = largest s[t]
              3. p[t] = e^(s[t] - m)
              4. total = sum of p[t]; s[t] becomes p[t] / total       a block for each row, in place
   mix        5. out = sum over t of s[t] * v[t]                      a block for each row

   (The steps are those of ref/attention.py, but for the division, which is here in step 4.) Must
   move sizeof(T) * (k + v + q + out) bytes. Moves besides, of scores: one write in `scores`, three
   reads and two writes in `softmax`, one read in `mix`: 28 * batch * n_heads * kv_len bytes. And
   each query head reads K and V for itself: n_heads / n_kv_heads times the requests that would do.
*/
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

__device__ long long length(const int *kv_lens, int b, long long kv_len) {
    return kv_lens ? min(max((long long)kv_lens[b], 0LL), kv_len) : kv_len;
}

/* grid (blocks of WARPS tokens, n_heads, batch) */
extern "C" __global__ void scores(const T *q, const T *k, const int *kv_lens, float *scores,
                                  long long kv_len, int n_kv_heads, float scale) {
    const int lane = threadIdx.x % 32, head = blockIdx.y, n_heads = gridDim.y, b = blockIdx.z;
    const int kv_head = head / (n_heads / n_kv_heads);
    const long long row = (long long)b * n_heads + head; // of q, of scores and of out
    const long long t = (long long)blockIdx.x * WARPS + threadIdx.x / 32;
    if (t >= length(kv_lens, b, kv_len)) return; // the whole warp
    const T *query = q + row * HEAD_DIM;
    const T *key = k + ((b * kv_len + t) * n_kv_heads + kv_head) * HEAD_DIM;
    float sum = 0;
    for (int c = lane; c < HEAD_DIM; c += 32) sum += (float)query[c] * (float)key[c];
    sum = warp_sum(sum);
    if (lane == 0) scores[row * kv_len + t] = scale * sum; // 1
}

/* The largest of the block's values, or their sum, in every thread. Each lambda is a `Join` of its own, with `parts` of
   its own: so no barrier is needed between two calls with different ones. The same one twice would need it. */
template <class Join> __device__ float over_the_block(float value, float nothing, Join join) {
    __shared__ float parts[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int lane_mask = 16; lane_mask; lane_mask /= 2)
        value = join(value, __shfl_xor_sync(0xffffffff, value, lane_mask));
    if (lane == 0) parts[warp] = value;
    __syncthreads();
    value = lane < blockDim.x / 32 ? parts[lane] : nothing;
    for (int lane_mask = 16; lane_mask; lane_mask /= 2)
        value = join(value, __shfl_xor_sync(0xffffffff, value, lane_mask));
    return value;
}

/* grid (n_heads, batch); blocks of whole warps */
extern "C" __global__ void softmax(float *scores, const int *kv_lens, long long kv_len) {
    const int b = blockIdx.y;
    float *row = scores + ((long long)b * gridDim.x + blockIdx.x) * kv_len;
    const long long len = length(kv_lens, b, kv_len);
    float m = LOWEST, total = 0;
    for (long long t = threadIdx.x; t < len; t += blockDim.x) m = fmaxf(m, row[t]);
    m = over_the_block(m, LOWEST, [](float x, float y) { return fmaxf(x, y); }); // 2
    for (long long t = threadIdx.x; t < len; t += blockDim.x) total += row[t] = expf(row[t] - m); // 3
    total = over_the_block(total, 0, [](float x, float y) { return x + y; }); // 4
    for (long long t = threadIdx.x; t < len; t += blockDim.x) row[t] /= total;
}

/* grid (n_heads, batch). A warp takes every WARPS-th token; the sums meet in shared memory. */
extern "C" __global__ void mix(const float *scores, const T *v, const int *kv_lens, T *out,
                               long long kv_len, int n_kv_heads) {
    __shared__ float sums[WARPS][HEAD_DIM];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int head = blockIdx.x, n_heads = gridDim.x, b = blockIdx.y;
    const int kv_head = head / (n_heads / n_kv_heads);
    const long long row = (long long)b * n_heads + head, len = length(kv_lens, b, kv_len);
    float acc[CHANNELS] = {};
    for (long long t = warp; t < len; t += WARPS) {
        const T *value = v + ((b * kv_len + t) * n_kv_heads + kv_head) * HEAD_DIM;
        const float share = scores[row * kv_len + t];
        for (int i = 0, c = lane; c < HEAD_DIM; i++, c += 32) acc[i] += share * (float)value[c];
    }
    for (int i = 0, c = lane; c < HEAD_DIM; i++, c += 32) sums[warp][c] = acc[i];
    __syncthreads();
    for (int c = threadIdx.x; c < HEAD_DIM; c += 32 * WARPS) {
        float sum = 0;
        for (int w = 0; w < WARPS; w++) sum += sums[w][c];
        out[row * HEAD_DIM + c] = (T)sum; // 5
    }
}
