/* Decode attention over a quantised cache, first of two launches: each block reads an equal share of
   the codes, and leaves what it found for ../attention/merge.cu.

   New since decode.cu of ../attention:
   - The codes lie in memory as the lanes of an mma take them (cache.cuh). A tile is twice as long,
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
   RING_STAGES and TEAM_WARPS (cache.cuh), and BLOCKS, that a multiprocessor is to have room for.
   Launch with 32 * WARPS threads on a block for each TEAMS shares, with one team at most one for each
   tile, with ONE_BLOCK_PER_ROW one for each TEAMS rows of all sequences; rows = n_kv_heads *
   HEAD_TILES; the other numbers: tiles.cuh. Shared memory: Shared. What is written:
   ../attention/partial.cuh; out, or the two others, may be null. q, out (batch, n_heads, HEAD_DIM); k, v
   and their scales as layout.py has them, with room for k_room and v_room tiles in a sequence. scale:
   times log2(e). early: launched as a dependent. */
#ifndef SCHEDULE
#define SCHEDULE Schedule<8, 32, 1, false, false>
#endif
#include "../device/hopper/warpgroup.cuh"
#include "../device/pdl.cuh"
#include "column_sums.cuh"
#include "queries.cuh"
#ifndef BLOCKS
#define BLOCKS 1
#endif
static_assert(HEAD_TILES_PER_BLOCK == 1, "all warps share the tokens of one head tile");

/* The products of a tile's keys with the queries, but for the factor score_scale. */
__device__ __forceinline__ void multiply_keys(HeadColumns (&s)[SIXTEENS], const Queries &queries, const uint4 *words,
                                              const __half2 *scales, int lane) {
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++) {
        unsigned keys[K_LANE];
        take_words(keys, words + 8 * K_LANE * t, lane);
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            HeadColumns part;
#pragma unroll
            for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) part[n][i] = 0;
#pragma unroll
            for (int step = group * (STEPS / K_GROUPS); step < (group + 1) * (STEPS / K_GROUPS); step++) {
                unsigned a[4];
                KEYS::keys(a, keys + step * KEYS::WORDS);
#pragma unroll
                for (int n = 0; n < HEAD_EIGHTS; n++)
                    mma_m16n8k16(part[n], a, queries.operand[n][step][0], queries.operand[n][step][1], __half());
            }
            float2 scale = {1, 1}; // of tokens g and g + 8
            if (!BY_CHANNEL) scale = __half22float2(scales[(t * 8 + lane / 4) * K_GROUPS + group]);
#pragma unroll
            for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (KEYS::OFFSET > 0) part[n][i] += queries.offset_product[group][n][i];
                    const float x = BY_CHANNEL ? part[n][i] : part[n][i] * (i < 2 ? scale.x : scale.y);
                    s[t][n][i] = group ? s[t][n][i] + x : x;
                }
        }
    }
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[t][n][i] *= queries.score_scale[n][i % 2];
}
/* Scores of tokens from the `tokens`-th on, counted from the lane's first, become those of no token. */
__device__ __forceinline__ void mask(HeadColumns (&s)[SIXTEENS], int tokens) {
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (16 * t + i / 2 * 8 >= tokens) s[t][n][i] = MASKED;
}
/* Add a tile's values, weighted. */
__device__ __forceinline__ void mix_values(ColumnSums &sums, const Weights &weights, const uint4 *words,
                                           const uint2 *scales, int lane) {
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++) {
        unsigned values[V_LANE];
        take_words(values, words + 8 * V_LANE * t, lane);
#pragma unroll
        for (int group = 0; group < V_GROUPS; group++) {
            const uint2 scale = scales[(t * 4 + lane % 4) * V_GROUPS + group]; // of tokens 2c, 2c + 1 and 8 more
            unsigned b[HEAD_EIGHTS][2];
#pragma unroll
            for (int n = 0; n < HEAD_EIGHTS; n++) {
                b[n][0] = mul_x2(weights[t][n][0], scale.x, __half());
                b[n][1] = mul_x2(weights[t][n][1], scale.y, __half());
            }
#pragma unroll
            for (int step = group * (STEPS / V_GROUPS); step < (group + 1) * (STEPS / V_GROUPS); step++) {
                unsigned a[4];
                VALUES::values(a, values + step * VALUES::WORDS);
#pragma unroll
                for (int n = 0; n < HEAD_EIGHTS; n++)
                    mma_m16n8k16(sums.values[step][n], a, b[n][0], b[n][1], __half());
            }
        }
    }
}

/* Shared memory of a block, as a warp of a team sees it: [WARPS][STAGES][SLOT] words of 16 bytes; if a team has several
   warps, [WARPS][HEADS][PITCH] floats and [WARPS][HEADS] pairs of them; [TEAMS][HEADS][PITCH] float16; [TEAMS][HEADS]
   ints. */
struct Shared {
    uint4 *ring;           // of the warp
    float *values;         // of the team, and all that follows
    float2 *max_and_sum;
    SharedQueries queries;

    __device__ __forceinline__ Shared(uint4 *memory, int warp, int team) : ring(memory + warp * STAGES * SLOT) {
        constexpr int JOINED = TEAM > 1 || WHOLE ? WARPS * HEADS : 0, EACH = JOINED / TEAMS;
        float *all_values = reinterpret_cast<float *>(memory + WARPS * STAGES * SLOT);
        float2 *all_pairs = reinterpret_cast<float2 *>(all_values + JOINED * PITCH);
        __half *all_queries = reinterpret_cast<__half *>(all_pairs + JOINED);
        int *all_exponents = reinterpret_cast<int *>(all_queries + TEAMS * HEADS * PITCH);
        values = all_values + team * EACH * PITCH, max_and_sum = all_pairs + team * EACH;
        queries = {all_queries + team * HEADS * PITCH, all_exponents + team * HEADS};
    }
};
/* The warps of a team meet. */
__device__ __forceinline__ void meet(int team) {
    if constexpr (TEAM == 1) __syncwarp();
    else if constexpr (TEAMS == 1) __syncthreads();
    else named_barrier<32 * TEAM>(1 + team);
}

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
