/* What segments of a row have in all, each relative to a maximum of its own, in units of log 2: the sum of weights, and
   four dimensions of the weighted values. A merge by (O, LSE), in any number of parts. */
#pragma once
#include "../attention/softmax.cuh"
#include "../device/math.cuh"

struct SegmentSums {
    float maximum = LOWEST, weights = 0;
    float4 values = {};

    /* Add several, whose numbers have come together: (maximum, weights) and values of each. */
    template <int N> __device__ __forceinline__ void add(const float2 (&of)[N], const float4 (&their_values)[N]) {
        float higher = maximum;
#pragma unroll
        for (int n = 0; n < N; n++) higher = fmaxf(higher, of[n].x);
        scale(exp2_approx(maximum - higher));
        maximum = higher;
#pragma unroll
        for (int n = 0; n < N; n++) {
            const float w = exp2_approx(of[n].x - higher);
            const float4 o = their_values[n];
            weights += w * of[n].y;
            values = make_float4(values.x + w * o.x, values.y + w * o.y, values.z + w * o.z, values.w + w * o.w);
        }
    }
    /* What was summed before is worth less now. */
    __device__ __forceinline__ void scale(float by) {
        weights *= by;
        values = make_float4(values.x * by, values.y * by, values.z * by, values.w * by);
    }
};
