/* A step of the walk that launches 2 and 3 make: a chunk's tokens into a state, 64 x STATE in the registers of a
   warpgroup, as fused.cu of the forward pass has it. Two directions are the same step with other tensors:

       forwards    h  = decay of the chunk * h  + sum over its tokens j: dt_j (decay from j to the end) x_j B_j^T
       backwards   dh = decay of the chunk * dh + sum over its tokens i: (decay from the start to i) dy_i C_i^T

   The left factor, x or dy times its weight, is taken in two parts of 16 bits, and so the product twice: what is lost
   of it once is in all states that follow, and in dA, a sum of both signs over everything, it was the largest error. */
#pragma once
#include "../device/hopper/wgmma.cuh"
#include "../device/math.cuh"
#include "tiles.cuh"

/* The chunk's tokens as the left factor, (columns of x, tokens), each times its weight: rounded, and what that leaves,
   rounded. */
__device__ __forceinline__ void weigh(unsigned (&f)[4][4], unsigned (&rest)[4][4], const Line &line, bool backwards,
                                      int lane) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int i = 16 * k + 8 * half + lane % 4 * 2; // and the next
            float by[2];
#pragma unroll
            for (int n = 0; n < 2; n++) by[n] = line.weight(i + n, backwards);
#pragma unroll
            for (int row = 0; row < 2; row++) {
                unsigned &pair = f[k][2 * half + row];
                const float2 v = unpack(pair, T());
                const float exact[2] = {v.x * by[0], v.y * by[1]};
                pair = pack(exact[0], exact[1], T());
                const float2 found = unpack(pair, T());
                rest[k][2 * half + row] = pack(exact[0] - found.x, exact[1] - found.y, T());
            }
        }
}

/* COLUMNS of the state, of which a thread has half as many numbers. rows: tile of x or dy; columns: tiles of B or C.
   Waits for the products. */
template <int COLUMNS>
__device__ __forceinline__ void add_chunk(float (&state)[COLUMNS / 2], unsigned rows, unsigned columns,
                                          const Line &line, bool backwards, int warp, int lane) {
    unsigned f[4][4], rest[4][4];
    load_columns(f, rows, warp, lane);
    weigh(f, rest, line, backwards, lane);
    const float decay = line.whole();
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; i++) state[i] *= decay;
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) {
        const Descriptor tokens = advance(mn_major(columns), 16 * k * 128);
        wgmma<COLUMNS, MN_MAJOR>(state, f[k], tokens, true, T());
        wgmma<COLUMNS, MN_MAJOR>(state, rest[k], tokens, true, T());
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep(state);
}

/* Sixteen columns of the state, rounded, to a place for 16 rows in shared memory (spot_of_block), and back. */
template <int NUMBERS>
__device__ __forceinline__ void store_columns(unsigned spot, const float (&state)[NUMBERS], int k) {
    stmatrix_x4(spot, {pack(state[8 * k], state[8 * k + 1], T()), pack(state[8 * k + 2], state[8 * k + 3], T()),
                       pack(state[8 * k + 4], state[8 * k + 5], T()), pack(state[8 * k + 6], state[8 * k + 7], T())});
}
__device__ __forceinline__ void load_state(float (&state)[STATE / 2], unsigned tiles, int warp, int lane) {
#pragma unroll
    for (int k = 0; k < STATE / 16; k++) {
        unsigned f[4];
        ldmatrix_x4(f, spot_of_block(tiles + k / 4 * TILE, warp, k % 4, lane));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = unpack(f[i], T());
            state[8 * k + 2 * i] = v.x, state[8 * k + 2 * i + 1] = v.y;
        }
    }
}
