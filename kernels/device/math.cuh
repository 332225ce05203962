/* Powers of two, and what is made of them. */
#pragma once

constexpr float LOG2_E = 1.4426950408889634f; // exp(a) = 2**(a * LOG2_E): the hardware has powers of 2 only

/* 2**a by the instruction itself, to about 22 bits; results below 2**-126 are 0. */
__device__ __forceinline__ float exp2_approx(float a) {
    float b;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
    return b;
}

/* 2**e exactly, -126 <= e <= 127: the exponent's bits, put in place. */
__device__ __forceinline__ float power_of_2(int e) { return __int_as_float((e + 127) << 23); }

/* 1 / a by the instruction itself, to about 23 bits: a division takes twenty times as long. 0 above 2**126. */
__device__ __forceinline__ float reciprocal_approx(float a) {
    float b;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(b) : "f"(a));
    return b;
}

__device__ __forceinline__ float silu(float a) { return a / (1 + __expf(-a)); }
