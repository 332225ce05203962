/* Rows of a product by one thread: chapter 02's last rung, for weights of NUMBER, which the flags give.

     -DNUMBER=half     LOAD=load_half     WIDEN=half_to_float
     -DNUMBER=bfloat   LOAD=load_bfloat   WIDEN=bfloat_to_float
     -DNUMBER=float    LOAD=load          WIDEN=(float)                                                              */
#pragma once
#include "bfloat.h"
enum { HALF = 4, ROWS = 2 * HALF, LINE = 64 / sizeof(NUMBER) }; /* LINE: numbers in a cache line of 64 bytes */

/* Eight rows, as two fours that may lie apart: rows of a gate and the same rows of up. */
typedef struct {
    const NUMBER *low, *high;
} Eight;

/* y[0..7] = rows · x; asks for the rows of `next`, if there are any, on the way. */
static void eight_rows(Eight rows, Eight next, const float *x, float *y, int64_t cols) {
    vec acc[ROWS] = {{0}};
    int64_t c = 0;
    for (; c + LINE <= cols; c += LINE) {
        for (int r = 0; r < HALF; r++) {
            __builtin_prefetch(next.low + r * cols + c, 0, 1); /* to be read; not into L1 */
            __builtin_prefetch(next.high + r * cols + c, 0, 1);
        }
        for (int v = 0; v < LINE; v += LANES) {
            vec xs = load(x + c + v);
            for (int r = 0; r < HALF; r++) {
                acc[r] = fma_(LOAD(rows.low + r * cols + c + v), xs, acc[r]);
                acc[HALF + r] = fma_(LOAD(rows.high + r * cols + c + v), xs, acc[HALF + r]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++) {
        const NUMBER *row = (r < HALF ? rows.low : rows.high) + r % HALF * cols;
        float total = sum(acc[r]);
        for (int64_t i = c; i < cols; i++) total += WIDEN(row[i]) * x[i];
        y[r] = total;
    }
}

static float one_row(const NUMBER *w, const float *x, int64_t n) {
    vec acc = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) acc = fma_(LOAD(w + c), load(x + c), acc);
    float total = sum(acc);
    for (; c < n; c++) total += WIDEN(w[c]) * x[c];
    return total;
}

/* Ask for eight rows, without using them. */
static void ask_for(Eight rows, int64_t cols) {
    for (int64_t c = 0; c < HALF * cols; c += LINE) {
        __builtin_prefetch(rows.low + c, 0, 1);
        __builtin_prefetch(rows.high + c, 0, 1);
    }
}
