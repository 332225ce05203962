/* Rung 6, specialised: wgmma with warps that only copy, and warps that only multiply.

   New since wgmma: a third warpgroup, the producer, of which one thread fills stages whenever they are empty. The
   others, the consumers, never wait for an empty stage, and run into a full one. So that there is room for a larger
   tile, registers move (setmaxnreg): a block starts with 168 for each of its 384 threads, producers keep 40,
   consumers take 232. A consumer has 64 x 256 sums, 128 registers; the tile is 128 x 256, whose copies bring 85 flops
   a byte instead of 64, and whose products, 16 x 256 of W at a time, read 80 bytes of shared memory a cycle instead
   of 96, of the 128 that there are. And the products of one step stay under way while the next are asked for: a
   consumer waits for those before (wgmma_wait<1>), and releases their stage.

   Still lost: a block's first copies and its last stores, when nobody multiplies, are paid for each tile.

   Maps as for tma, boxes of (128, 64) of x and (256, 64) of W. Launch ceil(m / 128) * ceil(n / 256) blocks of 384
   threads. */
#include "../device/hopper/warpgroup.cuh"
#include "../device/hopper/wgmma.cuh"
#include "load_by_tma.cuh"
#include "wide_tile.cuh"

__device__ __forceinline__ void fill_stages(Ring<STAGES> &ring, Stage *stages, const CUtensorMap &x,
                                            const CUtensorMap &W, int row, int column, int steps) {
    Phase<STAGES> phase;
    for (int step = 0; step < steps; step++) load_step(ring, phase, stages, x, W, row, column, step);
}

/* Steps 2 and 3: a consumer's 64 rows of the tile, from row `row` of it on. */
__device__ __forceinline__ void multiply(float (&sums)[COLUMNS / 2], Ring<STAGES> &ring, const Stage *stages, int row,
                                         int steps, int lane) {
    Phase<STAGES> phase, before;
    for (int step = 0; step < steps; step++) {
        ring.wait_full(phase);
        const Stage &stage = stages[phase.stage];
        const Descriptor a = k_major(shared_address(stage.x + row * ROW)), b = k_major(shared_address(stage.w));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++)
            wgmma<COLUMNS>(sums, advance(a, 32 * i), advance(b, 32 * i), step + i > 0, T());
        wgmma_commit();
        wgmma_wait<1>(); // the step before has read its stage
        if (step > 0 && lane == 0) ring.release(before);
        before = phase;
        phase.advance();
    }
    wgmma_wait<0>();
    keep(sums);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
matmul(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W, T *y, long long m, int n, int k) {
    extern __shared__ __align__(1024) Stage stages[];
    __shared__ Ring<STAGES> ring;
    const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32), steps = divide_up(k, STEP);
    if (threadIdx.x == 0) ring.init(1, 4 * CONSUMERS);
    __syncthreads();
    // 1. a tile of y
    const int2 tile = TileOrder<GROUP>{divide_up(m, ROWS), divide_up(n, COLUMNS)}.at(blockIdx.x);
    const int row = tile.x * ROWS, column = tile.y * COLUMNS;
    if (warp >= 4 * CONSUMERS) { // the producer
        give_registers<40>();
        if (threadIdx.x == 128 * CONSUMERS) fill_stages(ring, stages, x, W, row, column, steps);
    } else {
        take_registers<232>();
        float sums[COLUMNS / 2];
        const int group_row = warp / 4 * 64;
        multiply(sums, ring, stages, group_row, steps, lane);
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) // 4
            store_fragment(y, sums + 4 * j, row + group_row + warp % 4 * 16, column + 8 * j, m, n, lane);
    }
}
