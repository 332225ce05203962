/* The second launch of decode attention over pages: the segments of a row become its result.

   As ../attention/merge.cu: a segment i leaves o[i], l[i] and m[i], and
       out = sum of 2**(m[i] - m) * o[i] / sum of 2**(m[i] - m) * l[i]      with the largest m of all

   New since: which segments a row of q has follows from slots and lengths (requests.cuh), and may be many
   for one request and one for all others. So a warp takes a row, if it has few segments, and all warps of
   the block together take those that have many, one after another. The rows of a block lie far apart: those
   of a long request are in many blocks. Blocks are small, so that they find room beside the first launch.
   The order of all sums hangs on the number of segments alone. A row that saw no token is 0.

   Reads 4 * (HEAD_DIM + 2) bytes for each row and segment. Compile with SHAPE, SCHEDULE and PAGES, as
   the first launch, and THREADS: whole warps. Launch with as many threads on any number of blocks.
   partial (segments, HEAD_TILES_PER_BLOCK, HEADS, HEAD_DIM); max_and_sum (segments,
   HEAD_TILES_PER_BLOCK, HEADS) of (m, l); out (n_requests, NEW, n_heads, HEAD_DIM). blocks: of the first
   launch. */
#include "../device/copy.cuh"
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "requests.cuh"
#include "segment_sums.cuh"
#ifndef THREADS
#define THREADS 128
#endif

constexpr int COLUMNS = HEAD_DIM / 4, MERGERS = THREADS / 32; // of four dimensions; warps
constexpr int TURNS = (COLUMNS + 31) / 32;                    // in which a warp has all columns
constexpr int DEPTH = TURNS > 1 ? 4 : 5;                      // segments that a lane loads at once
constexpr int FEW = 8;                                        // segments that a warp takes alone

/* Of a row of q: where its segments lie, and how many it has. */
struct Segments {
    const float *partial;
    const float2 *max_and_sum;
    int count;

    /* row: among all, kv head after kv head. The lanes of a warp meet in here. */
    __device__ __forceinline__ Segments(const Requests &requests, const LineShares &shares, unsigned row,
                                        int n_kv_heads, const float *of_all, const float2 *pairs_of_all, int lane) {
        const unsigned kv_head = row / GROUP, of_group = row - kv_head * GROUP, b = kv_head / n_kv_heads;
        const int head_tile = (kv_head - b * n_kv_heads) * HEAD_TILES + of_group / HEADS; // of the request
        const int work_row = head_tile / HEAD_TILES_PER_BLOCK, tiles = requests.tiles(b);
        const int2 before = tiles_and_chunks_before(requests, b, lane);
        long long first;
        if (INVARIANT) {
            count = chunk_count(tiles);
            first = (long long)before.y * requests.rows + work_row * count;
        } else {
            const unsigned begin = before.x * requests.rows + work_row * tiles;
            const int first_block = shares.block_of(begin);
            first = first_block + (long long)b * requests.rows + work_row;
            count = tiles ? shares.block_of(begin + tiles - 1) - first_block + 1 : 0;
        }
        const long long at =
            (first * HEAD_TILES_PER_BLOCK + head_tile % HEAD_TILES_PER_BLOCK) * HEADS + of_group % HEADS;
        partial = of_all + at * HEAD_DIM, max_and_sum = pairs_of_all + at;
    }
    /* Of one column, the sums of each `every`-th segment from `from` on: DEPTH of them are on their way at once. */
    __device__ __forceinline__ SegmentSums sum(int from, int every, int column) const {
        constexpr int STRIDE = HEAD_TILES_PER_BLOCK * HEADS; // rows from segment to segment
        SegmentSums sums;
#pragma unroll 1
        for (int i = from; i < count; i += DEPTH * every) {
            float2 pair[DEPTH];
            uint4 words[DEPTH];
            float4 values[DEPTH];
#pragma unroll
            for (int d = 0; d < DEPTH; d++) { // all of them first: behind the last one, that one again, worth 0
                const long long away = (long long)min(i + d * every, count - 1) * STRIDE;
                words[d] = load_streaming(reinterpret_cast<const uint4 *>(partial + away * HEAD_DIM + 4 * column));
                pair[d] = __ldcg(max_and_sum + away);
            }
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                if (i + d * every >= count) pair[d] = make_float2(LOWEST, 0);
                values[d] = make_float4(__uint_as_float(words[d].x), __uint_as_float(words[d].y),
                                        __uint_as_float(words[d].z), __uint_as_float(words[d].w));
            }
            sums.add(pair, values);
        }
        return sums;
    }
};

