/* What a warpgroup hands on of a sequence: its half of the result, or of partial results. */
#pragma once
#include "hopper_softmax.cuh"

struct Outputs {
    T *out;              // (batch, n_heads, LATENT)
    float *partial_out;  // (segments, n_heads, LATENT), see line.cuh
    float2 *max_and_sum; // (segments, n_heads)
    int n_heads;
};

/* By way of shared memory, 32 columns at a time, so that a warp writes whole sectors. */
__device__ __forceinline__ void store_output(unsigned char *rows, const Values &o, const float (&total)[2], T *to,
                                             int heads, int lane) {
    float share[2];
#pragma unroll
    for (int r = 0; r < 2; r++) share[r] = total[r] == 0 ? 0 : 1 / total[r]; // 0: all scores were -inf
#pragma unroll
    for (int i = 0; i < SIDE_COLUMNS / 32; i++) {
        __syncwarp(); // what lay there has been read
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = lane % 16, word = 2 * half + lane / 16;
            const float *d = o + 16 * i + 8 * half;
            stmatrix_x4(shared_address(rows + row * 64 + (word ^ row / 2 % 4) * 16),
                        {pack(d[0] * share[0], d[1] * share[0], T()), pack(d[2] * share[1], d[3] * share[1], T()),
                         pack(d[4] * share[0], d[5] * share[0], T()), pack(d[6] * share[1], d[7] * share[1], T())});
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = 8 * half + lane / 4, word = lane % 4;
            if (row < heads)
                __stcg(reinterpret_cast<uint4 *>(to + row * LATENT + 32 * i + 8 * word),
                       *reinterpret_cast<const uint4 *>(rows + row * 64 + (word ^ row / 2 % 4) * 16));
        }
    }
}

__device__ __forceinline__ void store_partial(const Values &o, float *to, int heads, int lane) {
    const int g = lane / 4, c = lane % 4;
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (g + 8 * r < heads)
#pragma unroll
            for (int j = 0; j < SIDE_COLUMNS / 8; j++)
                __stcg(reinterpret_cast<float2 *>(to + (g + 8 * r) * LATENT + 8 * j + 2 * c),
                       make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]));
}

enum Barriers { OWN = 1, WEIGHTS = 3, SUMS = 5 }; // OWN: one for each warpgroup; WEIGHTS: for each slot

/* turn: 0, 1, 0, ... for one sequence after another. */
__device__ __forceinline__ void store(Shared &s, const Values &o, const RowSums &sums, const Work &work,
                                      const Outputs &to, int head_tile, int turn, int warpgroup, int thread) {
    const int lane = thread % 32, warp = thread / 32, row = 16 * warp + lane / 4;
    float total[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        total[r] = sums.weights[r];
#pragma unroll
        for (int lane_mask = 1; lane_mask < 4; lane_mask *= 2) total[r] += __shfl_xor_sync(~0u, total[r], lane_mask);
        if (lane % 4 == 0) s.weights[turn][warpgroup][row + 8 * r] = total[r];
    }
    named_barrier<256>(SUMS);
#pragma unroll
    for (int r = 0; r < 2; r++) total[r] += s.weights[turn][1 - warpgroup][row + 8 * r];
    const int first_head = HEADS * head_tile + 16 * warp, heads = to.n_heads - first_head; // of the warp's rows
    const bool whole = work.place < 0;
    const long long at = (long long)(whole ? work.b : work.place) * to.n_heads + first_head;
    if (whole) {
        T *out = to.out + at * LATENT + warpgroup * SIDE_COLUMNS;
        store_output(s.out[4 * warpgroup + warp], o, total, out, heads, lane);
        return;
    }
    store_partial(o, to.partial_out + at * LATENT + warpgroup * SIDE_COLUMNS, heads, lane);
#pragma unroll
    for (int r = 0; r < 2; r++)
        if (warpgroup == 0 && lane % 4 == 0 && lane / 4 + 8 * r < heads)
            __stcg(to.max_and_sum + at + lane / 4 + 8 * r, make_float2(sums.maximum[r], total[r]));
}
