/* Attention of one new token over its cache, on the CPU: chapter 08's split and merge, with threads for blocks.

   q (n_heads, head_dim) float; k, v (n_kv_heads, capacity, head_dim) half, of which kv_len tokens count; out like q.
   Query head h reads kv head h / group, group = n_heads / n_kv_heads.

   1. split   a thread takes one kv head and one part of its tokens, and for each of the group's heads keeps the maximum
              m, the sum l of exp(s - m) and the mix of the values under that maximum; a tile of tokens at a time
   2. merge   out = (sum over parts of exp(m - M) · mix) / (sum over parts of exp(m - M) · l), M the largest m

   partial: (parts, n_heads, head_dim + 2) floats of scratch memory: mix, then m and l. */
#include "tile.h"

void attention(const float *q, const half *k, const half *v, float *out, float *partial, int64_t n_heads,
               int64_t n_kv_heads, int64_t head_dim, int64_t capacity, int64_t kv_len, int64_t parts, float scale,
               int threads) {
    int64_t group = n_heads / n_kv_heads, each = (kv_len + parts - 1) / parts, row = head_dim + 2;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t task = 0; task < n_kv_heads * parts; task++) { /* 1 */
        int64_t kv_head = task / parts, part = task % parts;
        int64_t begin = part * each, end = begin + each < kv_len ? begin + each : kv_len;
        float *own = partial + (part * n_heads + kv_head * group) * row;
        for (int64_t h = 0; h < group; h++) {
            memset(own + h * row, 0, row * sizeof *own);
            own[h * row + head_dim] = -INFINITY;
        }
        for (int64_t t = begin; t < end; t += TILE) {
            int64_t tokens = end - t < TILE ? end - t : TILE, at = (kv_head * capacity + t) * head_dim;
            for (int64_t h = 0; h < group; h++) /* the tile stays in the cache for all heads of the group */
                one_tile(q + (kv_head * group + h) * head_dim, k + at, v + at, own + h * row, tokens, head_dim, scale);
        }
    }
    merge(partial, out, n_heads, head_dim, parts); /* 2 */
}
