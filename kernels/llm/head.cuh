/* A head of the new token, made ready for attention in the registers of a warp: its bias, its norm, its position (steps
   2 to 4 of ref.llm). A lane holds pairs: numbers i and i + HEAD_DIM / 2, i = lane + 32 n. */
#pragma once
#include "../device/reduce.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

using T = DTYPE;
constexpr int PAIRS = (HEAD_DIM / 2 + 31) / 32; // of a lane

/* x · weight / √(mean of x² + eps) */
__device__ void norm(float (&a)[PAIRS], float (&b)[PAIRS], const T *weight, float eps, int lane) {
    float squares = 0;
    for (int n = 0; n < PAIRS; n++) squares += a[n] * a[n] + b[n] * b[n];
    const float scale = rsqrtf(warp_sum(squares) / HEAD_DIM + eps);
    for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n;
        if (i < HEAD_DIM / 2) {
            a[n] *= scale * (float)weight[i];
            b[n] *= scale * (float)weight[i + HEAD_DIM / 2];
        }
    }
}

/* The sines and cosines of a lane's pairs at a position. Whole turns are left away in double: a float has no digits
   left for a small angle behind 100,000 tokens. */
struct Turns {
    float sine[PAIRS], cosine[PAIRS];

    __device__ Turns(const double *turns, int position, int lane) {
        for (int n = 0; n < PAIRS; n++) {
            const int i = lane + 32 * n;
            const double turn = i < HEAD_DIM / 2 ? position * turns[i] : 0;
            sincosf(6.283185307179586f * (float)(turn - floor(turn)), &sine[n], &cosine[n]);
        }
    }
    /* Turn each pair by its angle. */
    __device__ void rope(float (&a)[PAIRS], float (&b)[PAIRS]) const {
        for (int n = 0; n < PAIRS; n++) {
            const float x = a[n], y = b[n];
            a[n] = x * cosine[n] - y * sine[n];
            b[n] = y * cosine[n] + x * sine[n];
        }
    }
};
__device__ void rope(float (&a)[PAIRS], float (&b)[PAIRS], const double *turns, int position, int lane) {
    Turns(turns, position, lane).rope(a, b);
}

/* row, bias: (HEAD_DIM,) of this head; bias and weight may be null; so may turns, as values have no position. */
__device__ void take_head(float (&a)[PAIRS], float (&b)[PAIRS], const T *row, const T *bias, const T *weight,
                          float eps, const Turns *turns, int lane) {
    for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n;
        const bool here = i < HEAD_DIM / 2;
        a[n] = here ? (float)row[i] + (bias ? (float)bias[i] : 0) : 0;
        b[n] = here ? (float)row[i + HEAD_DIM / 2] + (bias ? (float)bias[i + HEAD_DIM / 2] : 0) : 0;
    }
    if (weight) norm(a, b, weight, eps, lane);
    if (turns) turns->rope(a, b);
}

__device__ void store_head(T *row, const float (&a)[PAIRS], const float (&b)[PAIRS], int lane) {
    for (int n = 0; n < PAIRS; n++) {
        const int i = lane + 32 * n;
        if (i < HEAD_DIM / 2) {
            row[i] = (T)a[n];
            row[i + HEAD_DIM / 2] = (T)b[n];
        }
    }
}
