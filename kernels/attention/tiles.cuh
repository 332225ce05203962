/* Which block has which tiles. All tiles of all rows (shape.cuh), one row after another, are a line that is cut into
   gridDim.x equal shares, one for each block. Where a share and a row meet is a segment. Segments are numbered
   block + row: going along the line, one of the two grows from each segment to the next.

   So shares are equal but for a tile, whatever the batch and the lengths, and no block waits for another. */
#pragma once
#include "../device/reduce_integers.cuh"
#include "shape.cuh"
#include "shares.cuh"

/* Where the tiles of all rows lie on the line, and which block has which. Every lane of a warp calls, and all get the
   same answer. */
struct TileSchedule {
    const int *kv_lens;                       // (batch,); not looked at without LENS
    int kv_len, batch, rows;                  // rows of a sequence
    int tiles_per_block, blocks_with_one_more; // the first so many blocks

    __device__ __forceinline__ int length(int b) const {
        return LENS ? min(max(__ldg(kv_lens + b), 0), kv_len) : kv_len;
    }
    /* Of a row of sequence b. */
    __device__ __forceinline__ int tiles(int b) const { return (length(b) + TILE - 1) / TILE; }

    /* Tiles of a row, summed over the sequences before b. */
    __device__ __forceinline__ int tiles_before(int b, int lane) const {
        if (!LENS) return b * tiles(0);
        int sum = 0;
#pragma unroll 4
        for (int i = lane; i < b; i += 32) sum += tiles(i);
        return warp_sum(sum);
    }
    /* Share out the tiles. Without LENS the host has done it. */
    __device__ __forceinline__ void share_out(int blocks, int lane) {
        if (!LENS) return;
        unsigned total = tiles_before(batch, lane) * rows;
        tiles_per_block = total / blocks, blocks_with_one_more = total - tiles_per_block * blocks;
    }
    __device__ __forceinline__ int first_tile(int block) const {
        return Shares{tiles_per_block, blocks_with_one_more}.first_tile(block);
    }
    __device__ __forceinline__ int block_of(unsigned tile) const {
        return Shares{tiles_per_block, blocks_with_one_more}.block_of(tile);
    }
};

/* A place on the line. */
struct TileCursor {
    int b, row, tile, tiles; // sequence, row of the sequence, tile of the row; tiles of the row

    /* The at-th tile on the line, which must exist. */
    __device__ __forceinline__ TileCursor(const TileSchedule &schedule, unsigned at, int lane) : b(0) {
        if (LENS) find_sequence(schedule, at, lane);
        tiles = schedule.tiles(b);
        row = at / tiles;
        tile = at - row * tiles;
        if (!LENS && schedule.batch > 1) {
            b = (unsigned)row / schedule.rows;
            row -= b * schedule.rows;
        }
    }
    /* b becomes the sequence that the tile is in, and `at` the tile's number among those of that sequence: 32 sequences
       at a time. */
    __device__ __forceinline__ void find_sequence(const TileSchedule &schedule, unsigned &at, int lane) {
#pragma unroll 1
        for (int from = 0;; from += 32) {
            unsigned mine = from + lane < schedule.batch ? schedule.tiles(from + lane) * schedule.rows : 0;
            unsigned up_to = warp_sum_up_to(mine, lane);
            unsigned later = __ballot_sync(~0u, at < up_to); // it is in the first of these sequences
            if (later) {
                int first = __ffs(later) - 1;
                b = from + first;
                at -= __shfl_sync(~0u, up_to - mine, first);
                break;
            }
            at -= __shfl_sync(~0u, up_to, 31);
        }
    }
    __device__ __forceinline__ long long work_row(const TileSchedule &schedule) const { // of all sequences
        return (long long)b * schedule.rows + row;
    }
    __device__ __forceinline__ void next_row(const TileSchedule &schedule) {
        if (++row == schedule.rows) {
            row = 0;
            do
                tiles = ++b < schedule.batch ? schedule.tiles(b) : 1;
            while (LENS && tiles == 0);
        }
    }
    __device__ __forceinline__ void advance(const TileSchedule &schedule, int by) {
        tile += by;
        while (tile >= tiles) {
            tile -= tiles;
            next_row(schedule);
        }
    }
};
