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
#include "../device/hopper/stmatrix.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "../device/hopper/wgmma.cuh"
#include "shape.cuh"
#ifndef SHAPE
#define SHAPE Shape<__nv_bfloat16, 128, 256, 2, 4>
#endif
using S = SHAPE;
using T = S::T;
using Sums = float[S::PART_ROWS / 64][S::PART_COLUMNS / 2]; // of a consumer: 64 rows at a time, as wgmma has them

/* Rows `first` and on of x or W, as many as a stage takes, which SHARERS blocks of the cluster need: each asks for its
   part, the mine-th, for all of them. */
template <int ROWS, int SHARERS>
__device__ __forceinline__ void load_shared(unsigned char *to, const CUtensorMap &map, int first, int step,
                                            Barrier &full, int mine, int blocks) {
    constexpr int PART = ROWS / SHARERS;
    if constexpr (SHARERS == 1) load_tile(to, map, first, step * STEP, full);
    else load_tile_multicast(to + mine * PART * ROW, map, first + mine * PART, step * STEP, full, blocks);
}

/* The producer: stages of all units, one after another. */
__device__ __forceinline__ void fill_stages(Shared<S> &shared, const CUtensorMap &x, const CUtensorMap &W,
                                            Work<S> work) {
    Phase<S::STAGES> phase;
    int beside = 0; // the blocks that share x's rows, a bit for each rank
#pragma unroll
    for (int i = 0; i < S::CLUSTER_COLUMNS; i++) beside |= 1 << (work.down + S::CLUSTER_ROWS * i);
    const int below = ((1 << S::CLUSTER_ROWS) - 1) << S::CLUSTER_ROWS * work.across; // those that share W's
    prefetch(x);
    prefetch(W);
    for (; work.exists(); work.next())
        for (int step = work.begin; step < work.end; step++) {
            auto &stage = shared.stages[phase.stage];
            Barrier &full = shared.ring.full[phase.stage];
            shared.ring.wait_empty(phase); // here, and in all blocks that get a part from here
            full.expect(sizeof(stage));
            load_shared<S::ROWS, S::CLUSTER_COLUMNS>(stage.x, x, work.row, step, full, work.across, beside);
            load_shared<S::COLUMNS, S::CLUSTER_ROWS>(stage.w, W, work.column, step, full, work.down, below);
            phase.advance();
        }
}

/* A lane for each block that fills this stage: `sharer` is its rank. */
__device__ __forceinline__ void release(Ring<S::STAGES> &ring, Phase<S::STAGES> phase, unsigned sharer, int lane) {
    if constexpr (S::CLUSTER == 1) {
        if (lane == 0) ring.release(phase);
    } else if (lane < S::SHARERS) arrive_at(ring.empty[phase.stage], sharer);
}

/* Steps 2 and 3: a consumer's part of a tile, from (row, column) of it on. */
__device__ __forceinline__ void multiply(Sums &sums, Shared<S> &shared, Phase<S::STAGES> &phase, int steps, int row,
                                         int column, unsigned sharer, int lane) {
    Phase<S::STAGES> before;
    for (int step = 0; step < steps; step++) {
        shared.ring.wait_full(phase);
        const auto &stage = shared.stages[phase.stage];
        const Descriptor a = k_major(shared_address(stage.x + row * ROW));
        const Descriptor b = k_major(shared_address(stage.w + column * ROW));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
#pragma unroll
            for (int r = 0; r < S::PART_ROWS / 64; r++)
                wgmma<S::PART_COLUMNS>(sums[r], advance(a, r * 64 * ROW + 32 * i), advance(b, 32 * i), step + i > 0,
                                       T());
        wgmma_commit();
        wgmma_wait<1>(); // the step before has read its stage
        if (step > 0) release(shared.ring, before, sharer, lane);
        before = phase;
        phase.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < S::PART_ROWS / 64; r++) keep(sums[r]);
    release(shared.ring, before, sharer, lane);
}

/* Step 4: the sums to y, a box of 64 x 64 at a time. Boxes go by turns to the consumer's two buffers. */
__device__ __forceinline__ void store_boxes(const CUtensorMap &y, const Sums &sums, Shared<S> &shared, int row,
                                            int column, int &buffer, int consumer, int thread) {
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int r = 0; r < S::PART_ROWS / BOX; r++)
#pragma unroll
        for (int c = 0; c < S::PART_COLUMNS / BOX; c++) {
            unsigned char *box = shared.y[consumer][buffer].rows;
            if (thread == 0) store_wait_read<BUFFERS - 1>(); // what lay there has been read
            named_barrier<128>(1 + consumer);
#pragma unroll
            for (int i = 0; i < BOX / 16; i++) { // the warp's 16 rows, 16 columns at a time
                const float *d = sums[r] + c * BOX / 2 + 8 * i;
                stmatrix_x4(
                    shared_address(box + swizzled(16 * warp + lane % 16, 2 * i + lane / 16)),
                    {pack(d[0], d[1], T()), pack(d[2], d[3], T()), pack(d[4], d[5], T()), pack(d[6], d[7], T())});
            }
            fence_async_proxy();
            named_barrier<128>(1 + consumer);
            if (thread == 0) {
                store_tile(y, row + r * BOX, column + c * BOX, box);
                store_commit();
            }
            buffer ^= 1;
        }
}

/* Step 4, from registers: in T, or in float32 where they are sums of a part of k. */
template <typename U>
__device__ __forceinline__ void store_plain(U *y, const Sums &sums, int row, int column, long long m, int n,
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
    Sums sums;
    for (; work.exists(); work.next()) { // 1. a tile of y
        multiply(sums, shared, phase, work.end - work.begin, part_row, part_column, sharer, thread % 32);
        const int row = work.row + part_row, column = work.column + part_column;
        if constexpr (same<S::Output, ThroughTma>)
            store_boxes(y_map, sums, shared, row, column, buffer, consumer, thread);
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
        if (thread == 0) fill_stages(shared, x, W, work);
    } else {
        if constexpr (S::CONSUMERS == 2) take_registers<232>();
        consume(shared, y_map, y, m, n, work, group, thread);
    }
    __syncwarp();
    if constexpr (S::CLUSTER > 1) cluster_barrier(); // nobody leaves while the other may still write here
}
