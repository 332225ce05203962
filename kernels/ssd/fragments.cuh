/* x^T as the left factor of products, in registers: (WIDTH, CHUNK). */
#pragma once
#include "../device/hopper/stmatrix.cuh"
#include "rare.cuh"

/* x^T or z^T, 16 tokens at a time: rows are columns of x, 16 of them a warp's. */
__device__ __forceinline__ void load_fragments(unsigned (&f)[4][4], unsigned tile, int thread) {
#pragma unroll
    for (int k = 0; k < 4; k++) ldmatrix_x4_trans(f[k], spot_of_tokens(tile, k, thread / 32, thread % 32));
}

/* (x w)^T, of weights that are rounded, unless all are tiny. */
__device__ __forceinline__ void weigh(unsigned (&f)[4][4], const unsigned (&x)[4][4], const Decays &by, int lane) {
    if (by.precise) return weigh_precisely(f, x, by, lane);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const uint4 w = *(const uint4 *)&by.rounded_to_end[place_of_weight(32 * i + lane % 4 * 2)];
        const unsigned of_token[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int n = 0; n < 8; n++)
            f[2 * i + n / 4][n % 4] = mul_x2(x[2 * i + n / 4][n % 4], of_token[n / 2], T());
    }
}
