/* Latent attention in one launch, whose blocks add up a sequence's segments where they lie: in one place in L2, by
   additions that memory does itself.

   An addition there is float + float: no block can multiply what others have added. So nothing that lies there is
   ever rescaled: first all blocks of a sequence agree on a reference for each head, the highest of their maxima,
   then each scales its own sums, in registers, and adds. Steps 7 to 11 are 1 to 5 of merge_in_place in
   ref/latent_attention.py. (amla.cu does it the other way.)

   New since last.cu: blocks wait for each other, twice, each time for those that have the same sequence and head
   tile. So all blocks must be running at a time: no more of them than multiprocessors. One whose share has a second
   sequence waits within its share, for the block before it to come to its end; shares that are whole parts of
   sequences do without. Each block divides a part of the result. The order of additions is not fixed, so the last
   bits differ from run to run.

   All as split.cu, but in place of partial results sums (batch, head tiles, HEADS, 512 + 1) float32, whatever they
   hold; arrived (batch, head tiles) and highest (batch, head tiles, HEADS), which are 0 before the first launch and
   again after each. */
#include "../device/atomics.cuh"
#include "../device/grid.cuh"
#include "walk.cuh"

/* The blocks that have a part of a sequence, for one head tile. */
struct Meeting {
    unsigned *counter;
    int count; // of blocks

    /* Until all have called it so many times; what they wrote before can be seen. */
    __device__ __forceinline__ void all_have_come(int times) const {
        __syncthreads();
        if (threadIdx.x == 0) {
            add_acquire_release(counter, 1);
            while (load_acquire(counter) < (unsigned)(times * count)) {
            }
        }
        __syncthreads();
    }
    /* The last one to leave, behind so many waits, sets the counter back. */
    __device__ __forceinline__ void leave(int times) const {
        if (threadIdx.x == 0 && add_acquire_release(counter, 1) == (times + 1) * count - 1) store_relaxed(counter, 0);
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
in_place(const T *q, const T *cache, const int *table, const int *kv_lens, T *out, float *sums_memory,
         unsigned *arrived, unsigned *all_highest, int kv_len, int batch, int n_heads, int n_pages, int max_pages,
         float scale) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Cache tokens{cache, table, n_pages, max_pages, kv_len};
    const Problem problem{q, tokens, {kv_lens, kv_len, batch}, n_heads, scale};
    const int lane = threadIdx.x % 32, g = lane / 4, c = lane % 4;
    clear_empty_sequences(problem, out);
    walk(problem, out, [&](HeadSums &sums, const Segment &segment, const Place &at) {
        const SegmentsOf segments(problem.sequences, LineShares(problem.sequences, gridDim.y, lane), at.b, lane);
        const int tile = at.b * gridDim.x + at.head_tile, first_row = at.first_head - at.head_tile * HEADS;
        const Meeting meeting{arrived + tile, segments.count};
        float4 *values = reinterpret_cast<float4 *>(sums_memory) + (long long)tile * HEADS * COLUMNS;
        float *weights = sums_memory + (long long)batch * gridDim.x * HEADS * LATENT + (long long)tile * HEADS;
        unsigned *highest = all_highest + tile * HEADS;
        const int member = at.share + at.b - (int)segments.first, mine = member * 32 * WARPS + threadIdx.x;
        const int all_threads = segments.count * 32 * WARPS;

        // 7. say how high this segment's maxima are, and clear a part of the place
        if (at.first_dim == 0 && c == 0)
#pragma unroll
            for (int r = 0; r < 2; r++) max_in_memory(highest + first_row + g + 8 * r, in_order(sums.maximum[r]));
        for (int i = mine; i < HEADS * COLUMNS; i += all_threads) __stcg(values + i, float4{});
        if (mine < HEADS) __stcg(weights + mine, 0.0f);
        meeting.all_have_come(1);

        // 8. agree; 9. align; 10. add
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = first_row + g + 8 * r;
            const float by = exp2_approx(sums.maximum[r] - from_order(__ldcg(highest + row)));
#pragma unroll
            for (int n = 0; n < DIMS / 8; n += 2) {
                const float *low = sums.values[n] + 2 * r, *high = sums.values[n + 1] + 2 * r;
                add_in_memory(values + row * COLUMNS + word_of(at.first_dim, n, lane),
                              make_float4(low[0] * by, low[1] * by, high[0] * by, high[1] * by));
            }
            if (at.first_dim == 0 && c == 0) add_in_memory(weights + row, sums.weights[2 * r] * by);
        }
        meeting.all_have_come(2);

        // 11. divide
        for (int i = mine; i < HEADS * COLUMNS; i += all_threads) {
            const int row = i / COLUMNS, head = at.head_tile * HEADS + row;
            if (head >= n_heads) break;
            T *to = out + ((long long)at.b * n_heads + head) * LATENT;
            store_word(to, i % COLUMNS, __ldcg(values + i), __ldcg(weights + row));
        }
        if (mine < HEADS) highest[mine] = 0; // for the next launch, as the counter
        __syncthreads();
        meeting.leave(2);
    });
}
