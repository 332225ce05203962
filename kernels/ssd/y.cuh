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

/* y to the place of x: a warp writes the columns that it alone has read. d: D of the row, which has `columns`; z^T: for
   a gate. */
__device__ __forceinline__ void write_y(const YSums &sums, const float4 (&decays)[4], unsigned x, const D *d,
                                        int columns, const unsigned (&z)[4][4], int thread) {
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int k = 0; k < 4; k++) { // 16 tokens
        float2 y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 decay =
                i / 2 ? make_float2(decays[k].z, decays[k].w) : make_float2(decays[k].x, decays[k].y);
            const int n = 8 * k + 2 * i;
            const float *own = k < 2 ? sums.early + n : sums.late + n - 16;
            y[i].x = sums.from_state[n] * decay.x + own[0], y[i].y = sums.from_state[n + 1] * decay.y + own[1];
        }
        const unsigned spot = spot_of_tokens(x, k, warp, lane);
        if constexpr (S::Skip::KIND == D_PER_COLUMN) add_skip(y, d, columns, spot, warp, lane);
        if constexpr (S::GATED) gate(y, z[k]);
        stmatrix_x4_trans(spot, {pack(y[0].x, y[0].y, T()), pack(y[1].x, y[1].y, T()),
                                 pack(y[2].x, y[2].y, T()), pack(y[3].x, y[3].y, T())});
    }
}
