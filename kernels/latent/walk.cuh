/* A block's way along its share of the line, for 16 to 64 heads: from segment to segment, from tile to tile. What
   becomes of a segment's sums is the epilogue's: split.cu leaves them for a second launch, others do the merge as
   well.

   Shared memory: queries [HEADS][WIDTH], STAGES tiles, weights [HEADS][TILE + 8], maxima [PARTS][HEADS]. */
#pragma once
#include "../device/pdl.cuh"
#include "../device/reduce_fragments.cuh"
#include "cache.cuh"
#include "line.cuh"
#include "products.cuh"
#ifndef STAGES
#define STAGES 2
#endif

/* What a kernel is told, but for where its results go. */
struct Problem {
    const T *q; // (batch, n_heads, WIDTH)
    Cache cache;
    Sequences sequences;
    int n_heads;
    float scale; // times log2(e)
};

/* Of a segment, the 16 heads and DIMS dimensions that a warp has. */
struct Place {
    int b, first_head, heads, first_dim; // head: of the sequence; heads: so many of 16 exist, or none
    int head_tile, share;
};

/* The result of a sequence that one block has had as a whole. */
__device__ __forceinline__ void store_result(T *out, const HeadSums &sums, const Place &at, int n_heads, int lane) {
    const int g = lane / 4, column = at.first_dim + lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        if (g + 8 * r >= at.heads) continue;
        T *to = out + ((long long)at.b * n_heads + at.first_head + g + 8 * r) * LATENT + column;
        const float share = sums.weights[2 * r] == 0 ? 0 : 1 / sums.weights[2 * r]; // 0: all its scores are -inf
#pragma unroll
        for (int n = 0; n < DIMS / 8; n++)
            *reinterpret_cast<unsigned *>(to + 8 * n) =
                pack(sums.values[n][2 * r] * share, sums.values[n][2 * r + 1] * share, T());
    }
}

/* What a merge makes the result of: line.cuh. */
struct Partial {
    float *partial_out;
    float2 *max_and_sum;

    __device__ __forceinline__ void store(const HeadSums &sums, const Place &at, int n_heads, int lane) const {
        const int g = lane / 4, column = at.first_dim + lane % 4 * 2;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (g + 8 * r >= at.heads) continue;
            const long long row = ((long long)at.share + at.b) * n_heads + at.first_head + g + 8 * r;
#pragma unroll
            for (int n = 0; n < DIMS / 8; n++)
                *reinterpret_cast<float2 *>(partial_out + row * LATENT + column + 8 * n) =
                    make_float2(sums.values[n][2 * r], sums.values[n][2 * r + 1]);
            if (column == 0) max_and_sum[row] = make_float2(sums.maximum[r], sums.weights[2 * r]);
        }
    }
};

/* Zeros for sequences without tokens, of which no block has a segment: each block has some. Where no second launch does
   it. */
__device__ __forceinline__ void clear_empty_sequences(const Problem &problem, T *out) {
    const int blocks = gridDim.x * gridDim.y, words = problem.n_heads * LATENT / 8;
    for (int b = blockIdx.y * gridDim.x + blockIdx.x; b < problem.sequences.batch; b += blocks)
        if (problem.sequences.length(b) == 0)
            for (int i = threadIdx.x; i < words; i += 32 * WARPS)
                reinterpret_cast<uint4 *>(out)[(long long)b * words + i] = uint4{};
}

/* A row of sums that lies in one place in memory has its columns in another order, so that a lane's numbers of two mma
   are 16 bytes: word 4 d + c has columns 2c, 2c + 1, 2c + 8 and 2c + 9 of the d-th sixteen. The word of a warp's sums n
   and n + 1, n even: */
__device__ __forceinline__ int word_of(int first_dim, int n, int lane) { return first_dim / 4 + 2 * n + lane % 4; }

/* Such a word, divided. to: the row of out. */
__device__ __forceinline__ void store_word(T *to, int word, float4 sum, float weight) {
    const float share = weight == 0 ? 0 : 1 / weight; // 0: all scores are -inf
    to += word / 4 * 16 + word % 4 * 2;
    *reinterpret_cast<unsigned *>(to) = pack(sum.x * share, sum.y * share, T());
    *reinterpret_cast<unsigned *>(to + 8) = pack(sum.z * share, sum.w * share, T());
}

