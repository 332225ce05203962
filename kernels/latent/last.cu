/* Latent attention in one launch: as split.cu, and the last block that comes to the end of a segment merges all of
   the sequence, for its heads.

   New since split.cu: a counter for each sequence and head tile. A block leaves its segment, then adds 1; who finds
   that all others have done so sees what they wrote, as the addition releases and acquires, and merges. Nobody
   waits, so the blocks may come in any order. But one block reads what is left of a sequence, where a second launch
   has a block for each head: with one sequence on all multiprocessors that takes longer than it saves.

   All as split.cu, but arrived (batch, head tiles), which is 0 before the first launch, and again after each. */
#include "../device/grid.cuh"
#include "walk.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
last(const T *q, const T *cache, const int *table, const int *kv_lens, T *out, float *partial_out, float2 *max_and_sum,
     unsigned *arrived, int kv_len, int batch, int n_heads, int n_pages, int max_pages, float scale) {
    __shared__ bool is_last;
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Cache tokens{cache, table, n_pages, max_pages, kv_len};
    const Problem problem{q, tokens, {kv_lens, kv_len, batch}, n_heads, scale};
    const Partial partial{partial_out, max_and_sum};
    const int lane = threadIdx.x % 32;
    clear_empty_sequences(problem, out);
    walk(problem, out, [&](const HeadSums &sums, const Segment &segment, const Place &at) {
        partial.store(sums, at, n_heads, lane);

        // 7. who is the last
        const LineShares shares(problem.sequences, gridDim.y, lane);
        const SegmentsOf segments(problem.sequences, shares, at.b, lane);
        __syncthreads();
        if (threadIdx.x == 0) {
            unsigned *counter = arrived + at.b * gridDim.x + at.head_tile;
            is_last = add_acquire_release(counter, 1) == segments.count - 1;
            if (is_last) store_relaxed(counter, 0); // for the next launch
        }
        __syncthreads();
        if (!is_last) return;

        // 8. merge: 128 threads for each head
        const int first = at.head_tile * HEADS, column = threadIdx.x % COLUMNS;
        for (int head = first + threadIdx.x / COLUMNS; head < min(first + HEADS, n_heads);
             head += 32 * WARPS / COLUMNS) {
            const long long row = segments.first * n_heads + head;
            Merged merged;
            merged.add_segments(reinterpret_cast<const float4 *>(partial_out) + row * COLUMNS + column,
                                max_and_sum + row, 0, segments.count, 1, n_heads);
            reinterpret_cast<uint2 *>(out)[((long long)at.b * n_heads + head) * COLUMNS + column] = merged.mean();
        }
    });
}
