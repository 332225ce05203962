/* The role of a warpgroup: step 2, scores. C B^T once for both rows of a pair, times the decays between two tokens of
   the chunk and dt, for each. Warp w has tokens 16 w to 16 w + 15, its block, as i; all tokens up to them are its j.
   Between two blocks the decay is a number of the row times one of the column; on the diagonal each pair of tokens
   takes an exponential. */
#pragma once
#include "../device/hopper/stmatrix.cuh"
#include "../device/hopper/tma.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "../device/hopper/wgmma.cuh"
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "sequences.cuh"

/* What of the decays needs no products. A lane has two tokens i of its block. It is made while the products run if
   there is a gate, for whose exponentials the other warps wait, too, and one sequence: several leave it no registers.
   Otherwise these are worth more. */
constexpr bool EARLY = S::GATED && !S::SEQUENCES;
struct LaneScores {
    float diagonal[6]; // decays between tokens of the block, times dt: of the pairs of which j may be up to i

    __device__ __forceinline__ void make(const Decays &by, int block, int lane) {
        const int i = 16 * block + lane / 4, j = 16 * block + lane % 4 * 2; // the first ones
        const float u[2] = {by.log_decay_in_block[i], by.log_decay_in_block[i + 8]};
        const float2 v0 = *(const float2 *)&by.log_decay_in_block[j], dt0 = *(const float2 *)&by.dt[j];
        const float2 v1 = *(const float2 *)&by.log_decay_in_block[j + 8], dt1 = *(const float2 *)&by.dt[j + 8];
        diagonal[0] = exp2_approx(u[0] - v0.x) * dt0.x, diagonal[1] = exp2_approx(u[0] - v0.y) * dt0.y;
        diagonal[2] = exp2_approx(u[1] - v0.x) * dt0.x, diagonal[3] = exp2_approx(u[1] - v0.y) * dt0.y;
        diagonal[4] = exp2_approx(u[1] - v1.x) * dt1.x, diagonal[5] = exp2_approx(u[1] - v1.y) * dt1.y;
        if constexpr (EARLY) keep(diagonal); // here, not behind the wait
    }
};

/* Of 16 x 16 products g those with j in block k, before that of the i, which decay by first and second from its end. */
__device__ __forceinline__ void score_earlier(float (&m)[8], const float *g, const Decays &by, int k, float first,
                                              float second, int j) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const float2 to = *(const float2 *)&by.weight_to_block_end[16 * k + 8 * h + j];
        m[4 * h + 0] = g[4 * h + 0] * (to.x * first);
        m[4 * h + 1] = g[4 * h + 1] * (to.y * first);
        m[4 * h + 2] = g[4 * h + 2] * (to.x * second);
        m[4 * h + 3] = g[4 * h + 3] * (to.y * second);
    }
}
/* On the diagonal, where i may be before j, and i = j takes D, which is `own` if it is a number for all columns. */
__device__ __forceinline__ void score_diagonal(float (&m)[8], const float *g, const float (&decays)[6], int j,
                                               float own, int lane) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
#pragma unroll
        for (int e = 0; e < 4; e++) {
            if (h == 1 && e < 2) { // i is before j
                m[4 * h + e] = 0;
                continue;
            }
            const int ii = lane / 4 + e / 2 * 8, jj = 8 * h + j + e % 2;
            float value = g[4 * h + e] * decays[h ? e + 2 : e];
            if (h == 0 && e >= 2) { // j is before i
                m[4 * h + e] = value;
                continue;
            }
            if (S::Skip::KIND == D_PER_HEAD && ii == jj) value += own;
            m[4 * h + e] = ii < jj ? 0 : value;
        }
    }
}

/* What the warp of block BLOCK makes of its products g: scores of one row of the pair. */
template <int BLOCK>
__device__ __forceinline__ void write_scores(const float (&g)[32], const Decays &by, LaneScores &made, unsigned tile,
                                             float own, int lane) {
    const int j = lane % 4 * 2; // the first of the thread, in a block of 16 x 16
    const float2 far0 = by.block_decay[0], far1 = by.block_decay[1];
    const float from[2] = {exp2_approx(by.log_decay_in_block[16 * BLOCK + lane / 4]),
                           exp2_approx(by.log_decay_in_block[16 * BLOCK + lane / 4 + 8])}; // from the block's start
#pragma unroll
    for (int k = 0; k <= BLOCK; k++) { // blocks of 16 tokens j
        float m[8];
        if (k < BLOCK) {
            const float between = BLOCK - k == 1 ? 1 : BLOCK - k == 3 ? far1.x : k ? far0.y : far0.x;
            score_earlier(m, g + 8 * k, by, k, from[0] * between, from[1] * between, j);
        } else {
            if constexpr (!EARLY) made.make(by, BLOCK, lane);
            score_diagonal(m, g + 8 * k, made.diagonal, j, own, lane);
        }
        stmatrix_x4(spot_of_block(tile, BLOCK, k, lane), {pack(m[0], m[1], T()), pack(m[2], m[3], T()),
                                                          pack(m[4], m[5], T()), pack(m[6], m[7], T())});
    }
}

