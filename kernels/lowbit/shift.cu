/* Rung 1, shift: a code becomes a number as one would write it down. Shift it to the right end, mask it, convert the
   integer to T, and T to float.

   New since chapter 04: W is BITS / 16 of the bytes. Still lost: the conversions. Each weight takes a shift, a mask, a
   conversion from integer (I2F, which a multiprocessor does at a fraction of the rate of a multiply-add), another to
   float, the zero, and only then the one multiply-add that it is about. The bytes come faster than that.

   Shapes, what to compile with, and how to launch: rows.cuh. */
#include "rows.cuh"

struct Shift {
    static __device__ void weights(const Codes &w, float zero, float (&weight)[TAKE]) {
#pragma unroll
        for (int i = 0; i < TAKE; i++) {
            int code = w.v[i / PER_WORD] >> BITS * (i % PER_WORD) & ((1 << BITS) - 1);
            weight[i] = (float)(T)code - zero;
        }
    }
};

extern "C" __global__ void __launch_bounds__(32 * WARPS)
gemv(const Codes *W, const SCALE *scale, const SCALE *zero, const T *x, T *y, long long rows, unsigned cols) {
    product<Shift>(W, scale, zero, x, y, rows, cols);
}
