/* Rows of a product by one thread, for weights of NUMBER, which the flags give.

     -DNUMBER=half     LOAD=load_half     WIDEN=half_to_float
     -DNUMBER=bfloat   LOAD=load_bfloat   WIDEN=bfloat_to_float
     -DNUMBER=float    LOAD=load          WIDEN=(float)

   As in chapter 02 a vector of x is loaded once for several rows. But these rows are no neighbours: each is one of a
   stream, many rows that lie one behind another, and behind a row its stream simply goes on. The processor sees which
   addresses a loop walks along, and fetches what lies ahead. Neighbouring rows jump at their end, all at once,
   and it must begin anew: a fifth of the time where rows have 4 KB.

   How many streams? Four come closest to reading alone. But with four, a quarter as many bytes of x as of W are
   loaded in float, twice as wide; that is no matter while x stays in the first cache. A longer one comes from the second,
   and six streams load it less often. (More find no place in the first cache beside it: rows that lie a multiple of 4 KB apart
   meet in one set of 8 lines.) */
#pragma once
#include "bfloat.h"
enum { FEW = 4, STREAMS = 6, FEW_COLS = 4096 }; /* FEW streams where x has at most FEW_COLS numbers, 16 KB */
enum { LINE = 64 / sizeof(NUMBER), AHEAD = 2 };  /* LINE: numbers in a cache line of 64 bytes */

static inline int streams_of(int64_t cols) { return cols <= FEW_COLS ? FEW : STREAMS; }

/* A row of each stream. */
typedef struct {
    const NUMBER *at[STREAMS];
} Rows;

/* y[s] = rows.at[s] · x; asks for the first lines of the rows that come next, as a stream may end, or begin a page of
   memory, beyond which the processor does not look. */
__attribute__((always_inline)) static inline void streams_times(const int streams, const Rows *rows, const Rows *next,
                                                                const float *x, float *y, int64_t cols) {
    const NUMBER *row[STREAMS];
    vec acc[STREAMS];
    for (int s = 0; s < streams; s++) {
        row[s] = rows->at[s], acc[s] = (vec){0};
        for (int line = 0; line < AHEAD; line++) __builtin_prefetch(next->at[s] + line * LINE, 0, 1); /* not into L1 */
    }
    int64_t c = 0;
#pragma GCC unroll 2
    for (; c + LANES <= cols; c += LANES) {
        vec xs = load(x + c);
        for (int s = 0; s < streams; s++) acc[s] = fma_(LOAD(row[s] + c), xs, acc[s]);
    }
    for (int s = 0; s < streams; s++) y[s] = sum(acc[s]);
    for (; c < cols; c++) /* the last few columns */
        for (int s = 0; s < streams; s++) y[s] += WIDEN(row[s][c]) * x[c];
}

/* Either is a function of its own, in which the rows' addresses stay in registers. */
__attribute__((noinline)) static void few_rows(const Rows *rows, const Rows *next, const float *x, float *y, int64_t cols) {
    streams_times(FEW, rows, next, x, y, cols);
}

__attribute__((noinline)) static void many_rows(const Rows *rows, const Rows *next, const float *x, float *y, int64_t cols) {
    streams_times(STREAMS, rows, next, x, y, cols);
}

/* Ask for rows, without using them. */
static void ask_for(const Rows *rows, int streams, int64_t cols) {
    for (int64_t c = 0; c < cols; c += LINE)
        for (int s = 0; s < streams; s++) __builtin_prefetch(rows->at[s] + c, 0, 1);
}
