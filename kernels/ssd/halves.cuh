/* Steps 3, 4 and 5 where dstate is more than 128: a block has one row, and each of its two warpgroups half of the
   columns of its state, 128, as many as registers hold. A half goes its way without the other. But y is the sum of what
   both give, state C^T of either half: a warpgroup finishes 32 tokens of the chunk, and hands the other its sums of the
   other 32, through shared memory, a warp to the warp of the same columns of x. */
#pragma once
#include "chain.cuh"
#include "y.cuh"

/* Sums of y, of which the other warpgroup finishes 16: a thread has them where the other's has its own. Its own are to
   be `kept`. y is to take the place of x: to hand over also says that this warp has read x. */
__device__ __forceinline__ void hand_over(Handed &handed, float (&kept)[16], const float (&from_state)[32], int turn,
                                          int side, int thread) {
    float given[16];
#pragma unroll
    for (int i = 0; i < 16; i++) {
        kept[i] = side ? from_state[16 + i] : from_state[i];
        given[i] = side ? from_state[i] : from_state[16 + i];
    }
#pragma unroll
    for (int i = 0; i < 4; i++)
        handed.sums[turn][side][i][thread] =
            make_float4(given[4 * i], given[4 * i + 1], given[4 * i + 2], given[4 * i + 3]);
    __syncwarp();
    if (thread % 32 == 0) handed.full[turn][4 * side + thread / 32].arrive();
}
/* Of the warpgroup's own tokens, what both halves give. Nobody says that a place is free again: who hands over anew has
   taken what the other gave later than it took this. */
__device__ __forceinline__ void take_over(float (&kept)[16], const Handed &handed, Phase<2> turn, int side,
                                          int thread) {
    handed.full[turn.stage][4 * (1 - side) + thread / 32].wait(turn.parity);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const float4 other = handed.sums[turn.stage][1 - side][i][thread];
        kept[4 * i] += other.x, kept[4 * i + 1] += other.y;
        kept[4 * i + 2] += other.z, kept[4 * i + 3] += other.w;
    }
}

/* The warpgroup's 32 tokens, to the place of x. */
__device__ __forceinline__ void write_y_of_half(const float (&from_state)[16], const float (&own)[16],
                                                const float4 (&decays)[2], unsigned x, const D *d, int columns,
                                                const unsigned (&z)[2][4], int side, int thread) {
    const int lane = thread % 32, warp = thread / 32;
#pragma unroll
    for (int k = 0; k < 2; k++)
        write_tokens(from_state + 8 * k, own + 8 * k, decays[k], x, 2 * side + k, d, columns, z[k], thread);
}

/* Pass 2 of a chunk: y of 32 tokens, and the half of the state behind it. As write_chunk in multiply.cuh. */
__device__ __forceinline__ void write_chunk_of_half(Shared &s, float (&state)[THREAD_NUMBERS], const Step &step,
                                                    Phase<STAGES> phase, Phase<2> turn, int group, int side,
                                                    const D *d_skip, int thread) {
    const int lane = thread % 32;
    const Decays &by = s.decays[phase.stage][0];
    const unsigned x = shared_address(s.x[phase.stage][0]);
    unsigned before[PART / 16][4], own[4][4], weighted[4][4];
    float from_state[32], from_tokens[16];
    // from the state before the chunk; meanwhile it decays
    to_fragments(before, state);
    wgmma_fence();
    start_from_state(from_state, before, shared_address(s.c[group][side * PART_TILES]));
    wgmma_commit();
    decay(state, by.block_decay[1].y);
    load_fragments(own, x, thread);
    wgmma_wait<0>(); // the operands' registers are free, and so is C
    keep(from_state);
    if (lane == 0) s.c_empty[group].arrive();
    weigh(weighted, own, by, lane);

    // from the chunk's own tokens; and the state behind the chunk
    const int place = warp_uniform(turn.stage);
    s.scores_ring.wait_full(turn);
    wgmma_fence();
    const unsigned scores = shared_address(s.scores[place][0]);
#pragma unroll
    for (int k = 0; k < 4; k++) // for the first 32 tokens the last two are zeros
        wgmma<32, K_MAJOR>(from_tokens, own[k], advance(k_major(scores), side * 32 * 128 + k * 32), k > 0, T());
    wgmma_commit();
    add_to_state(state, weighted, shared_address(s.b[group][side * PART_TILES]));
    wgmma_commit();
    float kept[16]; // of the sums over the state
    hand_over(s.handed, kept, from_state, place, side, thread);
    float4 decays[2]; // of tokens 16 i + lane % 4 * 2 of the 32 and the next, and those 8 behind them
#pragma unroll
    for (int i = 0; i < 2; i++)
        decays[i] = *(const float4 *)&by.decay_from_start[place_of_decay(32 * side + 16 * i + lane % 4 * 2)];
    wgmma_wait<1>(); // all but the state
    keep(from_tokens);
    // Infinity or NaN in x meets zeros of scores, those of the first of the 32 tokens at least.
    if (__builtin_expect(__any_sync(~0u, not_finite(from_tokens[0], from_tokens[2], 0, 0)), 0))
        from_earlier_of_half(from_tokens, own, s.scores[place][0], side, lane);
    __syncwarp();
    if (lane == 0) s.scores_ring.release(turn);

    const D *d = d_skip + step.head(0) * S::HEADDIM + step.head_part(0) * WIDTH;
    unsigned z[2][4];
    if constexpr (S::GATED) {
        s.z_ring.wait_full(turn);
#pragma unroll
        for (int k = 0; k < 2; k++)
            ldmatrix_x4_trans(z[k], spot_of_tokens(shared_address(s.z[place][0]), 2 * side + k, thread / 32, lane));
    }
    take_over(kept, s.handed, {place, turn.parity}, side, thread);
    write_y_of_half(kept, from_tokens, decays, x, d, step.columns(0), z, side, thread);
    fence_async_proxy(); // of y, and of what has been read of z (multiply.cuh)
    __syncwarp();
    if (lane == 0) {
        s.y_full[phase.stage].arrive();
        if constexpr (S::GATED) s.z_ring.release(turn);
    }
    wgmma_wait<0>();
    keep(state);
    if (lane == 0) s.b_empty[group].arrive();
}
