/* The online softmax of ../attention/softmax.cuh, where heads are the columns of an mma and not its rows: 8 heads fill
   one. Weights are float16 whatever the dtype of q. They carry a factor 2**lift, which keeps their products with the
   scales of values in its range. */
#pragma once
#include "../attention/partial.cuh"
#include "format.cuh"

constexpr int HEAD_EIGHTS = (HEADS + 7) / 8;   // mmas for the heads of a head tile: they are its columns
using HeadColumns = float[HEAD_EIGHTS][4];     // lane 4g + c has rows g and g + 8 of heads 2c and 2c + 1
using Weights = unsigned[SIXTEENS][HEAD_EIGHTS][2]; // (heads, tokens): head g, tokens 2c, 2c + 1 and 8 more

/* What a warp knows of a head tile: as SoftmaxSums (softmax.cuh), but heads are columns. */
struct ColumnSums {
    HeadColumns values[STEPS];     // weighted: (head_dim, heads)
    float maximum[HEAD_EIGHTS][2]; // `lift` below the largest score, so that weights are 2**lift times as large
    float weights[HEAD_EIGHTS][2]; // summed: of this lane's tokens alone

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++) {
#pragma unroll
            for (int step = 0; step < STEPS; step++)
#pragma unroll
                for (int i = 0; i < 4; i++) values[step][n][i] = 0;
            maximum[n][0] = maximum[n][1] = LOWEST;
            weights[n][0] = weights[n][1] = 0;
        }
    }
    __device__ __forceinline__ void raise_maxima(const HeadColumns (&s)[SIXTEENS], int lift) {
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float high = LOWEST;
#pragma unroll
                for (int t = 0; t < SIXTEENS; t++) high = fmaxf(high, fmaxf(s[t][n][i], s[t][n][i + 2]));
                high = fmaxf(maximum[n][i], column_max(high) - lift);
                const float scale = exp2_approx(maximum[n][i] - high);
                maximum[n][i] = high;
                weights[n][i] *= scale;
#pragma unroll
                for (int step = 0; step < STEPS; step++)
                    values[step][n][i] *= scale, values[step][n][i + 2] *= scale;
            }
    }
    /* s: scores of a tile. They become weights. */
    __device__ __forceinline__ void online_softmax(const HeadColumns (&s)[SIXTEENS], int lift, Weights &w) {
        bool rescale = false;
#pragma unroll
        for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
            for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) rescale |= s[t][n][i] > maximum[n][i % 2] + (RESCALE_ABOVE + lift);
        if (__any_sync(~0u, rescale)) raise_maxima(s, lift);
#pragma unroll
        for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
            for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    const float x = exp2_approx(s[t][n][2 * i] - maximum[n][0]);
                    const float y = exp2_approx(s[t][n][2 * i + 1] - maximum[n][1]);
                    weights[n][0] += x, weights[n][1] += y;
                    w[t][n][i] = movmatrix_trans(pack(x, y, __half()));
                }
    }
    /* At the end of a segment, what the only warp of a team hands on. */
    __device__ __forceinline__ void store(const StorePartial &partial, int lane) const {
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float sum = column_sum(weights[n][i]);
                const int g = lane / 4, head = 8 * n + lane % 4 * 2 + i;
                if (head >= HEADS) continue;
                const long long at = partial.place(0, head);
                if (g == 0) partial.max_and_sum[at] = make_float2(maximum[n][i], sum);
                float *to = partial.partial_out + at * HEAD_DIM + g;
#pragma unroll
                for (int step = 0; step < STEPS; step++) {
                    to[16 * step] = values[step][n][i] / VALUES::VALUE_UNIT;
                    to[16 * step + 8] = values[step][n][i + 2] / VALUES::VALUE_UNIT;
                }
            }
    }
    /* At the end of a segment, into shared memory of the team: [TEAM][HEADS][PITCH] and [TEAM][HEADS]. */
    __device__ __forceinline__ void lay_down(float *all_values, float2 *max_and_sum, int member, int lane) {
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float sum = column_sum(weights[n][i]);
                const int g = lane / 4, head = 8 * n + lane % 4 * 2 + i;
                if (head >= HEADS) continue;
                if (g == 0) max_and_sum[member * HEADS + head] = make_float2(maximum[n][i], sum);
                float *to = all_values + (member * HEADS + head) * PITCH + g;
#pragma unroll
                for (int step = 0; step < STEPS; step++)
                    to[16 * step] = values[step][n][i], to[16 * step + 8] = values[step][n][i + 2];
            }
    }
};

/* Add up what the warps of a team have laid down, each relative to its own maximum: four channels of a head for
   each of its threads. */
template <class Epilogue>
__device__ __forceinline__ void store(const Epilogue &epilogue, const float *all_values, const float2 *max_and_sum,
                                      int thread) {
#pragma unroll 2
    for (int i = thread; i < HEADS * (HEAD_DIM / 4); i += 32 * TEAM) {
        const int channel = i % (HEAD_DIM / 4) * 4, head = i / (HEAD_DIM / 4);
        const float2 found = joined<TEAM>(max_and_sum + head, HEADS);
        float2 low = {}, high = {}; // two and two: `out` may begin where only so many can be written at a time
#pragma unroll
        for (int w = 0; w < TEAM; w++) {
            const float4 a = *reinterpret_cast<const float4 *>(all_values + (w * HEADS + head) * PITCH + channel);
            const float share = exp2_approx(max_and_sum[w * HEADS + head].x - found.x);
            low.x += a.x * share, low.y += a.y * share, high.x += a.z * share, high.y += a.w * share;
        }
        constexpr float UNIT = VALUES::VALUE_UNIT;
        epilogue.store(0, head, channel, make_float2(low.x / UNIT, low.y / UNIT), found);
        epilogue.store(0, head, channel + 2, make_float2(high.x / UNIT, high.y / UNIT), found);
    }
}

/* The result of a row without tokens. */
__device__ __forceinline__ void store_zeros(const StoreOutput &epilogue, int thread) {
    for (int i = 2 * thread; i < HEADS * HEAD_DIM; i += 2 * 32 * TEAM)
        epilogue.store(0, i / HEAD_DIM, i % HEAD_DIM, make_float2(0, 0), make_float2(0, 1));
}
