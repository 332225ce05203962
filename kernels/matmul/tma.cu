/* Rung 4, tma: ring with its copies made by the tensor memory accelerator.

   New since ring: one thread asks for a tile of x and one of W, 128 rows of 128 bytes each, in two instructions; the
   copies of 256 threads, their addresses and their tests for the edge are gone. TMA exchanges the words as `swizzled`
   does, brings zeros for what lies outside, and counts its bytes at the stage's mbarrier: `full` expects one arrival,
   and 32 KB with it. (device/hopper/tma.cuh)

   Still lost: warp 0 waits for an empty stage before it multiplies, and everybody waits for warp 0; and shared memory
   allows two thirds of the tensor cores' rate (mma.cu), as operands pass through registers.

   x and W come as tensor maps, boxes of (128, 64) swizzled by 128 bytes. So k is a multiple of 8, addresses are of 16
   bytes. Any m, n. Launch and limits as for ring. */
#include "load_by_tma.cuh"
#include "square_tile.cuh"
#include "warp_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul(const __grid_constant__ CUtensorMap x, const __grid_constant__ CUtensorMap W, T *y, long long m, int n, int k) {
    extern __shared__ __align__(1024) Stage stages[];
    __shared__ Ring<STAGES> ring;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = divide_up(k, STEP);
    if (threadIdx.x == 0) ring.init(1, THREADS / 32);
    __syncthreads();
    // 1. a tile of y
    const int2 tile = TileOrder<GROUP>{divide_up(m, TILE), divide_up(n, TILE)}.at(blockIdx.x);
    const int row = tile.x * TILE, column = tile.y * TILE;
    const int warp_row = warp / 4 * WARP_ROWS, warp_column = warp % 4 * WARP_COLUMNS;
    Phase<STAGES> filling, reading;
    auto fill = [&](int step) {
        if (step < steps && threadIdx.x == 0) load_step(ring, filling, stages, x, W, row, column, step);
    };
    Sums sums = {};
    for (int step = 0; step < STAGES - 1; step++) fill(step);
    for (int step = 0; step < steps; step++) { // 2. along k
        fill(step + STAGES - 1);
        __syncwarp();
        ring.wait_full(reading);
        const Stage &stage = stages[reading.stage];
        multiply(sums, stage.x, stage.w, warp_row, warp_column, lane, T()); // 3
        fence_async_proxy(); // ldmatrix has brought what it was asked for: TMA would not wait for it (Ring::release)
        __syncwarp();
        if (lane == 0) ring.release(reading);
        reading.advance();
    }
    store(y, sums, row + warp_row, column + warp_column, m, n, lane); // 4
}
