/* Rung 3, ring: mma with mbarriers for its ring of stages.

   New since mma: no barrier for the whole block at each step. Each stage has two mbarriers. `full` counts the threads
   whose copies into it have come; `empty` the warps that have read it. Threads do not wait for copies of their own:
   these arrive by themselves (arrive_with_copies).

   Still lost: every thread computes addresses for its copies, and waits for an empty stage before its products. With
   three stages, filled two steps ahead, that is the stage of the step before: so a warp begins a step when all others
   have finished the one before, as at a barrier, and has two waits for it instead of one.

   Arguments, launch and limits as for mma, and compute capability 9.0. */
#include "../device/hopper/mbarrier.cuh"
#include "load_by_threads.cuh"
#include "warp_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul(const T *x, const T *W, T *y, long long m, int n, int k) {
    extern __shared__ __align__(1024) Stage stages[];
    __shared__ Ring<STAGES> ring;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = divide_up(k, STEP);
    if (threadIdx.x == 0) ring.init(THREADS, THREADS / 32);
    __syncthreads();
    // 1. a tile of y
    const int2 tile = TileOrder<GROUP>{divide_up(m, TILE), divide_up(n, TILE)}.at(blockIdx.x);
    const long long row = (long long)tile.x * TILE;
    const int column = tile.y * TILE, warp_row = warp / 4 * WARP_ROWS, warp_column = warp % 4 * WARP_COLUMNS;
    Phase<STAGES> filling, reading;
    auto fill = [&](int step) {
        if (step >= steps) return;
        ring.wait_empty(filling);
        load(stages[filling.stage].x, x, row, step * STEP, m, k);
        load(stages[filling.stage].w, W, column, step * STEP, n, k);
        ring.full[filling.stage].arrive_with_copies();
        filling.advance();
    };
    Sums sums = {};
    for (int step = 0; step < STAGES - 1; step++) fill(step);
    for (int step = 0; step < steps; step++) { // 2. along k
        fill(step + STAGES - 1);
        ring.wait_full(reading);
        const Stage &stage = stages[reading.stage];
        multiply(sums, stage.x, stage.w, warp_row, warp_column, lane, T()); // 3
        __syncwarp();
        if (lane == 0) ring.release(reading);
        reading.advance();
    }
    store(y, sums, row + warp_row, column + warp_column, m, n, lane); // 4
}
