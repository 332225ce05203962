/* Rung 5, wgmma: tma with Hopper's own products, a warpgroup's at a time.

   New since tma: two warpgroups of 128 threads have 64 rows of the tile's sums each, and wgmma multiplies 64 x 16
   numbers of x by 16 x 128 of W. It reads both from shared memory, where TMA has put them: no ldmatrix, no fragments,
   no registers but the sums. A descriptor says where; four instructions are a step along k. They run while the
   threads go on, so a stage is released when wgmma_wait says so. (device/hopper/wgmma.cuh)

   Still lost: each step waits for its own products before the next are asked for, so the tensor cores idle in between,
   and while thread 0 looks for an empty stage. A block's first copies and its last stores are paid for each tile.

   Arguments, launch and limits as for tma; sm_90a alone. */
#include "../device/hopper/warpgroup.cuh"
#include "../device/hopper/wgmma.cuh"
#include "load_by_tma.cuh"
#include "square_tile.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W, T *y, long long m, int n, int k) {
    extern __shared__ __align__(1024) Stage stages[];
    __shared__ Ring<STAGES> ring;
    const int lane = threadIdx.x % 32, warp = warp_uniform(threadIdx.x / 32), steps = divide_up(k, STEP);
    if (threadIdx.x == 0) ring.init(1, THREADS / 32);
    __syncthreads();
    // 1. a tile of y
    const int2 tile = TileOrder<GROUP>{divide_up(m, TILE), divide_up(n, TILE)}.at(blockIdx.x);
    const int row = tile.x * TILE, column = tile.y * TILE, group_row = warp / 4 * 64;
    Phase<STAGES> filling, reading;
    auto fill = [&](int step) {
        if (step < steps && threadIdx.x == 0) load_step(ring, filling, stages, x, W, row, column, step);
    };
    float sums[TILE / 2]; // 64 x 128 of the warpgroup
    for (int step = 0; step < STAGES - 1; step++) fill(step);
    for (int step = 0; step < steps; step++) { // 2. along k
        fill(step + STAGES - 1);
        __syncwarp();
        ring.wait_full(reading);
        const Stage &stage = stages[reading.stage];
        const Descriptor a = k_major(shared_address(stage.x + group_row * ROW)), b = k_major(shared_address(stage.w));
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < STEP / 16; i++) // 3
            wgmma<TILE>(sums, advance(a, 32 * i), advance(b, 32 * i), step + i > 0, T());
        wgmma_commit();
        wgmma_wait<0>();
        keep(sums);
        if (lane == 0) ring.release(reading);
        reading.advance();
    }
#pragma unroll
    for (int j = 0; j < TILE / 8; j++) // 4
        store_fragment(y, sums + 4 * j, row + group_row + warp % 4 * 16, column + 8 * j, m, n, lane);
}
