/* Between a layer's first product and its attention: biases, norms of heads, positions, and the new token's place in
   the cache (steps 2 to 4 of ref.llm).

   qkv        (n_heads + 2 · n_kv_heads, head_dim), what the product gave
   bias       like qkv, or null                                                          Qwen2
   q_norm, k_norm   (head_dim,), or null                                                 Qwen3
   turns      (head_dim / 2,) double: turns per token of each pair of numbers, frequency / 2π
   kv_len     (1,): tokens in the cache with this one, whose position is kv_len - 1; outside of 1 … capacity nothing is
              done
   q          (n_heads, head_dim)
   k, v       (capacity, n_kv_heads, head_dim): the cache

   A warp for each head: head.cuh. */
#include "../device/pdl.cuh"
#include "head.cuh"

extern "C" __global__ void rope_append(const T *qkv, const T *bias, const T *q_norm, const T *k_norm,
                                       const double *turns, const int *kv_len, T *q, T *k, T *v, int n_heads,
                                       int n_kv_heads, int capacity, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int warp = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x % 32, position = *kv_len - 1;
    if (warp >= n_heads + 2 * n_kv_heads || position < 0 || position >= capacity) return;
    const bool is_q = warp < n_heads, is_v = warp >= n_heads + n_kv_heads;
    const int kv_head = is_v ? warp - n_heads - n_kv_heads : warp - n_heads, at = warp * HEAD_DIM;

    float a[PAIRS], b[PAIRS];
    const Turns here(turns, position, lane);
    take_head(a, b, qkv + at, bias ? bias + at : nullptr, is_v ? nullptr : is_q ? q_norm : k_norm, eps,
              is_v ? nullptr : &here, lane);
    T *row = is_q ? q + at : (is_v ? v : k) + ((long long)position * n_kv_heads + kv_head) * HEAD_DIM;
    store_head(row, a, b, lane);
}
