/* Rows of a product by one thread, for weights of NUMBER, which the flags give.

     -DNUMBER=half     LOAD=load_half     WIDEN=half_to_float
     -DNUMBER=bfloat   LOAD=load_bfloat   WIDEN=bfloat_to_float
     -DNUMBER=float    LOAD=load          WIDEN=(float)

   As in chapter 02 a vector of x is loaded once for several rows. But these rows are no neighbours: each is one of a
   stream, many rows that lie one behind another, and at the end of a row its stream simply goes on. So the
   processor, which sees which addresses a loop walks along, and fetches what lies ahead of it, need not begin anew:
   neighbouring rows jump at their end, all at once, which costs a fifth of the time where rows have 4 KB.

   Six streams: with more of them the first cache has no place left for x (rows 4 KB apart meet in one set of
   its 8 lines), with fewer x is loaded more often than a long x, that has to come from the second cache, can be. */
#pragma once
#include "bfloat.h"
enum { STREAMS = 6, LINE = 64 / sizeof(NUMBER), AHEAD = 2 }; /* LINE: numbers in a cache line of 64 bytes */

/* A row of each stream. */
typedef struct {
    const NUMBER *at[STREAMS];
} Rows;

/* y[s] = rows.at[s] · x; asks for the first lines of the rows that come next, as a stream may end, or begin a page of
   memory, beyond which the processor does not look. */
static void multiply_rows(const Rows *rows, const Rows *next, const float *x, float *y, int64_t cols) {
    const NUMBER *row[STREAMS];
    vec acc[STREAMS] = {{0}};
    for (int s = 0; s < STREAMS; s++) {
        row[s] = rows->at[s];
        for (int line = 0; line < AHEAD; line++) __builtin_prefetch(next->at[s] + line * LINE, 0, 1); /* not into L1 */
    }
    int64_t c = 0;
    for (; c + LANES <= cols; c += LANES) {
        vec xs = load(x + c);
        for (int s = 0; s < STREAMS; s++) acc[s] = fma_(LOAD(row[s] + c), xs, acc[s]);
    }
    for (int s = 0; s < STREAMS; s++) {
        float total = sum(acc[s]);
        for (int64_t i = c; i < cols; i++) total += WIDEN(row[s][i]) * x[i];
        y[s] = total;
    }
}

/* Ask for rows, without using them. */
static void ask_for(const Rows *rows, int64_t cols) {
    for (int64_t c = 0; c < cols; c += LINE)
        for (int s = 0; s < STREAMS; s++) __builtin_prefetch(rows->at[s] + c, 0, 1);
}
