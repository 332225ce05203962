/* Who does what in fused.cu. The chunks of all pairs of rows stand in one line, which is cut into shares that cost the
   same, one for each ticket. */
#pragma once
#include "shared.cuh"
#include "steps.cuh"

constexpr float PASS_1 = 0.4f; // what a chunk of pass 1 counts, if one of pass 2 counts 1

/* Where a share begins in a pair, if not before it or behind it: cuts[share] holds a pair and, in 1 / 65536, what of it
   lies before. */
__device__ __forceinline__ int cut(const Shared &s, const Sizes &sizes, int share, int pair) {
    const unsigned cut = s.cuts[share];
    if ((int)(cut >> 16) != pair) return (int)(cut >> 16) < pair ? 0 : sizes.chunks;
    return (unsigned long long)(cut & 0xFFFF) * sizes.chunks >> 16;
}

/* How slowly a row decays with its dt_bias alone: chunks until nothing is left, at most 1e9. */
__device__ __forceinline__ float chunks_left(const Sizes &sizes, int row, const float *a, const Bias *dt_bias) {
    const float v = dt_bias ? as_float(dt_bias[row / S::HEAD_PARTS]) : S::Steps::SOFTPLUS ? 0 : 0.01f;
    const float rate = -a[row / S::HEAD_PARTS] * step_of(v, sizes) * LOG2_E * CHUNK;
    return rate > 0 ? fminf(-sizes.log2_negligible / rate, 1e9f) : 1e9f; // NaN too: ranks need an order
}

/* Rows in the order of the batch, shares of equal length. */
__device__ __forceinline__ void share_out_evenly(Shared &s, const Sizes &sizes) {
    const int rows = sizes.groups * sizes.rows;
    for (int i = threadIdx.x; i < rows && i < MOST_ROWS; i += blockDim.x) s.order[i] = i;
    for (int i = threadIdx.x; i <= sizes.tickets; i += blockDim.x)
        s.cuts[i] = ((unsigned long long)i * sizes.pairs << 16) / (unsigned)sizes.tickets;
}

/* Rows of a group, slow ones first, by rank: no two have the same. */
__device__ __forceinline__ void order_rows(Shared &s, const Sizes &sizes, float *left, const float *a,
                                           const Bias *dt_bias) {
    const int rows = sizes.groups * sizes.rows;
    for (int i = threadIdx.x; i < rows; i += blockDim.x) left[i] = chunks_left(sizes, i, a, dt_bias);
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const int begin = i / sizes.rows * sizes.rows;
        int rank = begin;
        for (int j = begin; j < begin + sizes.rows; j++) rank += left[j] > left[i] || (left[j] == left[i] && j < i);
        s.order[rank] = i;
    }
}

/* Where share i of the line begins: pairs of a batch cost `cost`, all of them `whole`. */
__device__ __forceinline__ unsigned cut_at(const Sizes &sizes, int i, const float *cost, float whole, int of_batch) {
    if (i == sizes.tickets) return (unsigned)sizes.pairs << 16;
    const int batches = sizes.pairs / of_batch;
    float at = whole * batches * i / sizes.tickets;
    const int batch = min((int)(at / whole), batches - 1);
    at = fmaxf(at - whole * batch, 0); // rounding may have gone below
    int pair = 0;
    for (; pair < of_batch && at >= cost[pair]; pair++) at -= cost[pair];
    const unsigned part = pair < of_batch ? min((unsigned)(at / cost[pair] * 65536), 65535u) : 0;
    return (unsigned)(batch * of_batch + pair) << 16 | part;
}

/* Cut the line of all pairs, one behind the other, into shares that cost the same, by all threads. Rows that decay
   alike are made pairs, slow ones first: pass 1 of a pair is as long as its slower row makes it. What is guessed here
   moves work between blocks, and changes results by rounding alone. */
__device__ __forceinline__ void share_out(Shared &s, const Sizes &sizes, const float *a, const Bias *dt_bias) {
    if (!sizes.sort) return share_out_evenly(s, sizes);
    const int of_batch = sizes.groups * sizes.pairs_of_group; // pairs
    float *left = reinterpret_cast<float *>(s.scores), *cost = left + MOST_ROWS;
    order_rows(s, sizes, left, a, dt_bias);
    __syncthreads();
    const float share = (float)sizes.chunks * sizes.pairs / sizes.tickets;
    for (int i = threadIdx.x; i < of_batch; i += blockDim.x) { // of a chunk of a pair, with its part of pass 1
        const int row = s.order[i / sizes.pairs_of_group * sizes.rows + ROWS * (i % sizes.pairs_of_group)];
        cost[i] = 1 + PASS_1 * fminf(1, left[row] / share);
    }
    __syncthreads();
    float whole = 0; // of a batch
    for (int j = 0; j < of_batch; j++) whole += cost[j];
    for (int i = threadIdx.x; i <= sizes.tickets; i += blockDim.x) s.cuts[i] = cut_at(sizes, i, cost, whole, of_batch);
}

/* What a ticket stands for: pieces of pairs, the last of which may go on in the next share. */
struct Share {
    const Shared &s;
    const Sizes &sizes;
    int ticket;

    __device__ __forceinline__ int first_pair() const { return s.cuts[ticket] >> 16; }
    __device__ __forceinline__ int last_pair() const { return min(s.cuts[ticket + 1] >> 16, sizes.pairs - 1); }
    /* Chunks of a pair. */
    __device__ __forceinline__ int begin(int pair) const { return cut(s, sizes, ticket, pair); }
    __device__ __forceinline__ int end(int pair) const { return cut(s, sizes, ticket + 1, pair); }
    /* Whether the next share goes on from the last piece. */
    __device__ __forceinline__ bool hands_on() const {
        const int pair = last_pair();
        return begin(pair) < end(pair) && end(pair) < sizes.chunks;
    }
};
