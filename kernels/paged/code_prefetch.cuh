/* How a warp's tiles come from pages of codes into its ring.

   A unit is 16 tokens of a kv head: codes of keys, codes of values, and the scales of both in one piece of its own,
   keys' first (../kv_cache/format.cuh: what a tile is made of; here its units may lie in several pages). A page is
   whole units. As in prefetch.cuh a warp holds two windows of 32 page numbers, so that no copy waits for a number. At
   the end of a row the second one is that of the next row's beginning, which has the same pages. */
#pragma once
#include "../device/copy.cuh"
#include "../device/hidden.cuh"
#include "../device/ring.cuh"
#include "../kv_cache/format.cuh"
#include "warp_tiles.cuh"

constexpr int UNIT = 16, UNITS = PAGE / UNIT;                              // tokens; of a page
constexpr int K_UNIT = K_WORDS / SIXTEENS, V_UNIT = V_WORDS / SIXTEENS;    // words of 16 bytes
constexpr int K_UNIT_SCALES = K_SCALES / SIXTEENS, UNIT_SCALES = K_UNIT_SCALES + V_SCALES / SIXTEENS;
static_assert(!BY_CHANNEL, "tokens have scales of their own, or a new one would change the codes of others");
static_assert(UNITS > 0, "a page is whole units");
static_assert(32 * PAGE % TILE == 0, "a tile's pages lie in one window");

using WarpTiles = TilesOfWarp<TEAM>;

/* The pool, and the table of who has which pages. */
struct CodePool {
    const uint4 *k, *v, *scales; // (n_pages, n_kv_heads, UNITS, K_UNIT), .. V_UNIT), .. UNIT_SCALES)
    const int *table;            // (max_requests, max_pages): the page of the pool that holds each page of a request
    int n_pages, n_kv_heads, max_pages;
};

/* Copies a warp's tiles into its ring, STAGES tiles before they are used. */
struct Prefetcher {
    const Requests &requests;
    const CodePool &pool;
    WarpTiles next;               // the tile to be copied
    int member;                   // of the team
    int length;                   // of the request: tokens
    const int *pages;             // its row of the table
    int first_page, next_first;   // of the windows
    int window, next_window;      // this lane's numbers
    uint4 *ring;
    CachePolicy once; // the cache is read once, so it is the first that may leave L2

    __device__ __forceinline__ Prefetcher(const Requests &requests, const CodePool &pool, const WarpTiles &begin,
                                          uint4 *ring, int member, int lane)
        : requests(requests), pool(pool), next(begin), member(member), ring(ring), once(evict_first()) {
        enter_request(lane); // in any case: the warp's first tile may be of another row of the same request
        find_tile(lane);
    }
    /* Whether the next tile has one of the newest tokens, which kernels ahead may still write. */
    __device__ __forceinline__ bool at_newest_token() const {
        return next.mine > 0 && (next.cursor.tile + 1) * TILE > length - NEW;
    }

    /* Ask for the next tile: first the keys and all scales, then the values, which are waited for one after the other.
       In place of a unit behind the request's last comes that one again. */
    __device__ __forceinline__ void prefetch(int slot, int lane) {
        const unsigned to = hidden(shared_address(ring + slot * SLOT + lane), lane); // insurance
        long long units[SIXTEENS];
        if (next.mine > 0) {
#pragma unroll
            for (int t = 0; t < SIXTEENS; t++)
                units[t] = unit_in_pool(min(next.cursor.tile * SIXTEENS + t, (length - 1) / UNIT));
#pragma unroll
            for (int t = 0; t < SIXTEENS; t++) copy<K_UNIT>(to, t * K_UNIT, pool.k + units[t] * K_UNIT, lane);
            copy_scales(to, units, lane);
        }
        CopyRing<STAGES, 2>::filled(); // also with nothing
        if (next.mine > 0) {
#pragma unroll
            for (int t = 0; t < SIXTEENS; t++) copy<V_UNIT>(to, K_WORDS + t * V_UNIT, pool.v + units[t] * V_UNIT, lane);
            next.next_tile();
            if (next.mine > 0 && next.cursor.tile * TILE / PAGE >= first_page + 32) {
                first_page = next_first, window = next_window;
                ask_ahead(lane);
            }
            find_tile(lane);
        }
        CopyRing<STAGES, 2>::filled();
    }

