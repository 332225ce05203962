/* Numbers of dt into steps: dt_bias, softplus, limits. */
#pragma once
#include "../device/math.cuh"
#include "shape.cuh"

/* log(1 + exp(v)), to 2e-6 of itself: |s| is at most 1/3. */
__device__ __forceinline__ float softplus(float v) {
    const float e = exp2_approx(-LOG2_E * fabsf(v)), s = __fdividef(e, 2 + e), t = s * s;
    return fmaxf(v, 0) + 2 * s * (1 + t * (1 / 3.f + t * (1 / 5.f + t * (1 / 7.f + t * (1 / 9.f)))));
}

/* A number of dt, with its bias, as a step. */
__device__ __forceinline__ float step_of(float v, const Sizes &sizes) {
    if (S::Steps::SOFTPLUS) v = softplus(v);
    v = v < sizes.dt_low ? sizes.dt_low : v; // NaN stays
    return v > sizes.dt_high ? sizes.dt_high : v;
}
