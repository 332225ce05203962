/* What decode attention is compiled for, whatever the cache holds: how large its heads are, and what a block takes.

   A tile is TILE tokens of one kv head. A head tile is up to 16 query heads of one kv head: the rows of an mma. A block
   takes HEAD_TILES_PER_BLOCK neighbouring head tiles side by side, and each of them has WARPS_PER_HEAD_TILE warps,
   which share its tokens: warp w serves head tile w % HEAD_TILES_PER_BLOCK. A row is what one sequence has for such a
   block: all its tokens, for so many head tiles. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename Type, int HeadDim, int Group> struct Shape {
    using T = Type;                          // of q and out: __half or __nv_bfloat16
    static constexpr int HEAD_DIM = HeadDim; // a multiple of 16
    static constexpr int GROUP = Group;      // query heads of a kv head
};

template <int Warps, int Tile, int HeadTilesPerBlock, bool Lens, bool OneBlockPerRow> struct Schedule {
    static constexpr int WARPS = Warps;                            // of a block
    static constexpr int TILE = Tile;                              // tokens: 16, or a multiple of it
    static constexpr int HEAD_TILES_PER_BLOCK = HeadTilesPerBlock; // divides WARPS
    static constexpr bool LENS = Lens;                             // each sequence has a length of its own
    static constexpr bool ONE_BLOCK_PER_ROW = OneBlockPerRow;      // whose results are final: no merge.cu
};
#ifndef SHAPE
#define SHAPE Shape<__nv_bfloat16, 128, 4>
#endif
#ifndef SCHEDULE
#define SCHEDULE Schedule<8, 16, 1, false, false>
#endif
using T = SHAPE::T;
constexpr int HEAD_DIM = SHAPE::HEAD_DIM, GROUP = SHAPE::GROUP;
constexpr int WARPS = SCHEDULE::WARPS, TILE = SCHEDULE::TILE, HEAD_TILES_PER_BLOCK = SCHEDULE::HEAD_TILES_PER_BLOCK;
constexpr bool LENS = SCHEDULE::LENS, ONE_BLOCK_PER_ROW = SCHEDULE::ONE_BLOCK_PER_ROW;

constexpr int WARPS_PER_HEAD_TILE = WARPS / HEAD_TILES_PER_BLOCK;
constexpr int HEAD_TILES = (GROUP + 15) / 16;                // of a kv head
constexpr int HEADS = (GROUP + HEAD_TILES - 1) / HEAD_TILES; // of a head tile; the last of a kv head may have fewer
constexpr int STEPS = HEAD_DIM / 16;                         // mmas along head_dim
constexpr int PITCH = HEAD_DIM + 8;                          // of a row in shared memory: no bank conflicts

/* A head tile among all: those of a row are neighbours. */
struct HeadTile {
    long long index; // of all head tiles
    __device__ __forceinline__ HeadTile(long long row, int of_row) : index(row * HEAD_TILES_PER_BLOCK + of_row) {}

    /* Of its kv head. */
    __device__ __forceinline__ int first_head() const { return HEAD_TILES > 1 ? index % HEAD_TILES * HEADS : 0; }
    /* The number of one of its heads among all query heads: that of its row in q, and in out. */
    __device__ __forceinline__ long long query_head(int head) const { return index / HEAD_TILES * GROUP + head; }
};
