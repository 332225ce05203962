/* What all rungs of the matmul on tensor cores share: where a tile lies in y, and in shared memory.

   y = x W^T: x (m, k), W (n, k), y (m, n), all row-major. A tile of y needs as many rows of x and of W, STEP numbers
   of k at a time: rows of 128 bytes, 8 words of 16 bytes. */
#pragma once
#include "../device/half2.cuh"
#include "../device/swizzle.cuh"

constexpr int STEP = 64, ROW = 128; // numbers of k in a row of a tile; its bytes

__device__ __forceinline__ int divide_up(long long a, int b) { return (int)((a + b - 1) / b); }

/* The tiles of y, numbered so that those which are worked on at a time need few rows of x and W: GROUP rows of tiles
   are a band, which is walked column by column. Then 128 blocks have 16 x 8 tiles, and not 128 x 1, and 24 strips of
   x and W come from memory instead of 129. */
template <int GROUP> struct TileOrder {
    int rows, columns; // of tiles

    __device__ __forceinline__ int count() const { return rows * columns; }
    /* Row and column of a tile. */
    __device__ __forceinline__ int2 at(int tile) const {
        const int band = tile / (GROUP * columns), in_band = tile - band * (GROUP * columns);
        const int height = min(GROUP, rows - band * GROUP); // the last band may be lower
        return {band * GROUP + in_band % height, in_band / height};
    }
};

/* Two neighbouring sums to y, rounded, as far as they lie inside. */
template <typename T>
__device__ __forceinline__ void store_pair(T *y, long long row, int column, long long m, int n, float a, float b) {
    if (row >= m || column >= n) return;
    T *to = y + row * n + column;
    if (column + 1 < n && (unsigned long long)to % (2 * sizeof(T)) == 0) {
        if constexpr (sizeof(T) == 4) *reinterpret_cast<float2 *>(to) = {a, b};
        else *reinterpret_cast<unsigned *>(to) = pack(a, b, T());
    } else {
        to[0] = (T)a;
        if (column + 1 < n) to[1] = (T)b;
    }
}

/* A lane's sums of 16 rows and 8 columns (mma.cuh): row g, columns 2c and 2c + 1, and the same 8 rows below. */
template <typename T>
__device__ __forceinline__ void store_fragment(T *y, const float *d, long long row, int column, long long m, int n,
                                               int lane) {
    store_pair(y, row + lane / 4, column + lane % 4 * 2, m, n, d[0], d[1]);
    store_pair(y, row + lane / 4 + 8, column + lane % 4 * 2, m, n, d[2], d[3]);
}
