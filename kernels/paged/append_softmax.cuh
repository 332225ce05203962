/* The online softmax of attention/softmax.cuh, its stale maximum too, for scores as wgmma leaves them: a thread has
   columns 2c and 2c + 1 of each eight, of rows g and g + 8 of its warp's sixteen. Maxima are in units of log 2. */
#pragma once
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/reduce_fragments.cuh"
#include "append_shape.cuh"

constexpr float RESCALE_ABOVE = 8;       // the maximum may be so much too small
constexpr float LOWEST = -3.4028235e38f; // of all finite scores: a maximum before there is one
#define MASKED __int_as_float(0xff800000) // the score of no token: -inf

using Scores = float[COLUMNS / 2];        // of a warpgroup, (64, COLUMNS)
using Weights = unsigned[COLUMNS / 16][4]; // the left operand of the product with values
using Values = float[HEAD_DIM / 2];       // weighted and summed, (64, HEAD_DIM)

struct RowSums {
    float maximum[2] = {LOWEST, LOWEST};
    float weights[2] = {}; // summed, of the thread's own columns
    float scale[2];        // what earlier sums are worth now, if a maximum has risen

    /* Scores become weights. Returns whether a maximum of the warp's rows has risen. to_log2: positive. */
    __device__ __forceinline__ bool online_softmax(Scores &s, float to_log2) {
        float highest[2];
        bool rises = false;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            highest[r] = fmaxf(s[2 * r], s[2 * r + 1]);
#pragma unroll
            for (int i = 4 + 2 * r; i < COLUMNS / 2; i += 4) highest[r] = fmaxf(highest[r], fmaxf(s[i], s[i + 1]));
            highest[r] *= to_log2;
            rises |= highest[r] > maximum[r] + RESCALE_ABOVE;
        }
        rises = __any_sync(~0u, rises);
        if (rises) {
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const float higher = row_max(fmaxf(maximum[r], highest[r]));
                scale[r] = exp2_approx(maximum[r] - higher);
                maximum[r] = higher;
                weights[r] *= scale[r];
            }
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum[2] = {};
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i += 4)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float &score = s[i + 2 * r + e];
                    score = exp2_approx(fmaf(score, to_log2, -maximum[r]));
                    sum[e] += score;
                }
            weights[r] += sum[0] + sum[1];
        }
        return rises;
    }
    __device__ __forceinline__ void rescale(Values &o) const {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) o[i] *= scale[i / 2 % 2];
    }
    __device__ __forceinline__ float total(int r) const {
        float sum = weights[r];
#pragma unroll
        for (int lane_mask = 1; lane_mask < 4; lane_mask *= 2) sum += __shfl_xor_sync(~0u, sum, lane_mask);
        return sum;
    }
};

__device__ __forceinline__ void to_operand(Weights &w, const Scores &s) {
#pragma unroll
    for (int i = 0; i < COLUMNS / 16; i++)
#pragma unroll
        for (int part = 0; part < 4; part++) w[i][part] = pack(s[8 * i + 2 * part], s[8 * i + 2 * part + 1], T());
}

/* Rows of a segment that a thread has, and what they may see. */
struct Limits {
    int tokens, seen[2]; // of the item; by the two rows
    int least;           // by the warpgroup's first row
    int first;           // the warpgroup's first token in a step

    __device__ __forceinline__ Limits(const Segment &segment, int warpgroup, int thread)
        : tokens(segment.tokens), first(ROWS == 64 ? warpgroup * COLUMNS : 0) {
        const int row = segment.row + (ROWS == 64 ? 0 : warpgroup * WARPGROUP_ROWS);
        least = of(segment, row);
#pragma unroll
        for (int r = 0; r < 2; r++) seen[r] = of(segment, row + thread / 32 * 16 + thread % 32 / 4 + 8 * r);
    }
    __device__ __forceinline__ int of(const Segment &segment, int pair) const {
        return S::USE == APPEND ? min(tokens, segment.seen + pair / GROUP) : tokens;
    }
    __device__ __forceinline__ bool cross(int step) const { return step * TOKENS + first + COLUMNS > least; }

    /* Mask what a row does not see. Where the tokens end within an eight, they are in its last places. */
    __device__ __forceinline__ void mask(Scores &s, int step, int lane) const {
        const int from = step * TOKENS + first, end = tokens - from, last_eight = end / 8, shift = -end & 7;
#pragma unroll
        for (int j = 0; j < COLUMNS / 8; j++) {
            const int late = j == last_eight ? shift : 0;
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int place = lane % 4 * 2 + e;
#pragma unroll
                for (int r = 0; r < 2; r++)
                    if (place < late || 8 * j + place - late >= seen[r] - from) s[4 * j + 2 * r + e] = MASKED;
            }
        }
    }
};
