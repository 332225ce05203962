/* What segments of a sequence have in all, each relative to a maximum of its own, in units of log 2. */
#pragma once
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "shape.cuh"

constexpr float LOWEST = -3.4028235e38f;       // of all finite scores
constexpr int COLUMNS = LATENT / 4, DEPTH = 8; // of four dimensions; segments that a thread loads at once

/* Four dimensions of a head, of some segments: weighted values and the sum of weights, relative to a maximum. */
struct Merged {
    float high = LOWEST, weights = 0;
    float4 values = {};

    template <int N> __device__ __forceinline__ void add(const float2 (&pairs)[N], const float4 (&their_values)[N]) {
        float higher = high;
#pragma unroll
        for (int n = 0; n < N; n++) higher = fmaxf(higher, pairs[n].x);
        const float less = exp2_approx(high - higher);
        high = higher, weights *= less;
        values = make_float4(values.x * less, values.y * less, values.z * less, values.w * less);
#pragma unroll
        for (int n = 0; n < N; n++) add_one(exp2_approx(pairs[n].x - higher), pairs[n].y, their_values[n]);
    }
    __device__ __forceinline__ void add_one(float worth, float their_weights, float4 v) {
        weights += worth * their_weights;
        values.x += worth * v.x, values.y += worth * v.y, values.z += worth * v.z, values.w += worth * v.w;
    }
    /* Of a head's segments those from the `from`-th on, each `every`-th; values, pairs: of the first. */
    __device__ __forceinline__ void add_segments(const float4 *their_values, const float2 *pairs, int from, int count,
                                                 int every, int n_heads) {
#pragma unroll 1
        for (int i = from; i < count; i += DEPTH * every) {
            float2 pair[DEPTH];
            float4 o[DEPTH];
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const long long row = (long long)(i + d * every) * n_heads;
                const bool there = i + d * every < count;
                pair[d] = there ? __ldcg(pairs + row) : make_float2(LOWEST, 0);
                o[d] = there ? __ldcg(their_values + row * COLUMNS) : float4{};
            }
            add(pair, o);
        }
    }
    /* The weighted mean, as four numbers of out; 0 where there is no weight. */
    __device__ __forceinline__ uint2 mean() const {
        const float share = weights == 0 ? 0 : 1 / weights;
        return make_uint2(pack(values.x * share, values.y * share, T()), pack(values.z * share, values.w * share, T()));
    }
};