/* epilogue(sums, segment, place): of a segment that is not the whole sequence; all threads of the block call. */
template <class Epilogue>
__device__ __forceinline__ void walk(const Problem &problem, T *out, const Epilogue &epilogue) {
    extern __shared__ __align__(16) uint4 shared[];
    T *queries = reinterpret_cast<T *>(shared), *ring = queries + HEADS * WIDTH, *weights = ring + STAGES * TILE_SIZE;
    float *maxima = reinterpret_cast<float *>(weights + HEADS * PITCH); // [PARTS][HEADS]
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, c = lane % 4;
    const int first_head = warp % SIXTEENS * 16, part = warp / SIXTEENS; // of the head tile
    const int heads_before = blockIdx.x * HEADS, share = blockIdx.y, n_heads = problem.n_heads;
    const Sequences &sequences = problem.sequences;

    // 1. which tiles
    const LineShares shares(sequences, gridDim.y, lane);
    const int begin = shares.first_tile(share), count = shares.first_tile(share + 1) - begin;
    if (count == 0) return;
    HeadSums sums;
    for (Segment segment(sequences, begin, count, lane);; segment.next(sequences)) {
        const int length = sequences.length(segment.b);
        const long long sequence_row = (long long)segment.b * n_heads + heads_before;
        auto copy_tile = [&](int tile) {
            if (tile < segment.end) {
                const int first = tile * TILE, slot = (tile - segment.tile) % STAGES;
                copy_rows<TILE>(ring + slot * TILE_SIZE, problem.cache.address(segment.b, first), length - first);
            }
            copy_async_commit(); // with nothing, too: copies are counted
        };

        // 2. queries, and the first tiles
        __syncthreads(); // who still reads the last segment's?
        copy_rows<HEADS>(queries, problem.q + sequence_row * WIDTH, n_heads - heads_before);
#pragma unroll 1
        for (int stage = 0; stage < STAGES - 1; stage++) copy_tile(segment.tile + stage);
        sums.clear();
#pragma unroll 1
        for (int tile = segment.tile; tile < segment.end; tile++) {
            if (STAGES > 1) copy_async_wait<(STAGES > 1 ? STAGES - 2 : 0)>();
            __syncthreads(); // all have what all have copied, and nobody reads the tile before
            copy_tile(tile + STAGES - 1);
            if (STAGES == 1) { // a card with little shared memory: nothing is copied ahead
                copy_async_wait<0>();
                __syncthreads();
            }
            const T *here = ring + (tile - segment.tile) % STAGES * TILE_SIZE;

            // 3. scores in units of log 2, and the highest of each head
            float s[TOKENS / 8][4] = {};
            multiply_keys(s, queries + first_head * WIDTH, here + part * TOKENS * WIDTH, lane);
            const int there = length - tile * TILE - part * TOKENS - 2 * c;
#pragma unroll
            for (int r = 0; r < 2; r++) {
                float highest = LOWEST;
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 2; i++) {
                        float &score = s[n][2 * r + i];
                        score = 8 * n + i < there ? score * problem.scale : -INFINITY;
                        highest = fmaxf(highest, score);
                    }
                highest = row_max(highest);
                if (c == 0) maxima[part * HEADS + first_head + g + 8 * r] = highest;
            }
            __syncthreads();

            // 4. weights
#pragma unroll
            for (int r = 0; r < 2; r++) {
                const int head = first_head + g + 8 * r;
                float highest = maxima[head];
#pragma unroll
                for (int p = 1; p < PARTS; p++) highest = fmaxf(highest, maxima[p * HEADS + head]);
                sums.follow(r, highest);
#pragma unroll
                for (int n = 0; n < TOKENS / 8; n++)
                    *reinterpret_cast<unsigned *>(weights + head * PITCH + part * TOKENS + 8 * n + 2 * c) =
                        pack(exp2_approx(s[n][2 * r] - sums.maximum[r]), exp2_approx(s[n][2 * r + 1] - sums.maximum[r]),
                             T());
            }
            __syncthreads();

            // 5. weighted values
            mix_values(sums, weights + first_head * PITCH, here, part * DIMS / 8, lane);
        }

        // 6. what becomes of it
        const int first = heads_before + first_head;
        const Place at{segment.b, first, n_heads - first, part * DIMS, (int)blockIdx.x, share};
        if (segment.whole()) store_result(out, sums, at, n_heads, lane);
        else epilogue(sums, segment, at);
        if (segment.left == 0) return;
    }
}
