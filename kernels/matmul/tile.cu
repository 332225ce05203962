/* Rung 1, tile: y = x W^T by multiply-adds, a tile of 128 x 128 of y for each block. Numbers of steps as in
   ref/matmul.py.

   x (m, k), W (n, k), y (m, n), row-major, of one type T of 16 bits; sums are fp32. A row of W is a column of the
   product, so both operands are read along k. 2*m*n*k flops; at least 2 * (m*k + n*k + m*n) bytes.

   One thread a number of y would read each row of x n times, and each row of W m times. Here a block reads 128 rows of
   either for 128 * 128 numbers of y: 64 flops a byte, where one thread a number has 1. STEP numbers of k at a time lie
   in shared memory, as floats, k by k; a thread has 8 x 8 sums, in two halves each way, so that its 16 operands of a k
   are four reads of 16 bytes, for 64 multiply-adds.

   The limit is the multiply-adds: 128 for each multiprocessor and cycle, 67 TFLOP/s on an H200, where tensor cores do
   989. Any m, n, k, any alignment, any card. Launch ceil(m / 128) * ceil(n / 128) blocks of 256 threads. Compile with
   DTYPE. */
#include "dtype.cuh"
constexpr int TILE = 128, STEP = 16, THREADS = 256, PITCH = TILE + 4; // so that a column's 16 numbers spread over banks

/* TILE rows, STEP numbers of each from column `begin` on, as floats; zeros outside. */
__device__ __forceinline__ void load(float (&to)[STEP][PITCH], const T *from, long long first, int begin,
                                     long long rows, int k) {
#pragma unroll
    for (int i = 0; i < TILE * STEP / THREADS; i++) {
        const int number = i * THREADS + threadIdx.x, row = number / STEP, column = number % STEP;
        const bool inside = first + row < rows && begin + column < k;
        to[column][row] = inside ? (float)from[(first + row) * k + begin + column] : 0.0f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS)
matmul(const T *x, const T *W, T *y, long long m, int n, int k) {
    __shared__ __align__(16) float x_tile[STEP][PITCH], w_tile[STEP][PITCH];
    // 1. a tile of y
    const int columns = (n + TILE - 1) / TILE, i = threadIdx.x / 16 * 4, j = threadIdx.x % 16 * 4;
    const long long row = (long long)(blockIdx.x / columns) * TILE;
    const int column = blockIdx.x % columns * TILE;
    float sums[8][8] = {};
    for (int begin = 0; begin < k; begin += STEP) { // 2. along k
        load(x_tile, x, row, begin, m, k);
        load(w_tile, W, column, begin, n, k);
        __syncthreads();
#pragma unroll
        for (int p = 0; p < STEP; p++) { // 3. multiply, and add
            float a[8], b[8];
            *reinterpret_cast<float4 *>(a) = *reinterpret_cast<const float4 *>(&x_tile[p][i]);
            *reinterpret_cast<float4 *>(a + 4) = *reinterpret_cast<const float4 *>(&x_tile[p][i + TILE / 2]);
            *reinterpret_cast<float4 *>(b) = *reinterpret_cast<const float4 *>(&w_tile[p][j]);
            *reinterpret_cast<float4 *>(b + 4) = *reinterpret_cast<const float4 *>(&w_tile[p][j + TILE / 2]);
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int c = 0; c < 8; c++) sums[r][c] += a[r] * b[c];
        }
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 8; r++) // 4. store
#pragma unroll
        for (int c = 0; c < 8; c++) {
            const long long to = row + i + r % 4 + r / 4 * (TILE / 2);
            const int at = column + j + c % 4 + c / 4 * (TILE / 2);
            if (to < m && at < n) y[to * n + at] = (T)sums[r][c];
        }
}
