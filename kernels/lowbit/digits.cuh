/* x as signed bytes: whole numbers, to base 256.

   Some numbers of a row of x are taken in units of 2**(e - LIFT), where 2**e is above the largest of them. They are
   rounded to whole ones, below 2**LIFT, and each is written as DIGITS signed bytes, n = d0 + 256 d1 + 65536 d2. A byte
   of 128 to 255 would mean 256 less, so one is carried into the next: 0x80 is added to every digit but the highest,
   and taken off again by an exclusive or, which gives it its sign.

   LIFT is 21. A number is rounded by adding 1.5 * 2**23: a float of this size has no bits behind the point, and its
   last 22 are the whole number, with its sign. The 0x8080 of the digits must find room beside it, so 22 would be too
   many. The fourth digit is 0: it fills the four bytes that make a number's place. */
#pragma once
#include "../device/half2.cuh"
#include "../device/math.cuh"
#include "../device/reduce_integers.cuh"

constexpr int DIGITS = 4, LIFT = 21, CARRY = 0x8080;

/* Numbers are multiplied by `up`, and the whole numbers are in units of `unit`. */
struct DigitScale {
    float up, unit;

    /* Of the largest number without its sign. NaN and infinity have a unit of NaN. */
    __device__ __forceinline__ DigitScale(float largest) {
        const int e = max((__float_as_int(largest) >> 23) - 126, LIFT - 126); // it is less than 2**e
        up = power_of_2(LIFT - e);
        const bool finite = largest < __int_as_float(0x7f800000);
        unit = finite ? power_of_2(e - LIFT) : __int_as_float(0x7fffffff);
    }
};

/* Four numbers as whole ones, each with CARRY in it. */
__device__ __forceinline__ void to_whole(unsigned (&whole)[4], const float (&v)[4], float up) {
    constexpr float MAGIC = 12582912.f + CARRY; // 1.5 * 2**23, and the carry
#pragma unroll
    for (int i = 0; i < 4; i++) whole[i] = __float_as_uint(fmaf(v[i], up, MAGIC)) - 0x4b400000;
}
template <typename X> __device__ __forceinline__ void to_whole(unsigned (&whole)[4], uint2 x, float up) {
    const float2 a = unpack(x.x, X()), b = unpack(x.y, X());
    to_whole(whole, {a.x, a.y, b.x, b.y}, up);
}
/* Byte k of four words as one word, in the order 0, 2, 1, 3 (layout.py). */
__device__ __forceinline__ unsigned byte_of_four(const unsigned (&v)[4], int k) {
    const unsigned pick = k | (k + 4) << 4; // byte k of either operand
    return __byte_perm(__byte_perm(v[0], v[2], pick), __byte_perm(v[1], v[3], pick), 0x5410);
}
/* Digit k of four whole numbers that have CARRY in them. */
__device__ __forceinline__ unsigned digit_of_four(const unsigned (&whole)[4], int k) {
    const unsigned word = k < 3 ? byte_of_four(whole, k) : 0; // the third has the sign; there is no fourth
    return CARRY >> 8 * k & 0x80 ? word ^ 0x80808080 : word;
}
