/* The best rung of decode attention, first of two launches: each block reads an equal share of the
   cache, and leaves what it found for merge.cu.

   New since split:
   - The query heads of a kv head are the rows of mma.m16n8k16, so k and v are read once for all of
     them: S = Q Kᵀ, then O += W V. S leaves the first mma laid out as W enters the second.
   - A warp owns a ring of STAGES tiles. It copies them with cp.async, waits for its own copies alone,
     and meets the other warps only at the end of a segment. Where a kv head has more than 16 query
     heads, the warps of its head tiles are a team with one ring, so that each tile is read once.
   - Shares are equal but for a tile, whatever the batch and the lengths (tiles.cuh).
   - The maximum of the online softmax is stale (softmax.cuh).
   - With ONE_BLOCK_PER_ROW shares are of whole rows: nothing is left to be merged, and this is the only
     launch.
   - Under programmatic dependent launch the ring is filled before the wait. The newest token of a
     sequence, q and what the merge before still reads come after it.

   Moves 4 * kv_len * HEAD_DIM bytes for each sequence and kv head once, and 4 * (HEAD_DIM + 2) bytes
   for each head and segment, with ONE_BLOCK_PER_ROW 2 * HEAD_DIM for each head.
   4 * kv_len * HEAD_DIM flops for each head.

   Compile with SHAPE and SCHEDULE (shape.cuh) and RING_STAGES. Launch with 32 * WARPS threads on as many
   blocks as there are to be shares, with LENS even more than tiles, with ONE_BLOCK_PER_ROW at most
   batch * rows; rows = n_kv_heads * HEAD_TILES / HEAD_TILES_PER_BLOCK. Two numbers say how they are
   shared out (tiles.cuh): of tiles, with ONE_BLOCK_PER_ROW of rows. What is written: partial.cuh; out,
   or the two others, may be null. Shared memory: [TEAMS][STAGES] tiles of k and v, [WARPS] queries of
   a head tile, WarpSums::FLOATS floats.
   q, out (batch, n_heads, HEAD_DIM); k, v (batch, kv_len, n_kv_heads, HEAD_DIM); all addresses
   multiples of 16 bytes. scale: times log2(e). early: launched as a dependent. */
#include "../device/hidden.cuh"
#include "../device/pdl.cuh"
#include "partial.cuh"
#include "queries.cuh"
#include "teams.cuh"
#include "tile_products.cuh"
#include "tiles.cuh"

static_assert(!ONE_BLOCK_PER_ROW || !LENS, "a row without a share would get no result");

/* A head tile's queries, which lie in q one behind the other. */
struct Queries : LaidQueries {
    __device__ __forceinline__ void load(const T *q, const HeadTile &tile, int lane) {
        const int first = tile.first_head();
        const uint4 *from = reinterpret_cast<const uint4 *>(q + tile.query_head(first) * HEAD_DIM);
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            int word = 32 * i + lane;
            if (word < HEADS * WORDS && first + word / WORDS < GROUP) loaded[i] = __ldcg(from + word);
        }
    }
};

/* The end of a segment: what a head tile's only warp has, or what its warps have laid down. All warps call. */
template <class Epilogue>
__device__ __forceinline__ void hand_on(const Epilogue &epilogue, const WarpSums &warp_sums, const SoftmaxSums &sums,
                                        int warp, int lane) {
    if constexpr (WARPS_PER_HEAD_TILE > 1) {
        warp_sums.lay_down(sums, warp, lane);
        warp_sums.store(epilogue, threadIdx.x);
        __syncthreads(); // who still reads what the warps have laid down?
    } else store(epilogue, warp % HEAD_TILES_PER_BLOCK, sums, lane);
}

/* Copies a team's tiles into its ring, STAGES tiles before they are used. */
struct Prefetcher {
    const TileSchedule &schedule;
    TileCursor next;  // the tile to be copied
    int left;         // tiles of the share from there on, if any
    int head_tile;    // of the block
    int member;       // this thread, of the team
    int token_stride; // elements
    T *ring;
    CachePolicy once; // the cache is read once, so it is the first that may leave L2

    __device__ __forceinline__ Prefetcher(const TileSchedule &schedule, const TileCursor &begin, int tiles, T *ring,
                                          int warp, int lane)
        : schedule(schedule), next(begin), left(tiles - warp / HEAD_TILES_PER_BLOCK),
          head_tile(warp % HEAD_TILES_PER_BLOCK), member(warp % TEAM * 32 + lane),
          token_stride(schedule.rows * HEAD_TILES_PER_BLOCK / HEAD_TILES * HEAD_DIM), ring(ring), once(evict_first()) {
        if (left > 0) next.advance(schedule, warp / HEAD_TILES_PER_BLOCK);
    }
    /* Whether the next tile has the newest token of a sequence. */
    __device__ __forceinline__ bool at_newest_token() const { return left > 0 && next.tile + 1 == next.tiles; }

