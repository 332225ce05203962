/* How a warp's tiles of a quantised cache come into its ring, where a sequence's codes lie in one piece. What a tile is
   made of: format.cuh. */
#pragma once
#include "../attention/tiles.cuh"
#include "../device/copy.cuh"
#include "../device/hidden.cuh"
#include "../device/ring.cuh"
#include "format.cuh"

/* A share that is a row begins at the row's first tile: nothing is searched for, so that the first copies are asked for
   sooner. */
struct RowCursor {
    int b, row, tile, tiles; // as in TileCursor

    __device__ __forceinline__ RowCursor(const TileSchedule &schedule, int share)
        : b((unsigned)share / schedule.rows), row(share - b * schedule.rows), tile(0), tiles(schedule.tiles(b)) {}
    __device__ __forceinline__ long long work_row(const TileSchedule &schedule) const {
        return (long long)b * schedule.rows + row;
    }
    __device__ __forceinline__ void next_row(const TileSchedule &) {} // there is none
};
template <bool> struct CursorOf { using type = TileCursor; };
template <> struct CursorOf<true> { using type = RowCursor; };
using Cursor = CursorOf<WHOLE>::type;

/* Where a warp is: the tiles of a share, one segment after another, of each those that are the warp's. They are
   neighbours, so that it meets a group's scales once. */
struct WarpTiles {
    Cursor cursor;     // tile: the next of this warp
    int left;          // tiles of the share that follow this segment
    int mine;          // tiles that the warp still has in it

    /* begin: of the share; count: its tiles. */
    __device__ __forceinline__ WarpTiles(const Cursor &begin, int count, int member) : cursor(begin), left(count) {
        enter(member);
    }
    __device__ __forceinline__ void enter(int member) {
        const int tiles = min(left, cursor.tiles - cursor.tile), from = tiles * member / TEAM;
        left -= tiles;
        mine = tiles * (member + 1) / TEAM - from;
        cursor.tile += from;
    }
    __device__ __forceinline__ void next_segment(const TileSchedule &schedule, int member) {
        cursor.tile = 0;
        cursor.next_row(schedule);
        enter(member);
    }
    /* The row of the next segment, which there must be. */
    __device__ __forceinline__ long long row_after(const TileSchedule &schedule) const {
        Cursor after = cursor;
        after.next_row(schedule);
        return after.work_row(schedule);
    }
    __device__ __forceinline__ void next_tile() { cursor.tile++, mine--; }
    /* Whether this is the first tile that its group of tokens has. */
    __device__ __forceinline__ bool at_new_group() const { return cursor.tile * TILE % TOKENS_STILL_CHANGING == 0; }
};

/* The cache, as layout.py lays it out. */
struct Codes {
    const uint4 *k, *v, *k_scale, *v_scale;
    int k_room, v_room; // tiles that a sequence has room for
};

/* Copies a warp's tiles into its ring, STAGES tiles before they are used. */
struct Prefetcher {
    const TileSchedule &schedule;
    const Codes &codes;
    WarpTiles next;   // the tile to be copied
    bool new_segment; // it is the warp's first of a segment
    const uint4 *k, *v, *k_scale, *v_scale; // this lane's words of it
    uint4 *ring;
    CachePolicy once; // the cache is read once, so it is the first that may leave L2

    __device__ __forceinline__ Prefetcher(const TileSchedule &schedule, const Codes &codes, const WarpTiles &begin,
                                          uint4 *ring)
        : schedule(schedule), codes(codes), next(begin), new_segment(true), ring(ring), once(evict_first()) {}

    /* Go on to a segment in which the warp has a tile. */
    __device__ __forceinline__ void find_tile(int member) {
        while (next.mine == 0 && next.left > 0) next.next_segment(schedule, member), new_segment = true;
    }
    /* Whether the next tile is of the group that the newest token of a sequence is in: what shares its scale. */
    __device__ __forceinline__ bool at_newest_group() const {
        if (next.mine == 0) return false;
        const int newest = schedule.length(next.cursor.b) - 1;
        return next.cursor.tile * TILE >= newest / TOKENS_STILL_CHANGING * TOKENS_STILL_CHANGING;
    }
    /* Ask for the next tile: first the keys, then the values, which are waited for one after the other. */
    __device__ __forceinline__ void prefetch(int slot, int lane) {
        const unsigned to = hidden(shared_address(ring + slot * SLOT + lane), lane); // insurance
        if (next.mine > 0) {
            if (new_segment) find_words(lane);
            copy<K_WORDS>(to, 0, k, lane);
            if (!BY_CHANNEL || new_segment || next.at_new_group()) {
                const int group = next.cursor.tile * TILE / TOKENS_STILL_CHANGING;
                copy<K_SCALES>(to, K_WORDS + V_WORDS, BY_CHANNEL ? k_scale + group * K_SCALES : k_scale, lane);
            }
            k += K_WORDS;
            if (!BY_CHANNEL) k_scale += K_SCALES;
        }
        CopyRing<STAGES, 2>::filled(); // also with nothing
        if (next.mine > 0) {
            copy<V_WORDS>(to, K_WORDS, v, lane);
            copy<V_SCALES>(to, K_WORDS + V_WORDS + K_SCALES, v_scale, lane);
            v += V_WORDS, v_scale += V_SCALES;
            new_segment = false;
            next.next_tile();
        }
        CopyRing<STAGES, 2>::filled();
    }

  private:
    __device__ __forceinline__ void find_words(int lane) {
        const int n_kv_heads = schedule.rows / HEAD_TILES;
        const long long row = (long long)next.cursor.b * n_kv_heads + next.cursor.row / HEAD_TILES;
        const long long key = row * codes.k_room + next.cursor.tile, value = row * codes.v_room + next.cursor.tile;
        k = codes.k + key * K_WORDS + lane, v = codes.v + value * V_WORDS + lane;
        v_scale = codes.v_scale + value * V_SCALES + lane;
        k_scale = codes.k_scale + lane;
        if (BY_CHANNEL)
            k_scale += row * ((codes.k_room * TILE + TOKENS_STILL_CHANGING - 1) / TOKENS_STILL_CHANGING) * K_SCALES;
        else
            k_scale += key * K_SCALES;
    }
    /* So many words, 32 at a time, to behind so many others in the slot; to: the lane's place in it. */
    template <int COUNT>
    __device__ __forceinline__ void copy(unsigned to, int behind, const uint4 *from, int lane) const {
#pragma unroll
        for (int i = 0; i < COUNT; i += 32)
            if (COUNT % 32 == 0 || i + lane < COUNT) copy_async(to + (behind + i) * 16, from + i, once);
    }
};
