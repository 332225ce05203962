/* Latent attention in one launch, whose blocks rescale a sequence's sums where they lie, in L2, by additions to
   their exponents: AMLA's step (ref/latent_attention.py) between blocks. A trial, as it is wrong for some values.

   Memory can add, and cannot multiply; but 2**n times a float is n << 23 added to its bits. So a block that has a
   higher reference than what lies there adds (old - new) << 23 to each of its floats, as whole numbers, and then its
   own sums, as floats. References are whole numbers, so nothing is left to compensate.

   Additions and rescales must not cross: a float sum that is added between another block's look at the reference and
   its rescale would be rescaled, too. So blocks have turns, one after another, handed on by a release and an
   acquire; and the two additions to one float are of one thread, whose accesses to one address stay in their order.
   Turns begin with a sequence's last share, whose segment is done first if its block has more sequences. All blocks
   must be running.

   What breaks it: a sum that is 0, as it may be by values of 0 or by values that cancel. Its bits have no exponent,
   and become -inf, or a huge number. Who adds in memory does not see it; and to look first is to read and write, as
   ever.

   All as split.cu, but in place of partial results sums (batch, head tiles, HEADS, 512 + 2) float32, whatever they
   hold; turns (batch, head tiles), 0 before the first launch and again after each. */
#include "../device/atomics.cuh"
#include "../device/grid.cuh"
#include "walk.cuh"

constexpr int LEAST_STEP = -30; // what is worth less is written over

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
amla(const T *q, const T *cache, const int *table, const int *kv_lens, T *out, float *sums_memory, unsigned *turns,
     int kv_len, int batch, int n_heads, int n_pages, int max_pages, float scale) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Cache tokens{cache, table, n_pages, max_pages, kv_len};
    const Problem problem{q, tokens, {kv_lens, kv_len, batch}, n_heads, scale};
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    clear_empty_sequences(problem, out);
    walk(problem, out, [&](HeadSums &sums, const Segment &segment, const Place &at) {
        const SegmentsOf segments(problem.sequences, LineShares(problem.sequences, gridDim.y, lane), at.b, lane);
        const int tile = at.b * gridDim.x + at.head_tile, first_row = at.first_head - at.head_tile * HEADS;
        float4 *values = reinterpret_cast<float4 *>(sums_memory) + (long long)tile * HEADS * COLUMNS;
        float2 *references = reinterpret_cast<float2 *>(sums_memory + (long long)batch * gridDim.x * HEADS * LATENT) +
                             tile * HEADS; // and the sum of weights
        const unsigned turn = segments.count - 1 - (at.share + at.b - (int)segments.first);

        // 7. wait for the turn
        if (threadIdx.x == 0)
            while (load_acquire(turns + tile) != turn) {
            }
        __syncthreads();

        // 8. rescale, and add
        float2 found[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = first_row + g + 8 * r;
            const float mine = ceilf(sums.maximum[r]);
            found[r] = turn ? __ldcg(references + row) : make_float2(mine, 0);
            const float higher = fmaxf(mine, found[r].x), step = found[r].x - higher;
            const float by = exp2_approx(sums.maximum[r] - higher);
            const bool anew = turn == 0 || step < LEAST_STEP;
            const int to_exponent = anew ? 0 : (int)step << 23;
#pragma unroll
            for (int n = 0; n < DIMS / 8; n += 2) {
                const float *low = sums.values[n] + 2 * r, *high = sums.values[n + 1] + 2 * r;
                float4 *to = values + row * COLUMNS + word_of(at.first_dim, n, lane);
                const float4 sum = make_float4(low[0] * by, low[1] * by, high[0] * by, high[1] * by);
                if (to_exponent)
#pragma unroll
                    for (int i = 0; i < 4; i++) add_in_memory(reinterpret_cast<int *>(to) + i, to_exponent);
                if (anew) __stcg(to, sum);
                else add_in_memory(to, sum);
            }
            found[r] = make_float2(higher, (anew ? 0 : found[r].y * exp2_approx(step)) + sums.weights[2 * r] * by);
        }
        __syncthreads(); // all have read the references
        if (at.first_dim == 0 && c == 0)
#pragma unroll
            for (int r = 0; r < 2; r++) __stcg(references + first_row + g + 8 * r, found[r]);
        __syncthreads();

        // 9. hand on; the last one divides
        const bool is_last = turn == segments.count - 1;
        if (threadIdx.x == 0) store_release(turns + tile, is_last ? 0 : turn + 1);
        if (!is_last) return;
        for (int i = threadIdx.x; i < HEADS * COLUMNS; i += 32 * WARPS) {
            const int row = i / COLUMNS, head = at.head_tile * HEADS + row;
            if (head >= n_heads) break;
            T *to = out + ((long long)at.b * n_heads + head) * LATENT;
            store_word(to, i % COLUMNS, __ldcg(values + i), __ldcg(references + row).y);
        }
    });
}
