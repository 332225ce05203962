/* The online softmax with a stale maximum, for scores that come 16 tokens at a time from the tensor cores, and N such
   sixteens side by side. Scores and maxima are in units of log 2.

   The sums of weights and of weighted values are relative to a maximum of the scores so far. It is stale: it follows
   only when a score exceeds it by more than RESCALE_ABOVE, so that almost every tile does without the shuffles that
   find it, and without scaling the sums. That is exact, since any reference cancels in the quotient of the sums; it
   only must be near enough to the scores that 2**(score - reference) neither overflows (here it is at most
   2**RESCALE_ABOVE) nor vanishes. */
#pragma once
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/mma.cuh"
#include "../device/reduce_fragments.cuh"
#include "shape.cuh"

constexpr float RESCALE_ABOVE = 8;        // the maximum may be so much too small
constexpr float LOWEST = -3.4028235e38f;  // of all finite scores: a maximum before there is one
#define MASKED __int_as_float(0xff800000) // the score of no token: -inf

constexpr int LANE_HEADS = HEADS > 8 ? 2 : 1; // g, and g + 8

/* What a warp knows of a head tile, in the layout of an mma whose rows are heads: lane 4g + c has heads g and g + 8,
   and of each tile tokens 2c, 2c + 1, 2c + 8 and 2c + 9. */
struct SoftmaxSums {
    float values[2 * STEPS][4]; // weighted: (heads, head_dim)
    float maximum[2];
    float weights[4]; // summed: of head g in [0], of head g + 8 in [2], the same in all lanes of a head

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) values[n][i] = 0;
        maximum[0] = maximum[1] = LOWEST;
        weights[0] = weights[1] = weights[2] = weights[3] = 0;
    }

    /* s: scores of 16 N tokens, MASKED for none. They become weights, in w as the mma with the values takes them. */
    template <int N> __device__ __forceinline__ void online_softmax(const float (&s)[N][2][4], unsigned (&w)[N][4]) {
        float highest[LANE_HEADS];
        bool rescale = false;
#pragma unroll
        for (int r = 0; r < LANE_HEADS; r++) {
#pragma unroll
            for (int t = 0; t < N; t++) {
                const float of_four = fmaxf(fmaxf(s[t][0][2 * r], s[t][0][2 * r + 1]),
                                            fmaxf(s[t][1][2 * r], s[t][1][2 * r + 1]));
                highest[r] = t ? fmaxf(highest[r], of_four) : of_four;
            }
            rescale |= highest[r] > maximum[r] + RESCALE_ABOVE;
        }
        if (__any_sync(~0u, rescale)) {
#pragma unroll
            for (int r = 0; r < LANE_HEADS; r++) raise_maximum(r, row_max(fmaxf(maximum[r], highest[r])));
        }
        // The sum of weights is one more product, with ones. It is of weights as rounded as for the values: else the
        // mean of values near the largest of their type may be infinity.
        const unsigned ones = pack(1, 1, T());
#pragma unroll
        for (int t = 0; t < N; t++) {
            w[t][1] = w[t][3] = 0;
#pragma unroll
            for (int r = 0; r < LANE_HEADS; r++)
#pragma unroll
                for (int n = 0; n < 2; n++) {
                    const float low = exp2_approx(s[t][n][2 * r] - maximum[r]);
                    const float high = exp2_approx(s[t][n][2 * r + 1] - maximum[r]);
                    w[t][2 * n + r] = pack(low, high, T());
                }
            mma_m16n8k16(weights, w[t], ones, ones, T());
        }
    }
    /* What was summed before is worth less now. */
    __device__ __forceinline__ void raise_maximum(int r, float higher) {
        const float scale = exp2_approx(maximum[r] - higher);
        maximum[r] = higher;
        weights[2 * r] *= scale;
#pragma unroll
        for (int n = 0; n < 2 * STEPS; n++) values[n][2 * r] *= scale, values[n][2 * r + 1] *= scale;
    }
};
