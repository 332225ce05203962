/* A warp's share of a tile's products on tensor cores, for rungs 2 to 4: 64 x 32 sums, of operands in shared memory
   whose words are exchanged (tiles.cuh). A tile of 128 x 128 has 2 x 4 such warps. */
#pragma once
#include "../device/copy.cuh"
#include "../device/mma.cuh"
#include "tiles.cuh"

constexpr int WARP_ROWS = 64, WARP_COLUMNS = 32;
using Sums = float[WARP_ROWS / 16][WARP_COLUMNS / 8][4];

/* One step along k: the 64 numbers of k that lie in a tile of x from row `row` on, times those in one
   of W from row `column` on. */
template <typename T>
__device__ __forceinline__ void multiply(Sums &sums, const unsigned char *x_tile, const unsigned char *w_tile, int row,
                                         int column, int lane, T) {
    const unsigned x = shared_address(x_tile), w = shared_address(w_tile);
#pragma unroll
    for (int k = 0; k < STEP / 16; k++) {
        unsigned a[WARP_ROWS / 16][4], b[WARP_COLUMNS / 16][4];
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++) // 16 rows; their first 8 columns, then the others
            ldmatrix_x4(a[i], x + swizzled(row + 16 * i + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int j = 0; j < WARP_COLUMNS / 16; j++) // 8 columns of the product, both halves of k; then the next 8
            ldmatrix_x4(b[j], w + swizzled(column + 16 * j + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
            for (int j = 0; j < WARP_COLUMNS / 8; j++)
                mma_m16n8k16(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1], T());
    }
}

/* The warp's sums to y, where its first is (row, column). */
template <typename T>
__device__ __forceinline__ void store(T *y, const Sums &sums, long long row, int column, long long m, int n, int lane) {
#pragma unroll
    for (int i = 0; i < WARP_ROWS / 16; i++)
#pragma unroll
        for (int j = 0; j < WARP_COLUMNS / 8; j++)
            store_fragment(y, sums[i][j], row + 16 * i, column + 8 * j, m, n, lane);
}
