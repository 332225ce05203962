/* The role of two warpgroups, one for each row of a pair, or for each half of a row's state: steps 3, 4 and 5. The
   state stays in registers, transposed, (WIDTH, PART): so it is the left factor of y^T = state C^T and the sum of
   state += (x w)^T B, and never passes through shared memory. */
#pragma once
#include "../device/hopper/tma.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "chain.cuh"
#include "halves.cuh"
#include "sequences.cuh"

constexpr float NEVER = -1e30f; // what is below is -infinity: nothing is negligible

/* Two warpgroups that walk in step ask the tensor cores for the same at the same time, and then both make y, while the
   tensor cores rest. With a gate y takes long: so there they take turns, and one starts the products of a chunk while
   the other makes y. Without, turns do not pay. */
constexpr bool TURNS = S::GATED && !S::HALVES;
constexpr int TURN_OF = 3; // and 4: barriers, of side 0 and of side 1
__device__ __forceinline__ void wait_for_turn(int side) { named_barrier<256>(TURN_OF + side); }
__device__ __forceinline__ void give_turn(int to) { named_barrier_arrive<256>(TURN_OF + to); }

/* Pass 1: the state alone. Weights reach to the piece's end, so no older sum decays. */
__device__ __forceinline__ void add_chunk(float (&state)[THREAD_NUMBERS], const Decays &by, const Begins &begins,
                                          unsigned x, unsigned b, int thread) {
    unsigned own[4][4], weighted[4][4];
    load_fragments(own, x, thread);
    weigh(weighted, own, by, thread % 32);
    if (S::SEQUENCES && by.sequence_begins) return add_last_sequence(state, weighted, begins, b, thread % 32);
    wgmma_fence();
    add_to_state(state, weighted, b);
    wgmma_commit();
    wgmma_wait<0>();
    keep(state);
}

/* Step 5, from the chunk's own tokens: x^T scores^T; a token j is of no use to the tokens before its block. */
__device__ __forceinline__ void start_from_scores(float (&early)[16], float (&late)[16], const unsigned (&x)[4][4],
                                                  unsigned scores) {
#pragma unroll
    for (int k = 0; k < 4; k++)
#pragma unroll
        for (int half = k / 2; half < 2; half++)
            wgmma<32, K_MAJOR>(half ? late : early, x[k], advance(k_major(scores), half * 32 * 128 + k * 32), k > 0,
                               T());
}

/* The end of a piece of pass 2: of the sequence, or of what this share has of it. */
__device__ __forceinline__ void end_piece(Shared &s, const float (&state)[THREAD_NUMBERS], const Step &step,
                                          const Sizes &sizes, const Chain &chain, float *final_states, int side,
                                          int thread) {
    if (step.chunk + 1 == sizes.chunks) {
        if (final_states)
            write_matrix(final_states + step.column(side, sizes.heads) * S::DSTATE, state, step.columns(side), side,
                         thread);
    } else if (sizes.log2_negligible > NEVER && __any_sync(~0u, not_finite(state))) {
        chain.mark(step.pair, s.launch);
        store_relaxed(&s.has_marked_pair, 1);
    }
}

/* Pass 2 of a chunk: y, and the state behind it. Products run on by themselves; what else there is to do is done while
   they do. */
