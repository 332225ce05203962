/* Where things lie in tiles of shared memory: 64 rows of 128 bytes, swizzled (swizzle.cuh). */
#pragma once
#include "../device/swizzle.cuh"
#include "shared.cuh"

/* The lane's row of a 16 x 16 block, for stmatrix: lane l has row l % 8 of matrix l / 8, of 2 x 2. */
__device__ __forceinline__ unsigned spot_of_block(unsigned tile, int row, int column, int lane) {
    return tile + swizzled(16 * row + lane / 8 % 2 * 8 + lane % 8, 2 * column + lane / 16);
}
/* The same for ldmatrix and stmatrix that transpose: tokens from 16 k on, the 16 columns of a warp. */
__device__ __forceinline__ unsigned spot_of_tokens(unsigned tile, int k, int warp, int lane) {
    return tile + swizzled(16 * k + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
}
/* A number. */
__device__ __forceinline__ float number_of(const unsigned char *tile, int row, int column) {
    return as_float(*reinterpret_cast<const T *>(tile + swizzled(row, column / 8) + column % 8 * 2));
}
