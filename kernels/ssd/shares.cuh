/* Who does what in fused.cu: how the chunks of all pairs of rows are shared out to tickets. */
#pragma once
#include "fused.cuh"

/* How the chunks of a stretch are shared out. In a long one, each pair has as many pieces as there are shares for all
   pairs: these are the first shares, the first pieces of all pairs first, so that the blocks go through the sequence
   side by side and find in L2 what others have brought. The rests of all pairs stand in one line, which the other
   shares cut evenly. */
struct Line {
    int first, length; // chunks of the stretch
    int pieces, rests; // pieces of a pair; the first share of rests
    DEVICE Line(const Sizes &s, int stretch)
        : first(stretch * s.stretch), length(min(s.stretch, s.chunks - stretch * s.stretch)), pieces(s.pieces),
          rests(s.pieces * s.pairs) {}
    /* Where a piece of a pair begins; piece `pieces` is the rest. */
    DEVICE int begin(const Shared &s, int pair, int piece) const {
        return piece == 0 ? 0 : min(length, (piece * (s.piece[pair] + 1) * length + 65535) >> 16);
    }
    /* Where a share of the rests begins in this pair, if not before it or behind it. */
    DEVICE int cut(const Shared &s, int share, int pair) const {
        const unsigned cut = s.cuts[share - rests];
        const int rest = begin(s, pair, pieces);
        if ((int)(cut >> 16) != pair) return (int)(cut >> 16) < pair ? rest : length;
        return rest + ((cut & 0xFFFF) * (length - rest) >> 16);
    }
};

/* log(1 + exp(v)), to 2e-6 of itself: |s| is at most 1/3. */
DEVICE float softplus(float v) {
    const float e = exp2_(-LOG2_E * fabsf(v)), s = __fdividef(e, 2 + e), t = s * s;
    return fmaxf(v, 0) + 2 * s * (1 + t * (1 / 3.f + t * (1 / 5.f + t * (1 / 7.f + t * (1 / 9.f)))));
}

/* How slowly a row decays with its dt_bias alone: chunks until nothing is left, at most 1e9. */
DEVICE float chunks_left(const Sizes &sizes, int row, const float *a, const BIAS_T *dt_bias) {
    float v = dt_bias ? as_float(dt_bias[row / HALVES]) : SOFTPLUS ? 0 : 0.01f;
    if (SOFTPLUS) v = softplus(v);
    v = v < sizes.dt_low ? sizes.dt_low : v > sizes.dt_high ? sizes.dt_high : v;
    const float rate = -a[row / HALVES] * v * LOG2_E * CHUNK;
    return rate > 0 ? fminf(-sizes.stop / rate, 1e9f) : 1e9f; // NaN too: ranks need an order
}

/* Make shares that cost the same, by all threads. Rows that decay alike are made pairs, slow ones first: pass 1 of a
   pair is as long as its slower row makes it. What is guessed here moves work between blocks, and changes results by
   rounding alone. */
DEVICE void share_out(Shared &s, const Sizes &sizes, const float *a, const BIAS_T *dt_bias) {
    const int of_batch = sizes.groups * sizes.pairs_of_group, rows = sizes.groups * sizes.rows, pairs = sizes.pairs;
    const int rests = sizes.tickets - sizes.pieces * pairs; // shares of rests
    if (!sizes.sort) {
        for (int i = threadIdx.x; i < rows && i < MOST_ROWS; i += blockDim.x) s.order[i] = i;
        for (int i = threadIdx.x; i <= rests; i += blockDim.x) s.cuts[i] = ((u64)i * pairs << 16) / (unsigned)rests;
        return; // the plan has no pieces, then
    }
    float *left = reinterpret_cast<float *>(s.scores), *cost = left + MOST_ROWS;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) left[i] = chunks_left(sizes, i, a, dt_bias);
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const int begin = i / sizes.rows * sizes.rows;
        int rank = begin;
        for (int j = begin; j < begin + sizes.rows; j++) rank += left[j] > left[i] || (left[j] == left[i] && j < i);
        s.order[rank] = i;
    }
    __syncthreads();
    const float share = (float)min(sizes.stretch, sizes.chunks) * pairs / sizes.tickets;
    auto pass_1 = [&](int i) { // what it adds to the cost of a chunk of a pair
        const int row = s.order[i / sizes.pairs_of_group * sizes.rows + 2 * (i % sizes.pairs_of_group)];
        return PASS_1 * fminf(1, left[row] / share);
    };
    for (int i = threadIdx.x; i < of_batch; i += blockDim.x) cost[i] = 1 + pass_1(i);
    __syncthreads();
    float whole = 0;    // of a batch
    if (sizes.pieces) { // a piece of any pair costs the same as a share of rests, where about half has a pass 1
        float all = 0;
        for (int j = 0; j < of_batch; j++) all += (1 + cost[j]) / 2, whole += (1 + cost[j]) / 2 / cost[j];
        const int batches = pairs / of_batch;
        const float one = batches * all / (rests + sizes.pieces * batches * whole);
        __syncthreads();
        for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
            const float part = rests ? fminf(one / cost[i % of_batch], 1.f / sizes.pieces) : 1.f / sizes.pieces;
            s.piece[i] = min((int)(65536 * part), 65535);
        }
        __syncthreads();
        for (int i = threadIdx.x; i < of_batch; i += blockDim.x)
            cost[i] = (65536 - sizes.pieces * s.piece[i]) * (1 + pass_1(i) / 2);
        __syncthreads();
    }
    whole = 0;
    for (int j = 0; j < of_batch; j++) whole += cost[j];
    for (int i = threadIdx.x; i <= rests; i += blockDim.x) {
        const int batches = pairs / of_batch;
        float at = rests ? whole * batches * i / rests : 0;
        const int batch = min((int)(at / whole), batches - 1);
        at -= whole * batch;
        int pair = 0;
        for (; pair < of_batch && at >= cost[pair]; pair++) at -= cost[pair];
        const unsigned part = pair < of_batch ? min((unsigned)(at / cost[pair] * 65536), 65535u) : 0;
        s.cuts[i] = i == rests ? (unsigned)pairs << 16 : (unsigned)(batch * of_batch + pair) << 16 | part;
    }
}
