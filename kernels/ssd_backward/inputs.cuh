/* The role of a warpgroup in chunks.cu: tokens as inputs, j, a row of the products for each. It makes dx and dB, and of
   the steps' gradients what belongs to inputs. Warp w has tokens 16 w to 16 w + 15, a lane two of them. */
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

/* What a chunk's own tokens give each other. g: (x_j dy_i), of which only i >= j count. scores: decay B_j C_i, the left
   factor of dx. s_sum += g decay dt_j. */
__device__ __forceinline__ OwnSums make_scores(const float (&g)[32], unsigned (&scores)[4][4], float (&s_sum)[32],
                                               Shared &s, StepSums &sums, const Line &line, const Inputs &own,
                                               int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    float over_inputs[16];
    OwnSums found;
#pragma unroll
    for (int n = 0; n < 8; n++) {
        float score[4] = {0, 0, 0, 0};
        over_inputs[2 * n] = over_inputs[2 * n + 1] = 0;
        if (n / 2 > warp)
            multiply_decays<false>(g + 4 * n, score, s_sum + 4 * n, over_inputs + 2 * n, found, s.products[n][thread],
                                   line, n, own, lane);
        else if (n / 2 == warp)
            multiply_decays<true>(g + 4 * n, score, s_sum + 4 * n, over_inputs + 2 * n, found, s.products[n][thread],
                                  line, n, own, lane);
        scores[n / 2][n % 2 * 2] = pack(score[0], score[1], T());
        scores[n / 2][n % 2 * 2 + 1] = pack(score[2], score[3], T());
    }
    *(float2 *)&sums.over_inputs[warp][8 * column_block(lane) + lane % 4 * 2] = column_sums(over_inputs, lane);
    return found;
}

/* x_j . (dh B_j) of the two tokens, times the decay to the chunk's end: what they give through the state behind it. */
__device__ __forceinline__ void dot_with_x(float (&through_end)[2], const float (&from_end)[32],
                                           const unsigned (&x)[4][4], const Inputs &own) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float dot = 0;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 v = unpack(x[n / 2][n % 2 * 2 + r], T());
            dot += v.x * from_end[4 * n + 2 * r] + v.y * from_end[4 * n + 2 * r + 1];
        }
        through_end[r] = row_sum(dot) * own.to_end[r];
    }
}

/* dx = dt (from the chunk's own tokens + decay to the end * from the state behind it) + D dy, to the place of x. */
__device__ __forceinline__ void write_dx(const float (&from_own)[32], const float (&from_end)[32], unsigned to,
                                         unsigned dy, const Inputs &own, float d, int warp, int lane) {
    const float weight[2] = {own.dt[0] * own.to_end[0], own.dt[1] * own.to_end[1]};
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned f[4], dx[4];
        ldmatrix_x4(f, spot_of_block(dy, warp, k, lane));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = unpack(f[i], T());
            const int at = 8 * k + i / 2 * 4 + i % 2 * 2, r = i % 2;
            dx[i] = pack(own.dt[r] * from_own[at] + (weight[r] * from_end[at] + d * v.x),
                         own.dt[r] * from_own[at + 1] + (weight[r] * from_end[at + 1] + d * v.y), T());
        }
        stmatrix_x4(spot_of_block(to, warp, k, lane), dx);
    }
}

/* A head: dx, the sums of the steps, and what it adds to dB and S^T. */
__device__ __forceinline__ void add_head(Shared &s, float (&db)[STATE / 2], float (&s_sum)[32], int stage,
                                         Phase<STATE_STAGES> state, StepSums &sums, float d, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32), state_stage = warp_uniform(state.stage);
    const unsigned x = shared_address(s.x[stage]), dy = shared_address(s.dy[stage]);
    const unsigned dh = shared_address(s.dh[state_stage]);
    const Line &line = s.lines[stage];
    const Inputs own(line, warp, lane);
    unsigned rows[4][4], weighted[4][4], scores[4][4];
    float g[32], from_end[32], through_end[2]; // g: products x_j dy_i, and then what the chunk's own tokens give to dx
    load_rows(rows, x, warp, lane);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<64, K_MAJOR>(g, rows[k], advance(k_major(dy), 32 * k), k > 0, T());
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float by = own.dt[i % 2] * own.to_end[i % 2];
        weighted[i / 4][i % 4] = scaled(rows[i / 4][i % 4], by, by);
    }
    s.states_ring.wait_full(state);
    s.between_full[state_stage].wait(state.parity);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STATE / 16; k++) {
        const int further = k / 4 * TILE + k % 4 * 32;
        wgmma<64>(from_end, advance(k_major(shared_address(s.b)), further), advance(k_major(dh), further), k > 0, T());
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma<STATE, MN_MAJOR>(db, weighted[k], advance(mn_major(dh), 16 * k * 128), true, T());
    wgmma_commit();
    wgmma_wait<1>();
    keep(g);
    const OwnSums found = make_scores(g, scores, s_sum, s, sums, line, own, thread);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<64, MN_MAJOR>(g, scores[k], advance(mn_major(dy), 16 * k * 128), k > 0, T());
    wgmma_commit();
    wgmma_wait<1>();
    keep(from_end), keep(db);
    if (lane == 0) s.states_ring.release(state);
    dot_with_x(through_end, from_end, rows, own);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float own_outputs = row_sum(found.over_outputs[r]);
        if (lane % 4 == 0) {
            sums.dt[own.j[r]] = own.dt[r];
            sums.over_outputs[own.j[r]] = own.dt[r] * own_outputs;
            sums.to_end[own.j[r]] = own.dt[r] * through_end[r];
            sums.direct[own.j[r]] = own_outputs + through_end[r];
        }
    }
    const float skip = warp_sum(found.skip);
    if (lane == 0) sums.skip[warp] = skip;
    wgmma_wait<0>();
    keep(g);
    write_dx(g, from_end, x, dy, own, d, warp, lane);
}

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

__device__ __forceinline__ void walk_inputs(Shared &s, const Sizes &sizes, const float *d_skip, float *to, int chunk,
                                            const Run &run, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    float db[STATE / 2], s_sum[32];
    clear(db), clear(s_sum);
    s.chunk_full.wait(0);
    keep_products(s, thread);
    Phase<STAGES> phase;
    Phase<STATE_STAGES> state;
    Phase<2> place;
    for (int row = run.first; row < run.last; row++, phase.advance(), state.advance(), place.advance()) {
        const int stage = warp_uniform(phase.stage);
        const float d = d_skip ? d_skip[sizes.head_of(row)] : 0;
        s.ring.wait_full(phase);
        s.sums_ring.wait_empty(place);
        add_head(s, db, s_sum, stage, state, s.sums[warp_uniform(place.stage)], d, thread);
        fence_async_proxy(); // of dx
        __syncwarp();
        if (lane == 0) s.sums_ring.full[place.stage].arrive(), s.dx_full[stage].arrive();
    }
    unsigned sums[4][4];
    to_fragments(sums, s_sum);
#pragma unroll
    for (int k = 0; k < 4; k++) stmatrix_x4(spot_of_block(shared_address(s.turned), warp, k, lane), sums[k]);
    named_barrier_arrive<256>(TURNED);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma<STATE, MN_MAJOR>(db, sums[k], advance(mn_major(shared_address(s.c)), 16 * k * 128), true, T());
    wgmma_commit();
    wgmma_wait<0>();
    keep(db);
    write_sums(to, db, sizes, chunk, thread);
}
