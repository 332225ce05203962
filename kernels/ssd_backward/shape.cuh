/* Sizes that the launches of the backward pass share: of a program, and of a call. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename Type, int DState> struct Shape {
    using T = Type; // of x, B, C, dy and what is stored of states: __half or __nv_bfloat16
    static constexpr int STATE = (DState + 63) / 64 * 64; // columns of a state; TMA fills up with zeros
    static_assert(DState <= 128 && DState % 8 == 0);
};

#ifndef SHAPE
#define SHAPE Shape<__half, 128>
#endif
using S = SHAPE;
using T = S::T;
constexpr int CHUNK = 64, WIDTH = 64;        // tokens; columns of x in a head, the last of them may be zeros
constexpr int STATE = S::STATE;              // columns of a state
constexpr int STATE_TILES = STATE / 64;      // of B, of C, and of a state
constexpr int TILE = 64 * 128;               // bytes: 64 rows, swizzled (swizzle.cuh)

/* A chunk of a head, as launch 1 (decays.cu) writes it for the others. */
struct Line {
    float dt[CHUNK];        // steps: with bias, softplus and limits; behind the sequence's end 0
    float log_decay[CHUNK]; // log2 of the decay from the chunk's start to behind the token: A dt, summed
};

/* Of a call. chunks: an even number, so that all have a pair; behind the sequence's end all is zero. */
struct Sizes {
    int seqlen, chunks, heads, groups, headdim, dstate;

    __device__ __forceinline__ int group_of(int head) const { return head / (heads / groups); }
    /* Of a chunk of a head, among the lines of all. */
    __device__ __forceinline__ long long line_of(int batch, int head, int chunk) const {
        return ((long long)batch * heads + head) * chunks + chunk;
    }
};