/* The mean of the values, as four numbers of out. */
__device__ __forceinline__ void store(T *out, unsigned row, int n_kv_heads, int column, const SegmentSums &all) {
    const float share = all.weights == 0 ? 0 : 1 / all.weights; // 0: it saw no token
    const uint2 mean = make_uint2(pack(all.values.x * share, all.values.y * share, T()),
                                  pack(all.values.z * share, all.values.w * share, T()));
    const long long to = query_row(row / GROUP, n_kv_heads, row % GROUP) * HEAD_DIM + 4 * column;
    __stcg(reinterpret_cast<uint2 *>(out + to), mean);
}

// The 1: without it ptxas saves registers, and asks for one segment after another.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
merge(const float *partial, const float2 *max_and_sum, const int *slots, const int *lens, T *out, int n_requests,
      int rows, int max_requests, int max_len, int newer, int blocks) {
    __shared__ float4 found[MERGERS][COLUMNS];
    __shared__ float2 pairs[MERGERS];
    __shared__ bool many[2][MERGERS]; // segments; for this turn and the next
    let_next_kernel_start();
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int n_kv_heads = rows * HEAD_TILES_PER_BLOCK / HEAD_TILES;
    const unsigned all_rows = (unsigned)n_requests * n_kv_heads * GROUP;
    const Requests requests{slots, lens, n_requests, rows, max_requests, max_len, newer};
    const LineShares shares(requests, blocks, lane);
#pragma unroll 1
    for (unsigned first = blockIdx.x, turn = 0; first < all_rows; first += MERGERS * gridDim.x, turn ^= 1) {
        // 1. which segments this warp's row has
        const unsigned mine = first + warp * gridDim.x;
        const Segments own(requests, shares, min(mine, all_rows - 1), n_kv_heads, partial, max_and_sum, lane);
        if (lane == 0) many[turn][warp] = mine < all_rows && own.count > FEW;
        wait_for_previous_kernel();

        // 2. few: on its own
        if (mine < all_rows && own.count <= FEW)
#pragma unroll
            for (int column = lane; column < COLUMNS; column += 32)
                store(out, mine, n_kv_heads, column, own.sum(0, 1, column));
        __syncthreads();

        // 3. many: together, row after row
#pragma unroll 1
        for (int w = 0; w < MERGERS; w++) {
            if (!many[turn][w]) continue;
            const unsigned row = first + w * gridDim.x;
            const Segments theirs(requests, shares, row, n_kv_heads, partial, max_and_sum, lane);
            for (int column = lane; column < COLUMNS; column += 32) {
                const SegmentSums sums = theirs.sum(warp, MERGERS, column);
                found[warp][column] = sums.values;
                if (column == 0) pairs[warp] = make_float2(sums.maximum, sums.weights);
            }
            __syncthreads();
            for (int column = threadIdx.x; column < COLUMNS; column += THREADS) {
                SegmentSums all;
                float2 pair[MERGERS];
                float4 values[MERGERS];
#pragma unroll
                for (int n = 0; n < MERGERS; n++) pair[n] = pairs[n], values[n] = found[n][column];
                all.add(pair, values);
                store(out, row, n_kv_heads, column, all);
            }
            __syncthreads(); // who still reads what the warps have found?
        }
    }
}
