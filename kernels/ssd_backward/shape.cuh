/* Sizes that the launches of the backward pass share: of a program, and of a call. */
#pragma once
#include "../device/math.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename Type, int DState, bool Sequences = false> struct Shape {
    using T = Type; // of x, B, C, dy and what is stored of states: __half or __nv_bfloat16
    static constexpr bool SEQUENCES = Sequences;          // several in a row of tokens
    static constexpr int STATE = (DState + 63) / 64 * 64; // columns of a state; TMA fills up with zeros
    static_assert(DState <= 128 && DState % 8 == 0);
};

#ifndef SHAPE
#define SHAPE Shape<__half, 128>
#endif
using S = SHAPE;
using T = S::T;
constexpr int CHUNK = 64, WIDTH = 64;   // tokens; columns of x in a row of heads, the last of them may be zeros
constexpr int STATE = S::STATE;         // columns of a state
constexpr int STATE_TILES = STATE / 64; // of B, of C, and of a state
constexpr int TILE = 64 * 128;          // bytes: 64 rows, swizzled (swizzle.cuh)

/* Of each token: where in the chunk its sequence begins. 0 is before the chunk, 1 the chunk's first token. */
template <bool SEQUENCES> struct Begins {
    __device__ __forceinline__ int begin_of(int) const { return 0; }
    __device__ __forceinline__ void set_pair(int, int2) {}
};
template <> struct Begins<true> {
    int begin[CHUNK];
    __device__ __forceinline__ int begin_of(int i) const { return begin[i]; }
    __device__ __forceinline__ void set_pair(int i, int2 pair) { *(int2 *)&begin[i] = pair; }
};

/* A chunk of a head, as launch 1 (decays.cu) writes it for the others. Nothing of a sequence reaches the next. */
struct alignas(16) Line : Begins<S::SEQUENCES> {
    float dt[CHUNK];        // steps: with bias, softplus and limits; behind the sequence's end 0
    float log_decay[CHUNK]; // log2 of the decay from the start of the chunk, or the sequence, to behind the token

    /* Decay from the chunk's start to behind token i, from behind token j to the chunk's end, and over all of it. */
    __device__ __forceinline__ float from_start(int i) const {
        return S::SEQUENCES && begin_of(i) ? 0 : exp2_approx(log_decay[i]);
    }
    __device__ __forceinline__ float to_end(int j) const {
        const float decay = exp2_approx(log_decay[CHUNK - 1] - log_decay[j]);
        return S::SEQUENCES && begin_of(j) != begin_of(CHUNK - 1) ? 0 : decay;
    }
    /* Of token i in a walk in either direction (walk.cuh), without a branch. */
    __device__ __forceinline__ float weight(int i, bool backwards) const {
        const float log = log_decay[i], power = exp2_approx(backwards ? log : log_decay[CHUNK - 1] - log);
        const float decay = S::SEQUENCES && begin_of(i) != (backwards ? 0 : begin_of(CHUNK - 1)) ? 0 : power;
        return decay * (backwards ? 1 : dt[i]);
    }
    __device__ __forceinline__ float whole() const { return from_start(CHUNK - 1); }
};

/* Of a call. chunks: an even number, so that all have a pair; behind the sequence's end all is zero. A row is 64
   columns of x: a head, or one of the `parts` of a head. All but dx are sums over columns of x: parts are added up as
   heads are. */
struct Sizes {
    int seqlen, chunks, heads, groups, headdim, dstate, parts;

    __device__ __forceinline__ int group_of(int row) const { return row / (heads / groups * parts); }
    __device__ __forceinline__ int head_of(int row) const { return row / parts; }
    __device__ __forceinline__ int column_of(int row) const { return row % parts * WIDTH; } // the first of the head's
    /* A chunk's number among those of all heads, and of all rows. */
    __device__ __forceinline__ long long line_of(int batch, int head, int chunk) const {
        return ((long long)batch * heads + head) * chunks + chunk;
    }
    __device__ __forceinline__ long long row_line_of(int batch, int row, int chunk) const {
        return ((long long)batch * heads * parts + row) * chunks + chunk;
    }
};
