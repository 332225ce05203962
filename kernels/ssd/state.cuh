/* A state in the registers of a warpgroup, or its half of one: (WIDTH, PART), as a product of wgmma has its sums
   (wgmma.cuh). */
#pragma once
#include "../device/half2.cuh"
#include "../device/hopper/wgmma.cuh"
#include "shape.cuh"

__device__ __forceinline__ void clear(float (&state)[THREAD_NUMBERS]) {
#pragma unroll
    for (int i = 0; i < THREAD_NUMBERS; i++) state[i] = 0;
}

/* state *= by, here, under products that run on by themselves. */
__device__ __forceinline__ void decay(float (&state)[THREAD_NUMBERS], float by) {
#pragma unroll
    for (int i = 0; i < THREAD_NUMBERS; i++) state[i] *= by;
    keep(state);
}

/* In scratch memory it lies as the threads hold it, 16 bytes of each thread side by side. */
__device__ __forceinline__ void write_state(float *to, const float (&state)[THREAD_NUMBERS], int thread) {
#pragma unroll
    for (int i = 0; i < THREAD_NUMBERS / 4; i++)
        reinterpret_cast<float4 *>(to)[128 * i + thread] =
            make_float4(state[4 * i], state[4 * i + 1], state[4 * i + 2], state[4 * i + 3]);
}
__device__ __forceinline__ void add_state(float (&state)[THREAD_NUMBERS], const float *from, float by, int thread) {
#pragma unroll
    for (int i = 0; i < THREAD_NUMBERS / 4; i++) {
        const float4 v = __ldcg(reinterpret_cast<const float4 *>(from) + 128 * i + thread);
        state[4 * i] += by * v.x, state[4 * i + 1] += by * v.y;
        state[4 * i + 2] += by * v.z, state[4 * i + 3] += by * v.w;
    }
}

/* The first column that a warpgroup has. */
__device__ __forceinline__ int first_column(int side) { return S::HALVES ? side * PART : 0; }

/* Where a thread's numbers 4 i and 4 i + 1 lie in a (rows, DSTATE) matrix; 4 i + 2 and + 3 are eight rows below. A
   warp's eight rows are there or not, all of them, and so are eight columns. */
__device__ __forceinline__ int spot_of(int i, int thread) {
    return (thread / 32 * 16 + thread % 32 / 4) * S::DSTATE + 8 * i + thread % 4 * 2;
}
__device__ __forceinline__ bool there(int i, int h, int rows, int side, int thread) {
    return first_column(side) + 8 * i < S::DSTATE && (!S::PADDED_HEAD || thread / 32 * 16 + 8 * h < rows);
}
__device__ __forceinline__ float2 load_pair(const float *from) { return *reinterpret_cast<const float2 *>(from); }
template <typename U> __device__ __forceinline__ float2 load_pair(const U *from) {
    return unpack(*reinterpret_cast<const unsigned *>(from), U());
}
/* state += by * the matrix */
__device__ __forceinline__ void add_matrix(float (&state)[THREAD_NUMBERS], const Initial *from, float by, int rows,
                                           int side, int thread) {
    from += first_column(side);
#pragma unroll
    for (int i = 0; i < PART / 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (there(i, h, rows, side, thread)) {
                const float2 v = load_pair(from + spot_of(i, thread) + 8 * h * S::DSTATE);
                state[4 * i + 2 * h] += by * v.x, state[4 * i + 2 * h + 1] += by * v.y;
            }
}
__device__ __forceinline__ void write_matrix(float *to, const float (&state)[THREAD_NUMBERS], int rows, int side,
                                             int thread) {
    to += first_column(side);
#pragma unroll
    for (int i = 0; i < PART / 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++)
            if (there(i, h, rows, side, thread))
                *reinterpret_cast<float2 *>(to + spot_of(i, thread) + 8 * h * S::DSTATE) =
                    make_float2(state[4 * i + 2 * h], state[4 * i + 2 * h + 1]);
}

/* Rounded, as the left factor of products over its columns, 16 at a time. */
__device__ __forceinline__ void to_fragments(unsigned (&f)[PART / 16][4], const float (&state)[THREAD_NUMBERS]) {
#pragma unroll
    for (int i = 0; i < THREAD_NUMBERS / 2; i++) f[i / 4][i % 4] = pack(state[2 * i], state[2 * i + 1], T());
}

/* Steps 3 and 4: state += (x w)^T B, where f is (x w)^T and b a tile. */
__device__ __forceinline__ void add_to_state(float (&state)[THREAD_NUMBERS], const unsigned (&f)[4][4], unsigned b) {
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<PART, MN_MAJOR>(state, f[k], advance(mn_major(b), 16 * k * 128), true, T());
}
