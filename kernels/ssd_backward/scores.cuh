/* The role of a warpgroup in chunks.cu: what a chunk's own tokens give each other. A row of its products is a token
   j, a column a token i. It makes scores, the left factor of dx; S^T, a sum over heads; and of the steps' gradients
   what belongs to pairs of tokens. */
#pragma once
#include "rows.cuh"

/* Of sixteen columns at once, over the eight lanes of a column: a lane is left with two of them, those of block
   column_block(lane). As warp_sums in reduce.cuh. */
__device__ __forceinline__ int column_block(int lane) { return lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2; }
__device__ __forceinline__ float2 column_sums(float (&v)[16], int lane) {
#pragma unroll
    for (int n = 8, lane_mask = 16; n >= 2; n /= 2, lane_mask /= 2) {
        const bool upper = lane & lane_mask;
#pragma unroll
        for (int r = 0; r < n; r++) {
            const float mine = upper ? v[r + n] : v[r], yours = upper ? v[r] : v[r + n];
            v[r] = mine + __shfl_xor_sync(~0u, yours, lane_mask);
        }
    }
    return make_float2(v[0], v[1]);
}

/* B C^T of the chunk, once for all heads, to where each thread finds its own. */
__device__ __forceinline__ void keep_products(Shared &s, int thread) {
    float g[32];
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STATE / 16; k++) {
        const int further = k / 4 * TILE + k % 4 * 32;
        wgmma<64>(g, advance(k_major(shared_address(s.b)), further), advance(k_major(shared_address(s.c)), further),
                  k > 0, T());
    }
    wgmma_commit();
    wgmma_wait<0>();
    keep(g);
#pragma unroll
    for (int n = 0; n < 8; n++) s.products[n][thread] = make_float4(g[4 * n], g[4 * n + 1], g[4 * n + 2], g[4 * n + 3]);
}

/* What a lane keeps of its tokens' products with later ones. */
struct OwnSums {
    float over_outputs[2] = {0, 0}; // sums over i of g decay B_j C_i, without dt_j
    float skip = 0;                 // x_j dy_j: g on the diagonal
};

/* Eight tokens i from 8 n on. ON_DIAGONAL: some of them may be before a j, and count for nothing. */
template <bool ON_DIAGONAL>
__device__ __forceinline__ void multiply_decays(const float *g, float (&score)[4], float *s_sum, float *over_inputs,
                                                OwnSums &found, const float4 &product, const Line &line, int n,
                                                const Inputs &own, int lane) {
    const int i = 8 * n + lane % 4 * 2;
    const float2 log_decay = *(const float2 *)&line.log_decay[i];
    const float products[4] = {product.x, product.y, product.z, product.w};
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const int j = own.j[e / 2];
        float decay = exp2_approx((e % 2 ? log_decay.y : log_decay.x) - own.log_decay[e / 2]);
        if (ON_DIAGONAL && i + e % 2 < j) decay = 0;
        if (S::SEQUENCES && line.begin_of(i + e % 2) > j + 1) decay = 0;
        if (ON_DIAGONAL && i + e % 2 == j) found.skip += g[e];
        score[e] = decay * products[e];
        const float m = g[e] * score[e];
        s_sum[e] += g[e] * decay * own.dt[e / 2];
        found.over_outputs[e / 2] += m;
        over_inputs[e % 2] += m * own.dt[e / 2];
    }
}

/* All pairs of a head. g: (x_j dy_i), of which only i >= j count. scores: decay B_j C_i, to a tile, in which what lies
   before the diagonal stays zero. s_sum += g decay dt_j. */
__device__ __forceinline__ void make_scores(const float (&g)[32], unsigned scores, float (&s_sum)[32], Shared &s,
                                            StepSums &sums, const Line &line, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    const Inputs own(line, warp, lane);
    float over_inputs[16];
    OwnSums found;
#pragma unroll
    for (int k = 0; k < 4; k++) { // 16 tokens i
        float score[2][4] = {};
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const int n = 2 * k + h;
            over_inputs[2 * n] = over_inputs[2 * n + 1] = 0;
            if (k > warp)
                multiply_decays<false>(g + 4 * n, score[h], s_sum + 4 * n, over_inputs + 2 * n, found,
                                       s.products[n][thread], line, n, own, lane);
            else if (k == warp)
                multiply_decays<true>(g + 4 * n, score[h], s_sum + 4 * n, over_inputs + 2 * n, found,
                                      s.products[n][thread], line, n, own, lane);
        }
        if (k >= warp)
            stmatrix_x4(spot_of_block(scores, warp, k, lane),
                        {pack(score[0][0], score[0][1], T()), pack(score[0][2], score[0][3], T()),
                         pack(score[1][0], score[1][1], T()), pack(score[1][2], score[1][3], T())});
    }
    *(float2 *)&sums.over_inputs[warp][8 * column_block(lane) + lane % 4 * 2] = column_sums(over_inputs, lane);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = row_sum(found.over_outputs[r]);
        if (lane % 4 == 0) sums.over_outputs[own.j[r]] = sum;
    }
    const float skip = warp_sum(found.skip);
    if (lane == 0) sums.skip[warp] = skip;
}

__device__ __forceinline__ void walk_scores(Shared &s, const Run &run, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    float s_sum[32];
    clear(s_sum);
    for (int place = 0; place < 2; place++)
        for (int k = 0; k < warp; k++)
            stmatrix_x4(spot_of_block(shared_address(s.scores[place]), warp, k, lane), {0, 0, 0, 0});
    s.chunk_full.wait(0);
    keep_products(s, thread);
    Phase<STAGES> phase;
    Phase<2> place;
    for (int row = run.first; row < run.last; row++, phase.advance(), place.advance()) {
        const int stage = warp_uniform(phase.stage), at = warp_uniform(place.stage);
        s.ring.wait_full(phase);
        float g[32];
        const unsigned x = shared_address(s.x[stage]), dy = shared_address(s.dy[stage]);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < 4; k++)
            wgmma<64>(g, advance(k_major(x), 32 * k), advance(k_major(dy), 32 * k), k > 0, T());
        wgmma_commit();
        s.sums_ring.wait_empty(place);
        s.scores_ring.wait_empty(place);
        wgmma_wait<0>();
        keep(g);
        make_scores(g, shared_address(s.scores[at]), s_sum, s, s.sums[at], s.lines[stage], thread);
        __syncwarp();
        if (lane == 0) s.scores_ring.full[at].arrive(), s.sums_ring.full[at].arrive();
    }
    // S^T takes the place of the first scores, when both have been read.
    s.scores_ring.wait_empty(place), place.advance();
    s.scores_ring.wait_empty(place);
    unsigned sums[4][4];
    to_fragments(sums, s_sum);
#pragma unroll
    for (int k = 0; k < 4; k++) stmatrix_x4(spot_of_block(shared_address(s.scores[0]), warp, k, lane), sums[k]);
    named_barrier_arrive<384>(TURNED);
}
