/* What memory does itself, where the value lies, in L2: a warp sends numbers there and goes on. Nothing comes back, so
   nobody waits; but the order of additions is anybody's, and float sums hang on it. In no order with anything else: a
   barrier of grid.cuh has to follow before somebody reads.

   Four floats at once, in one piece of 16 bytes, since compute capability 9.0; before, one by one. Additions there are,
   and maxima of whole numbers; no multiplication. */
#pragma once

__device__ __forceinline__ void add_in_memory(float4 *to, float4 v) {
#if __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z),
                 "f"(v.w) : "memory");
#else
    float *one = reinterpret_cast<float *>(to);
    atomicAdd(one, v.x), atomicAdd(one + 1, v.y), atomicAdd(one + 2, v.z), atomicAdd(one + 3, v.w);
#endif
}
__device__ __forceinline__ void add_in_memory(float *to, float v) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(to), "f"(v) : "memory");
}
/* Whole numbers, to whatever lies there: to a float's bits, too. */
__device__ __forceinline__ void add_in_memory(int *to, int v) {
    asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void max_in_memory(unsigned *to, unsigned v) {
    asm volatile("red.relaxed.gpu.global.max.u32 [%0], %1;" ::"l"(to), "r"(v) : "memory");
}

/* Whole numbers in the order of floats: a larger float has a larger one, and none has 0. */
__device__ __forceinline__ unsigned in_order(float v) {
    const unsigned bits = __float_as_uint(v);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}
__device__ __forceinline__ float from_order(unsigned v) {
    return __uint_as_float(v >> 31 ? v & 0x7fffffff : ~v);
}
