/* Words of a state, of 32, 16 or 8 bits a number: to floats, and back. */
#pragma once
#include "../device/half2.cuh"
#include "../device/words.cuh"

constexpr bool CODED = sizeof(STATE) == 1; // codes of 8 bits: a number is code · scale

template <int N, typename T> __device__ __forceinline__ void widen_word(const Word<T, N> &word, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++) to[i] = element(word, i);
}
/* A conversion of a whole number takes eight times as long as an addition. So a code plus 128 becomes the last byte of
   2**23, and 2**23 + 128 is taken away; and back, 1.5 * 2**23 is added, which rounds, and leaves the code in the last
   byte. */
template <int N> __device__ __forceinline__ void widen_word(const Word<signed char, N> &word, float (&to)[N]) {
#pragma unroll
    for (int i = 0; i < N; i++)
        to[i] = __uint_as_float(__byte_perm(word.bits[i / 4] ^ 0x80808080, 0x4b000000, 0x7440 | i % 4)) - 8388736.f;
}

/* All numbers of a word, rounded to the state's type; of codes, after the multiplication by per_code. */
template <int N> __device__ __forceinline__ void store_word(float *to, const float (&from)[N], float) {
    if constexpr (N == 1) *to = from[0];
    else *reinterpret_cast<float4 *>(to) = {from[0], from[1], from[2], from[3]};
}
template <int N, typename Half>
__device__ __forceinline__ void store_word(Half *to, const float (&from)[N], float) {
    if constexpr (N == 1) *to = (Half)from[0];
    else {
        uint4 word;
        word.x = pack(from[0], from[1], Half()), word.y = pack(from[2], from[3], Half());
        word.z = pack(from[4], from[5], Half()), word.w = pack(from[6], from[7], Half());
        *reinterpret_cast<uint4 *>(to) = word;
    }
}
template <int N> __device__ __forceinline__ void store_word(signed char *to, const float (&from)[N], float per_code) {
    auto code = [&](int i) { return __float_as_uint(fmaf(from[i], per_code, 12582912.f)); };
    if constexpr (N == 1) *to = (signed char)code(0);
    else {
        unsigned bits[4];
#pragma unroll
        for (int i = 0; i < 4; i++)
            bits[i] = __byte_perm(__byte_perm(code(4 * i), code(4 * i + 1), 0x0040),
                                  __byte_perm(code(4 * i + 2), code(4 * i + 3), 0x0040), 0x5410);
        *reinterpret_cast<uint4 *>(to) = {bits[0], bits[1], bits[2], bits[3]};
    }
}
