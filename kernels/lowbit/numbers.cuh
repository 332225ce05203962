/* Codes as 16-bit numbers, two in a register, as tensor cores take them beside x: magic.cu's way, on interleaved codes.

   Operand i of m16n8k32 (layout.py) lies `at(i)` bits from the end of a byte. It is moved to where the type has room
   for it; at 2 bits, to where it is large beside what is added to it. Under the bits of 2**MANTISSA it is a 16-bit
   number: that power, and the code times 2**shift_in_number(i), alike in a row of the tile. What is added to a code so
   comes off again in one of two ways. Where the power is small beside the codes, all of it, and the zero, comes off a
   group's sum before the first product. Elsewhere that would cost digits, and each number is made exact: the code less
   its zero, or less MIDDLE where the zero is that of a whole row, which comes off the sum of all. */
#pragma once
#include "unit.cuh"

template <typename T> constexpr int MANTISSA_OF = 10;
template <> constexpr int MANTISSA_OF<__nv_bfloat16> = 7;

template <class W, typename T> struct Numbers {
    static constexpr int BITS = W::BITS, MANTISSA = MANTISSA_OF<T>;
    static constexpr bool IS_HALF = MANTISSA == 10;
    static constexpr unsigned MAGIC = IS_HALF ? 0x64006400 : 0x43004300; // 2**MANTISSA, twice
    static constexpr unsigned ONES = IS_HALF ? 0x3c003c00 : 0x3f803f80;
    static constexpr float MIDDLE = W::GROUP == 0 && BITS == 8 ? 128 : 0;

    static constexpr int at(int i) { return BITS == 8 ? 0 : BITS == 4 ? i % 2 * 4 : i * 2; }
    static constexpr int shift_in_number(int i) { // of a code in its number
        return BITS == 2 ? IS_HALF ? 8 - i % 2 * 2 : 4 - i % 2 * 2 : BITS == 4 && IS_HALF ? at(i) : 0;
    }
    static constexpr int shift_down(int i, int odd) { return at(i) + 8 * odd - shift_in_number(i); } // less than 0: up
    static constexpr bool exact(int i) { return BITS == 8 || MANTISSA - shift_in_number(i) > BITS + 2; }

    float scale[2] = {1, 1}, zero[2] = {MIDDLE, MIDDLE}; // of rows g and g + 8
    unsigned minus_offset_x2[2];                         // of a number that is made exact: magic number and zero

    /* Before a group: the scale is that of the numbers. */
    __device__ __forceinline__ void begin_group(const typename W::Scale *scales, int group, int g) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (W::GROUP) {
                const float2 factor = scale_and_zero(scales, (group * 8 + g) * 2 + half);
                scale[half] = factor.x, zero[half] = factor.y;
            }
            minus_offset_x2[half] = broadcast_x2(-zero[half] - (1 << MANTISSA - shift_in_number(half)), T());
            if (!exact(half)) scale[half] /= 1 << shift_in_number(half);
        }
    }
    /* A group's products begin with what they will come out too large by: d of a lane, and its sums of x. */
    __device__ __forceinline__ void take_off(float (&d)[4], float2 x_sums) const {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float too_much = (1 << MANTISSA) + zero[i / 2] * (1 << shift_in_number(i / 2));
            d[i] = exact(i / 2) ? 0 : -too_much * (i % 2 ? x_sums.y : x_sums.x);
        }
    }
    /* Two codes of a word, those of operand i in the lower bytes of its halves, or in the upper ones (odd). `magic` is
       MAGIC. */
    template <int i, int odd> __device__ __forceinline__ unsigned codes_to_half2(unsigned w, unsigned magic) const {
        if (MANTISSA < BITS) { // a byte takes a float's room: under 2**23, whose upper half is the number, that off
            const float low = __uint_as_float(__byte_perm(w, 0x4b000000, 0x7440 + odd)) - (8388608 + zero[i % 2]);
            const float high = __uint_as_float(__byte_perm(w, 0x4b000000, 0x7442 + odd)) - (8388608 + zero[i % 2]);
            return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x7632);
        }
        constexpr int down = shift_down(i, odd);
        unsigned number = down > 0 ? w >> (down > 0 ? down : 0) : w << (down > 0 ? 0 : -down);
        number = number & ((1 << BITS) - 1) * 0x10001 << shift_in_number(i) | magic;
        if (BITS == 8) number = __byte_perm(w, magic, odd ? 0x5351 : 0x5250); // one instruction
        const int exponent = (IS_HALF ? 15 : 127) - shift_in_number(i); // of what takes the shift back
        const unsigned back = exponent * (IS_HALF ? 0x04000400 : 0x00800080); // twice
        return exact(i) ? fma_x2(number, back, minus_offset_x2[i % 2], T()) : number;
    }
    /* The operands of a step, 32 columns: two of m16n8k16. */
    __device__ __forceinline__ void operands(unsigned (&a)[2][4], const unsigned *w, int step, unsigned magic) const {
        const unsigned *const words = w + BITS / 2 * step; // operands 0 .. 3 share them
        a[0][0] = codes_to_half2<0, 0>(words[0], magic), a[0][2] = codes_to_half2<0, 1>(words[0], magic);
        a[0][1] = codes_to_half2<1, 0>(words[BITS / 8], magic), a[0][3] = codes_to_half2<1, 1>(words[BITS / 8], magic);
        a[1][0] = codes_to_half2<2, 0>(words[BITS / 4], magic), a[1][2] = codes_to_half2<2, 1>(words[BITS / 4], magic);
        a[1][1] = codes_to_half2<3, 0>(words[3 * BITS / 8], magic);
        a[1][3] = codes_to_half2<3, 1>(words[3 * BITS / 8], magic);
    }
};
