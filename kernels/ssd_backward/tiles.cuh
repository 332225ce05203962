/* Where fragments lie in tiles of shared memory: 64 rows of 128 bytes, swizzled (swizzle.cuh). */
#pragma once
#include "../device/copy.cuh"
#include "../device/hopper/stmatrix.cuh"
#include "../device/half2.cuh"
#include "../device/mma.cuh"
#include "../device/swizzle.cuh"
#include "shape.cuh"

/* What several blocks read at about the same time: L2 treats it as anything else. */
constexpr CachePolicy AS_ANY = 0x1000000000000000;

/* The lane's row of a 16 x 16 block, for ldmatrix and stmatrix: lane l has row l % 8 of matrix l / 8, of 2 x 2. */
__device__ __forceinline__ unsigned spot_of_block(unsigned tile, int row, int column, int lane) {
    return tile + swizzled(16 * row + lane / 8 % 2 * 8 + lane % 8, 2 * column + lane / 16);
}
/* The same for ldmatrix that transposes: rows from 16 k on, the 16 columns of a warp. */
__device__ __forceinline__ unsigned spot_of_turned(unsigned tile, int k, int warp, int lane) {
    return tile + swizzled(16 * k + lane / 16 * 8 + lane % 8, 2 * warp + lane / 8 % 2);
}

/* The warp's 16 rows of a tile, as the left factor of products over its 64 columns. */
__device__ __forceinline__ void load_rows(unsigned (&f)[4][4], unsigned tile, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < 4; k++) ldmatrix_x4(f[k], spot_of_block(tile, warp, k, lane));
}
/* The warp's 16 columns of a tile, as the left factor of products over its 64 rows. */
__device__ __forceinline__ void load_columns(unsigned (&f)[4][4], unsigned tile, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < 4; k++) ldmatrix_x4_trans(f[k], spot_of_turned(tile, k, warp, lane));
}

/* Sums of a product, rounded, as the left factor of another over their columns. */
template <int COUNT>
__device__ __forceinline__ void to_fragments(unsigned (&f)[COUNT / 8][4], const float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT / 2; i++) f[i / 4][i % 4] = pack(d[2 * i], d[2 * i + 1], T());
}

template <int COUNT> __device__ __forceinline__ void clear(float (&d)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) d[i] = 0;
}

/* Two numbers of a left factor, each times its own. */
__device__ __forceinline__ unsigned scaled(unsigned pair, float by_first, float by_second) {
    const float2 v = unpack(pair, T());
    return pack(v.x * by_first, v.y * by_second, T());
}

/* The lane's part of a dot product: of the row r of its two, of a left factor and of sums. */
__device__ __forceinline__ float row_dot(const unsigned (&f)[4][4], const float (&d)[32], int r) {
    float sum = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        const float2 v = unpack(f[n / 2][n % 2 * 2 + r], T());
        sum += v.x * d[4 * n + 2 * r] + v.y * d[4 * n + 2 * r + 1];
    }
    return sum;
}

/* A line, by all lanes of a warp, with cp.async. */
__device__ __forceinline__ void copy_line(Line &to, const Line *from, int lane) {
    for (int i = 16 * lane; i < sizeof(Line); i += 16 * 32)
        copy_async_or_zero(shared_address(&to) + i, reinterpret_cast<const char *>(from) + i, true);
}
