/* A warp's products with a tile of keys and values in shared memory: what kernels with such tiles share. */
#pragma once
#include "../device/copy.cuh"
#include "../device/mma.cuh"
#include "shape.cuh"
#include "softmax.cuh"

constexpr int SIXTEENS = TILE / 16;        // of a tile's tokens: as many chains of mma side by side
constexpr int WORDS = HEAD_DIM / 8;        // of 16 bytes, in a token
constexpr int TILE_SIZE = TILE * HEAD_DIM; // elements; a slot of the ring has keys, then values
constexpr int BYTES = sizeof(T);
using Scores = float[SIXTEENS][2][4]; // (heads, tokens) as an mma's sums,
using Weights = unsigned[SIXTEENS][4]; // and as the left operand of the next
using QueryOperands = unsigned[STEPS][4]; // (heads, head_dim), of a head tile

/* Where a word of a token lies in a tile, in elements. Words are exchanged within aligned groups, so that
   ldmatrix finds the same word of 8 tokens in different banks, and the 128 bytes that come from memory
   together stay together: into padded rows, an H200 copies 4 % more slowly. */
__device__ __forceinline__ int place_of(int token, int word) {
    constexpr int TURN = WORDS % 8 == 0 ? 8 : WORDS % 4 == 0 ? 4 : 2;
    return token * HEAD_DIM + (word ^ token / (8 / TURN) % TURN) * 8;
}

/* 16 bytes of zeros into shared memory. */
__device__ __forceinline__ void store_zeros(unsigned to) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
}

/* (heads, tokens), of keys in shared memory. */
__device__ __forceinline__ void multiply_keys(Scores &s, const QueryOperands &queries, unsigned keys, int lane) {
#pragma unroll
    for (int d = 0; d < STEPS; d++)
#pragma unroll
        for (int t = 0; t < SIXTEENS; t++) {
            unsigned b[4];
            ldmatrix_x4(b, keys + place_of(16 * t + lane % 8 + lane / 16 * 8, 2 * d + lane / 8 % 2) * BYTES);
            mma_m16n8k16(s[t][0], queries[d], b[0], b[1], T());
            mma_m16n8k16(s[t][1], queries[d], b[2], b[3], T());
        }
}
/* Scores in units of log 2; from the `tokens`-th on, counted from the lane's first, those of no token. */
__device__ __forceinline__ void scale_and_mask(Scores &s, float scale, int tokens) {
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
        for (int n = 0; n < 2; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[t][n][i] = 16 * t + 8 * n + i % 2 < tokens ? s[t][n][i] * scale : MASKED;
}
/* Add the values, weighted. */
__device__ __forceinline__ void mix_values(SoftmaxSums &sums, const Weights &weights, unsigned values, int lane) {
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
        for (int d = 0; d < STEPS; d++) {
            unsigned b[4];
            ldmatrix_x4_trans(b, values + place_of(16 * t + lane % 16, 2 * d + lane / 16) * BYTES);
            mma_m16n8k16(sums.values[2 * d], weights[t], b[0], b[1], T());
            mma_m16n8k16(sums.values[2 * d + 1], weights[t], b[2], b[3], T());
        }
}
