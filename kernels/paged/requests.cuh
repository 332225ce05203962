/* Which block has which tiles of a batch of requests, whose keys and values lie in pages.

   All tiles of all rows (../attention/shape.cuh), one row after another, are a line that is cut into gridDim.x equal
   shares, one for each block, as in ../attention/tiles.cuh. Where a share and a row meet is a segment. Nothing is
   planned beforehand: a replayed graph shares out whatever lengths and requests it finds.

   Then the segments of a request hang on who else is there, and so does the order of its sums. With INVARIANT they do
   not: a row is cut into chunks, of a size that hangs on its own length alone, a segment is a chunk, and shares end
   where chunks do. The price: shares differ by up to a chunk, and there are more segments. */
#pragma once
#include "../attention/shape.cuh"
#include "../attention/shares.cuh"
#include "../device/reduce_integers.cuh"
#include "variant.cuh"

template <int PageSize, int NewTokens, bool Invariant> struct Pages {
    static constexpr int PAGE = PageSize;            // tokens; a power of two
    static constexpr int NEW = NewTokens;            // tokens of a request that ask: the last ones
    static constexpr bool INVARIANT = Invariant;     // the bits of a result do not hang on the other requests
};
#ifndef PAGES
#define PAGES Pages<16, 1, false>
#endif
constexpr int PAGE = PAGES::PAGE, NEW = PAGES::NEW;
constexpr bool INVARIANT = PAGES::INVARIANT;
constexpr int LEAST_CHUNK = 8, MOST_CHUNKS = 128; // tiles of a chunk; chunks of a row
static_assert(TILE % PAGE == 0 || PAGE % TILE == 0, "a tile must be whole pages, or a page whole tiles");
static_assert(GROUP % NEW == 0, "GROUP: rows of a kv head, the query heads of each new token");

/* Chunks and tiles of a row of so many tiles. */
__device__ __forceinline__ int chunk_size(int tiles) {
    return max((tiles + LEAST_CHUNK * MOST_CHUNKS - 1) / (LEAST_CHUNK * MOST_CHUNKS), 1) * LEAST_CHUNK;
}
__device__ __forceinline__ int chunk_count(int tiles) { return (tiles + chunk_size(tiles) - 1) / chunk_size(tiles); }

/* The row of q, and of out, that a row of a kv head has: rows are the heads of the group, new token after new token. */
__device__ __forceinline__ long long query_row(long long kv_head, int n_kv_heads, int row) { // kv_head: of all requests
    if constexpr (NEW == 1) return kv_head * GROUP + row;
    constexpr int HEADS_OF_GROUP = GROUP / NEW;
    const long long b = kv_head / n_kv_heads, of_request = kv_head - b * n_kv_heads;
    return ((b * NEW + row / HEADS_OF_GROUP) * n_kv_heads + of_request) * HEADS_OF_GROUP + row % HEADS_OF_GROUP;
}

/* The requests of a launch. A slot out of range is nobody's, a length out of range the nearest one in it. */
struct Requests {
    const int *slots, *lens; // (count,); (max_requests,)
    int count, rows, max_requests, max_len; // rows of a request; tokens that a table has room for
    int newer;                              // tokens behind the last one that asks: these do not count

    __device__ __forceinline__ int slot(int b) const { return __ldg(slots + b); }
    __device__ __forceinline__ int length(int b) const {
        const int at = slot(b);
        return (unsigned)at < (unsigned)max_requests ? max(min(__ldg(lens + at), max_len) - newer, 0) : 0;
    }
    /* In front of a request of so many tokens: what no query sees, by its variant. */
    __device__ __forceinline__ int skipped_tiles(int length) const {
        if (!Variant::SKIPS) return 0;
        return min(max(Variant::first_token(max(length - NEW, 0)), 0) / TILE, (length + TILE - 1) / TILE);
    }
    /* Of a row of request b, behind those. */
    __device__ __forceinline__ int tiles(int b) const {
        const int tokens = length(b);
        return (tokens + TILE - 1) / TILE - skipped_tiles(tokens);
    }
};

