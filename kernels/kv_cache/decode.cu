/* Decode attention over a quantised cache, first of two launches: each block reads an equal share of
   the codes, and leaves what it found for ../attention/merge.cu.

   New since decode.cu of ../attention:
   - The codes lie in memory as the lanes of an mma take them (format.cuh). A tile is twice as long,
     TILE = 32, so that two chains of mma run side by side.
   - Codes become float16 in registers (codes.cuh). Scales do not touch them. A scale of keys goes into
     the score of its token, or, where a channel has it, into q, once for each group of tokens; a
     scale of values goes into the weight of its token.
   - Keys and values are the left operands, Sᵀ = K Qᵀ and Oᵀ += Vᵀ Wᵀ, so that 8 query heads, not 16,
     fill an mma. movmatrix turns Sᵀ into Wᵀ.
   - Operands are float16 whatever the dtype of q. Powers of two keep them in its range: q is brought
     below 2**q_lift, head by head (queries.cuh), and the weights carry 2**lift.
   - A warp has neighbouring tiles, so that it meets a group's scales once. Keys and values are
     waited for one after the other.
   - A share belongs to a team of warps, from one to all of a block. The fewer, the fewer wait for each
     other at the end of a segment, and the more segments are left for merge.cu.
   - With ONE_BLOCK_PER_ROW a share is a row, of any length: nothing is left to be merged, and this is
     the only launch.

   Moves HEAD_DIM * (bits of k + bits of v) / 8 bytes for each token and kv head, and 2 for each
   scale; and 4 * (HEAD_DIM + 2) bytes for each head and segment.

   Compile with SHAPE (HEAD_DIM a multiple of 16), SCHEDULE (one head tile a block), CACHE,
   RING_STAGES and TEAM_WARPS (format.cuh), and BLOCKS, that a multiprocessor is to have room for.
   Launch with 32 * WARPS threads on a block for each TEAMS shares, with one team at most one for each
   tile, with ONE_BLOCK_PER_ROW one for each TEAMS rows of all sequences; rows = n_kv_heads *
   HEAD_TILES; the other numbers: tiles.cuh. Shared memory: Shared. What is written:
   ../attention/partial.cuh; out, or the two others, may be null. q, out (batch, n_heads, HEAD_DIM); k, v
   and their scales as layout.py has them, with room for k_room and v_room tiles in a sequence. scale:
   times log2(e). early: launched as a dependent. */
#ifndef SCHEDULE
#define SCHEDULE Schedule<8, 32, 1, false, false>
#endif
#include "../device/pdl.cuh"
#include "cache.cuh"
#include "products.cuh"
#include "teams.cuh"
#ifndef BLOCKS
#define BLOCKS 1
#endif
static_assert(HEAD_TILES_PER_BLOCK == 1, "all warps share the tokens of one head tile");

/* The warp's tiles of a share. */
__device__ __forceinline__ WarpTiles warp_tiles(const TileSchedule &schedule, int share, int first, int count,
                                                int member, int lane) {
    if constexpr (WHOLE) {
        const RowCursor begin(schedule, share);
        return {begin, begin.tiles, member};
    } else return {TileCursor(schedule, first, lane), count, member};
}

