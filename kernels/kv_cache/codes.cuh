/* What a code becomes on its way into an mma: two float16 at a time, without a conversion of integers.

   A step of a lane is 8 codes in WORDS words, the four registers of the left operand of m16n8k16 (see
   layout.py for which code lies where). Integers are stored with an offset, so none is
   negative. Alone in its 16 bits such a number u reads as the float16 u * 2**-24, a subnormal one;
   four bits further up, as 16 times as much. Masks and byte permutations bring it there.

   keys     leaves it at that. Units, the factor 16 and the offset are made up for outside: a product
            with a key is in units of KEY_UNIT; HIGH is what the last two registers are too large by;
            OFFSET and OFFSET_HIGH are the offset, as it reads in the first two and in the last two
   values   must subtract the offset: over thousands of tokens it would drown the sum. One fma does it,
            exactly, and leaves code * VALUE_UNIT */
#pragma once
#include "../device/half2.cuh"

struct Int8 {
    static constexpr int BITS = 8, WORDS = 2;
    static constexpr float KEY_UNIT = 1.f / (1 << 24), HIGH = 1, VALUE_UNIT = 1.f / 512;
    static constexpr unsigned OFFSET = 0x00800080, OFFSET_HIGH = 0x00800080; // 128

    static __device__ __forceinline__ void keys(unsigned (&a)[4], const unsigned *w) {
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = __byte_perm(w[i / 2], 0, i % 2 ? 0x4342 : 0x4140);
    }
    static __device__ __forceinline__ void values(unsigned (&a)[4], const unsigned *w) {
        keys(a, w);
#pragma unroll
        for (int i = 0; i < 4; i++) a[i] = fma_x2(a[i], 0x78007800, 0xb400b400, __half()); // 2**15, -128 / 512
    }
};
struct Int4 {
    static constexpr int BITS = 4, WORDS = 1;
    static constexpr float KEY_UNIT = 1.f / (1 << 24), HIGH = 16, VALUE_UNIT = 1.f / 512;
    static constexpr unsigned OFFSET = 0x00080008, OFFSET_HIGH = 0x00800080; // 8, 16 * 8

    static __device__ __forceinline__ void keys(unsigned (&a)[4], const unsigned *w) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned pairs = w[0] >> 8 * i;
            a[i] = pairs & 0x000f000f;
            a[i + 2] = pairs & 0x00f000f0;
        }
    }
    static __device__ __forceinline__ void values(unsigned (&a)[4], const unsigned *w) {
        keys(a, w);
#pragma unroll
        for (int i = 0; i < 4; i++) // 2**15 or 2**11, and -8 / 512
            a[i] = fma_x2(a[i], i < 2 ? 0x78007800 : 0x68006800, 0xa400a400, __half());
    }
};
struct Fp8 { // e4m3 has an instruction since compute capability 8.9, and no offset
    static constexpr int BITS = 8, WORDS = 2;
    static constexpr float KEY_UNIT = 1, HIGH = 1, VALUE_UNIT = 1;
    static constexpr unsigned OFFSET = 0, OFFSET_HIGH = 0;

    static __device__ __forceinline__ void keys(unsigned (&a)[4], const unsigned *w) {
#pragma unroll
        for (int i = 0; i < 4; i += 2)
#if __CUDA_ARCH__ >= 890
            asm("{ .reg .b16 low, high; mov.b32 {low, high}, %2;\n"
                "cvt.rn.f16x2.e4m3x2 %0, low; cvt.rn.f16x2.e4m3x2 %1, high; }"
                : "=r"(a[i]), "=r"(a[i + 1]) : "r"(w[i / 2]));
#else
            a[i] = widened(w[i / 2], 0x1404), a[i + 1] = widened(w[i / 2], 0x3424);
#endif
    }
    static __device__ __forceinline__ void values(unsigned (&a)[4], const unsigned *w) { keys(a, w); }
    /* Two bytes, each put above a zero, as float16: the exponent's bits are 8 too low. 0x7f is NaN. */
    static __device__ __forceinline__ unsigned widened(unsigned w, unsigned two) {
        const unsigned put = __byte_perm(w, 0, two), low = put >> 1 & 0x3f803f80;
        const unsigned nan = __vcmpeq2(low, 0x3f803f80), wide = mul_x2(low, 0x5c005c00, __half());
        return ((wide | (put & 0x80008000)) & ~nan) | (nan & 0x7fff7fff);
    }
};
