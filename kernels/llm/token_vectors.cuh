/* The vectors that blocks hand to each other, and how threads take them up. */
#pragma once
#include "dated.cuh"
#include "token_tasks.cuh"

constexpr int PER_GATE = HALF % 2 ? 8 : 4; // a task's gates are published by twos, where there are two

/* The vectors that blocks hand to each other. */
struct Vectors {
    Dated *x, *mixed, *h, *a, *qkv, *partials;
    __device__ __forceinline__ Vectors(Dated *at)
        : x(at), mixed(x + Spread<8>::size(S::HIDDEN)), h(mixed + Spread<8>::size(Q_ROWS)),
          a(h + Spread<8>::size(S::HIDDEN)), qkv(a + Spread<PER_GATE>::size(S::FFN)), partials(qkv + QKV_ROWS) {}
};

/* What a thread holds of a vector that is multiplied with rows. */
template <class R> struct Part {
    float at[R::WORDS][8];

    /* EACH: dated numbers of a word, 4 for two of 16 bits each. */
    template <int EACH> __device__ __forceinline__ void load(const Dated *from, unsigned date, int thread) {
        // First for the last number alone, by one lane: all lanes at once would be much to ask for again and again
        if (thread % 32 == 0) wait_for(from + Spread<EACH>::place(R::ROW_WORDS * EACH - 1), date);
        __syncwarp();
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
