/* The sums of a cluster's blocks, whose columns are parts of the same rows.

   A block sends each of its sums to the block that is the row of x's, as soon as it has it, and goes on: the rows of x
   are dealt out to the blocks. When all blocks have sent all of theirs, each adds up what it was sent. So there is one
   barrier of the cluster for the launch, and y is written by all of its blocks. Since compute capability 9.0. */
#pragma once
#include "../device/hopper/cluster_store.cuh"
#include "unit.cuh"

template <class I, class B> struct ClusterSums {
    static_assert(I::ROWS % B::CLUSTER == 0, "each block has as many rows of x");
    static constexpr int X_ROWS = I::ROWS / B::CLUSTER; // of a block
    float *received; // [the block's turn of a tile][X_ROWS][block that sent it][16 rows]

    /* The other blocks are there, and can be sent something, behind ready(). */
    static __device__ __forceinline__ void here() { cluster_begin(); }
    static __device__ __forceinline__ void ready() { cluster_wait(); }

    /* Send this block's sum of a row in its tile number `turn`. */
    __device__ __forceinline__ void send(int turn, int x_row, int row_of_tile, float sum) const {
        const int at = ((turn * X_ROWS + x_row % X_ROWS) * B::CLUSTER + B::split()) * 16 + row_of_tile;
        store_in_cluster(received + at, x_row / X_ROWS, sum);
    }
    /* All is sent: add it up, and store(x_row, row, sum) what is the block's. Of all threads of all blocks. */
    template <class Store>
    __device__ __forceinline__ void add_up(const Share<B> &share, long long rows, int m, int thread, Store store) const {
        cluster_arrive(), cluster_wait();
        const int turns = (share.tiles - B::number() + B::count() - 1) / B::count();
#pragma unroll 1
        for (int i = thread; i < turns * X_ROWS * 16; i += B::THREADS) {
            const int x_row = B::split() * X_ROWS + i / 16 % X_ROWS;
            const long long row = (B::number() + (long long)B::count() * (i / 16 / X_ROWS)) * 16 + i % 16;
            if (row >= rows || x_row >= m) continue;
            const float *const sums = received + i / 16 * B::CLUSTER * 16 + i % 16;
            float all = 0;
#pragma unroll
            for (int block = 0; block < B::CLUSTER; block++) all += sums[block * 16];
            store(x_row, row, all);
        }
    }
};
