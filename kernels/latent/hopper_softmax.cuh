/* The online softmax of ../attention/softmax.cuh, with its stale maximum, for scores as wgmma leaves them: a thread has
   columns 2c and 2c + 1 of each eight, of rows g and g + 8 of its warp's sixteen. Maxima are in units of log 2.

   The warpgroups take turns with tiles, so a maximum goes from one to the other: who has made weights says what they
   are relative to. Both go through all of them, and so both have the same at the end. */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/stmatrix.cuh"
#include "../device/math.cuh"
#include "../device/reduce_fragments.cuh"
#include "hopper_products.cuh"

constexpr float RESCALE_ABOVE = 8;       // the maximum may be so much too small
constexpr float LOWEST = -3.4028235e38f; // of all finite scores: a maximum before there is one
#define MASKED __int_as_float(0xff800000) // the score of no token: -inf

struct RowSums {
    float maximum[2] = {LOWEST, LOWEST};
    float weights[2] = {}; // summed, of the thread's own columns of the warpgroup's own tiles
    float scale[2];        // what earlier sums are worth now, if a maximum has risen

    __device__ __forceinline__ void raise(const float (&to)[2]) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            scale[r] = exp2_approx(maximum[r] - to[r]);
            maximum[r] = to[r];
            weights[r] *= scale[r];
        }
    }
    /* Scores become weights. Returns whether a maximum of the warp's rows has risen. to_log2: positive. */
    __device__ __forceinline__ bool online_softmax(Scores &s, float to_log2) {
        float highest[2];
        bool rises = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            highest[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int i = 4 + 2 * r; i < TILE / 2; i += 4) highest[r] = fmaxf(highest[r], fmaxf(s[i], s[i + 1]));
            highest[r] *= to_log2;
            rises |= highest[r] > maximum[r] + RESCALE_ABOVE;
        }
        rises = __any_sync(~0u, rises);
        if (rises) {
            const float higher[2] = {row_max(fmaxf(maximum[0], highest[0])), row_max(fmaxf(maximum[1], highest[1]))};
            raise(higher);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float even = 0, odd = 0; // two sums, so that half as many additions wait for each other
#pragma unroll
            for (int i = 2 * r; i < TILE / 2; i += 4) {
                s[i] = exp2_approx(fmaf(s[i], to_log2, -maximum[r]));
                s[i + 1] = exp2_approx(fmaf(s[i + 1], to_log2, -maximum[r]));
                even += s[i], odd += s[i + 1];
            }
            weights[r] += even + odd;
        }
        return rises;
    }
    /* What the other warpgroup's weights are relative to. Returns whether it has risen. */
    __device__ __forceinline__ bool take(const float (&others)[HEADS], int thread) {
        const int row = thread / 32 * 16 + thread % 32 / 4;
        const float higher[2] = {others[row], others[row + 8]};
        const bool rises = __any_sync(~0u, higher[0] > maximum[0] || higher[1] > maximum[1]);
        if (rises) raise(higher);
        return rises;
    }
    __device__ __forceinline__ void tell(float (&others)[HEADS], int thread) const {
        const int row = thread / 32 * 16 + thread % 32 / 4;
        if (thread % 4 == 0) others[row] = maximum[0], others[row + 8] = maximum[1];
    }
    __device__ __forceinline__ void rescale(Values &o) const {
#pragma unroll
        for (int i = 0; i < SIDE_COLUMNS / 2; i++) o[i] *= scale[i / 2 % 2];
    }
};

/* In the tile in which a sequence ends: no weight for what lies behind. */
__device__ __forceinline__ void mask(Scores &s, int tokens, int lane) {
#pragma unroll
    for (int i = 0; i < TILE / 2; i++)
        if (i / 4 * 8 + lane % 4 * 2 + i % 2 >= tokens) s[i] = MASKED;
}

/* And no value, as 0 * NaN is NaN: zeros for the rows behind, in a side of the slot. By a warpgroup. */
__device__ __forceinline__ void clear_behind(unsigned char *side, int tokens, int thread) {
    for (int i = 8 * tokens * SIDE_PARTS + thread; i < 8 * TILE * SIDE_PARTS; i += 128) {
        const int row = i / (8 * SIDE_PARTS), word = i % (8 * SIDE_PARTS);
        *reinterpret_cast<uint4 *>(side + word / 8 * PART_BYTES + row * 128 + word % 8 * 16) = uint4{};
    }
}

__device__ __forceinline__ void round_weights(Weights &w, const Scores &s) {
#pragma unroll
    for (int i = 0; i < TILE / 16; i++)
#pragma unroll
        for (int part = 0; part < 4; part++) w[i][part] = pack(s[8 * i + 2 * part], s[8 * i + 2 * part + 1], T());
}

/* For the other warpgroup: as an operand, swizzled. */
__device__ __forceinline__ void store_weights(unsigned to, const Weights &w, int thread) {
    const int lane = thread % 32, row = thread / 32 * 16 + lane % 16;
#pragma unroll
    for (int i = 0; i < TILE / 16; i++) stmatrix_x4(to + row * 128 + ((2 * i + lane / 16) ^ row % 8) * 16, w[i]);
}