    /* Ask for the next tile; past the end of a sequence lay down zeros, where anything may stand. */
    __device__ __forceinline__ void prefetch(const T *k, const T *v, int slot, int lane) {
        if (left > 0) {
            const unsigned slot_at = hidden(shared_address(ring + 2 * slot * TILE_SIZE), lane); // insurance
            const int first = next.tile * TILE, there = schedule.length(next.b) - first; // tokens
            const long long at = ((long long)next.b * schedule.kv_len + first) * token_stride +
                                 (next.row * HEAD_TILES_PER_BLOCK + head_tile) / HEAD_TILES * HEAD_DIM;
#pragma unroll
            for (int kv = 0; kv < 2; kv++)
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    const int number = 32 * TEAM * i + member, token = number / WORDS, word = number % WORDS;
                    if (TILE * WORDS % (32 * TEAM) && number >= TILE * WORDS) continue;
                    const T *from = (kv ? v : k) + at + token * (long long)token_stride + 8 * word;
                    const unsigned to = slot_at + (kv * TILE_SIZE + place_of(token, word)) * BYTES;
                    if (token < there) copy_async(to, from, once);
                    else store_zeros(to);
                }
            left -= WARPS_PER_HEAD_TILE;
            if (left > 0) next.advance(schedule, WARPS_PER_HEAD_TILE);
        }
        CopyRing<STAGES>::filled(); // with nothing, too
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
decode(const T *q, const T *k, const T *v, const int *kv_lens, T *out, float *partial_out, float2 *max_and_sum,
       int kv_len, int batch, int rows, int tiles_per_block, int blocks_with_one_more, float scale, int early) {
    extern __shared__ __align__(16) uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head_tile = warp % HEAD_TILES_PER_BLOCK;
    const int team = warp / TEAM;
    T *rings = reinterpret_cast<T *>(shared), *all_queries = rings + TEAMS * STAGES * 2 * TILE_SIZE;
    T *ring_memory = rings + team * STAGES * 2 * TILE_SIZE, *query_memory = all_queries + warp * HEADS * PITCH;
    const WarpSums warp_sums(reinterpret_cast<float *>(all_queries + WARPS * HEADS * PITCH));
    let_next_kernel_start();
    if (!early) wait_for_previous_kernel();

    // 1. which tiles
    TileSchedule schedule{kv_lens, kv_len, batch, rows, tiles_per_block, blocks_with_one_more};
    schedule.share_out(gridDim.x, lane);
    const int unit = ONE_BLOCK_PER_ROW ? schedule.tiles(0) : 1, begin = schedule.first_tile(blockIdx.x) * unit;
    int left = schedule.first_tile(blockIdx.x + 1) * unit - begin; // tiles of the share
    if (left == 0) {
        wait_for_previous_kernel(); // who waits for this kernel takes the one before as done, too
        return;
    }
    TileCursor here(schedule, begin, lane); // the segment; the warp's next tile is `mine` further
    int mine = warp / HEAD_TILES_PER_BLOCK;

    // 2. fill the ring. q, and the newest token of a sequence, may come from the kernels ahead
    Queries queries;
    Prefetcher prefetcher(schedule, here, left, ring_memory, warp, lane);
    if (!early) queries.load(q, HeadTile(here.work_row(schedule), head_tile), lane);
#pragma unroll 1
    for (int slot = 0; slot < STAGES; slot++) {
        if (prefetcher.at_newest_token()) wait_for_previous_kernel();
        prefetcher.prefetch(k, v, slot, lane);
    }
    wait_for_previous_kernel(); // once more is over at once
    if (early) queries.load(q, HeadTile(here.work_row(schedule), head_tile), lane);

    CopyRing<STAGES> ring;
    SoftmaxSums sums;
#pragma unroll 1
    for (;;) { // segments
        const long long row = here.work_row(schedule);
        const int tiles = min(left, here.tiles - here.tile); // of the segment
        queries.take(query_memory, HeadTile(row, head_tile), lane);
        sums.clear();
#pragma unroll 1
        for (; mine < tiles; mine += WARPS_PER_HEAD_TILE) {
            const unsigned keys = shared_address(ring_memory + ring.wait_full() * 2 * TILE_SIZE);
            sync_team(team);

            // 3. scores
            Scores s = {};
            multiply_keys(s, queries.operand, keys, lane);
            scale_and_mask(s, scale, schedule.length(here.b) - (here.tile + mine) * TILE - lane % 4 * 2);

            // 4. weights, and 5. weighted values
            Weights weights;
            sums.online_softmax(s, weights);
            mix_values(sums, weights, keys + TILE_SIZE * BYTES, lane);
            sync_team(team);

            // 6. ask for what comes STAGES tiles later
            prefetcher.prefetch(k, v, ring.slot, lane);
            ring.advance();
        }

        // 7. what the block hands on
        if constexpr (ONE_BLOCK_PER_ROW) hand_on(StoreOutput{out, row}, warp_sums, sums, warp, lane);
        else hand_on(StorePartial{partial_out, max_and_sum, blockIdx.x + row}, warp_sums, sums, warp, lane);
        left -= tiles;
        if (left == 0) return;
        mine -= tiles;
        here.tile = 0;
        here.next_row(schedule);
        queries.load(q, HeadTile(here.work_row(schedule), head_tile), lane);
    }
}