/* A tile: its scores and weights when its keys have come, its weighted values when those have, too. */
__device__ __forceinline__ void take_tile(ColumnSums &sums, Queries &queries, const SharedQueries &shared_queries,
                                          const TileSchedule &schedule, const WarpTiles &here, bool new_segment,
                                          const CopyRing<STAGES, 2> &ring, const uint4 *ring_memory, int lift,
                                          int lane) {
    const uint4 *slot = ring_memory + ring.wait_full<0>() * SLOT; // keys
    const uint4 *k_scales = slot + K_WORDS + V_WORDS, *v_scales = k_scales + K_SCALES;
    __syncwarp();

    // 3. scores, (tokens, heads)
    HeadColumns s[SIXTEENS];
    if (BY_CHANNEL && (new_segment || here.at_new_group())) queries.take_scaled(shared_queries, k_scales, lane);
    multiply_keys(s, queries, slot, reinterpret_cast<const __half2 *>(k_scales), lane);
    if (here.cursor.tile + 1 == here.cursor.tiles)
        mask(s, schedule.length(here.cursor.b) - here.cursor.tile * TILE - lane / 4);

    // 4. weights, and 5. weighted values
    Weights weights;
    sums.online_softmax(s, lift, weights);
    ring.wait_full<1>(); // values
    __syncwarp();
    mix_values(sums, weights, slot + K_WORDS, reinterpret_cast<const uint2 *>(v_scales), lane);
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS)
decode(const T *q, const uint4 *k, const uint4 *v, const uint4 *k_scale, const uint4 *v_scale, const int *kv_lens,
       T *out, float *partial_out, float2 *max_and_sum, int kv_len, int batch, int rows, int tiles_per_share,
       int shares_with_one_more, int k_room, int v_room, float scale, int q_lift, int lift, int early) {
    extern __shared__ __align__(16) uint4 memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / TEAM, member = warp % TEAM;
    const Shared shared(memory, warp, team);
    let_next_kernel_start();
    if (!early) wait_for_previous_kernel();

    // 1. which tiles. The shares of a block lie far apart, so that those with one more are everywhere
    const int share = team * gridDim.x + blockIdx.x;
    TileSchedule schedule{kv_lens, kv_len, batch, rows, tiles_per_share, shares_with_one_more};
    int first = 0, count = 0;
    if constexpr (!WHOLE) {
        schedule.share_out(TEAMS * gridDim.x, lane);
        first = schedule.first_tile(share), count = schedule.first_tile(share + 1) - first;
    } else if (share < batch * rows) count = schedule.tiles((unsigned)share / rows);
    if (count == 0) {
        wait_for_previous_kernel(); // who waits for this kernel takes the one before as done, too
        if (WHOLE && share < batch * rows) store_zeros(StoreOutput{out, share}, threadIdx.x % (32 * TEAM));
        return;
    }
    WarpTiles here = warp_tiles(schedule, share, first, count, member, lane);

    // 2. fill the ring. q, the newest token of a sequence, and what shares its scale may come from the kernels ahead
    Queries queries;
    const Codes codes{k, v, k_scale, v_scale, k_room, v_room};
    Prefetcher prefetcher(schedule, codes, here, shared.ring);
    if (!early) queries.load(q, HeadTile(here.cursor.work_row(schedule), 0), member, lane);
#pragma unroll 1
    for (int slot = 0; slot < STAGES; slot++) {
        prefetcher.find_tile(member);
        if (prefetcher.at_newest_group()) wait_for_previous_kernel();
        prefetcher.prefetch(slot, lane);
    }
    wait_for_previous_kernel(); // once more is over at once
    if (early) queries.load(q, HeadTile(here.cursor.work_row(schedule), 0), member, lane);

    CopyRing<STAGES, 2> ring;
    ColumnSums sums;
#pragma unroll 1
    for (;;) { // segments
        const long long row = here.cursor.work_row(schedule);
        queries.lay_down(shared.queries, q_lift, member, lane);
        meet(team);
        queries.take(shared.queries, q_lift, scale, lane);
        if (here.left > 0) queries.load(q, HeadTile(here.row_after(schedule), 0), member, lane); // of the next segment
        sums.clear();
#pragma unroll 1
        for (bool new_segment = true; here.mine > 0; here.next_tile(), new_segment = false) {
            take_tile(sums, queries, shared.queries, schedule, here, new_segment, ring, shared.ring, lift, lane);

            // 6. ask for what comes STAGES tiles later
            prefetcher.find_tile(member);
            prefetcher.prefetch(ring.slot, lane);
            ring.advance();
        }

        // 7. what the share hands on
        const StorePartial partial{partial_out, max_and_sum, share + row};
        if constexpr (TEAM == 1 && !WHOLE) sums.store(partial, lane);
        else {
            sums.lay_down(shared.values, shared.max_and_sum, member, lane);
            meet(team);
            if constexpr (WHOLE) {
                store(StoreOutput{out, row}, shared.values, shared.max_and_sum, threadIdx.x % (32 * TEAM));
                return;
            }
            store(partial, shared.values, shared.max_and_sum, threadIdx.x % (32 * TEAM));
        }
        if (here.left == 0) return;
        meet(team);
        here.next_segment(schedule, member);
    }
}