__device__ __forceinline__ void write_chunk(Shared &s, float (&state)[THREAD_NUMBERS], const Step &step,
                                            const Sizes &sizes, Phase<STAGES> phase, Phase<2> turn, int stage,
                                            int side, const D *d_skip, const Ends &ends, int thread) {
    const int lane = thread % 32;
    const Begins &begins = s.begins[S::SEQUENCES ? stage : 0];
    const Decays &by = s.decays[stage][side];
    const unsigned x = shared_address(s.x[stage][side]);
    unsigned before[PART / 16][4], own[4][4], weighted[4][4];
    YSums y;
    // from the state before the chunk; meanwhile it decays
    to_fragments(before, state);
    if constexpr (TURNS) wait_for_turn(side);
    wgmma_fence();
    start_from_state(y.from_state, before, shared_address(s.c[stage]));
    wgmma_commit();
    if (S::SEQUENCES && by.sequence_begins) end_sequence(state, step, sizes, ends, side, thread);
    decay(state, by.block_decay[1].y);
    load_fragments(own, x, thread);
    wgmma_wait<0>(); // the operands' registers are free
    weigh(weighted, own, by, lane);

    // from the chunk's own tokens; and the state behind the chunk
    const int place = warp_uniform(turn.stage);
    s.scores_ring.wait_full(turn);
    wgmma_fence();
    start_from_scores(y.early, y.late, own, shared_address(s.scores[place][side]));
    wgmma_commit();
    add_to_state(state, weighted, shared_address(s.b[stage]));
    wgmma_commit();
    if constexpr (TURNS) give_turn(1 - side);
    keep(y.from_state);
    if (S::SEQUENCES && by.sequence_begins) drop_from_state(y.from_state, begins, lane);
    float4 decays[4]; // of tokens 16 i + lane % 4 * 2 and the next, and those 8 behind them
#pragma unroll
    for (int i = 0; i < 4; i++)
        decays[i] = *(const float4 *)&by.decay_from_start[place_of_decay(16 * i + lane % 4 * 2)];
    wgmma_wait<1>(); // all but the state
    keep(y.early);
    keep(y.late);
    // Infinity or NaN in x meets zeros of scores, those of the first token of each half at least.
    if (__builtin_expect(__any_sync(~0u, not_finite(y.early[0], y.early[2], y.late[0], y.late[2])), 0))
        from_earlier(y.early, y.late, s.x[phase.stage][side], s.scores[turn.stage][side], begins, thread);
    __syncwarp();
    if (lane == 0) s.scores_ring.release(turn);

    const D *d = d_skip + step.head(side) * S::HEADDIM + step.head_part(side) * WIDTH;
    unsigned z[4][4];
    if constexpr (S::GATED) {
        s.z_ring.wait_full(turn);
        load_fragments(z, shared_address(s.z[turn.stage][side]), thread);
    }
    write_y(y, decays, x, d, step.columns(side), z, thread);
    // z is given back here, not behind its loads: these may be on their way when an arrival behind them is seen
    // already, and TMA does not wait for them.
    fence_async_proxy(); // of y, and of what has been read of z
    __syncwarp();
    if (lane == 0) {
        s.y_full[phase.stage].arrive();
        if constexpr (S::GATED) s.z_ring.release(turn);
    }
    wgmma_wait<0>();
    keep(state);
    if (S::SEQUENCES && by.sequence_begins && __any_sync(~0u, not_finite(state))) { // perhaps from another sequence
        clear(state);
        add_last_sequence(state, weighted, begins, shared_address(s.b[stage]), lane);
    }
}

__device__ __forceinline__ void multiply(Shared &s, const Sizes &sizes, const Chain &chain, int side, const D *d_skip,
                                         const Initial *initial, float *final_states, const Ends &ends, int thread) {
    Turns turns; // of scores and z
    float state[THREAD_NUMBERS];
    if (TURNS && side == 1) give_turn(0); // who begins
    for (Phase<STAGES> phase;; phase.advance()) {
        s.ring.wait_full(phase);
        const Step &step = s.steps[phase.stage];
        const int stage = warp_uniform(phase.stage), kind = warp_uniform(step.kind);
        if (kind & END) {
            if (TURNS && side == 0) wait_for_turn(0); // what the other has given last
            return;
        }
        const int row = S::HALVES ? 0 : side, tile = S::HALVES ? side * PART_TILES : 0;
        const int group = S::HALVES ? warp_uniform(place_of_group(phase)) : stage;
        const Decays &by = s.decays[stage][row];
        const Begins &begins = s.begins[S::SEQUENCES ? stage : 0];
        if (kind & LOCAL) {
            if (kind & FIRST) clear(state);
            if (!warp_uniform(by.skip))
                add_chunk(state, by, begins, shared_address(s.x[stage][row]), shared_address(s.b[group][tile]), thread);
            if (S::HALVES && thread % 32 == 0) s.b_empty[group].arrive(), s.c_empty[group].arrive();
        } else {
            if (__builtin_expect(kind & PUBLISH, 0))
                hand_on(state, by.log_piece, chain, step.ticket, s.launch, side, thread);
            if (__builtin_expect(kind & FIRST, 0)) look_back(state, s, step, sizes, chain, initial, side, thread);
            if constexpr (S::HALVES) write_chunk_of_half(s, state, step, phase, turns, group, side, d_skip, thread);
            else write_chunk(s, state, step, sizes, phase, turns, stage, side, d_skip, ends, thread);
            turns.advance();
            if (__builtin_expect(kind & LAST && (side == 0 || !(kind & SINGLE)), 0))
                end_piece(s, state, step, sizes, chain, final_states, side, thread);
        }
        __syncwarp();
        if (thread % 32 == 0) s.ring.release(phase);
    }
}
