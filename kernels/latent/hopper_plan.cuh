/* How hopper.cu goes about it, and what a block has in shared memory.

   A block has 64 heads of a sequence and a line of tiles of 64 tokens. A tile lies in nine parts of 64 tokens and 64 of
   their numbers, as TMA brings them, swizzled: parts 0 to 7 are the latent vector, part 8 is rotated. It fills a slot.
   The two slots, and the two warpgroups that multiply, take turns: warpgroup w makes the scores of what comes to slot
   w, and adds the values of all tiles to its own half of the result, columns 256 w to 256 w + 255, whose parts are the
   slot's side w. The rotated part is done with when scores are, and then holds their weights, for the other. */
#pragma once
#include "../device/hopper/cluster.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "line.cuh"

template <int LeastTiles, int MergeTiles, bool Multicast, bool OwnSideFirst, int PartsBefore, int Ahead>
struct Plan {
    static constexpr int LEAST_TILES = LeastTiles;         // of a share
    static constexpr int MERGE_TILES = MergeTiles;         // as many tiles take as long as partial results and a merge
    static constexpr bool MULTICAST = Multicast;           // two blocks with the same tiles bring them for each other
    static constexpr bool OWN_SIDE_FIRST = OwnSideFirst;   // parts in the order in which their places become free
    static constexpr int PARTS_BEFORE = PartsBefore;       // of a tile's scores, then the other's values, then the rest
    static constexpr int AHEAD = Ahead;                    // tiles that L2 is asked for before there is room for them
};
#ifndef PLAN
#define PLAN Plan<2, 4, false, true, 6, 2>
#endif
constexpr bool MULTICAST = PLAN::MULTICAST, OWN_SIDE_FIRST = PLAN::OWN_SIDE_FIRST;
static_assert(HEADS == 64 && TILE == 64, "a product has 64 rows, and a tile is a page");

constexpr int WARPGROUPS = 2, THREADS = 128 * (WARPGROUPS + 1); // that multiply; and one that brings tiles
constexpr int PARTS = WIDTH / 64, SIDE_PARTS = 4, ROTATED = 8, PART_BYTES = 64 * 64 * (int)sizeof(T);
constexpr int SLOTS = 2, SEGMENTS = 4, AHEAD = PLAN::AHEAD, PARTS_BEFORE = PLAN::PARTS_BEFORE;
static_assert(AHEAD <= 32, "page numbers are known so far ahead");
constexpr int SIDE_COLUMNS = LATENT / WARPGROUPS; // of the result, that a warpgroup has

/* The part that comes as the i-th to this slot. */
__device__ __forceinline__ int part_at(int i, int slot) {
    return OWN_SIDE_FIRST && slot == 1 && i < ROTATED ? i ^ SIDE_PARTS : i;
}

/* The shares that the line is cut into, at most so many. Each has some tiles, so that partial results stay few. Where
   all sequences have the same length and whole ones come out nearly even, none is cut. */
__device__ __forceinline__ int share_count(const Sequences &sequences, int most, int lane) {
    const int batch = sequences.batch, tiles = sequences.tiles(0), total = sequences.tiles_before(batch, lane);
    const int abreast = (batch + most - 1) / most;
    if (batch % abreast == 0 && total == batch * tiles && abreast * tiles <= total / most + PLAN::MERGE_TILES)
        return batch / abreast;
    return max(1, min(most, total / PLAN::LEAST_TILES));
}

/* What multiplies and what brings agree on: some tiles of a sequence, one after another. */
struct Work {
    int tiles;    // 0: there is no more
    int b;        // the sequence
    int last;     // tokens of the last tile, of 64
    int place;    // of partial results (line.cuh); -1: the sequence is whole, and has its result
};

struct Shared {
    alignas(1024) unsigned char q[PARTS][PART_BYTES];
    unsigned char tiles[SLOTS][PARTS][PART_BYTES];
    unsigned char out[4 * WARPGROUPS][1024]; // a warp's results on their way
    float maximum[SLOTS][HEADS];             // that the weights in a slot are relative to
    float weights[2][WARPGROUPS][HEADS];     // sums, by turns
    Work work[SEGMENTS];
    Ring<SEGMENTS> work_ring;
    Ring<1> q_ring;
    Barrier full[SLOTS][PARTS], empty[SLOTS][2]; // of each side

    __device__ __forceinline__ void init() {
        work_ring.init(1, 4 * WARPGROUPS);
        q_ring.init(1, 4 * WARPGROUPS);
#pragma unroll
        for (int slot = 0; slot < SLOTS; slot++) {
#pragma unroll
            for (int part = 0; part < PARTS; part++) full[slot][part].init(1);
#pragma unroll
            for (int side = 0; side < 2; side++) empty[slot][side].init(MULTICAST ? 8 : 4);
        }
        Barrier::init_done();
    }
};
