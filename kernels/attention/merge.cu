/* The second launch of decode attention: the segments of a row become its result.

   A segment i leaves three things of each head, relative to a reference m[i] that is near its
   largest score, in units of log 2:
       o[i] = sum of 2**(score - m[i]) * value, (HEAD_DIM,), not divided;  l[i] = sum of 2**(score - m[i])
   Then, with the largest m of all, the result is
       out = sum of 2**(m[i] - m) * o[i] / sum of 2**(m[i] - m) * l[i]

   A block has TOGETHER heads, and TEAMS teams of a thread for each four of their dimensions; team t
   adds up every TEAMS-th segment. Which segments a row has follows from the lengths as in tiles.cuh.
   The order of all sums is fixed, so the result is the same bit for bit. A row without tokens is 0.

   Reads 4 * (HEAD_DIM + 2) bytes for each head and segment. Compile with SHAPE and SCHEDULE, as the
   first launch, THREADS and TOGETHER. Launch with THREADS threads, a multiple of 32 and at least
   TOGETHER * HEAD_DIM / 4, on batch * n_heads / TOGETHER blocks; TOGETHER divides HEADS and GROUP.
   partial (segments, HEAD_TILES_PER_BLOCK, HEADS, HEAD_DIM); max_and_sum (segments,
   HEAD_TILES_PER_BLOCK, HEADS) of (m, l); out (batch, n_heads, HEAD_DIM). */
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/pdl.cuh"
#include "softmax.cuh"
#include "tiles.cuh"
#ifndef THREADS
#define THREADS 256
#endif
#ifndef TOGETHER
#define TOGETHER 1
#endif

constexpr int WIDTH = TOGETHER * HEAD_DIM, COLUMNS = WIDTH / 4, TEAMS = THREADS / COLUMNS;
constexpr int DEPTH = 5; // segments that a thread loads at once

extern "C" __global__ void __launch_bounds__(THREADS)
merge(const float *partial, const float2 *max_and_sum, const int *kv_lens, T *out, int kv_len, int batch, int rows,
      int tiles_per_block, int blocks_with_one_more, int blocks) {
    __shared__ float4 found[TEAMS][COLUMNS];
    __shared__ float2 pairs[TEAMS][TOGETHER];
    let_next_kernel_start();
    const int column = threadIdx.x % COLUMNS, team = threadIdx.x / COLUMNS, mine = column / (HEAD_DIM / 4); // my head
    const unsigned n_heads = rows * HEAD_TILES_PER_BLOCK / HEAD_TILES * GROUP, heads_before = blockIdx.x * TOGETHER;
    const unsigned b = heads_before / n_heads, head = heads_before - b * n_heads;
    const int head_tile = head / GROUP * HEAD_TILES + head % GROUP / HEADS; // of the sequence
    const int row = head_tile / HEAD_TILES_PER_BLOCK;

    // 1. which segments
    TileSchedule schedule{kv_lens, kv_len, batch, rows, tiles_per_block, blocks_with_one_more};
    const int lane = threadIdx.x % 32;
    schedule.share_out(blocks, lane);
    const int tiles = schedule.tiles(b), begin = schedule.tiles_before(b, lane) * rows + row * tiles;
    const int first = schedule.block_of(begin), count = tiles ? schedule.block_of(begin + tiles - 1) - first + 1 : 0;
    const long long segment = (long long)first + (long long)b * rows + row;
    const long long at = (segment * HEAD_TILES_PER_BLOCK + head_tile % HEAD_TILES_PER_BLOCK) * HEADS +
                         head % GROUP % HEADS;
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
            const int next = (i + d * TEAMS) * (HEAD_TILES_PER_BLOCK * HEADS);
            const bool there = i + d * TEAMS < count;
            pair[d] = there ? __ldcg(max_and_sum + next) : make_float2(LOWEST, 0);
            o[d] = there ? __ldcg(reinterpret_cast<const float4 *>(partial + (long long)next * HEAD_DIM)) : float4{};
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
        const int head = i / HEAD_DIM;
        float high = LOWEST, total = 0, x = 0, y = 0;
#pragma unroll
        for (int t = 0; t < TEAMS; t++) high = fmaxf(high, pairs[t][head].x);
#pragma unroll
        for (int t = 0; t < TEAMS; t++) {
            const float w = exp2_approx(pairs[t][head].x - high);
            const float2 o = reinterpret_cast<const float2 *>(found[t])[i / 2];
            total += w * pairs[t][head].y, x += w * o.x, y += w * o.y;
        }
        const float share = count ? 1 / total : 0;
        *reinterpret_cast<unsigned *>(out + (long long)blockIdx.x * WIDTH + i) = pack(x * share, y * share, T());
    }
}
