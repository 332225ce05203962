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

struct Eight {
    float at[8];
};
/* Eight neighbouring channels of `mixed`, of what attention found of a few groups of tokens: two groups at a time. */
__device__ __forceinline__ Eight merged_word(const Dated *partials, int groups, unsigned date, int word) {
    const int head = word * 8 / HEAD_DIM;
    float high = LOWEST, total = 0;
    Eight sums = {};
    for (int group = 0; group < groups; group += 2) {
        unsigned bits[2][10];
        bool all;
        do {
            all = true;
#pragma unroll
            for (int t = 0; t < 2; t++) {
                const Dated *of_group = partials + min(group + t, groups - 1) * PARTIAL;
#pragma unroll
                for (int j = 0; j < 8; j += 2)
                    all &= look(bits[t][j], bits[t][j + 1], of_group + Spread<8>::place(word * 8 + j), date);
                all &= look(bits[t][8], bits[t][9], of_group + OF_HEADS + 2 * head, date);
            }
        } while (!all);
        const float before = high;
#pragma unroll
        for (int t = 0; t < 2; t++) high = fmaxf(high, __uint_as_float(bits[t][8]));
        const float scale = exp2_approx(before - high);
        total *= scale;
#pragma unroll
        for (int i = 0; i < 8; i++) sums.at[i] *= scale;
#pragma unroll
        for (int t = 0; t < 2; t++) {
            const float w = group + t < groups ? exp2_approx(__uint_as_float(bits[t][8]) - high) : 0;
            total += w * __uint_as_float(bits[t][9]);
#pragma unroll
            for (int i = 0; i < 8; i++) sums.at[i] += w * __uint_as_float(bits[t][i]);
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) sums.at[i] /= total;
    return sums;
}

/* What a thread holds of a vector that is multiplied with rows. */
template <class R> struct Part {
    float at[R::WORDS][8];

    /* Until the last number of this warp's words is there, by one lane: all lanes at once would be much to ask for again
       and again; and all blocks' warps for the same number, much to ask of one place. */
    template <int EACH> __device__ __forceinline__ void wait_last(const Dated *from, unsigned date, int thread) {
        const int word = R::word(R::WORDS - 1, thread | 31);
        if (thread % 32 == 0) wait_for(from + Spread<EACH>::place(word * EACH + EACH - 1), date);
        __syncwarp();
    }
    /* `mixed`, of what attention found of a few groups of tokens. */
    __device__ __forceinline__ void load_merged(const Dated *partials, int groups, unsigned date, int thread) {
        wait_last<8>(partials + (groups - 1) * PARTIAL, date, thread);
#pragma unroll
        for (int k = 0; k < R::WORDS; k++) {
            const Eight found = merged_word(partials, groups, date, R::word(k, thread));
#pragma unroll
            for (int i = 0; i < 8; i++) at[k][i] = R::has_word(k, thread) ? found.at[i] : 0;
        }
    }
    /* EACH: dated numbers of a word, 4 for two of 16 bits each. */
    template <int EACH> __device__ __forceinline__ void load(const Dated *from, unsigned date, int thread) {
        wait_last<EACH>(from, date, thread);
        unsigned bits[R::WORDS][EACH];
        wait_for_words(bits, from, date, [&](int k) { return R::word(k, thread); });
#pragma unroll
        for (int k = 0; k < R::WORDS; k++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if constexpr (EACH == 8) at[k][i] = __uint_as_float(bits[k][i]);
                else {
                    const float2 two = unpack(bits[k][i / 2], T());
                    at[k][i] = i % 2 ? two.y : two.x;
                }
                if (!R::has_word(k, thread)) at[k][i] = 0;
            }
    }
    /* Multiply with a norm's weight; the sum of squares from before is left for `scale`. */
    __device__ __forceinline__ void norm(const uint4 (&weight)[R::WORDS], float *squares, int thread) {
        float sum = 0;
#pragma unroll
        for (int k = 0; k < R::WORDS; k++) {
            float w[8];
            widen(weight[k], w, T());
#pragma unroll
            for (int i = 0; i < 8; i++) {
                sum += at[k][i] * at[k][i];
                at[k][i] *= w[i];
            }
        }
        sum = warp_sum(sum);
        if (thread % 32 == 0) squares[thread / 32] = sum;
    }
};
