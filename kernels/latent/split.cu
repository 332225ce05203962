/* Latent attention, first of two launches: each block reads an equal share of the tokens for 16 to 64 heads
   (walk.cuh), and leaves what it found for merge.cu.

   Moves 1152 bytes a token for each head tile, all but the first from L2, and 2056 bytes for each head and segment.
   Does 2 * (576 + 512) flops for each token and head.

   Compile with SHAPE and STAGES. Launch with 256 threads on (head tiles, shares) blocks; shared memory: walk.cuh. q
   (batch, n_heads, 576); cache (batch, kv_len, 576), or, if PAGED, (n_pages, 64, 576) and table (batch, max_pages);
   kv_lens (batch,) or none; out (batch, n_heads, 512); partial_out, max_and_sum: line.cuh. scale: times log2(e). */
#include "walk.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
split(const T *q, const T *cache, const int *table, const int *kv_lens, T *out, float *partial_out,
      float2 *max_and_sum, int kv_len, int batch, int n_heads, int n_pages, int max_pages, float scale) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Cache tokens{cache, table, n_pages, max_pages, kv_len};
    const Problem problem{q, tokens, {kv_lens, kv_len, batch}, n_heads, scale};
    const Partial partial{partial_out, max_and_sum};
    walk(problem, out, [&](const HeadSums &sums, const Segment &, const Place &at) {
        partial.store(sums, at, n_heads, threadIdx.x % 32);
    });
}
