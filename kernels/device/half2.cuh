/* Two 16-bit numbers in one register, the first in the lower half: as tensor cores take them, and as one instruction
   works on both. The last argument, T(), only says which type they have.

   On every card of the course, but for arithmetic of two bfloat16, since compute capability 8.0. For an older card it
   does not compile. */
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

/* Two floats, rounded. */
__device__ __forceinline__ unsigned pack(float low, float high, __half) {
    __half2 pair = __floats2half2_rn(low, high);
    return *reinterpret_cast<unsigned *>(&pair);
}
__device__ __forceinline__ unsigned pack(float low, float high, __nv_bfloat16) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<unsigned *>(&pair);
}

/* Two floats, exactly. A bfloat16 is the upper half of a float. */
__device__ __forceinline__ float2 unpack(unsigned pair, __half) {
    return __half22float2(*reinterpret_cast<__half2 *>(&pair));
}
__device__ __forceinline__ float2 unpack(unsigned pair, __nv_bfloat16) {
    return {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000)};
}

/* Eight numbers of 16 bytes, exactly. */
template <typename T> __device__ __forceinline__ void widen(uint4 word, float (&to)[8], T) {
    const unsigned pairs[4] = {word.x, word.y, word.z, word.w};
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        const float2 pair = unpack(pairs[i / 2], T());
        to[i] = pair.x, to[i + 1] = pair.y;
    }
}

/* One number, twice. */
__device__ __forceinline__ unsigned broadcast_x2(float v, __half) {
    const __half2 pair = __float2half2_rn(v);
    return reinterpret_cast<const unsigned &>(pair);
}
__device__ __forceinline__ unsigned broadcast_x2(float v, __nv_bfloat16) {
    const __nv_bfloat162 pair = __float2bfloat162_rn(v);
    return reinterpret_cast<const unsigned &>(pair);
}

/* a * b and a * b + c, rounded once, of both halves. Products of two bfloat16 alone came with compute capability 9.0:
   before, -0 is added, which changes nothing. */
__device__ __forceinline__ unsigned mul_x2(unsigned a, unsigned b, __half) {
    unsigned c;
    asm("mul.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ unsigned mul_x2(unsigned a, unsigned b, __nv_bfloat16) {
    unsigned c;
#if __CUDA_ARCH__ >= 900
    asm("mul.bf16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
#else
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(c) : "r"(a), "r"(b), "r"(0x80008000));
#endif
    return c;
}
__device__ __forceinline__ unsigned fma_x2(unsigned a, unsigned b, unsigned c, __half) {
    unsigned d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
__device__ __forceinline__ unsigned fma_x2(unsigned a, unsigned b, unsigned c, __nv_bfloat16) {
    unsigned d;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
