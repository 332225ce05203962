/* rope_append into a cache of 8 or 4 bits: the new token's keys and values are quantised as they are written.

   qkv … q        as in rope_append.cu
   k, v           codes (n_kv_heads, tiles, bytes of a tile) of 16 tokens a tile, as kernels/kv_cache/layout.py has them
   k_scale, v_scale   (n_kv_heads, tiles, 16 · GROUPS) float16: one for GROUP channels of a token
   capacity       tokens; outside of 1 … capacity nothing is done
   k_tiles, v_tiles   that a kv head has room for

   A number is rounded to T first, as a cache of 16 bits would hold it, and gets the code and scale that
   kernels/kv_cache/rounding.py gives it, bit for bit. Nothing of other tokens changes. A warp for each head. Compile
   with DTYPE, HEAD_DIM (a multiple of 16), BITS (8 or 4) and GROUP (16, 32 or HEAD_DIM). */
#include "../device/pdl.cuh"
#include "../kv_cache/put_head.cuh"
#include "head.cuh"

constexpr int HEADS = 4; // warps of a block

extern "C" __global__ void rope_append_quantized(const T *qkv, const T *bias, const T *q_norm, const T *k_norm,
                                                 const double *turns, const int *kv_len, T *q, unsigned char *k,
                                                 __half *k_scale, unsigned char *v, __half *v_scale, int n_heads,
                                                 int n_kv_heads, int capacity, int k_tiles, int v_tiles, float eps) {
    __shared__ T heads[HEADS][HEAD_DIM];
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
    if (is_q) return store_head(q + at, a, b, lane);

    // From pairs to neighbours, so that a group lies in neighbouring lanes
    T *head = heads[threadIdx.x / 32];
    store_head(head, a, b, lane);
    __syncwarp();
    float x[MINE];
    for (int n = 0; n < MINE; n++) x[n] = lane + 32 * n < HEAD_DIM ? (float)head[lane + 32 * n] : 0;
    const long long tile = (long long)kv_head * (is_v ? v_tiles : k_tiles) + position / TILE;
    put_head(x, (is_v ? v : k) + tile * TILE_BYTES, (is_v ? v_scale : k_scale) + tile * TILE * GROUPS, position % TILE,
             is_v, lane);
}
