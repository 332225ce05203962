/* Decode attention over pages, first of two launches: each block reads an equal share of what the
   requests have, and leaves what it found for merge.cu.

   New since decode.cu of ../attention:
   - Keys and values lie in pages of a pool, and a table says which (prefetch.cuh): a window of 32 page
     numbers in the lanes of a warp, loaded ahead, so that no copy waits for a number.
   - The line of tiles goes over the requests of a list of slots. Lengths, tables and the list are read
     here: a graph's replay follows them (requests.cuh).
   - Several new tokens of a request may ask at once (NEW): the rows of the mma are then the heads of the
     group for each of them, and each row has a last token of its own.
   - A variant may change scores, hide tokens and turn keys (variant.cuh).
   - A warp has neighbouring tiles of a segment. With INVARIANT the bits of a request's result hang on
     its own tokens alone.

   Moves 4 * length * HEAD_DIM bytes for each request and kv head once, 4 bytes for each page and head
   tile, and 4 * (HEAD_DIM + 2) bytes for each row of q and segment.

   Compile with SHAPE and SCHEDULE (../attention/shape.cuh; GROUP: rows of a kv head, NEW times the heads
   of its group), PAGES (requests.cuh) and RING_STAGES. Launch with 32 * WARPS threads on as many blocks
   as there are to be shares; rows = n_kv_heads * HEAD_TILES / HEAD_TILES_PER_BLOCK. Shared memory:
   [TEAMS][STAGES] tiles of k and v, [WARPS] queries of a head tile, WarpSums::FLOATS floats.
   q (n_requests, NEW, n_heads, HEAD_DIM); k, v (n_pages, n_kv_heads, PAGE, HEAD_DIM); slots (n_requests,);
   lens (max_requests,); table (max_requests, max_pages). partial_out, max_and_sum:
   ../attention/partial.cuh. All addresses of q, k and v multiples of 16 bytes. newer: so many last tokens
   of each request are newer than those that ask. scale: times log2(e), without
   a variant's SCORES. early: launched as a dependent. */
#include "../attention/partial.cuh"
#include "../attention/queries.cuh"
#include "../device/pdl.cuh"
#include "prefetch.cuh"
#include "variant_products.cuh"

/* The queries of a head tile's rows, wherever they lie in q. */
struct Queries : LaidQueries {
    __device__ __forceinline__ void load(const T *q, const HeadTile &tile, int n_kv_heads, int lane) {
        const int first = tile.first_head();
#pragma unroll
        for (int i = 0; i < LOADS; i++) {
            const int word = 32 * i + lane, row = first + word / WORDS;
            if (word >= HEADS * WORDS || row >= GROUP) continue;
            const T *from = q + query_row(tile.index / HEAD_TILES, n_kv_heads, row) * HEAD_DIM + word % WORDS * 8;
            loaded[i] = __ldcg(reinterpret_cast<const uint4 *>(from));
        }
    }
};

/* Scores in units of log 2; from the row's own end on, those of no token. tokens: of the request, counted from the
   lane's first; first_row: of the head tile. */
