/* Rung 2, mma: the products on tensor cores, a warp's at a time. On every card since compute capability 8.0.

   New since tile: a warp has 64 x 32 of the tile's sums, and mma.m16n8k16 multiplies 16 x 16 numbers of x by 16 x 8
   of W in one instruction. Tiles stay in 16 bits, 64 numbers of k a row. What feeds the tensor cores changes with it:
   - cp.async copies words of 16 bytes into shared memory, passing by the registers, two steps ahead (copy.cuh);
   - ldmatrix brings fragments back, four 8 x 8 matrices at a time. It reads the same word of eight rows, which lie 128
     bytes apart, in the same four banks. So words are exchanged: word w of row r is at place w ^ r % 8 (swizzled).

   For each k16 a warp reads 6 * 512 bytes of shared memory, 24 cycles, for 16 products, 16 cycles of an H200's tensor
   cores. So shared memory allows two thirds of their rate; whether mma.sync itself would reach more is not seen here.

   k a multiple of 8, x and W at multiples of 16 bytes: a word lies in one row. Any m, n; y as it comes. Launch
   ceil(m / 128) * ceil(n / 128) blocks of 256 threads. Compile with DTYPE. */
#include "load_by_threads.cuh"
#include "warp_product.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 2)
matmul(const T *x, const T *W, T *y, long long m, int n, int k) {
    extern __shared__ __align__(1024) Stage stages[];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, steps = divide_up(k, STEP);
    // 1. a tile of y
    const int2 tile = TileOrder<GROUP>{divide_up(m, TILE), divide_up(n, TILE)}.at(blockIdx.x);
    const long long row = (long long)tile.x * TILE;
    const int column = tile.y * TILE, warp_row = warp / 4 * WARP_ROWS, warp_column = warp % 4 * WARP_COLUMNS;
    auto fill = [&](int step) {
        if (step < steps) {
            load(stages[step % STAGES].x, x, row, step * STEP, m, k);
            load(stages[step % STAGES].w, W, column, step * STEP, n, k);
        }
        copy_async_commit(); // with nothing, too: the wait counts
    };
    Sums sums = {};
    for (int step = 0; step < STAGES - 1; step++) fill(step);
    for (int step = 0; step < steps; step++) { // 2. along k
        copy_async_wait<STAGES - 2>();
        __syncthreads(); // all have copied their part of this step, and are done with the one before
        fill(step + STAGES - 1);
        const Stage &stage = stages[step % STAGES];
        multiply(sums, stage.x, stage.w, warp_row, warp_column, lane, T()); // 3
    }
    store(y, sums, row + warp_row, column + warp_column, m, n, lane); // 4
}
