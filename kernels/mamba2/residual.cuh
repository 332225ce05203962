/* The residual stream, in float or in the type of the weights, as the products of a token read it. */
#pragma once
#include "../fusion/products.cuh"

using Residual = RESIDUAL;

/* A thread's part of the residual, as ThreadVector::load has it of 16-bit numbers. */
template <int WORDS> __device__ __forceinline__ void load_part(ThreadVector<WORDS> &part, /* 16 bits a
    number */ const T *x, int cols, int thread) {
    part.load(x, cols, thread);
}
template <int WORDS>
__device__ __forceinline__ void load_part(ThreadVector<WORDS> &part, const float *x, int cols, int thread) {
#pragma unroll
    for (int k = 0; k < WORDS; k++) {
        const int word = k * (int)blockDim.x + thread;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float4 v = word < cols / VEC ? /* past the
                end zeros */ __ldcg(reinterpret_cast<const float4 *>(x) + 2 * word + half) : float4{};
            float *to = part.at[k] + 4 * half;
            to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
        }
    }
}
