/* Which tiles of a block's share a warp has. */
#pragma once
#include "requests.cuh"

/* The tiles of a share that are one warp's: segment after segment, of each some neighbours. Which, hangs on the segment
   and on the warp's number among the MEMBERS that share it. */
template <int MEMBERS> struct TilesOfWarp {
    TileCursor cursor; // tile: the next of this warp
    int left;          // tiles of the share that follow this segment
    int mine;          // tiles that the warp still has in it
    int end;           // of the segment

    /* begin: of the share; count: its tiles. */
    __device__ __forceinline__ TilesOfWarp(const TileCursor &begin, int count, int member)
        : cursor(begin), left(count) {
        enter(member);
    }
    __device__ __forceinline__ void enter(int member) {
        const int tiles = min(left, cursor.to_end()), from = tiles * member / MEMBERS;
        left -= tiles;
        end = cursor.tile + tiles;
        mine = tiles * (member + 1) / MEMBERS - from;
        cursor.tile += from;
    }
    /* There must be one. */
    __device__ __forceinline__ void next_segment(const Requests &requests, int member) {
        cursor.tile = end;
        if (end == cursor.tiles) cursor.next_row(requests);
        enter(member);
    }
    __device__ __forceinline__ void next_tile() { cursor.tile++, mine--; }
};
