/* The size of a step of the states, in which NaN stays: fminf and fmaxf drop it, and it would be the lower limit. */
#pragma once

__device__ __forceinline__ float softplus(float a) { return a > 20 ? a : log1pf(expf(a)); }

/* A number of dt, with its bias: softplus, if that is asked for, and within limits. */
__device__ __forceinline__ float step_size(float dt, bool by_softplus, float lowest, float highest) {
    if (by_softplus) dt = softplus(dt);
    dt = dt < lowest ? lowest : dt;
    return dt > highest ? highest : dt;
}
