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

template <typename Type, int Rows, int Columns, int Consumers, int Stages, int Group = 16, int Cluster = 1,
          typename Destination = ThroughTma>
struct Shape {
    using T = Type; // of x, W and y: __half or __nv_bfloat16
    using Output = Destination;
    static constexpr int ROWS = Rows, COLUMNS = Columns;  // of a tile of y
    static constexpr int CONSUMERS = Consumers;           // warpgroups that multiply: 1 or 2
    static constexpr int STAGES = Stages;                 // of the ring
    static constexpr int GROUP = Group;                   // rows of tiles in a band (TileOrder), or rows of clusters
    static constexpr int CLUSTER = Cluster;               // blocks that share W's rows, their tiles one below the other
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
    const int steps, splits, rank;   // steps of all of k
    int unit, row, column, part, begin, end; // the first row and column of the tile; steps from begin to end

    __device__ __forceinline__ Work(long long m, int n, int k, int splits)
        : order{divide_up(m, S::ROWS * S::CLUSTER), divide_up(n, S::COLUMNS)}, steps(divide_up(k, STEP)),
          splits(splits), rank(S::CLUSTER > 1 ? cluster_rank() : 0), unit(blockIdx.x / S::CLUSTER) {
        find();
    }
    __device__ __forceinline__ bool exists() const { return unit < order.count() * splits; }
    __device__ __forceinline__ void next() {
        unit += gridDim.x / S::CLUSTER;
        find();
    }
    __device__ __forceinline__ void find() {
        part = 0, begin = 0, end = steps;
        if constexpr (same<typename S::Output, Partial>) {
            part = unit / order.count();
            begin = steps * part / splits, end = steps * (part + 1) / splits; // steps < 2^25
        }
        const int2 tile = order.at(unit - part * order.count());
        row = (tile.x * S::CLUSTER + rank) * S::ROWS, column = tile.y * S::COLUMNS;
    }
};
