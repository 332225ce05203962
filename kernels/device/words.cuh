/* Words: N neighbouring elements as bits, at most 16 bytes, that one instruction loads. N * sizeof(T) is a power of
   two, and addresses are multiples of it. */
#pragma once
#include "copy.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <typename T, int N> struct Word {
    static constexpr int BYTES = N * sizeof(T), PARTS = BYTES < 4 ? 1 : BYTES / 4;
    unsigned bits[PARTS];
};

template <int BYTES> struct WordOf;
template <> struct WordOf<16> { using type = uint4; };
template <> struct WordOf<8> { using type = uint2; };
template <> struct WordOf<4> { using type = unsigned; };
template <> struct WordOf<2> { using type = unsigned short; };

template <int N, typename T> __device__ __forceinline__ Word<T, N> load_word(const T *from) {
    using Bits = typename WordOf<N * sizeof(T)>::type;
    Word<T, N> word;
    if constexpr (sizeof(Bits) == 2) word.bits[0] = *reinterpret_cast<const Bits *>(from);
    else *reinterpret_cast<Bits *>(word.bits) = *reinterpret_cast<const Bits *>(from);
    return word;
}

/* Past L1, and where it stands (copy.cuh). */
template <int N, typename T> __device__ __forceinline__ Word<T, N> load_word_streaming(const T *from) {
    using Bits = typename WordOf<N * sizeof(T)>::type;
    Word<T, N> word;
    if constexpr (sizeof(Bits) == 2) word.bits[0] = load_streaming(reinterpret_cast<const Bits *>(from));
    else *reinterpret_cast<Bits *>(word.bits) = load_streaming(reinterpret_cast<const Bits *>(from));
    return word;
}

__device__ __forceinline__ float as_float(unsigned bits, float) { return __uint_as_float(bits); }
__device__ __forceinline__ float as_float(unsigned bits, __half) { return __half2float(__ushort_as_half(bits)); }
/* A bfloat16 is the upper half of a float. */
__device__ __forceinline__ float as_float(unsigned bits, __nv_bfloat16) { return __uint_as_float(bits << 16); }

/* Element i of a word, as a float. */
template <typename T, int N> __device__ __forceinline__ float element(const Word<T, N> &word, int i) {
    if constexpr (sizeof(T) == 4) return as_float(word.bits[i], T());
    else return as_float(word.bits[i / 2] >> 16 * (i % 2) & 0xffff, T());
}
