/* Between a layer's first product and its attention: biases, norms of heads, positions, and the new token's place in the
   cache (steps 2 to 4 of ref.llm).

   qkv        (n_heads + 2 · n_kv_heads, head_dim), what the product gave
   bias       like qkv, or null                                                          Qwen2
   q_norm, k_norm   (head_dim,), or null                                                 Qwen3
   turns      (head_dim / 2,) double: turns per token of each pair of numbers, frequency / 2π
   kv_len     (1,): tokens in the cache with this one, whose position is kv_len - 1; outside of 1 … capacity nothing is
              done
   q          (n_heads, head_dim)
   k, v       (capacity, n_kv_heads, head_dim): the cache

   A warp for each head. Its lanes hold pairs: numbers i and i + head_dim/2. */
#include "../device/pdl.cuh"
#include "../device/reduce.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;
constexpr int PAIRS = (HEAD_DIM / 2 + 31) / 32; // of a lane

/* x · weight / √(mean of x² + eps), for a head that lies in the registers of a warp. */
__device__ void norm(float (&a)[PAIRS], float (&b)[PAIRS], const T *weight, float eps, int lane) {
    float squares = 0;
    for (int n = 0; n < PAIRS; n++) squares += a[n] * a[n] + b[n] * b[n];
    const float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
    for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n;
        if (i < HEAD_DIM / 2) {
            a[n] *= scale * (float)weight[i];
            b[n] *= scale * (float)weight[i + HEAD_DIM / 2];
        }
    }
}

/* Turn each pair by its angle at a position. Whole turns are left away in double: a float has no digits left for a
   small angle behind 100,000 tokens. */
__device__ void rope(float (&a)[PAIRS], float (&b)[PAIRS], const double *turns, int position, int lane) {
    for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n;
        if (i < HEAD_DIM / 2) {
            const double turn = position * turns[i];
            const float angle = 6.283185307179586f * (float)(turn - floor(turn)), x = a[n], y = b[n];
            float sine, cosine;
            sincosf(angle, &sine, &cosine);
            a[n] = x * cosine - y * sine;
            b[n] = y * cosine + x * sine;
        }
    }
}

extern "C" __global__ void rope_append(const T *qkv, const T *bias, const T *q_norm, const T *k_norm,
                                       const double *turns, const int *kv_len, T *q, T *k, T *v, int n_heads,
                                       int n_kv_heads, int capacity, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, position = *kv_len - 1;
    if (warp >= n_heads + 2 * n_kv_heads || position < 0 || position >= capacity) return;
    const bool is_q = warp < n_heads, is_v = warp >= n_heads + n_kv_heads;
    const int kv_head = is_v ? warp - n_heads - n_kv_heads : warp - n_heads;

    float a[PAIRS], b[PAIRS];
    for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n, at = warp * HEAD_DIM + i;
        const bool here = i < HEAD_DIM / 2;
        a[n] = here ? (float)qkv[at] + (bias ? (float)bias[at] : 0) : 0;
        b[n] = here ? (float)qkv[at + HEAD_DIM / 2] + (bias ? (float)bias[at + HEAD_DIM / 2] : 0) : 0;
    }
    const T *weight = is_q ? q_norm : k_norm;
    if (weight && !is_v) norm(a, b, weight, eps, lane);
    if (!is_v) rope(a, b, turns, position, lane);

    T *row = (is_v ? v : k) + ((long long)position * n_kv_heads + kv_head) * HEAD_DIM;
    if (is_q) row = q + warp * HEAD_DIM;
    for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n;
        if (i < HEAD_DIM / 2) {
            row[i] = (T)a[n];
            row[i + HEAD_DIM / 2] = (T)b[n];
        }
    }
}