/* Tiles, and with INVARIANT chunks, of a row, summed over the requests before b. Every lane of a warp calls, here and
   below, and all get the same answer. */
__device__ __forceinline__ int2 tiles_and_chunks_before(const Requests &requests, int b, int lane) {
    int2 sum = {0, 0};
#pragma unroll 4
    for (int i = lane; i < b; i += 32) {
        const int tiles = requests.tiles(i);
        sum.x += tiles;
        if (INVARIANT) sum.y += chunk_count(tiles);
    }
    return make_int2(warp_sum(sum.x), INVARIANT ? warp_sum(sum.y) : 0);
}

/* The line in equal shares. */
struct LineShares : Shares {
    unsigned total; // tiles of the line

    __device__ __forceinline__ LineShares(const Requests &requests, int blocks, int lane)
        : total(tiles_and_chunks_before(requests, requests.count, lane).x * requests.rows) {
        tiles_per_block = total / blocks, blocks_with_one_more = total - tiles_per_block * blocks;
    }
};

/* A place on the line. */
struct TileCursor {
    int b, row, tile, tiles; // request, row of the request, tile of the row, behind those skipped; tiles of the row
    int chunks_before;       // of all rows before this one, with INVARIANT

    /* The at-th tile on the line, which must exist: 32 requests at a time. */
    __device__ __forceinline__ TileCursor(const Requests &requests, unsigned at, int lane) : chunks_before(0) {
#pragma unroll 1
        for (int from = 0;; from += 32) {
            const int of_row = from + lane < requests.count ? requests.tiles(from + lane) : 0;
            const unsigned mine = of_row * requests.rows, up_to = warp_sum_up_to(mine, lane);
            const unsigned later = __ballot_sync(~0u, at < up_to); // it is in the first of these requests
            const int first = later ? __ffs(later) - 1 : 31;
            if (INVARIANT) {
                const int chunks = chunk_count(of_row) * requests.rows, chunks_up_to = warp_sum_up_to(chunks, lane);
                chunks_before += __shfl_sync(~0u, later ? chunks_up_to - chunks : chunks_up_to, first);
            }
            at -= __shfl_sync(~0u, later ? up_to - mine : up_to, first);
            b = from + first;
            tiles = __shfl_sync(~0u, of_row, first);
            if (later) break;
        }
        row = at / tiles;
        tile = at - row * tiles;
        if (INVARIANT) chunks_before += row * chunk_count(tiles);
    }
    __device__ __forceinline__ long long work_row(const Requests &requests) const { // of all requests
        return (long long)b * requests.rows + row;
    }
    /* Where the segment that begins here, or in which here is, is kept for the merge. */
    __device__ __forceinline__ long long segment(const Requests &requests, int block) const {
        return INVARIANT ? chunks_before + tile / chunk_size(tiles) : block + work_row(requests);
    }
    /* Tiles from here to where the segment must end. */
    __device__ __forceinline__ int to_end() const {
        const int to_end = tiles - tile;
        if (!INVARIANT) return to_end;
        const int chunk = chunk_size(tiles);
        return min(to_end, chunk - tile % chunk);
    }
    __device__ __forceinline__ void next_row(const Requests &requests) {
        tile = 0;
        if (INVARIANT) chunks_before += chunk_count(tiles);
        if (++row == requests.rows) {
            row = 0;
            do tiles = ++b < requests.count ? requests.tiles(b) : 1;
            while (tiles == 0);
        }
    }
};

/* The line's tile at which the share of a block begins. */
__device__ __forceinline__ int share_begin(const Requests &requests, const LineShares &shares, int block,
                                           int lane) {
    const int at = shares.first_tile(block);
    if (!INVARIANT || (unsigned)at >= shares.total) return at;
    const TileCursor here(requests, at, lane); // the next chunk begins a chunk's end from here, or here
    return here.tile % chunk_size(here.tiles) ? at + here.to_end() : at;
}