/* g = C B^T, 64 x 64, which runs on by itself. */
__device__ __forceinline__ void start_products(float (&g)[32], unsigned b, unsigned c) {
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STATE / 16; k++) {
        const int further = k / 4 * TILE + k % 4 * 32;
        wgmma<64>(g, advance(k_major(c), further), advance(k_major(b), further), k > 0, T());
    }
    wgmma_commit();
}

__device__ __forceinline__ void make_scores(Shared &s, const D *d_skip, int thread) {
    const int lane = thread % 32, block = warp_uniform(thread / 32); // its 16 tokens i
    float d[2] = {0, 0};
    // Of the blocks above the diagonal those in the second column of each two are multiplied: they stay zero. With
    // halves of a state all are.
    if (!S::HALVES && block % 2 == 0)
        for (int k = 0; k < 4; k++)
            stmatrix_x4(spot_of_block(shared_address(s.scores[k / ROWS][k % ROWS]), block, block + 1, lane),
                        {0, 0, 0, 0});
    if (S::HALVES)
        for (int k = 0; k < 2; k++)
            for (int column = block + 1; column < 4; column++)
                stmatrix_x4(spot_of_block(shared_address(s.scores[k][0]), block, column, lane), {0, 0, 0, 0});
    Turns turns;
    for (Phase<STAGES> phase;; phase.advance()) {
        s.ring.wait_full(phase);
        const int stage = warp_uniform(phase.stage), kind = warp_uniform(s.steps[stage].kind);
        if (kind & END) return;
        if (!(kind & LOCAL)) {
            float g[32];
            const int group = S::HALVES ? warp_uniform(place_of_group(phase)) : stage;
            start_products(g, shared_address(s.b[group]), shared_address(s.c[group]));
            const Step &step = s.steps[stage];
            if (S::Skip::KIND == D_PER_HEAD && kind & FIRST) {
#pragma unroll
                for (int row = 0; row < ROWS; row++) d[row] = as_float(d_skip[step.head(row)]);
            }
            const Phase<2> turn = turns;
            const int place = warp_uniform(turn.stage);
            const Decays &by0 = s.decays[stage][0], &by1 = s.decays[stage][ROWS - 1];
            int own = lane;
            // What is made of it is not kept: there are no registers for it.
            if constexpr (S::SEQUENCES || S::GATED) asm volatile("" : "+r"(own));
            LaneScores made0, made1;
            if constexpr (EARLY) {
                made0.make(by0, block, own);
                if (ROWS == 2) made1.make(by1, block, own);
            }
            s.scores_ring.wait_empty(turn);
            wgmma_wait<0>();
            keep(g);
            if (S::HALVES && lane == 0) s.b_empty[group].arrive(), s.c_empty[group].arrive();
            const unsigned tile0 = shared_address(s.scores[place][0]);
            const unsigned tile1 = shared_address(s.scores[place][ROWS - 1]);
            // Without a branch within: so the compiler can read early.
            if (block == 0) {
                write_scores<0>(g, by0, made0, tile0, d[0], own);
                if (ROWS == 2) write_scores<0>(g, by1, made1, tile1, d[1], own);
            } else if (block == 1) {
                write_scores<1>(g, by0, made0, tile0, d[0], own);
                if (ROWS == 2) write_scores<1>(g, by1, made1, tile1, d[1], own);
            } else if (block == 2) {
                write_scores<2>(g, by0, made0, tile0, d[0], own);
                if (ROWS == 2) write_scores<2>(g, by1, made1, tile1, d[1], own);
            } else {
                write_scores<3>(g, by0, made0, tile0, d[0], own);
                if (ROWS == 2) write_scores<3>(g, by1, made1, tile1, d[1], own);
            }
            if (S::SEQUENCES && by0.sequence_begins) blank_scores(s.scores[place], s.begins[stage], block, own);
            fence_async_proxy();
            __syncwarp();
            if (lane == 0) s.scores_ring.full[place].arrive();
            turns.advance();
        } else if (S::HALVES && lane == 0) {
            s.b_empty[place_of_group(phase)].arrive(), s.c_empty[place_of_group(phase)].arrive();
        }
        __syncwarp();
        if (lane == 0) s.ring.release(phase);
    }
}
