/* The second launch of decode attention over pages: the segments of a row become its result.

   As ../attention/merge.cu, whose three steps it has: a segment i leaves o[i], l[i] and m[i], and
       out = sum of 2**(m[i] - m) * o[i] / sum of 2**(m[i] - m) * l[i]      with the largest m of all

   New since: which segments a row has follows from slots and lengths (requests.cuh), and may be many for
   one request and one for all others. So a block has as many teams as fit, and a team asks for DEPTH
   segments at once: the sums of a long row wait for memory few times.
   The order of all sums is fixed, so the result is the same bit for bit. A row that saw no token is 0.

   Reads 4 * (HEAD_DIM + 2) bytes for each row and segment. Compile with SHAPE, SCHEDULE and PAGES, as
   the first launch, THREADS and TOGETHER. Launch with THREADS threads, a multiple of 32 and at least
   TOGETHER * HEAD_DIM / 4, on n_requests * n_kv_heads * GROUP / TOGETHER blocks; TOGETHER divides HEADS
   and GROUP. partial (segments, HEAD_TILES_PER_BLOCK, HEADS, HEAD_DIM); max_and_sum (segments,
   HEAD_TILES_PER_BLOCK, HEADS) of (m, l); out (n_requests, NEW, n_heads, HEAD_DIM). blocks: of the first
   launch. */
#include "../device/copy.cuh"
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "requests.cuh"
#include "segment_sums.cuh"
#ifndef THREADS
#define THREADS 256
#endif
#ifndef TOGETHER
#define TOGETHER 1
#endif

constexpr int WIDTH = TOGETHER * HEAD_DIM, COLUMNS = WIDTH / 4, TEAMS = THREADS / COLUMNS;
constexpr int DEPTH = 6; // segments that a thread loads at once

/* Of one row: where its segments begin, and how many it has. */
__device__ __forceinline__ int segments_of(const Requests &requests, int b, int row, int blocks, int lane,
                                           long long &first) {
    const int tiles = requests.tiles(b);
    const int2 before = tiles_and_chunks_before(requests, b, lane);
    if (INVARIANT) {
        first = (long long)before.y * requests.rows + row * chunk_count(tiles);
        return chunk_count(tiles);
    }
    const LineShares shares(requests, blocks, lane);
    const unsigned begin = before.x * requests.rows + row * tiles;
    const int first_block = shares.block_of(begin);
    first = first_block + (long long)b * requests.rows + row;
    return tiles ? shares.block_of(begin + tiles - 1) - first_block + 1 : 0;
}

// The 1: without it ptxas saves registers, and asks for one segment after another.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
merge(const float *partial, const float2 *max_and_sum, const int *slots, const int *lens, T *out, int n_requests,
      int rows, int max_requests, int max_len, int newer, int blocks) {
    __shared__ float4 found[TEAMS][COLUMNS];
    __shared__ float2 pairs[TEAMS][TOGETHER];
    let_next_kernel_start();
    const int column = threadIdx.x % COLUMNS, team = threadIdx.x / COLUMNS, mine = column / (HEAD_DIM / 4); // my row
    const int n_kv_heads = rows * HEAD_TILES_PER_BLOCK / HEAD_TILES;
    const unsigned kv_head = blockIdx.x / (GROUP / TOGETHER), of_group = blockIdx.x % (GROUP / TOGETHER) * TOGETHER;
    const unsigned b = kv_head / n_kv_heads;
    const int head_tile = (kv_head - b * n_kv_heads) * HEAD_TILES + of_group / HEADS; // of the request

    // 1. which segments
    const Requests requests{slots, lens, n_requests, rows, max_requests, max_len, newer};
    long long first;
    const int row = head_tile / HEAD_TILES_PER_BLOCK;
    const int count = segments_of(requests, b, row, blocks, threadIdx.x % 32, first);
    const long long at = (first * HEAD_TILES_PER_BLOCK + head_tile % HEAD_TILES_PER_BLOCK) * HEADS + of_group % HEADS;
    partial += at * HEAD_DIM + 4 * column;
    max_and_sum += at + mine;
    wait_for_previous_kernel();

    // 2. each team's sums: DEPTH segments are on their way at once
    constexpr int STRIDE = HEAD_TILES_PER_BLOCK * HEADS; // rows from segment to segment
    SegmentSums sums;
#pragma unroll 1
    for (int i = team; i < count; i += DEPTH * TEAMS) {
        float2 pair[DEPTH];
        uint4 words[DEPTH];
        float4 values[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) { // all of them first: behind the last one, that one again, which is worth 0
            const long long away = (long long)min(i + d * TEAMS, count - 1) * STRIDE;
            words[d] = load_streaming(reinterpret_cast<const uint4 *>(partial + away * HEAD_DIM));
            pair[d] = __ldcg(max_and_sum + away);
        }
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            if (i + d * TEAMS >= count) pair[d] = make_float2(LOWEST, 0);
            values[d] = make_float4(__uint_as_float(words[d].x), __uint_as_float(words[d].y),
                                    __uint_as_float(words[d].z), __uint_as_float(words[d].w));
        }
        sums.add(pair, values);
    }
    if (team < TEAMS) found[team][column] = sums.values;
    if (team < TEAMS && column % (HEAD_DIM / 4) == 0) pairs[team][mine] = make_float2(sums.maximum, sums.weights);
    __syncthreads();

    // 3. the sums of all teams, by the first
    if (team > 0) return;
    SegmentSums all;
    float2 pair[TEAMS];
    float4 values[TEAMS];
#pragma unroll
    for (int t = 0; t < TEAMS; t++) pair[t] = pairs[t][mine], values[t] = found[t][column];
    all.add(pair, values);
    const float share = all.weights == 0 ? 0 : 1 / all.weights; // 0: it saw no token
    const uint2 mean = make_uint2(pack(all.values.x * share, all.values.y * share, T()),
                                  pack(all.values.z * share, all.values.w * share, T()));
    const long long to = query_row(kv_head, n_kv_heads, of_group + mine) * HEAD_DIM + 4 * column % HEAD_DIM;
    __stcg(reinterpret_cast<uint2 *>(out + to), mean);
}
