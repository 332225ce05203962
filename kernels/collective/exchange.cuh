/* What the exchanges of whole messages have in common: a message as words, and sums of words.

   Sums are float, in the order of ranks, on every device: all get the same bits. */
#pragma once
#include "../device/half2.cuh"
#include "number.cuh"

using T = DTYPE;
constexpr int VEC = 16 / sizeof(T); // numbers in a word

/* What one device adds to the sum, and where the sum goes: n numbers. wide: every word lies at a multiple of 16 bytes,
   on all devices. */
struct Message {
    T *at;
    long long n;
    int wide;

    __device__ __forceinline__ long long words() const { return (n + VEC - 1) / VEC; }
    /* Word k; zeros past the end. */
    __device__ __forceinline__ uint4 load(long long k) const {
        if (wide && (k + 1) * VEC <= n) return __ldcg(reinterpret_cast<const uint4 *>(at) + k);
        uint4 word = {};
        T *numbers = reinterpret_cast<T *>(&word);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            if (k * VEC + i < n) numbers[i] = at[k * VEC + i];
        return word;
    }
    __device__ __forceinline__ void store(long long k, uint4 word) const {
        if (wide && (k + 1) * VEC <= n) {
            reinterpret_cast<uint4 *>(at)[k] = word;
            return;
        }
        const T *numbers = reinterpret_cast<const T *>(&word);
#pragma unroll
        for (int i = 0; i < VEC; i++)
            if (k * VEC + i < n) at[k * VEC + i] = numbers[i];
    }
};

/* The words of a message that are this block's: from `first` to before `last`. */
struct Part {
    long long first, last;
};
__device__ __forceinline__ Part part_of(long long words) {
    const long long each = (words + gridDim.x - 1) / gridDim.x, first = blockIdx.x * each;
    return {first, min(first + each, words)};
}

__device__ __forceinline__ void widen_word(uint4 word, float (&to)[4], float) {
    to[0] = __uint_as_float(word.x), to[1] = __uint_as_float(word.y);
    to[2] = __uint_as_float(word.z), to[3] = __uint_as_float(word.w);
}
template <typename Half> __device__ __forceinline__ void widen_word(uint4 word, float (&to)[8], Half) {
    widen(word, to, Half());
}
__device__ __forceinline__ uint4 round_word(const float (&v)[4], float) {
    return {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])};
}
template <typename Half> __device__ __forceinline__ uint4 round_word(const float (&v)[8], Half) {
    return {pack(v[0], v[1], Half()), pack(v[2], v[3], Half()), pack(v[4], v[5], Half()), pack(v[6], v[7], Half())};
}

/* The sum of words, one of each device. */
__device__ __forceinline__ void add_words(const uint4 (&words)[DEVICES], float (&sum)[VEC]) {
    widen_word(words[0], sum, T());
#pragma unroll
    for (int r = 1; r < DEVICES; r++) {
        float next[VEC];
        widen_word(words[r], next, T());
#pragma unroll
        for (int i = 0; i < VEC; i++) sum[i] += next[i];
    }
}
__device__ __forceinline__ uint4 sum_of(const uint4 (&words)[DEVICES]) {
    float sum[VEC];
    add_words(words, sum);
    return round_word(sum, T());
}