  private:
    /* Go on to a segment in which the warp has a tile, if there is one. */
    __device__ __forceinline__ void find_tile(int lane) {
        if (next.mine > 0 || next.left == 0) return;
        const int before = next.cursor.b;
        do next.next_segment(requests, member);
        while (next.mine == 0 && next.left > 0);
        if (next.mine == 0) return;
        if (next.cursor.b != before) enter_request(lane);
        else enter_row(lane);
    }
    __device__ __forceinline__ int window_of_tile() const { return next.cursor.tile * TILE / PAGE / 32 * 32; }
    __device__ __forceinline__ void enter_request(int lane) {
        length = requests.length(next.cursor.b);
        pages = pool.table + (long long)requests.slot(next.cursor.b) * pool.max_pages;
        first_page = window_of_tile();
        window = page_number(first_page, lane);
        ask_ahead(lane);
    }
    /* Another row of the same request, or another piece of it. */
    __device__ __forceinline__ void enter_row(int lane) {
        if (window_of_tile() == next_first) window = next_window;
        else if (window_of_tile() != first_page) window = page_number(window_of_tile(), lane);
        first_page = window_of_tile();
        ask_ahead(lane);
    }
    /* The window behind this one, or, where the segment has no more, the first one. */
    __device__ __forceinline__ void ask_ahead(int lane) {
        const int last = (next.cursor.tile + next.mine - 1) * TILE / PAGE; // page of the segment, for this warp
        next_first = first_page + 32 <= last ? first_page + 32 : 0;
        next_window = page_number(next_first, lane);
    }
    /* Of this lane, in a window; behind the request's last page, that one. */
    __device__ __forceinline__ int page_number(int first, int lane) const {
        return __ldg(pages + min(first + lane, (length - 1) / PAGE));
    }
    /* The number of a request's unit among all of the pool, for the kv head. A page out of the pool is the last in it.
       The lanes of a warp meet in here. */
    __device__ __forceinline__ long long unit_in_pool(int unit) const {
        const int number = __shfl_sync(~0u, window, unit / UNITS % 32), kv_head = next.cursor.row / HEAD_TILES;
        const unsigned page = min((unsigned)number, (unsigned)pool.n_pages - 1);
        return ((long long)page * pool.n_kv_heads + kv_head) * UNITS + unit % UNITS;
    }
    /* So many words, 32 at a time, to behind so many others in the slot; to: the lane's place in it. */
    template <int COUNT>
    __device__ __forceinline__ void copy(unsigned to, int behind, const uint4 *from, int lane) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 32)
            if (COUNT % 32 == 0 || i + lane < COUNT) copy_async(to + (behind + i) * 16, from + i + lane, once);
    }
    /* Those of all units, each a piece in the pool; in the slot keys' and values' lie apart. */
    __device__ __forceinline__ void copy_scales(unsigned to, const long long (&units)[SIXTEENS], int lane) const {
#pragma unroll
        for (int i = 0; i < SIXTEENS * UNIT_SCALES; i += 32) {
            const int number = i + lane, t = number / UNIT_SCALES, word = number % UNIT_SCALES;
            long long unit = units[0];
#pragma unroll
            for (int other = 1; other < SIXTEENS; other++) unit = t == other ? units[other] : unit;
            const bool of_keys = word < K_UNIT_SCALES;
            const int at = of_keys ? t * K_UNIT_SCALES + word
                                   : K_SCALES + t * (UNIT_SCALES - K_UNIT_SCALES) + word - K_UNIT_SCALES;
            if (SIXTEENS * UNIT_SCALES % 32 == 0 || number < SIXTEENS * UNIT_SCALES)
                copy_async(to + (K_WORDS + V_WORDS + at - lane) * 16, pool.scales + unit * UNIT_SCALES + word, once);
        }
    }
};
