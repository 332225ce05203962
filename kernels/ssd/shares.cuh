/* Who does what in fused.cu: how the chunks of all pairs of rows are shared out to tickets. */
#pragma once
#include "fused.cuh"

/* Where a share begins in a pair, if not before it or behind it: cuts[share] holds a pair and, in 1 / 65536, what of it
   lies before. */
DEVICE int cut(const Shared &s, const Sizes &sizes, int share, int pair) {
    const unsigned cut = s.cuts[share];
    if ((int)(cut >> 16) != pair) return (int)(cut >> 16) < pair ? 0 : sizes.chunks;
    return (u64)(cut & 0xFFFF) * sizes.chunks >> 16;
}

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

/* Cut the line of all pairs, one behind the other, into shares that cost the same, by all threads. Rows that decay
   alike are made pairs, slow ones first: pass 1 of a pair is as long as its slower row makes it. What is guessed here
   moves work between blocks, and changes results by rounding alone. */
DEVICE void share_out(Shared &s, const Sizes &sizes, const float *a, const BIAS_T *dt_bias) {
    const int of_batch = sizes.groups * sizes.pairs_of_group, rows = sizes.groups * sizes.rows;
    if (!sizes.sort) {
        for (int i = threadIdx.x; i < rows && i < MOST_ROWS; i += blockDim.x) s.order[i] = i;
        for (int i = threadIdx.x; i <= sizes.tickets; i += blockDim.x)
            s.cuts[i] = ((u64)i * sizes.pairs << 16) / (unsigned)sizes.tickets;
        return;
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
    const float share = (float)sizes.chunks * sizes.pairs / sizes.tickets;
    for (int i = threadIdx.x; i < of_batch; i += blockDim.x) { // of a chunk of a pair, with its part of pass 1
        const int row = s.order[i / sizes.pairs_of_group * sizes.rows + 2 * (i % sizes.pairs_of_group)];
        cost[i] = 1 + PASS_1 * fminf(1, left[row] / share);
    }
    __syncthreads();
    float whole = 0; // of a batch
    for (int j = 0; j < of_batch; j++) whole += cost[j];
    for (int i = threadIdx.x; i <= sizes.tickets; i += blockDim.x) {
        const int batches = sizes.pairs / of_batch;
        float at = whole * batches * i / sizes.tickets;
        const int batch = min((int)(at / whole), batches - 1);
        at = fmaxf(at - whole * batch, 0); // rounding may have gone below
        int pair = 0;
        for (; pair < of_batch && at >= cost[pair]; pair++) at -= cost[pair];
        const unsigned part = pair < of_batch ? min((unsigned)(at / cost[pair] * 65536), 65535u) : 0;
        s.cuts[i] = i == sizes.tickets ? (unsigned)sizes.pairs << 16 : (unsigned)(batch * of_batch + pair) << 16 | part;
    }
}
