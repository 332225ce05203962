/* Numbers that tell themselves that they are there: how blocks of one launch hand on vectors without a barrier.

   A dated number is a float and a date, 8 bytes that are written and read as one. Who needs it reads until it has the
   date that is waited for. Nothing else tells of its arrival: no flag that would have to come behind it, so no fence
   and no second way to L2 and back. A barrier of the grid (device/grid.cuh) takes three such ways: write, arrive, read.

   Dates only rise, so that nothing is cleared between launches. A place is written again only by who has, through
   others, what was made of its last number. */
#pragma once

using Dated = unsigned long long;

__device__ __forceinline__ void publish(Dated *at, unsigned bits, unsigned date) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(at), "l"((Dated)date << 32 | bits) : "memory");
}
__device__ __forceinline__ void publish(Dated *at, float value, unsigned date) {
    publish(at, __float_as_uint(value), date);
}
__device__ __forceinline__ Dated look(const Dated *at) {
    Dated both;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(both) : "l"(at) : "memory");
    return both;
}
__device__ __forceinline__ bool has(Dated both, unsigned date) { return (unsigned)(both >> 32) == date; }
__device__ __forceinline__ float value_of(Dated both) { return __uint_as_float((unsigned)both); }

/* Until the number is there. `seen`: what a look at it gave earlier. */
__device__ __forceinline__ float wait_for(const Dated *at, unsigned date, Dated seen) {
    while (!has(seen, date)) seen = look(at);
    return value_of(seen);
}
__device__ __forceinline__ float wait_for(const Dated *at, unsigned date) { return wait_for(at, date, look(at)); }

/* N of them, each where at(i) says, all asked for before the first is waited for. */
template <int N, class At> __device__ __forceinline__ void wait_for_all(float (&to)[N], unsigned date, At at) {
    Dated seen[N];
    bool all;
    do {
        all = true;
#pragma unroll
        for (int i = 0; i < N; i++) seen[i] = look(at(i));
#pragma unroll
        for (int i = 0; i < N; i++) all &= has(seen[i], date);
    } while (!all);
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = value_of(seen[i]);
}

/* A vector of which each thread reads words of 8 numbers. EACH dated numbers make a word: 8, or 4 that are two of 16
   bits each. Those that 32 neighbouring threads read at a time lie together: no sector is asked for twice. */
template <int EACH> struct Spread {
    static constexpr int size(int numbers) { return (numbers / 8 + 31) / 32 * 32 * EACH; }
    /* The place of dated number i. */
    static __device__ __forceinline__ int place(int i) {
        const int word = i / EACH, j = i % EACH;
        return word / 32 * (32 * EACH) + j / 2 * 64 + word % 32 * 2 + j % 2;
    }
};

/* The bits of two neighbours, at a multiple of 16 bytes. Whether they have the date. */
__device__ __forceinline__ bool look(unsigned &first, unsigned &second, const Dated *at, unsigned date) {
    unsigned when[2];
    asm volatile("{ .reg .u64 a, b; ld.relaxed.gpu.global.v2.u64 {a, b}, [%4];"
                 " mov.b64 {%0, %1}, a; mov.b64 {%2, %3}, b; }"
                 : "=r"(first), "=r"(when[0]), "=r"(second), "=r"(when[1]) : "l"(at) : "memory");
    return when[0] == date && when[1] == date;
}

/* The bits of WORDS words, word(k) each, as soon as all are there. */
template <int EACH, int WORDS, class Word>
__device__ __forceinline__ void wait_for_words(unsigned (&bits)[WORDS][EACH], const Dated *vector, unsigned date,
                                               Word word) {
    bool all;
    do {
        all = true;
#pragma unroll
        for (int k = 0; k < WORDS; k++)
#pragma unroll
            for (int j = 0; j < EACH; j += 2) {
                const Dated *at = vector + Spread<EACH>::place(word(k) * EACH + j);
                all &= look(bits[k][j], bits[k][j + 1], at, date);
            }
    } while (!all);
}
