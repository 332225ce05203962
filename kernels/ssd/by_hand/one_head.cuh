/* What one warpgroup does with a chunk of one head, a step of SSD after the other (chapter 15's first two rungs). The
   pieces are fused.cu's own; there they belong to roles, and run beside each other. headdim 64, dstate 64 or 128. */
#pragma once
#include "../../device/hopper/tma.cuh"
#include "../decays.cuh"
#include "../multiply.cuh"
#include "../scores.cuh"
#include "plain_sizes.cuh"

static_assert(S::HEADDIM == 64 && !S::PADDED_STATE && !S::GATED && S::Skip::KIND == D_PER_HEAD);

/* A chunk in shared memory: what TMA brings. */
struct Tiles {
    unsigned char x[TILE]; // and y, when x has been read
    unsigned char b[STATE_TILES][TILE], c[STATE_TILES][TILE];
};
struct HeadMaps {
    const CUtensorMap &x, &b, &c;
};

/* One head: where it is, and its numbers. */
struct Head {
    int batch, head, group;
    const Dt *dt; // of its first token
    float slope, bias, skip;

    __device__ __forceinline__ Head(int number, const Sizes &sizes, const Dt *first, const float *a,
                                    const Bias *dt_bias, const D *d_skip)
        : batch(number / sizes.heads), head(number % sizes.heads), group(head / (sizes.heads / sizes.groups)),
          dt(first + batch * sizes.dt_batch + head * sizes.dt_head), slope(a[head] * LOG2_E),
          bias(as_float(dt_bias[head])), skip(as_float(d_skip[head])) {}
    /* Where its tile of x or y lies. */
    __device__ __forceinline__ Place place(int chunk) const { return {{0, chunk * CHUNK, 0, head, batch}}; }
};

/* By one thread: all tiles of a chunk, which arrive at `full`. */
__device__ __forceinline__ void ask_for(Tiles &to, const HeadMaps &maps, const Head &of, int chunk, Barrier &full) {
    const Place group = {{0, chunk * CHUNK, 0, of.group, of.batch}};
    full.expect(sizeof(Tiles));
    load_tile(to.x, maps.x, of.place(chunk), full, LEAVES_FIRST);
    load_tile(to.b, maps.b, group, full, LEAVES_LAST);
    load_tile(to.c, maps.c, group, full, LEAVES_LAST);
}

/* Step 1, by a warp: dt into decays. Past the sequence's end nothing is added, and nothing decays. */
__device__ __forceinline__ void write_decays(Decays &to, const Head &of, const Sizes &sizes, int chunk, int lane) {
    const int token = chunk * CHUNK + 2 * lane;
    float2 steps = {0, 0};
    if (token < sizes.seqlen) steps.x = step_of(as_float(of.dt[token * sizes.dt_token]) + of.bias, sizes);
    if (token + 1 < sizes.seqlen) steps.y = step_of(as_float(of.dt[(token + 1) * sizes.dt_token]) + of.bias, sizes);
    LaneDecays decays;
    decays.make(steps, of.slope, {}, false, lane);
    decays.store_decays(to, lane);
    decays.store_weights(to, {}, lane);
}

/* Scores of blocks above the diagonal that are multiplied: they stay zero. Once. */
__device__ __forceinline__ void clear_scores(unsigned char *scores, int warp, int lane) {
    if (warp % 2 == 0) stmatrix_x4(spot_of_block(shared_address(scores), warp, warp + 1, lane), {0, 0, 0, 0});
}
/* Step 2: scores, C B^T times decays and dt. */
__device__ __forceinline__ void score(unsigned char *scores, const Tiles &tiles, const Decays &by, float skip, int warp,
                                      int lane) {
    const unsigned to = shared_address(scores);
    float g[32];
    start_products(g, shared_address(tiles.b), shared_address(tiles.c));
    wgmma_wait<0>();
    keep(g);
    LaneScores made; // each makes its own
    if (warp == 0) write_scores<0>(g, by, made, to, skip, lane);
    else if (warp == 1) write_scores<1>(g, by, made, to, skip, lane);
    else if (warp == 2) write_scores<2>(g, by, made, to, skip, lane);
    else write_scores<3>(g, by, made, to, skip, lane);
    fence_async_proxy(); // wgmma reads them next
}

/* Steps 3 to 5: y to the place of x, and the state behind the chunk. */
__device__ __forceinline__ void walk_chunk(float (&state)[THREAD_NUMBERS], Tiles &tiles, const unsigned char *scores,
                                            const Decays &by, int thread) {
    const int lane = thread % 32;
    const unsigned x = shared_address(tiles.x);
    unsigned before[STATE / 16][4], own[4][4], weighted[4][4], no_z[4][4];
    YSums y;
    load_fragments(own, x, thread);
    weigh(weighted, own, by, lane);
    to_fragments(before, state);
#pragma unroll
    for (int i = 0; i < THREAD_NUMBERS; i++) state[i] *= by.block_decay[1].y;
    wgmma_fence();
    start_from_state(y.from_state, before, shared_address(tiles.c));
    start_from_scores(y.early, y.late, own, shared_address(scores));
    add_to_state(state, weighted, shared_address(tiles.b));
    wgmma_commit();
    wgmma_wait<0>();
    keep(y.from_state), keep(y.early), keep(y.late), keep(state);
    float4 decays[4]; // of tokens 16 i + lane % 4 * 2 and the next, and those 8 behind them
#pragma unroll
    for (int i = 0; i < 4; i++)
        decays[i] = *reinterpret_cast<const float4 *>(&by.decay_from_start[place_of_decay(16 * i + lane % 4 * 2)]);
    write_y(y, decays, x, nullptr, WIDTH, no_z, thread);
    fence_async_proxy(); // TMA reads y next
}
