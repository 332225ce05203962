/* How a warp's tiles come from their pages into its ring.

   A page of a kv head lies in one piece: PAGE * HEAD_DIM elements. Which page it is, the table says, and a load whose
   address comes from another load costs twice the wait. So a warp holds a window of 32 page numbers, one in each lane,
   and the next one behind it: one load for 32 pages, asked for long before it is needed, and a shuffle for each page.
*/
#pragma once
#include "../attention/teams.cuh"
#include "../attention/tile_products.cuh"
#include "../device/hidden.cuh"
#include "warp_tiles.cuh"

static_assert(32 * PAGE % TILE == 0, "a tile's pages lie in one window");

using WarpTiles = TilesOfWarp<WARPS_PER_HEAD_TILE>;

/* The pool, and the table of who has which pages. */
struct PagePool {
    const T *k, *v;   // (n_pages, n_kv_heads, PAGE, HEAD_DIM)
    const int *table; // (max_requests, max_pages): the page of the pool that holds each page of a request
    int n_pages, n_kv_heads, max_pages;
};

/* Copies a team's tiles into its ring, STAGES tiles before they are used. */
struct Prefetcher {
    const Requests &requests;
    const PagePool &pool;
    WarpTiles next;         // the tile to be copied
    int head_tile, warp;    // of the block: this warp's; among the warps of a head tile: its number
    int member;             // this thread, of the team
    int length, skipped;    // of the request: tokens; tiles in front
    const int *pages;       // its row of the table
    int first_page;         // of the window
    int window, next_window; // this lane's numbers
    T *ring;
    CachePolicy once; // the cache is read once, so it is the first that may leave L2

    __device__ __forceinline__ Prefetcher(const Requests &requests, const PagePool &pool, const WarpTiles &begin,
                                          T *ring, int warp_of_block, int lane)
        : requests(requests), pool(pool), next(begin), head_tile(warp_of_block % HEAD_TILES_PER_BLOCK),
          warp(warp_of_block / HEAD_TILES_PER_BLOCK), member(warp_of_block % TEAM * 32 + lane), ring(ring),
          once(evict_first()) {
        if (next.mine > 0) enter_request(lane);
        find_tile(lane);
    }
    /* Whether the next tile has one of the newest tokens, which kernels ahead may still write. */
    __device__ __forceinline__ bool at_newest_token() const {
        return next.mine > 0 && (tile() + 1) * TILE > length - NEW;
    }

    /* Ask for the next tile; past the end of a request lay down zeros, whatever its last page holds. */
    __device__ __forceinline__ void prefetch(int slot, int lane) {
        if (next.mine > 0) {
            const unsigned slot_at = hidden(shared_address(ring + 2 * slot * TILE_SIZE), lane); // insurance
            const int first = tile() * TILE, there = length - first; // tokens
            const int kv_head = (next.cursor.row * HEAD_TILES_PER_BLOCK + head_tile) / HEAD_TILES;
            long long tile_at = 0;
            if (PAGE >= TILE) tile_at = address(first / PAGE, kv_head) + first % PAGE * HEAD_DIM;
#pragma unroll
            for (int kv = 0; kv < 2; kv++)
#pragma unroll
                for (int i = 0; i < COPIES; i++) {
                    const int number = 32 * TEAM * i + member, token = number / WORDS, word = number % WORDS;
                    long long at = tile_at + 8 * number;
                    if (PAGE < TILE) // all lanes: their page numbers are asked for
                        at = address(first / PAGE + min(token, TILE - 1) / PAGE, kv_head) + token % PAGE * HEAD_DIM +
                             8 * word;
                    if (TILE * WORDS % (32 * TEAM) && number >= TILE * WORDS) continue;
                    const unsigned to = slot_at + (kv * TILE_SIZE + place_of(token, word)) * BYTES;
                    if (token < there) copy_async(to, (kv ? pool.v : pool.k) + at, once);
                    else store_zeros(to);
                }
            next.next_tile();
            if (next.mine > 0 && tile() * TILE / PAGE >= first_page + 32) {
                first_page += 32, window = next_window;
                next_window = page_number(first_page + 32, lane);
            }
            find_tile(lane);
        }
        CopyRing<STAGES>::filled(); // with nothing, too
    }

  private:
    __device__ __forceinline__ int tile() const { // of the request
        return Variant::SKIPS ? next.cursor.tile + skipped : next.cursor.tile;
    }
    /* Go on to a segment in which the warp has a tile, if there is one. */
    __device__ __forceinline__ void find_tile(int lane) {
        if (next.mine > 0 || next.left == 0) return;
        do next.next_segment(requests, warp);
        while (next.mine == 0 && next.left > 0);
        if (next.mine > 0) enter_request(lane);
    }
    __device__ __forceinline__ void enter_request(int lane) {
        length = requests.length(next.cursor.b), skipped = requests.skipped_tiles(length);
        pages = pool.table + (long long)requests.slot(next.cursor.b) * pool.max_pages;
        first_page = tile() * TILE / PAGE / 32 * 32;
        window = page_number(first_page, lane);
        next_window = page_number(first_page + 32, lane);
    }
    /* Of this lane, in a window; behind the request's last page, that one. */
    __device__ __forceinline__ int page_number(int first, int lane) const {
        return __ldg(pages + min(first + lane, (length - 1) / PAGE));
    }
    /* Where a page of the request begins for a kv head, in elements. A number out of the pool is the last one in it. */
    __device__ __forceinline__ long long address(int page, int kv_head) const {
        const unsigned in_pool = min((unsigned)__shfl_sync(~0u, window, page % 32), (unsigned)pool.n_pages - 1);
        return ((long long)in_pool * pool.n_kv_heads + kv_head) * (PAGE * HEAD_DIM);
    }
};
