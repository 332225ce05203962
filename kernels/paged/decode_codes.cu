/* Decode attention over pages of 8 or 4 bits, first of two launches: each share of the pages belongs to a
   team of warps, which leaves what it found for merge.cu.

   It is ../kv_cache/decode.cu, its products and its teams, over the line of tiles of decode.cu beside it:
   - A tile's units of 16 tokens come through the table, each from its page (code_prefetch.cuh).
   - The line goes over the requests of a list of slots; lengths, tables and the list are read here.
   - Several new tokens of a request may ask at once (NEW): columns of the mma are then the heads of the
     group for each of them, and each column has a last token of its own.
   - Behind a length a page holds what it held for somebody before, be it NaN: there scores are masked, and
     scales and codes of values cleared, since a weight of 0 times NaN is NaN.

   Moves HEAD_DIM * 2 * bits / 8 bytes for each token and kv head and 2 for each scale, by head tiles of a kv
   head once each; 4 for each page and head tile; and 4 * (HEAD_DIM + 2) for each row of q and segment.

   Compile with SHAPE and SCHEDULE (../attention/shape.cuh; GROUP: rows of a kv head, NEW times the heads of
   its group; one head tile a block), PAGES (requests.cuh; pages of 16 tokens or more), CACHE, RING_STAGES and
   TEAM_WARPS (../kv_cache/format.cuh). Launch with 32 * WARPS threads on a block for each TEAMS shares; rows =
   n_kv_heads * HEAD_TILES. Shared memory: Shared. q (n_requests, NEW, n_heads, HEAD_DIM); k, v, scales: the
   pool (code_prefetch.cuh); slots (n_requests,); lens (max_requests,); table (max_requests, max_pages).
   partial_out, max_and_sum: ../attention/partial.cuh. newer: so many last tokens of each request are newer
   than those that ask. scale: times log2(e). lift: of weights. early: launched as a dependent. */
#ifndef SCHEDULE
#define SCHEDULE Schedule<8, 32, 1, true, false>
#endif
#include "../device/pdl.cuh"
#include "../kv_cache/products.cuh"
#include "../kv_cache/teams.cuh"
#include "code_prefetch.cuh"
static_assert(HEAD_TILES_PER_BLOCK == 1 && !WHOLE, "a block has shares of one head tile at a time");

constexpr int Q_LIFT = 15; // queries are brought below 2**15, as no scale touches them

/* The queries of a head tile's rows, wherever they lie in q. */
struct RowQueries : Queries {
    __device__ __forceinline__ void load_rows(const T *q, long long row, int n_kv_heads, int member, int lane) {
        const HeadTile tile(row, 0);
        const int first = tile.first_head();
#pragma unroll
        for (int i = 0; i < WARP_HEADS; i++)
#pragma unroll
            for (int j = 0; j < LANE_FOURS; j++) {
                const int of_tile = member + i * TEAM, four = lane + 32 * j;
                loaded[i][j] = uint2{};
                if (of_tile >= HEADS || first + of_tile >= GROUP || four >= FOURS) continue;
                const T *from = q + query_row(tile.index / HEAD_TILES, n_kv_heads, first + of_tile) * HEAD_DIM;
                loaded[i][j] = __ldcg(reinterpret_cast<const uint2 *>(from) + four);
            }
    }
};

/* Scores of tokens that a row does not see become those of no token. tokens: of the request, counted from the lane's
   first; first_row: of the head tile. */
__device__ __forceinline__ void mask_rows(HeadColumns (&s)[SIXTEENS], int tokens, int first_row, int lane) {
#pragma unroll
    for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
        for (int i = 0; i < 2; i++) { // the last new token sees all tokens, the one before one less
            const int row = min(first_row + 8 * n + lane % 4 * 2 + i, GROUP - 1);
            const int end = tokens - (NEW - 1) + row / (GROUP / NEW);
#pragma unroll
            for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
                for (int half = 0; half < 2; half++)
                    if (16 * t + 8 * half >= end) s[t][n][2 * half + i] = MASKED;
        }
}
/* Of a tile's values, what is behind its first `tokens` becomes 0: scales, and codes that can be NaN. */
__device__ __forceinline__ void clear_behind(uint4 *values, uint4 *scales, int tokens, int lane) {
    __half *each = reinterpret_cast<__half *>(scales);
    for (int i = lane; i < 8 * V_SCALES; i += 32) {
        constexpr int OF_UNIT = 16 * V_GROUPS;
        const int within = i % OF_UNIT, c = within / (4 * V_GROUPS), token = 2 * c + within % 4 / 2 * 8 + within % 2;
        if (i / OF_UNIT * 16 + token >= tokens) each[i] = __half(0.f);
    }
    if (VALUES::OFFSET > 0) return; // integers
    unsigned *words = reinterpret_cast<unsigned *>(values); // a lane's step: tokens 2c and 2c + 1, then 8 more
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++)
#pragma unroll 1
        for (int i = lane; i < 4 * V_UNIT; i += 32) {
            // words of 16 bytes hold two steps of a lane, and what is left over, in words of 8, one
            constexpr int PAIRED = V_LANE / 4 * 4 * 32;
            const int of_lane = i < PAIRED ? i / 4 % 32 : (i - PAIRED) / 2;
            const int left = tokens - 16 * t - (of_lane % 4 * 2 + i % 2 * 8); // of the word's two tokens
            if (left < 2) words[4 * V_UNIT * t + i] &= left == 1 ? 0x00ff00ff : 0;
        }
}

