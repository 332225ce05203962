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

/* What a chunk's own tokens give each other. g: (x_j dy_i), of which only i >= j count. scores: decay B_j C_i, the left
   factor of dx. s_sum += g decay dt_j. over_outputs: sums over i of g decay B_j C_i, without dt_j. */
__device__ __forceinline__ void multiply_decays(const float (&g)[32], unsigned (&scores)[4][4], float (&s_sum)[32],
                                                float (&over_outputs)[2], Shared &s, StepSums &sums, const Line &line,
                                                const Inputs &own, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    float over_inputs[16];
    over_outputs[0] = over_outputs[1] = 0;
#pragma unroll
    for (int n = 0; n < 8; n++) { // 8 tokens i
        float score[4] = {0, 0, 0, 0};
        over_inputs[2 * n] = over_inputs[2 * n + 1] = 0;
        if (8 * n + 7 >= 16 * warp) { // else all of them are before all j
            const int i = 8 * n + lane % 4 * 2;
            const float2 log_decay = *(const float2 *)&line.log_decay[i];
            const float4 product = s.products[n][thread];
            const float products[4] = {product.x, product.y, product.z, product.w};
#pragma unroll
            for (int e = 0; e < 4; e++) {
                const float power = exp2_approx((e % 2 ? log_decay.y : log_decay.x) - own.log_decay[e / 2]);
                const int j = own.j[e / 2];
                const bool reaches = i + e % 2 >= j && (!S::SEQUENCES || line.begin_of(i + e % 2) <= j + 1);
                const float decay = reaches ? power : 0;
                score[e] = decay * products[e];
                const float m = g[4 * n + e] * score[e];
                s_sum[4 * n + e] += g[4 * n + e] * decay * own.dt[e / 2];
                over_outputs[e / 2] += m;
                over_inputs[2 * n + e % 2] += m * own.dt[e / 2];
            }
        }
        scores[n / 2][n % 2 * 2] = pack(score[0], score[1], T());
        scores[n / 2][n % 2 * 2 + 1] = pack(score[2], score[3], T());
    }
    const float2 found = column_sums(over_inputs, lane);
    *(float2 *)&sums.over_inputs[warp][8 * column_block(lane) + lane % 4 * 2] = found;
}

/* q: sums of dx without dt_j. Those of the state behind the chunk are there, without their decay: x_j . q_j of them,
   for each of the two tokens, and then the decay. */
__device__ __forceinline__ void decay_from_end(float (&q)[32], float (&through_end)[2], const unsigned (&x)[4][4],
                                               const Inputs &own) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        through_end[r] = row_sum(row_dot(x, q, r)) * own.to_end[r];
#pragma unroll
        for (int n = 0; n < 8; n++) q[4 * n + 2 * r] *= own.to_end[r], q[4 * n + 2 * r + 1] *= own.to_end[r];
    }
}

/* dx = dt q + D dy, to the place of x; the lane's part of dy . x. */
__device__ __forceinline__ float write_dx(const float (&q)[32], const unsigned (&x)[4][4], unsigned to, unsigned dy,
                                          const Inputs &own, float d, int warp, int lane) {
    float skip = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned f[4], dx[4];
        ldmatrix_x4(f, spot_of_block(dy, warp, k, lane));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = unpack(f[i], T()), u = unpack(x[k][i], T());
            const int at = 8 * k + i / 2 * 4 + i % 2 * 2;
            skip += v.x * u.x + v.y * u.y;
            dx[i] = pack(own.dt[i % 2] * q[at] + d * v.x, own.dt[i % 2] * q[at + 1] + d * v.y, T());
        }
        stmatrix_x4(spot_of_block(to, warp, k, lane), dx);
    }
    return skip;
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
    float g[32], q[32], through_end[2], over_outputs[2];
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
        wgmma<64>(q, advance(k_major(shared_address(s.b)), further), advance(k_major(dh), further), k > 0, T());
    }
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma<STATE, MN_MAJOR>(db, weighted[k], advance(mn_major(dh), 16 * k * 128), true, T());
    wgmma_commit();
    wgmma_wait<1>();
    keep(g);
    multiply_decays(g, scores, s_sum, over_outputs, s, sums, line, own, thread);
    wgmma_wait<0>();
    keep(q), keep(db);
    if (lane == 0) s.states_ring.release(state);
    decay_from_end(q, through_end, rows, own);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<64, MN_MAJOR>(q, scores[k], advance(mn_major(dy), 16 * k * 128), true, T());
    wgmma_commit();
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float own_outputs = row_sum(over_outputs[r]);
        if (lane % 4 == 0) {
            sums.dt[own.j[r]] = own.dt[r];
            sums.over_outputs[own.j[r]] = own.dt[r] * own_outputs;
            sums.to_end[own.j[r]] = own.dt[r] * through_end[r];
            sums.direct[own.j[r]] = own_outputs + through_end[r];
        }
    }
    wgmma_wait<0>();
    keep(q);
    const float skip = warp_sum(write_dx(q, rows, x, dy, own, d, warp, lane));
    if (lane == 0) sums.skip[warp] = skip;
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
