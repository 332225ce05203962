/* What a block of planned.cu's kind does but for where its sums go: one warpgroup has TMA fill stages, the others
   multiply. Kernels of other topics, whose sums have another way to go, take it from here.

   S is a Shape (shape.cuh). Maps: of x boxes of (ROWS / CLUSTER_COLUMNS, 64), of W of (COLUMNS / CLUSTER_ROWS, 64). */
#pragma once
#include "../device/hopper/stmatrix.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "../device/hopper/wgmma.cuh"
#include "shape.cuh"

template <class S>
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
template <class S>
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
template <class S>
__device__ __forceinline__ void release(Ring<S::STAGES> &ring, Phase<S::STAGES> phase, unsigned sharer, int lane) {
    if constexpr (S::CLUSTER == 1) {
        if (lane == 0) ring.release(phase);
    } else if (lane < S::SHARERS) arrive_at(ring.empty[phase.stage], sharer);
}

/* A consumer's part of a tile, from (row, column) of it on. */
template <class S>
__device__ __forceinline__ void multiply(Sums<S> &sums, Shared<S> &shared, Phase<S::STAGES> &phase, int steps, int row,
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
                                       typename S::T());
        wgmma_commit();
        wgmma_wait<1>(); // the step before has read its stage
        if (step > 0) release<S>(shared.ring, before, sharer, lane);
        before = phase;
        phase.advance();
    }
    wgmma_wait<0>();
#pragma unroll
    for (int r = 0; r < S::PART_ROWS / 64; r++) keep(sums[r]);
    release<S>(shared.ring, before, sharer, lane);
}

/* A box of 64 x 64 sums, the c-th of the r-th 64 rows, rounded, to a consumer's place in shared memory, as TMA has it. */
template <class S>
__device__ __forceinline__ void put_box(unsigned char *box, const Sums<S> &sums, int r, int c, int thread) {
    using T = typename S::T;
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int i = 0; i < BOX / 16; i++) { // the warp's 16 rows, 16 columns at a time
        const float *d = sums[r] + c * BOX / 2 + 8 * i;
        stmatrix_x4(shared_address(box + swizzled(16 * warp + lane % 16, 2 * i + lane / 16)),
                    {pack(d[0], d[1], T()), pack(d[2], d[3], T()), pack(d[4], d[5], T()), pack(d[6], d[7], T())});
    }
}

/* One box to y. Boxes go by turns to the consumer's two buffers. */
template <class S>
__device__ __forceinline__ void store_box(const CUtensorMap &y, const Sums<S> &sums, Shared<S> &shared, int r, int c,
                                          int row, int column, int &buffer, int consumer, int thread) {
    unsigned char *box = shared.y[consumer][buffer].rows;
    if (thread == 0) store_wait_read<BUFFERS - 1>(); // what lay there has been read
    named_barrier<128>(1 + consumer);
    put_box<S>(box, sums, r, c, thread);
    fence_async_proxy();
    named_barrier<128>(1 + consumer);
    if (thread == 0) {
        store_tile(y, row + r * BOX, column + c * BOX, box);
        store_commit();
    }
    buffer ^= 1;
}

/* All of a consumer's sums to y. */
template <class S>
__device__ __forceinline__ void store_boxes(const CUtensorMap &y, const Sums<S> &sums, Shared<S> &shared, int row,
                                            int column, int &buffer, int consumer, int thread) {
#pragma unroll
    for (int r = 0; r < S::PART_ROWS / BOX; r++)
#pragma unroll
        for (int c = 0; c < S::PART_COLUMNS / BOX; c++)
            store_box<S>(y, sums, shared, r, c, row, column, buffer, consumer, thread);
}
