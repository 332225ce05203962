/* Rung 8, planned: the best. persistent with its sizes chosen for the matrices at hand, by plan.py.

   New since persistent:
   - Sizes are a Shape (shape.cuh): large tiles for large products, small ones where there are few tiles. A consumer
     has PART_ROWS x PART_COLUMNS of a tile's sums. Where even small tiles are few, they are cut along k: a unit of
     work is a part of a tile, whose sums stay in float32, and merge.cu adds the parts up.
   - Blocks may be a cluster. Tiles one below the other need the same rows of W, tiles side by side the same rows of x:
     each asks for a part, for all of them. Of two tiles of 128 x 256, one below the other, either block reads 32 KB a
     step from L2 instead of 48; of 2 x 2, 24.
   - Where y is nothing for TMA (n no multiple of 8, an odd address), sums are stored from registers.

   Maps as for persistent; of x boxes of (ROWS / CLUSTER_COLUMNS, 64), of W of (COLUMNS / CLUSTER_ROWS, 64); where the
   output is not ThroughTma, any map for y. Launch up to as many blocks as there are units, a multiple of CLUSTER, of
   THREADS, with sizeof(Shared) bytes. splits > 1 needs Partial, whose y has (splits, m, n) floats. */
#include "warpgroups.cuh"
#ifndef SHAPE
#define SHAPE Shape<__nv_bfloat16, 128, 256, 2, 4>
#endif
using S = SHAPE;
using T = S::T;

/* Step 4 (store_boxes is its other way), from registers: in T, or in float32 where they are sums of a part of k. */
template <typename U>
__device__ __forceinline__ void store_plain(U *y, const Sums<S> &sums, int row, int column, long long m, int n,
                                            int thread) {
#pragma unroll
    for (int r = 0; r < S::PART_ROWS / 64; r++)
#pragma unroll
        for (int j = 0; j < S::PART_COLUMNS / 8; j++)
            store_fragment(y, sums[r] + 4 * j, row + r * 64 + thread / 32 * 16, column + 8 * j, m, n, thread % 32);
}

__device__ __forceinline__ void consume(Shared<S> &shared, const CUtensorMap &y_map, void *y, long long m, int n,
                                        Work<S> work, int consumer, int thread) {
    const int part_row = consumer % S::ROW_PARTS * S::PART_ROWS;
    const int part_column = consumer / S::ROW_PARTS * S::PART_COLUMNS;
    const unsigned sharer = work.sharer(thread % 32);
    Phase<S::STAGES> phase;
    int buffer = 0;
    Sums<S> sums;
    for (; work.exists(); work.next()) { // 1. a tile of y; 2. and 3. its products
        multiply<S>(sums, shared, phase, work.end - work.begin, part_row, part_column, sharer, thread % 32);
        const int row = work.row + part_row, column = work.column + part_column;
        if constexpr (same<S::Output, ThroughTma>)
            store_boxes<S>(y_map, sums, shared, row, column, buffer, consumer, thread);
        else if constexpr (same<S::Output, Plain>)
            store_plain(static_cast<T *>(y), sums, row, column, m, n, thread);
        else store_plain(static_cast<float *>(y) + work.part * m * n, sums, row, column, m, n, thread);
    }
    if (same<S::Output, ThroughTma> && thread == 0) store_wait();
}

extern "C" __global__ void __launch_bounds__(S::THREADS, 1)
matmul(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W,
       const __grid_constant__ CUtensorMap y_map, void *y, long long m, int n, int k, int splits) {
    extern __shared__ __align__(1024) unsigned char memory[];
    Shared<S> &shared = *reinterpret_cast<Shared<S> *>(memory);
    const int group = warp_uniform(threadIdx.x / 128), thread = threadIdx.x % 128;
    if (threadIdx.x == 0) shared.ring.init(1, 4 * S::CONSUMERS * S::SHARERS);
    if constexpr (S::CLUSTER == 1) __syncthreads();
    else cluster_barrier();
    const Work<S> work(m, n, k, splits);
    if (group == S::CONSUMERS) {
        if constexpr (S::CONSUMERS == 2) give_registers<40>(); // of one there are enough
        if (thread == 0) fill_stages<S>(shared, x, W, work);
    } else {
        if constexpr (S::CONSUMERS == 2) take_registers<232>();
        consume(shared, y_map, y, m, n, work, group, thread);
    }
    __syncwarp();
    if constexpr (S::CLUSTER > 1) cluster_barrier(); // nobody leaves while the other may still write here
}
