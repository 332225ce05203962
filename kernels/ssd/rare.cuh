/* What few inputs need: numbers that are infinite or NaN, D with a number for each column, and steps so small that
   rounded weights lose digits. Apart, so that the way of all others can be read without. */
#pragma once
#include "../device/half2.cuh"
#include "../device/mma.cuh"
#include "tiles.cuh"

/* Whether any of the numbers is infinite or NaN. */
__device__ __forceinline__ bool not_finite(float a, float b, float c, float d) {
    return !(a * 0 + b * 0 + c * 0 + d * 0 == 0);
}
__device__ __forceinline__ bool not_finite(const float (&state)[THREAD_NUMBERS]) {
    float none = 0;
#pragma unroll
    for (int i = 0; i < THREAD_NUMBERS; i++) none = fmaf(state[i], 0, none);
    return none != 0;
}

/* x^T scores^T again, of the tokens up to each token alone, and of its own sequence: in the product an infinite x met
   the zeros of scores. */
__device__ __forceinline__ void from_earlier(float (&early)[16], float (&late)[16], const unsigned char *x,
                                             const unsigned char *scores, const Begins &begins, int thread) {
    const int lane = thread % 32, column = thread / 32 * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 16; i++) early[i] = late[i] = 0;
    for (int j = 0; j < CHUNK; j++) {
        const float x0 = number_of(x, j, column), x1 = number_of(x, j, column + 8);
        int own = lane % 4 * 2;
        if constexpr (S::SEQUENCES) asm volatile("" : "+r"(own)); // begins are read anew: they have no registers
#pragma unroll
        for (int n = 0; n < 16; n++) {
            const int i = n / 2 * 8 + lane % 4 * 2 + n % 2;
            if (j > i || (S::SEQUENCES && j + 1 < begins.of[n / 2 * 8 + own + n % 2])) continue;
            const float by = number_of(scores, i, j);
            float *to = n < 8 ? early + n / 2 * 4 + n % 2 : late + n / 2 * 4 - 16 + n % 2;
            to[0] += by * x0, to[2] += by * x1;
        }
    }
}

/* The same for 32 tokens, of an x^T that is in registers: its place may hold y by now. */
__device__ __forceinline__ void from_earlier_of_half(float (&sums)[16], const unsigned (&x)[4][4],
                                                     const unsigned char *scores, int side, int lane) {
#pragma unroll
    for (int i = 0; i < 16; i++) sums[i] = 0;
#pragma unroll
    for (int block = 0; block < 8; block++) // of 8 tokens
#pragma unroll 1
        for (int of_block = 0; of_block < 8; of_block++) {
            const int from = lane & ~3 | of_block / 2, j = 8 * block + of_block;
            const float2 v0 = unpack(__shfl_sync(~0u, x[block / 2][block % 2 * 2], from), T());
            const float2 v1 = unpack(__shfl_sync(~0u, x[block / 2][block % 2 * 2 + 1], from), T());
            const float x0 = of_block % 2 ? v0.y : v0.x, x1 = of_block % 2 ? v1.y : v1.x;
#pragma unroll
            for (int n = 0; n < 8; n++) {
                const int i = 32 * side + n / 2 * 8 + lane % 4 * 2 + n % 2;
                if (j > i) continue;
                const float by = number_of(scores, i, j);
                sums[n / 2 * 4 + n % 2] += by * x0, sums[n / 2 * 4 + n % 2 + 2] += by * x1;
            }
        }
}

/* (x w)^T where all dt are tiny: products are rounded, weights are not. */
__device__ __forceinline__ void weigh_precisely(unsigned (&f)[4][4], const unsigned (&x)[4][4], const Decays &by,
                                                int lane) {
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float2 w = *(const float2 *)&by.weight_to_end[8 * (i / 2) + lane % 4 * 2];
        const float2 v = unpack(x[i / 4][i % 4], T());
        f[i / 4][i % 4] = pack(v.x * w.x, v.y * w.y, T());
    }
}

/* y += D x for 16 tokens and the warp's columns, whose block of x lies at spot_of_tokens. */
__device__ __forceinline__ void add_skip(float2 (&y)[4], const D *d_of_row, int columns, unsigned x, int warp,
                                         int lane) {
    unsigned own[4];
    ldmatrix_x4_trans(own, x);
    float d[2];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int column = 16 * warp + 8 * h + lane / 4;
        d[h] = !S::PADDED_HEAD || column < columns ? as_float(d_of_row[column]) : 0;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 v = unpack(own[i], T());
        y[i].x += d[i % 2] * v.x, y[i].y += d[i % 2] * v.y;
    }
}
