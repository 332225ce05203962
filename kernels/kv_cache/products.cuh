/* A tile's products with codes: scores of its keys, and its values, weighted. Scales do not touch the codes. */
#pragma once
#include "column_sums.cuh"
#include "queries.cuh"

/* The products of a tile's keys with the queries, but for the factor score_scale. */
__device__ __forceinline__ void multiply_keys(HeadColumns (&s)[SIXTEENS], const Queries &queries, const uint4 *words,
                                              const __half2 *scales, int lane) {
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++) {
        unsigned keys[K_LANE];
        take_words(keys, words + 8 * K_LANE * t, lane);
#pragma unroll
        for (int group = 0; group < K_GROUPS; group++) {
            HeadColumns part;
#pragma unroll
            for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) part[n][i] = 0;
#pragma unroll
            for (int step = group * (STEPS / K_GROUPS); step < (group + 1) * (STEPS / K_GROUPS); step++) {
                unsigned a[4];
                KEYS::keys(a, keys + step * KEYS::WORDS);
#pragma unroll
                for (int n = 0; n < HEAD_EIGHTS; n++)
                    mma_m16n8k16(part[n], a, queries.operand[n][step][0], queries.operand[n][step][1], __half());
            }
            float2 scale = {1, 1}; // of tokens g and g + 8
            if (!BY_CHANNEL) scale = __half22float2(scales[(t * 8 + lane / 4) * K_GROUPS + group]);
#pragma unroll
            for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    if (KEYS::OFFSET > 0) part[n][i] += queries.offset_product[group][n][i];
                    const float x = BY_CHANNEL ? part[n][i] : part[n][i] * (i < 2 ? scale.x : scale.y);
                    s[t][n][i] = group ? s[t][n][i] + x : x;
                }
        }
    }
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) s[t][n][i] *= queries.score_scale[n][i % 2];
}
/* Scores of tokens from the `tokens`-th on, counted from the lane's first, become those of no token. */
__device__ __forceinline__ void mask(HeadColumns (&s)[SIXTEENS], int tokens) {
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++)
#pragma unroll
        for (int n = 0; n < HEAD_EIGHTS; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (16 * t + i / 2 * 8 >= tokens) s[t][n][i] = MASKED;
}
/* Add a tile's values, weighted. */
__device__ __forceinline__ void mix_values(ColumnSums &sums, const Weights &weights, const uint4 *words,
                                           const uint2 *scales, int lane) {
#pragma unroll
    for (int t = 0; t < SIXTEENS; t++) {
        unsigned values[V_LANE];
        take_words(values, words + 8 * V_LANE * t, lane);
#pragma unroll
        for (int group = 0; group < V_GROUPS; group++) {
            const uint2 scale = scales[(t * 4 + lane % 4) * V_GROUPS + group]; // of tokens 2c, 2c + 1 and 8 more
            unsigned b[HEAD_EIGHTS][2];
#pragma unroll
            for (int n = 0; n < HEAD_EIGHTS; n++) {
                b[n][0] = mul_x2(weights[t][n][0], scale.x, __half());
                b[n][1] = mul_x2(weights[t][n][1], scale.y, __half());
            }
#pragma unroll
            for (int step = group * (STEPS / V_GROUPS); step < (group + 1) * (STEPS / V_GROUPS); step++) {
                unsigned a[4];
                VALUES::values(a, values + step * VALUES::WORDS);
#pragma unroll
                for (int n = 0; n < HEAD_EIGHTS; n++)
                    mma_m16n8k16(sums.values[step][n], a, b[n][0], b[n][1], __half());
            }
        }
    }
}