__device__ __forceinline__ void scale_and_mask_rows(Scores &s, float scale, int tokens, int first_row, int lane) {
    if constexpr (NEW == 1) scale_and_mask(s, scale, tokens);
    else {
#pragma unroll
        for (int r = 0; r < 2; r++) { // rows g and g + 8; the last new token sees all tokens, the one before one less
            const int row = min(first_row + lane / 4 + 8 * r, GROUP - 1);
            const int end = tokens - (NEW - 1) + row / (GROUP / NEW);
#pragma unroll
            for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
                for (int n = 0; n < 2; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float &score = s[t][n][2 * r + i];
                        score = 16 * t + 8 * n + i < end ? score * scale : MASKED;
                    }
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
decode(VARIANT_TENSORS const T *q, const T *k, const T *v, const int *slots, const int *lens, const int *table,
       float *partial_out, float2 *max_and_sum, int n_requests, int rows, int max_requests, int max_pages,
       int n_pages, int newer, float scale, int early) {
    extern __shared__ __align__(16) uint4 shared[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, head_tile = warp % HEAD_TILES_PER_BLOCK;
    const int team = warp / TEAM, n_kv_heads = rows * HEAD_TILES_PER_BLOCK / HEAD_TILES;
    T *rings = reinterpret_cast<T *>(shared), *all_queries = rings + TEAMS * STAGES * 2 * TILE_SIZE;
    T *ring_memory = rings + team * STAGES * 2 * TILE_SIZE, *query_memory = all_queries + warp * HEADS * PITCH;
    const WarpSums warp_sums(reinterpret_cast<float *>(all_queries + WARPS * HEADS * PITCH));
    let_next_kernel_start();
    if (!early) wait_for_previous_kernel();

    // 1. which tiles
    const Requests requests{slots, lens, n_requests, rows, max_requests, max_pages * PAGE, newer};
    const LineShares shares(requests, gridDim.x, lane);
    const int begin = share_begin(requests, shares, blockIdx.x, lane);
    const int count = share_begin(requests, shares, blockIdx.x + 1, lane) - begin; // tiles of the share
    if (count == 0) {
        wait_for_previous_kernel(); // who waits for this kernel takes the one before as done, too
        return;
    }
    const int member = warp / HEAD_TILES_PER_BLOCK;
    WarpTiles here(TileCursor(requests, begin, lane), count, member);

    // 2. fill the ring. q, and the newest tokens of a request, may come from the kernels ahead
    const PagePool pool{k, v, table, n_pages, n_kv_heads, max_pages};
    Queries queries;
    Prefetcher prefetcher(requests, pool, here, ring_memory, warp, lane);
    if (!early) queries.load(q, HeadTile(here.cursor.work_row(requests), head_tile), n_kv_heads, lane);
#pragma unroll 1
    for (int slot = 0; slot < STAGES; slot++) {
        if (prefetcher.at_newest_token()) wait_for_previous_kernel();
        prefetcher.prefetch(slot, lane);
    }
    wait_for_previous_kernel(); // once more is over at once
    if (early) queries.load(q, HeadTile(here.cursor.work_row(requests), head_tile), n_kv_heads, lane);

    const Variant variant VARIANT_MADE;
    CopyRing<STAGES> ring;
    SoftmaxSums sums;
#pragma unroll 1
    for (;;) { // segments
        const HeadTile tile(here.cursor.work_row(requests), head_tile);
        const int length = requests.length(here.cursor.b);
        const StorePartial partial{partial_out, max_and_sum, here.cursor.segment(requests, blockIdx.x)};
        queries.take(query_memory, tile, lane);
        const int skipped = requests.skipped_tiles(length), kv_head = tile.index / HEAD_TILES % n_kv_heads;
        ScorePlaces at{here.cursor.b, kv_head * GROUP_HEADS, tile.first_head(), 0, length};
        if (Variant::TURNS) turn_queries(queries.operand, variant, at, lane);
        sums.clear();
#pragma unroll 1
        for (; here.mine > 0; here.next_tile()) {
            const unsigned keys = shared_address(ring_memory + ring.wait_full() * 2 * TILE_SIZE);
            sync_team(team);

            // 3. scores
            Scores s = {};
            const int first_token = (here.cursor.tile + skipped) * TILE;
            if (Variant::TURNS) multiply_turned_keys(s, queries.operand, keys, variant, first_token, lane);
            else multiply_keys(s, queries.operand, keys, lane);
            if (Variant::SCORES) {
                at.first_token = first_token + lane % 4 * 2;
                vary_scores(s, variant, scale, at, lane);
            } else scale_and_mask_rows(s, scale, length - first_token - lane % 4 * 2, tile.first_head(), lane);

            // 4. weights, and 5. weighted values
            Weights weights;
            sums.online_softmax(s, weights);
            mix_values(sums, weights, keys + TILE_SIZE * BYTES, lane);
            sync_team(team);

            // 6. ask for what comes STAGES tiles later
            prefetcher.prefetch(ring.slot, lane);
            ring.advance();
        }

        // 7. what the block hands on
        if constexpr (WARPS_PER_HEAD_TILE > 1) {
            warp_sums.lay_down(sums, warp, lane);
            warp_sums.store(partial, threadIdx.x);
            __syncthreads(); // who still reads what the warps have laid down?
        } else store(partial, head_tile, sums, lane);
        if (here.left == 0) return;
        here.next_segment(requests, member);
        queries.load(q, HeadTile(here.cursor.work_row(requests), head_tile), n_kv_heads, lane);
    }
}
