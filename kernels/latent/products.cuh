/* What eight warps do with a tile of tokens in shared memory, a warp's mma at a time: the products of split.cu and
   of its relatives.

   The tile is read twice: all its 576 numbers as keys, and the first 512 of them as values. So a byte that has come
   once serves 16 to 64 heads for both products. HEADS / 16 warps have different heads, and the PARTS of those with
   the same heads take different tokens of a tile for scores, and different dimensions of the result.

   The maximum that sums are relative to is stale, as in ../attention/softmax.cuh: it follows when a score exceeds it
   by RESCALE_ABOVE. */
#pragma once
#include "../device/copy.cuh"
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/mma.cuh"
#include "merged.cuh"

constexpr int WARPS = 8, SIXTEENS = HEADS / 16, PARTS = WARPS / SIXTEENS; // warps; of heads; warps of the same heads
constexpr int TOKENS = TILE / PARTS, DIMS = LATENT / PARTS;               // of a warp: for scores, of the result
constexpr int WORDS = WIDTH / 8;                                          // of 16 bytes
constexpr int TILE_SIZE = TILE * WIDTH, PITCH = TILE + 8;                 // elements
constexpr float RESCALE_ABOVE = 8;                                        // log 2
static_assert(TOKENS % 8 == 0 && TILE % 16 == 0 && DIMS % 16 == 0, "whole products");

/* Where a word of a row lies, in elements: exchanged within eight, so that ldmatrix finds the same word of eight rows
   in different banks. */
__device__ __forceinline__ int place_of(int row, int word) { return row * WIDTH + (word ^ row % 8) * 8; }

/* Start to copy rows of 576 numbers; those from `there` on become zeros, whatever lies behind them. */
template <int ROWS>
__device__ __forceinline__ void copy_rows(T *to, const T *from, int there) {
    const unsigned at = shared_address(to);
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * WORDS; i += 32 * WARPS) {
        const int row = i / WORDS, word = i - row * WORDS;
        copy_async_or_zero(at + place_of(row, word) * sizeof(T), from + 8ll * i, row < there);
    }
}

/* What a warp knows of 16 heads, in the layout of an mma: lane 4g + c has heads g and g + 8. */
struct HeadSums {
    float values[DIMS / 8][4]; // weighted: (heads, DIMS)
    float maximum[2];
    float weights[4]; // summed: of head g in [0], of g + 8 in [2]

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[n][i] = 0;
        maximum[0] = maximum[1] = LOWEST;
        weights[0] = weights[1] = weights[2] = weights[3] = 0;
    }
    /* Follow the highest score, if it is too far above. */
    __device__ __forceinline__ void follow(int r, float highest) {
        if (highest <= maximum[r] + RESCALE_ABOVE) return;
        const float scale = exp2_approx(maximum[r] - highest);
        maximum[r] = highest;
        weights[2 * r] *= scale;
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++) values[n][2 * r] *= scale, values[n][2 * r + 1] *= scale;
    }
};

/* Scores (16 heads, TOKENS), not scaled. */
__device__ __forceinline__ void multiply_keys(float (&s)[TOKENS / 8][4], const T *queries, const T *keys, int lane) {
    const unsigned q = shared_address(queries), k = shared_address(keys);
#pragma unroll
    for (int d = 0; d < WIDTH / 32; d++) {
        unsigned a[2][4];
#pragma unroll
        for (int half = 0; half < 2; half++)
            ldmatrix_x4(a[half], q + place_of(lane % 16, 4 * d + 2 * half + lane / 16) * sizeof(T));
#pragma unroll
        for (int n = 0; n < TOKENS / 8; n++) {
            unsigned b[4];
            ldmatrix_x4(b, k + place_of(8 * n + lane % 8, 4 * d + lane / 8) * sizeof(T));
            mma_m16n8k16(s[n], a[0], b[0], b[1], T());
            mma_m16n8k16(s[n], a[1], b[2], b[3], T());
        }
    }
}

/* Add the values, weighted; first_word: of this warp's dimensions. The sum of weights is one more product, with ones:
   of weights as rounded as for the values. */
__device__ __forceinline__ void mix_values(HeadSums &sums, const T *weights, const T *values, int first_word,
                                           int lane) {
    const unsigned w = shared_address(weights), v = shared_address(values), ones = pack(1, 1, T());
#pragma unroll
    for (int t = 0; t < TILE / 16; t++) {
        unsigned a[4];
        ldmatrix_x4(a, w + (lane % 16 * PITCH + 16 * t + lane / 16 * 8) * sizeof(T));
        mma_m16n8k16(sums.weights, a, ones, ones, T());
#pragma unroll
        for (int d = 0; d < DIMS / 16; d++) {
            unsigned b[4];
            ldmatrix_x4_trans(b, v + place_of(16 * t + lane % 16, first_word + 2 * d + lane / 16) * sizeof(T));
            mma_m16n8k16(sums.values[2 * d], a, b[0], b[1], T());
            mma_m16n8k16(sums.values[2 * d + 1], a, b[2], b[3], T());
        }
    }
}
