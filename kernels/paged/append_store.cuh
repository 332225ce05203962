/* What a warpgroup hands on at the end of a segment: the result, or sums that are to be merged: values that are not
   divided, the maximum that they are relative to, in units of log 2, and the sum of weights. */
#pragma once
#include "../device/hopper/stmatrix.cuh"
#include "../device/hopper/warpgroup.cuh"
#include "append_softmax.cuh"

enum Barriers { OWN = 1, JOIN = 3 }; // OWN: one for each warpgroup

struct Outputs {
    T *out;            // APPEND: (queries of all items, n_heads, HEAD_DIM)
    float *parts;      // (PLACES * blocks * ROWS, HEAD_DIM); SHARED: and behind them, of what is not cut, (rows of
                       // the list, n_heads, HEAD_DIM); and of each row:
    float2 *part_sums;
    int4 *found;       // SHARED: (rows of the list, n_heads): how many parts; which row of `parts` is the first of
                       // them; the second; and how far it is from each to the next
    int n_heads, blocks;

    /* A pair's row among those of out, or of the list. */
    __device__ __forceinline__ long long row_of(const Segment &segment, int pair) const {
        return (long long)(segment.query + pair / GROUP) * n_heads + segment.kv_head * GROUP + pair % GROUP;
    }
};

/* With 64 rows: the second warpgroup's sums, of its own half of the tokens, are added to the first's. */
__device__ __forceinline__ void join(Shared &s, Values &o, float (&maximum)[2], float (&total)[2], int warpgroup,
                                     int thread) {
    float *values = reinterpret_cast<float *>(s.out);
    const int row = thread / 32 * 16 + thread % 32 / 4;
    named_barrier<256>(JOIN); // what lay there has been read
    if (warpgroup == 1) {
#pragma unroll
        for (int i = 0; i < HEAD_DIM / 2; i++) values[i * 128 + thread] = o[i];
        if (thread % 4 == 0)
            for (int r = 0; r < 2; r++) s.max_and_sum[row + 8 * r] = make_float2(maximum[r], total[r]);
    }
    named_barrier<256>(JOIN);
    if (warpgroup == 1) return;
    float mine[2], others[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float2 other = s.max_and_sum[row + 8 * r];
        const float high = fmaxf(maximum[r], other.x);
        mine[r] = exp2_approx(maximum[r] - high), others[r] = exp2_approx(other.x - high);
        maximum[r] = high, total[r] = total[r] * mine[r] + other.y * others[r];
    }
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 2; i++)
        o[i] = o[i] * mine[i / 2 % 2] + values[i * 128 + thread] * others[i / 2 % 2];
    named_barrier<128>(OWN); // all have read: results may lie there
}

/* The result: by way of shared memory, so that a warp writes whole lines. */
__device__ __forceinline__ void store_output(Shared &s, const Values &o, const float (&total)[2],
                                             const Segment &segment, const Outputs &to, int warpgroup, int thread) {
    constexpr int WORDS = HEAD_DIM / 8, PITCH = HEAD_DIM * sizeof(T);
    const int lane = thread % 32, warp = thread / 32;
    unsigned char *rows = s.out[warpgroup] + warp * 16 * PITCH;
    float share[2];
#pragma unroll
    for (int r = 0; r < 2; r++) share[r] = total[r] == 0 ? 0 : 1 / total[r]; // 0: it saw no token
    __syncwarp(); // what lay there has been read
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 16; i++) {
        const int word = 2 * i + lane / 16, row = lane % 16;
        const float *d = o + 8 * i;
        stmatrix_x4(shared_address(rows + row * PITCH + (word ^ row % 8) * 16),
                    {pack(d[0] * share[0], d[1] * share[0], T()), pack(d[2] * share[1], d[3] * share[1], T()),
                     pack(d[4] * share[0], d[5] * share[0], T()), pack(d[6] * share[1], d[7] * share[1], T())});
    }
    __syncwarp();
    const int first = segment.row + (ROWS == 64 ? 0 : warpgroup * WARPGROUP_ROWS) + warp * 16;
#pragma unroll
    for (int i = 0; i < 16 * WORDS / 32; i++) {
        const int row = (32 * i + lane) / WORDS, word = lane % WORDS, pair = first + row;
        if (pair < segment.pairs)
            *reinterpret_cast<uint4 *>(to.out + to.row_of(segment, pair) * HEAD_DIM + 8 * word) =
                *reinterpret_cast<const uint4 *>(rows + row * PITCH + (word ^ row % 8) * 16);
    }
}

__device__ __forceinline__ void store_partial(const Values &o, const float (&maximum)[2], const float (&total)[2],
                                              const Segment &segment, const Outputs &to, int warpgroup, int thread) {
    const int c = thread % 4;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = warpgroup * WARPGROUP_ROWS + thread / 32 * 16 + thread % 32 / 4 + 8 * r; // of the tile
        const int pair = segment.row + row;
        if (pair >= segment.pairs) continue;
        const bool cut = segment.place >= 0;
        const long long mine = to.row_of(segment, pair);
        const int at = cut ? segment.place * ROWS + row : PLACES * to.blocks * ROWS + (int)mine;
        float *values = to.parts + (long long)at * HEAD_DIM + 2 * c;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 8; j++)
            *reinterpret_cast<float2 *>(values + 8 * j) = make_float2(o[4 * j + 2 * r], o[4 * j + 2 * r + 1]);
        if (c == 0) to.part_sums[at] = make_float2(maximum[r], total[r]);
        if (S::USE == SHARED && c == 0 && segment.parts > 0)
            to.found[mine] = make_int4(segment.parts, at, segment.next_place * ROWS + row, segment.stride * ROWS);
    }
}

__device__ __forceinline__ void store(Shared &s, Values &o, RowSums &sums, const Segment &segment,
                                      const Outputs &to, int warpgroup, int thread) {
    float total[2] = {sums.total(0), sums.total(1)};
    if constexpr (ROWS == 64) {
        join(s, o, sums.maximum, total, warpgroup, thread);
        if (warpgroup == 1) return;
    }
    if (S::USE == APPEND && segment.place < 0) store_output(s, o, total, segment, to, warpgroup, thread);
    else store_partial(o, sums.maximum, total, segment, to, warpgroup, thread);
}
