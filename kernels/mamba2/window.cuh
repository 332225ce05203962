/* The convolution's step, behind the sums of in_proj: who has summed a channel's row has its newest input. */
#pragma once
#include "../device/math.cuh"

/* window (TAPS - 1, channels), the inputs before this one, oldest first, written in place; weight (channels, TAPS),
   bias (channels,) or null. Channels are the rows from `inner` on. A thread owns a channel, so that no two meet. */
template <typename T, int TAPS> struct Window {
    const float *weight, *bias;
    T *window;
    int inner, channels;

    __device__ __forceinline__ bool has(int row) const { return row >= inner && row < inner + channels; }
    /* What the tokens before give to a row's sum; the window moves on by one. */
    __device__ __forceinline__ float before(int row) const {
        const int c = row - inner;
        float sum = bias ? bias[c] : 0;
#pragma unroll
        for (int k = 0; k < TAPS - 1; k++) {
            const T past = window[(long long)k * channels + c];
            if (k > 0) window[(long long)(k - 1) * channels + c] = past;
            sum += weight[(long long)c * TAPS + k] * (float)past;
        }
        return sum;
    }
    __device__ __forceinline__ float newest_tap(int row) const {
        return weight[(long long)(row - inner) * TAPS + TAPS - 1];
    }
    /* The row's result, as it stands in a window from now on: rounded. */
    __device__ __forceinline__ T after(int row, float before, float tap, T now) const {
        window[(long long)(TAPS - 2) * channels + row - inner] = now;
        return (T)silu(before + tap * (float)now);
    }
};