/* A tile: its scores and weights when its keys have come, its weighted values when those have, too. length: of the
   request, in tokens. */
__device__ __forceinline__ void take_tile(ColumnSums &sums, const Queries &queries, const WarpTiles &here, int length,
                                          int first_row, const CopyRing<STAGES, 2> &ring, uint4 *ring_memory, int lift,
                                          int lane) {
    uint4 *slot = ring_memory + ring.wait_full<0>() * SLOT; // keys, and all scales
    uint4 *k_scales = slot + K_WORDS + V_WORDS, *v_scales = k_scales + K_SCALES;
    const int tokens = length - here.cursor.tile * TILE; // from the tile's first on
    __syncwarp();

    // 3. scores, (tokens, rows)
    HeadColumns s[SIXTEENS];
    multiply_keys(s, queries, slot, reinterpret_cast<const __half2 *>(k_scales), lane);
    if (tokens - (NEW - 1) < TILE) mask_rows(s, tokens - lane / 4, first_row, lane);

    // 4. weights, and 5. weighted values
    Weights weights;
    sums.online_softmax(s, lift, weights);
    ring.wait_full<1>(); // values
    __syncwarp();
    if (tokens < TILE) {
        clear_behind(slot + K_WORDS, v_scales, tokens, lane);
        __syncwarp();
    }
    mix_values(sums, weights, slot + K_WORDS, reinterpret_cast<const uint2 *>(v_scales), lane);
    __syncwarp();
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
decode(const T *q, const uint4 *k, const uint4 *v, const uint4 *scales, const int *slots, const int *lens,
       const int *table, float *partial_out, float2 *max_and_sum, int n_requests, int rows, int max_requests,
       int max_pages, int n_pages, int newer, float scale, int lift, int early) {
    extern __shared__ __align__(16) uint4 memory[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, team = warp / TEAM, member = warp % TEAM;
    const int n_kv_heads = rows / HEAD_TILES;
    const Shared shared(memory, warp, team);
    let_next_kernel_start();
    if (!early) wait_for_previous_kernel();

    // 1. which tiles. The shares of a block lie far apart, so that those with one more are everywhere
    const int share = team * gridDim.x + blockIdx.x;
    const Requests requests{slots, lens, n_requests, rows, max_requests, max_pages * PAGE, newer};
    const LineShares shares(requests, TEAMS * gridDim.x, lane);
    const int begin = share_begin(requests, shares, share, lane);
    const int count = share_begin(requests, shares, share + 1, lane) - begin;
    if (count == 0) {
        wait_for_previous_kernel(); // who waits for this kernel takes the one before as done, too
        return;
    }
    WarpTiles here(TileCursor(requests, begin, lane), count, member);

    // 2. fill the ring. q, and the newest tokens of a request, may come from the kernels ahead
    const CodePool pool{k, v, scales, table, n_pages, n_kv_heads, max_pages};
    RowQueries queries;
    Prefetcher prefetcher(requests, pool, here, shared.ring, member, lane);
    if (!early) queries.load_rows(q, here.cursor.work_row(requests), n_kv_heads, member, lane);
#pragma unroll 1
    for (int slot = 0; slot < STAGES; slot++) {
        if (prefetcher.at_newest_token()) wait_for_previous_kernel();
        prefetcher.prefetch(slot, lane);
    }
    wait_for_previous_kernel(); // once more is over at once
    if (early) queries.load_rows(q, here.cursor.work_row(requests), n_kv_heads, member, lane);

    CopyRing<STAGES, 2> ring;
    ColumnSums sums;
#pragma unroll 1
    for (;;) { // segments
        const StorePartial partial{partial_out, max_and_sum, here.cursor.segment(requests, share)};
        const int length = requests.length(here.cursor.b), first_row = here.cursor.row % HEAD_TILES * HEADS;
        queries.lay_down(shared.queries, Q_LIFT, member, lane);
        meet(team);
        queries.take(shared.queries, Q_LIFT, scale, lane);
        sums.clear();
        WarpTiles after = here;
        if (here.left > 0) { // the next segment's are on their way meanwhile
            after.next_segment(requests, member);
            queries.load_rows(q, after.cursor.work_row(requests), n_kv_heads, member, lane);
        }
#pragma unroll 1
        for (; here.mine > 0; here.next_tile()) {
            take_tile(sums, queries, here, length, first_row, ring, shared.ring, lift, lane);

            // 6. ask for what comes STAGES tiles later
            prefetcher.prefetch(ring.slot, lane);
            ring.advance();
        }

        // 7. what the share hands on
        if constexpr (TEAM == 1) sums.store(partial, lane);
        else {
            sums.lay_down(shared.values, shared.max_and_sum, member, lane);
            meet(team);
            store(partial, shared.values, shared.max_and_sum, threadIdx.x % (32 * TEAM));
        }
        if (here.left == 0) return;
        meet(team);
        here = after;
    }
}
