/* y of a chunk and a row of heads, transposed as the products leave it: (WIDTH, CHUNK). */
#pragma once
#include "../device/hopper/stmatrix.cuh"
#include "../device/math.cuh"
#include "fragments.cuh"
#include "state.cuh"

/* Sums of y before they are added up. */
struct YSums {
    float from_state[32];      // to be multiplied by the decay from the chunk's start
    float early[16], late[16]; // from the chunk's own tokens: tokens i below 32, and the others
};

/* Step 5, from the state before the chunk: state C^T. */
__device__ __forceinline__ void start_from_state(float (&from_state)[32], const unsigned (&state)[PART / 16][4],
                                                 unsigned c) {
#pragma unroll
    for (int k = 0; k < PART / 16; k++)
        wgmma<64, K_MAJOR>(from_state, state[k], advance(k_major(c), k / 4 * TILE + k % 4 * 32), k > 0, T());
}

/* y *= silu(z) */
__device__ __forceinline__ void gate(float2 (&y)[4], const unsigned (&z)[4]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 v = unpack(z[i], T());
        y[i].x *= v.x * reciprocal_approx(1 + exp2_approx(-LOG2_E * v.x));
        y[i].y *= v.y * reciprocal_approx(1 + exp2_approx(-LOG2_E * v.y));
    }
}

/* y of 16 tokens, of which a thread has 8 sums over the state and 8 of the chunk's own tokens, to the place of x: from
   token 16 k on, the columns that the warp alone has read. d: D of the row, which has `columns`; z^T: for a gate. */
__device__ __forceinline__ void write_tokens(const float *from_state, const float *own, float4 decays, unsigned x,
                                             int k, const D *d, int columns, const unsigned (&z)[4], int thread) {
    const int lane = thread % 32, warp = thread / 32;
    float2 y[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 decay = i / 2 ? make_float2(decays.z, decays.w) : make_float2(decays.x, decays.y);
        y[i].x = from_state[2 * i] * decay.x + own[2 * i];
        y[i].y = from_state[2 * i + 1] * decay.y + own[2 * i + 1];
    }
    const unsigned spot = spot_of_tokens(x, k, warp, lane);
    if constexpr (S::Skip::KIND == D_PER_COLUMN) add_skip(y, d, columns, spot, warp, lane);
    if constexpr (S::GATED) gate(y, z);
    stmatrix_x4_trans(spot, {pack(y[0].x, y[0].y, T()), pack(y[1].x, y[1].y, T()),
                             pack(y[2].x, y[2].y, T()), pack(y[3].x, y[3].y, T())});
}

/* All y of a chunk. */
__device__ __forceinline__ void write_y(const YSums &sums, const float4 (&decays)[4], unsigned x, const D *d,
                                        int columns, const unsigned (&z)[4][4], int thread) {
#pragma unroll
    for (int k = 0; k < 4; k++)
        write_tokens(sums.from_state + 8 * k, k < 2 ? sums.early + 8 * k : sums.late + 8 * (k - 2), decays[k], x,
                     k, d, columns, z[k], thread);
}
