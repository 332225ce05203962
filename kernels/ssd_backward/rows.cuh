/* What the roles of chunks.cu that multiply have in common: rows of products are tokens, of which warp w has 16 w to
   16 w + 15, and a lane two. */
#pragma once
#include "../device/hopper/tma.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "../device/hopper/wgmma.cuh"
#include "../device/math.cuh"
#include "../device/reduce.cuh"
#include "shared.cuh"
#include "tiles.cuh"

/* Over the four lanes of a row. */
__device__ __forceinline__ float row_sum(float v) {
    v += __shfl_xor_sync(~0u, v, 1);
    return v + __shfl_xor_sync(~0u, v, 2);
}
/* A lane's two tokens j. */
struct Inputs {
    int j[2];
    float log_decay[2], dt[2], to_end[2]; // to_end: decay from behind the token to the chunk's end

    __device__ __forceinline__ Inputs(const Line &line, int warp, int lane) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            j[r] = 16 * warp + lane / 4 + 8 * r;
            log_decay[r] = line.log_decay[j[r]], dt[r] = line.dt[j[r]];
            to_end[r] = line.to_end(j[r]);
        }
    }
};

/* A row of 64 tokens' sums, STATE columns each, of a run of heads. */
__device__ __forceinline__ void write_sums(float *to, const float (&d)[STATE / 2], const Sizes &sizes, int chunk,
                                           int thread) {
    const int token = thread / 32 * 16 + thread % 32 / 4, left = sizes.seqlen - chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < STATE / 8; i++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int column = 8 * i + thread % 4 * 2;
            if (token + 8 * h < left && column < sizes.dstate)
                *(float2 *)(to + (long long)(token + 8 * h) * sizes.groups * sizes.dstate + column) =
                    make_float2(d[4 * i + 2 * h], d[4 * i + 2 * h + 1]);
        }
}

constexpr int TURNED = 1; // a barrier: S^T is there
