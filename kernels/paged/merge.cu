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
#include "../attention/softmax.cuh"
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "requests.cuh"
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
    const int2 before = Shares::before(requests, b, lane);
    if (INVARIANT) {
        first = (long long)before.y * requests.rows + row * chunk_count(tiles);
        return chunk_count(tiles);
    }
    const Shares shares(requests, blocks, lane);
    const unsigned begin = before.x * requests.rows + row * tiles;
    const int first_block = shares.block_of(begin);
    first = first_block + (long long)b * requests.rows + row;
    return tiles ? shares.block_of(begin + tiles - 1) - first_block + 1 : 0;
}

extern "C" __global__ void __launch_bounds__(THREADS)
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

    // 2. each team's sums, relative to its own largest m
    float high = LOWEST, total = 0;
    float4 sum = {};
#pragma unroll 1
    for (int i = team; i < count; i += DEPTH * TEAMS) {
        float4 o[DEPTH];
        float2 pair[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const long long next = (long long)(i + d * TEAMS) * (HEAD_TILES_PER_BLOCK * HEADS);
            const bool there = i + d * TEAMS < count;
            pair[d] = there ? __ldcg(max_and_sum + next) : make_float2(LOWEST, 0);
            o[d] = there ? __ldcg(reinterpret_cast<const float4 *>(partial + next * HEAD_DIM)) : float4{};
        }
        const float before = high;
#pragma unroll
        for (int d = 0; d < DEPTH; d++) high = fmaxf(high, pair[d].x);
        const float scale = exp2_approx(before - high);
        sum = make_float4(sum.x * scale, sum.y * scale, sum.z * scale, sum.w * scale), total *= scale;
#pragma unroll
        for (int d = 0; d < DEPTH; d++) {
            const float w = exp2_approx(pair[d].x - high);
            total += w * pair[d].y;
            sum.x += w * o[d].x, sum.y += w * o[d].y, sum.z += w * o[d].z, sum.w += w * o[d].w;
        }
    }
    if (team < TEAMS) {
        found[team][column] = sum;
        if (column % (HEAD_DIM / 4) == 0) pairs[team][mine] = make_float2(high, total);
    }
    __syncthreads();

    // 3. the sums of all teams: two dimensions for each thread
#pragma unroll 1
    for (int i = 2 * threadIdx.x; i < WIDTH; i += 2 * THREADS) {
        const int of_block = i / HEAD_DIM;
        float high = LOWEST, total = 0, x = 0, y = 0;
#pragma unroll
        for (int t = 0; t < TEAMS; t++) high = fmaxf(high, pairs[t][of_block].x);
#pragma unroll
        for (int t = 0; t < TEAMS; t++) {
            const float w = exp2_approx(pairs[t][of_block].x - high);
            const float2 o = reinterpret_cast<const float2 *>(found[t])[i / 2];
            total += w * pairs[t][of_block].y, x += w * o.x, y += w * o.y;
        }
        const float share = total == 0 ? 0 : 1 / total; // 0: it saw no token
        const long long to = query_row(kv_head, n_kv_heads, of_group + of_block) * HEAD_DIM + i % HEAD_DIM;
        *reinterpret_cast<unsigned *>(out + to) = pack(x * share, y * share, T());
    }
}
