/* The role of a warpgroup in chunks.cu: tokens as inputs, j, a row of the products for each. It makes dx and dB, and of
   the steps' gradients what goes through the state behind the chunk. */
#pragma once
#include "rows.cuh"

/* The lane's part of the sum over all numbers of two states: both lie in the same order. */
__device__ __forceinline__ float dot(const unsigned char *h, const unsigned char *dh, int thread) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < STATE_TILES * TILE / 16 / 128; i++) {
        float u[8], v[8];
        widen(reinterpret_cast<const uint4 *>(h)[128 * i + thread], u, T());
        widen(reinterpret_cast<const uint4 *>(dh)[128 * i + thread], v, T());
#pragma unroll
        for (int n = 0; n < 8; n++) sum += u[n] * v[n];
    }
    return sum;
}

/* q: dh B_j. x_j . q_j of the lane's two tokens, times the decay to the chunk's end, is what they give through the
   state behind it; q takes the decay, too. */
__device__ __forceinline__ void decay_from_end(float (&q)[32], const unsigned (&x)[4][4], StepSums &sums,
                                               const Inputs &own, int lane) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float to_end = own.to_end[r];
        float dot = 0;
#pragma unroll
        for (int n = 0; n < 8; n++) {
            const float2 v = unpack(x[n / 2][n % 2 * 2 + r], T());
            dot += v.x * q[4 * n + 2 * r] + v.y * q[4 * n + 2 * r + 1];
            q[4 * n + 2 * r] *= to_end, q[4 * n + 2 * r + 1] *= to_end;
        }
        dot = row_sum(dot) * to_end;
        if (lane % 4 == 0) sums.through_end[own.j[r]] = dot, sums.dt[own.j[r]] = own.dt[r];
    }
}

/* dx = dt q + D dy, to the place of x. */
__device__ __forceinline__ void write_dx(const float (&q)[32], unsigned to, unsigned dy, const Inputs &own, float d,
                                         int warp, int lane) {
#pragma unroll
    for (int k = 0; k < 4; k++) {
        unsigned f[4], dx[4];
        ldmatrix_x4(f, spot_of_block(dy, warp, k, lane));
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = unpack(f[i], T());
            const int at = 8 * k + i / 2 * 4 + i % 2 * 2;
            dx[i] = pack(own.dt[i % 2] * q[at] + d * v.x, own.dt[i % 2] * q[at + 1] + d * v.y, T());
        }
        stmatrix_x4(spot_of_block(to, warp, k, lane), dx);
    }
}

/* Where a head's tiles are. */
struct Places {
    Phase<STATE_STAGES> state;
    Phase<2> sums;
    int stage;
};

/* A head: dx, and what it adds to dB. */
__device__ __forceinline__ void add_head(Shared &s, float (&db)[STATE / 2], const Places &at, float d, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32), state = warp_uniform(at.state.stage);
    const unsigned x = shared_address(s.x[at.stage]), dy = shared_address(s.dy[at.stage]);
    const unsigned dh = shared_address(s.dh[state]);
    StepSums &sums = s.sums[warp_uniform(at.sums.stage)];
    const Inputs own(s.lines[at.stage], warp, lane);
    unsigned rows[4][4], weighted[4][4], scores[4][4];
    float q[32]; // sums of dx without dt_j
    load_rows(rows, x, warp, lane);
    s.states_ring.wait_full(at.state);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STATE / 16; k++) {
        const int further = k / 4 * TILE + k % 4 * 32;
        wgmma<64>(q, advance(k_major(shared_address(s.b)), further), advance(k_major(dh), further), k > 0, T());
    }
    wgmma_commit();
#pragma unroll
    for (int i = 0; i < 16; i++) {
        const float by = own.dt[i % 2] * own.to_end[i % 2];
        weighted[i / 4][i % 4] = scaled(rows[i / 4][i % 4], by, by);
    }
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma<STATE, MN_MAJOR>(db, weighted[k], advance(mn_major(dh), 16 * k * 128), true, T());
    wgmma_commit();
    const float through = warp_sum(dot(s.h[state][0], s.dh[state][0], thread)) * s.lines[at.stage].whole();
    wgmma_wait<0>();
    keep(q), keep(db);
    fence_async_proxy(); // of what has been read of h and dh
    __syncwarp();
    if (lane == 0) s.states_ring.release(at.state); // early: the next states but one are on their way then
    s.sums_ring.wait_empty(at.sums);
    if (lane == 0) sums.state[warp] = through;
    decay_from_end(q, rows, sums, own, lane);
    s.scores_ring.wait_full(at.sums);
    load_rows(scores, shared_address(s.scores[warp_uniform(at.sums.stage)]), warp, lane);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++) wgmma<64, MN_MAJOR>(q, scores[k], advance(mn_major(dy), 16 * k * 128), true, T());
    wgmma_commit();
    wgmma_wait<0>();
    keep(q);
    __syncwarp();
    if (lane == 0) s.scores_ring.release(at.sums);
    write_dx(q, x, dy, own, d, warp, lane);
}

__device__ __forceinline__ void walk_inputs(Shared &s, const Sizes &sizes, const float *d_skip, float *to, int chunk,
                                            const Run &run, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    float db[STATE / 2];
    clear(db);
    s.chunk_full.wait(0);
    Phase<STAGES> phase;
    Places at{};
    for (int row = run.first; row < run.last; row++, phase.advance(), at.state.advance(), at.sums.advance()) {
        at.stage = warp_uniform(phase.stage);
        const float d = d_skip ? d_skip[sizes.head_of(row)] : 0;
        s.ring.wait_full(phase);
        add_head(s, db, at, d, thread);
        fence_async_proxy(); // of dx
        __syncwarp();
        if (lane == 0) s.sums_ring.full[at.sums.stage].arrive(), s.dx_full[at.stage].arrive();
    }
    named_barrier<384>(TURNED);
    unsigned sums[4][4];
    load_rows(sums, shared_address(s.scores[0]), warp, lane);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma<STATE, MN_MAJOR>(db, sums[k], advance(mn_major(shared_address(s.c)), 16 * k * 128), true, T());
    wgmma_commit();
    wgmma_wait<0>();
    keep(db);
    write_sums(to, db, sizes, chunk, thread);
}
