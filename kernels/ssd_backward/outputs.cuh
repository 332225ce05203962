/* The role of a warpgroup in chunks.cu: tokens as outputs, i, a row of the products for each. It makes dC, and of the
   steps' gradients what belongs to outputs and to the state; and for both roles the state between two chunks. */
#pragma once
#include "inputs.cuh"
#include "walk.cuh"

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

/* The state between the pair's chunks, in the place of the one before or behind the pair: what the other chunk's tokens
   make of it. */
__device__ __forceinline__ void make_between(Shared &s, const Half &half, int stage, int state, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    const unsigned place = shared_address(half.second() ? s.h[state] : s.dh[state]);
    float between[STATE / 2];
    load_state(between, place, warp, lane);
    add_chunk<STATE>(between, shared_address(s.other_rows[stage]), shared_address(s.other_columns),
                     s.other_lines[stage], !half.second(), warp, lane);
#pragma unroll
    for (int k = 0; k < STATE / 16; k++)
        store_columns(spot_of_block(place + k / 4 * TILE, warp, k % 4, lane), between, k);
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) s.between_full[state].arrive();
}

/* A head: what it adds to dC, and sums of the steps. */
__device__ __forceinline__ void add_outputs(Shared &s, float (&dc)[STATE / 2], int stage, int state, StepSums &sums,
                                            int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32), first = 16 * warp + lane / 4;
    const unsigned h = shared_address(s.h[state]);
    const Line &line = s.lines[stage];
    const float decay[2] = {line.from_start(first), line.from_start(first + 8)};
    unsigned dy[4][4], weighted[4][4];
    float y[32]; // of the state before the chunk, without the decay from there
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STATE / 16; k++) {
        const int further = k / 4 * TILE + k % 4 * 32;
        wgmma<64>(y, advance(k_major(shared_address(s.c)), further), advance(k_major(h), further), k > 0, T());
    }
    wgmma_commit();
    load_rows(dy, shared_address(s.dy[stage]), warp, lane);
#pragma unroll
    for (int i = 0; i < 16; i++) weighted[i / 4][i % 4] = scaled(dy[i / 4][i % 4], decay[i % 2], decay[i % 2]);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma<STATE, MN_MAJOR>(dc, weighted[k], advance(mn_major(h), 16 * k * 128), true, T());
    wgmma_commit();
    const float through = warp_sum(dot(s.h[state][0], s.dh[state][0], thread));
    if (lane == 0) sums.state[warp] = through * line.whole();
    wgmma_wait<0>();
    keep(y), keep(dc);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float sum = row_sum(row_dot(dy, y, r)) * decay[r];
        if (lane % 4 == 0) sums.from_start[first + 8 * r] = sum;
    }
}

__device__ __forceinline__ void walk_outputs(Shared &s, const Sizes &sizes, float *to, const Half &half,
                                             const Run &run, int thread) {
    const int lane = thread % 32, warp = warp_uniform(thread / 32);
    float dc[STATE / 2];
    clear(dc);
    s.chunk_full.wait(0);
    Phase<STAGES> phase;
    Phase<STATE_STAGES> state;
    Phase<2> place;
    for (int row = run.first; row < run.last; row++, phase.advance(), state.advance(), place.advance()) {
        const int stage = warp_uniform(phase.stage), state_stage = warp_uniform(state.stage);
        s.ring.wait_full(phase);
        s.states_ring.wait_full(state);
        make_between(s, half, stage, state_stage, thread);
        s.between_full[state_stage].wait(state.parity);
        s.sums_ring.wait_empty(place);
        add_outputs(s, dc, stage, state_stage, s.sums[warp_uniform(place.stage)], thread);
        fence_async_proxy(); // of what has been read
        __syncwarp();
        if (lane == 0) s.sums_ring.full[place.stage].arrive(), s.ring.release(phase), s.states_ring.release(state);
    }
    named_barrier<256>(TURNED);
    unsigned sums[4][4];
    load_columns(sums, shared_address(s.turned), warp, lane);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
        wgmma<STATE, MN_MAJOR>(dc, sums[k], advance(mn_major(shared_address(s.b)), 16 * k * 128), true, T());
    wgmma_commit();
    wgmma_wait<0>();
    keep(dc);
    write_sums(to, dc, sizes, half.chunk, thread);
}
