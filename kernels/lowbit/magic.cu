/* Rung 2, magic: no conversion from integer. 0x6400 is the float16 1024, and the next number is 1025: so a code in the
   last bits of this pattern is added to it. A word has two such patterns side by side, and one LOP3 masks the codes in
   both and puts the magic number's exponent over them. bfloat16 has 0x4300, 128, and room for 7 bits; a code of 8 goes
   by float32, whose 0x4b000000 is 2**23.

   New since shift: the conversion, and the zero with it. What must be subtracted is 1024 + zero, a whole number that T
   holds, so that one subtraction for two weights leaves code - zero, and nothing is rounded. (One FMA with the scale,
   (1024 + code) * scale - (1024 + zero) * scale, would round its constant by up to half a step.)

   A word of row-major codes gives the pairs i, i + 16 / BITS. Still lost: shifts, the way from T to float, and x's too.
   Two bits a weight come faster than even this.

   Shapes, what to compile with, and how to launch: rows.cuh. */
#include "rows.cuh"

constexpr bool HALF = Format<T>::HALF;
constexpr unsigned MAGIC = HALF ? 0x64006400 : 0x43004300, MASK = ((1 << BITS) - 1) * 0x00010001u;
constexpr float VALUE = HALF ? 1024 : 128; // what MAGIC stands for, twice

/* (a & MASK) | MAGIC, in one instruction: bit i of 0xea is the result where a, MASK and MAGIC are the bits of i. */
__device__ unsigned mask_or(unsigned a) {
    unsigned d;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(d) : "r"(a), "r"(MASK), "r"(MAGIC));
    return d;
}

struct Magic {
    static __device__ void weights(const Codes &w, float zero, float (&weight)[TAKE]) {
        constexpr int APART = PER_WORD / 2; // from a code in the lower half of a word to the one above it
        T bias = (T)(VALUE + zero);         // exact
#pragma unroll
        for (int k = 0; k < WORDS; k++)
            if constexpr (BITS == 8 && !HALF) {
#pragma unroll
                for (int i = 0; i < 4; i++) { // the upper bytes of 2**23, and one code
                    unsigned bits = __byte_perm(w.v[k], 0x4b000000, 0x7540 + i);
                    weight[4 * k + i] = __uint_as_float(bits) - (8388608 + zero);
                }
            } else {
#pragma unroll
                for (int i = 0; i < APART; i++) {
                    unsigned bits = mask_or(w.v[k] >> BITS * i);
                    Pair difference = __hsub2(*(Pair *)&bits, Pair{bias, bias});
                    float2 two = floats(*(unsigned *)&difference);
                    weight[PER_WORD * k + i] = two.x;
                    weight[PER_WORD * k + i + APART] = two.y;
                }
            }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
gemv(const Codes *W, const SCALE *scale, const SCALE *zero, const T *x, T *y, long long rows, unsigned cols) {
    product<Magic>(W, scale, zero, x, y, rows, cols);
}
