/* The sizes of rung 8 (planned.cu), which plan.py chooses, and what a block has in shared memory. */
#pragma once
#include "../device/hopper/cluster.cuh"
#include "tiles.cuh"

/* Where sums go. */
struct ThroughTma; // to y, as whole boxes by way of shared memory: n a multiple of 8, y at a multiple of 16 bytes
struct Plain;      // to y, from registers
struct Partial;    // to scratch memory, in float32: sums over a part of k, which merge.cu adds up

template <typename U, typename V> constexpr bool same = false;
template <typename U> constexpr bool same<U, U> = true;

template <typename Type, int Rows, int Columns, int Consumers, int Stages, int Group = 16, int ClusterRows = 1,
          int ClusterColumns = 1, typename Destination = ThroughTma>
struct Shape {
    using T = Type; // of x, W and y: __half or __nv_bfloat16
    using Output = Destination;
    static constexpr int ROWS = Rows, COLUMNS = Columns;  // of a tile of y
    static constexpr int CONSUMERS = Consumers;           // warpgroups that multiply: 1 or 2
    static constexpr int STAGES = Stages;                 // of the ring
    static constexpr int GROUP = Group;                   // rows of tiles in a band (TileOrder), or rows of clusters
    static constexpr int CLUSTER_ROWS = ClusterRows;      // blocks whose tiles lie one below the other, and share W's
    static constexpr int CLUSTER_COLUMNS = ClusterColumns; // blocks whose tiles lie side by side, and share x's
    static constexpr int CLUSTER = CLUSTER_ROWS * CLUSTER_COLUMNS;
    static constexpr int SHARERS = CLUSTER_ROWS + CLUSTER_COLUMNS - 1; // blocks that fill one's stages, oneself too
    static constexpr int THREADS = 128 * (CONSUMERS + 1); // the last warpgroup is the producer
    static constexpr int ROW_PARTS = ROWS / 64 < CONSUMERS ? ROWS / 64 : CONSUMERS; // consumers one below the other
    static constexpr int PART_ROWS = ROWS / ROW_PARTS, PART_COLUMNS = COLUMNS * ROW_PARTS / CONSUMERS; // of one's sums
    static_assert((CONSUMERS == 1 || CONSUMERS == 2) && ROWS % (64 * ROW_PARTS) == 0 && CONSUMERS % ROW_PARTS == 0);
    static_assert(PART_COLUMNS % 64 == 0 && PART_ROWS * PART_COLUMNS <= 64 * 256); // 128 registers of sums
};

constexpr int BOX = 64, BUFFERS = 2; // rows and columns of y that one store takes; those of a consumer at a time

template <typename S> struct Shared {
    struct Stage {
        unsigned char x[S::ROWS * ROW], w[S::COLUMNS * ROW];
    };
    struct Box {
        unsigned char rows[BOX * ROW];
    };
    alignas(1024) Stage stages[S::STAGES];
    Box y[S::CONSUMERS][BUFFERS];
    Ring<S::STAGES> ring;
};

/* A unit of work: a tile, or a part of one along k. A block takes every gridDim.x-th; blocks of a cluster go
   together. */
template <typename S> struct Work {
    const TileOrder<S::GROUP> order; // of tiles, or of pairs
    const int steps, splits;         // steps of all of k
    const int down, across;          // the block's place in its cluster
    int unit, row, column, part, begin, end; // the first row and column of the tile; steps from begin to end

    __device__ __forceinline__ Work(long long m, int n, int k, int splits)
        : order{divide_up(m, S::ROWS * S::CLUSTER_ROWS), divide_up(n, S::COLUMNS * S::CLUSTER_COLUMNS)},
          steps(divide_up(k, STEP)), splits(splits), down(S::CLUSTER > 1 ? cluster_rank() % S::CLUSTER_ROWS : 0),
          across(S::CLUSTER > 1 ? cluster_rank() / S::CLUSTER_ROWS : 0), unit(blockIdx.x / S::CLUSTER) {
        find();
    }
    __device__ __forceinline__ bool exists() const { return unit < order.count() * splits; }
    __device__ __forceinline__ void next() {
        unit += gridDim.x / S::CLUSTER;
        find();
    }
    /* The rank of the i-th block that shares x's or W's rows with this: it fills stages here, and this one there. */
    __device__ __forceinline__ unsigned sharer(int i) const {
        if (i < S::CLUSTER_ROWS) return i + S::CLUSTER_ROWS * across;
        const int other = i - S::CLUSTER_ROWS;
        return down + S::CLUSTER_ROWS * (other + (other >= across));
    }
    __device__ __forceinline__ void find() {
        part = 0, begin = 0, end = steps;
        if constexpr (same<typename S::Output, Partial>) {
            part = unit / order.count();
            begin = steps * part / splits, end = steps * (part + 1) / splits; // steps < 2^25
        }
        const int2 tile = order.at(unit - part * order.count());
        row = (tile.x * S::CLUSTER_ROWS + down) * S::ROWS, column = (tile.y * S::CLUSTER_COLUMNS + across) * S::COLUMNS;
    }
};
