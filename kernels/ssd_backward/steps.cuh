/* From a number of dt to a step, and the way back of its gradient: dt_bias, softplus, limits. */
#pragma once
#include "../device/half2.cuh"

__device__ __forceinline__ float as_float(float x) { return x; }
__device__ __forceinline__ float as_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float as_float(__nv_bfloat16 x) { return __bfloat162float(x); }

struct StepRule {
    int softplus;
    float low, high; // limits

    __device__ __forceinline__ float unlimited(float v) const {
        return softplus ? fmaxf(v, 0) + log1pf(expf(-fabsf(v))) : v;
    }
    /* The step of a number with its bias. */
    __device__ __forceinline__ float step_of(float v) const {
        v = unlimited(v);
        v = v < low ? low : v; // NaN stays
        return v > high ? high : v;
    }
    /* d step / d number: 0 where a limit holds the step. */
    __device__ __forceinline__ float slope_at(float v) const {
        const float step = unlimited(v);
        if (step < low || step > high) return 0;
        return softplus ? 1 / (1 + expf(-v)) : 1;
    }
};
