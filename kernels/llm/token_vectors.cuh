/* The vectors that blocks hand to each other, and how threads take them up. */
#pragma once
#include "token_attention.cuh"

constexpr int PER_GATE = HALF % 2 ? 8 : 4; // a task's gates are published by twos, where there are two

/* The vectors that blocks hand to each other. */
struct Vectors {
    Dated *x, *mixed, *h, *a, *qkv, *partials;
    __device__ __forceinline__ Vectors(Dated *at)
        : x(at), mixed(x + Spread<8>::size(S::HIDDEN)), h(mixed + Spread<8>::size(Q_ROWS)),
          a(h + Spread<8>::size(S::HIDDEN)), qkv(a + Spread<PER_GATE>::size(S::FFN)), partials(qkv + QKV_ROWS) {}
};

/* Eight neighbouring channels of `mixed` as four pairs, of what attention found of a few groups of tokens: two groups
   at a time. */
__device__ __forceinline__ void merge_word(unsigned (&to)[4], const Dated *partials, int groups, unsigned date,
                                           int word) {
    const int head = word * 8 / HEAD_DIM;
    float high = LOWEST, total = 0, sums[8] = {};
    for (int group = 0; group < groups; group += 2) {
        unsigned pairs[2][4], max_and_sum[2][2];
        bool all;
        do {
            all = true;
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const Dated *of_group = partials + min(group + t, groups - 1) * PARTIAL;
#pragma unroll
                for (int j = 0; j < 4; j += 2)
                    all &= look(pairs[t][j], pairs[t][j + 1], of_group + Spread<4>::place(word * 4 + j), date);
                all &= look(max_and_sum[t][0], max_and_sum[t][1], of_group + OF_HEADS + 2 * head, date);
            }
        } while (!all);
        const float before = high;
#pragma unroll
        for (int t = 0; t < 2; t++) high = fmaxf(high, __uint_as_float(max_and_sum[t][0]));
        const float scale = exp2_approx(before - high);
        total *= scale;
#pragma unroll
        for (int i = 0; i < 8; i++) sums[i] *= scale;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const float w = exp2_approx(__uint_as_float(max_and_sum[t][0]) - high) * __uint_as_float(max_and_sum[t][1]);
            if (group + t == groups) break; // the last one twice
            total += w;
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const float2 pair = unpack(pairs[t][i / 2], T());
                sums[i] += w * (i % 2 ? pair.y : pair.x);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < 4; j++) to[j] = pack(sums[2 * j] / total, sums[2 * j + 1] / total, T());
}

/* What a thread holds of a vector that is multiplied with rows: words of 8 numbers, in T. */
template <class R> struct Part {
    unsigned at[R::WORDS][4];

    /* Until the last number of this warp's words is there, by one lane: all lanes at once would be much to ask for
       again and again; and all blocks' warps for the same number, much to ask of one place. */
    template <int EACH> __device__ __forceinline__ void wait_last(const Dated *from, unsigned date, int thread) {
        const int word = R::word(R::WORDS - 1, thread | 31);
        if (thread % 32 == 0) wait_for(from + Spread<EACH>::place(word * EACH + EACH - 1), date);
        __syncwarp();
    }
    /* Where the row has ended, zeros. */
    __device__ __forceinline__ void end(int thread) {
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (!R::has_word(k, thread)) at[k][i] = 0;
    }
    /* `mixed`, of what attention found of a few groups of tokens. */
    __device__ __forceinline__ void load_merged(const Dated *partials, int groups, unsigned date, int thread) {
        wait_last<4>(partials + (groups - 1) * PARTIAL, date, thread);
#pragma unroll
        for (int k = 0; k < R::WORDS; k++) merge_word(at[k], partials, groups, date, R::word(k, thread));
        end(thread);
    }
    /* Pairs. */
    __device__ __forceinline__ void load_pairs(const Dated *from, unsigned date, int thread) {
        wait_last<4>(from, date, thread);
        wait_for_words(at, from, date, [&](int k) { return R::word(k, thread); });
        end(thread);
    }
    /* Floats, of which convert(k, floats) makes what is multiplied. */
    template <class Convert>
    __device__ __forceinline__ void load_floats(const Dated *from, unsigned date, int thread, Convert convert) {
        wait_last<8>(from, date, thread);
        unsigned bits[R::WORDS][8];
        wait_for_words(bits, from, date, [&](int k) { return R::word(k, thread); });
        float all[R::WORDS][8];
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
#pragma unroll
            for (int i = 0; i < 8; i++) all[k][i] = R::has_word(k, thread) ? __uint_as_float(bits[k][i]) : 0;
        convert(all);
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
#pragma unroll
            for (int i = 0; i < 4; i++) at[k][i] = pack(all[k][2 * i], all[k][2 * i + 1], T());
    }
};
