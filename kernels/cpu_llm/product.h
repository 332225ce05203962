/* Rows of a product by one thread, for weights of NUMBER, which the flags give.

     -DNUMBER=half     LOAD=load_half     WIDEN=half_to_float
     -DNUMBER=bfloat   LOAD=load_bfloat   WIDEN=bfloat_to_float
     -DNUMBER=float    LOAD=load          WIDEN=(float)

   As in chapter 02 a vector of x is loaded once for several rows. But these rows are no neighbours: each is one of a
   stream, many rows that lie one behind another, and behind a row its stream simply goes on. The processor sees which
   addresses a loop walks along, and fetches what lies ahead. Neighbouring rows all jump at their end, and it must
   begin anew: that costs a fifth of the time where rows have 4 KB.

   How many streams? Four come closest to reading alone, as long as x stays in the first cache: as long as a row of each
   stream and x fit into it together, since that much passes between two uses of a number of x. A longer x comes from
   the second cache each time, a float for every four weights; six streams ask for it less often. (With eight, rows that
   lie a multiple of 4 KB apart fill all places of a set of the first cache, and x has none there.) */
#pragma once
#include "bfloat.h"
enum { FEW = 4, STREAMS = 6, LINE = 64 / sizeof(NUMBER), AHEAD = 2 }; /* LINE: numbers in a cache line of 64 bytes */
enum { FIRST_CACHE = 1 << 15 }; /* bytes, of most processors; where it is larger, little is lost */

static inline int streams_of(int64_t cols) {
    return cols * (FEW * sizeof(NUMBER) + sizeof(float)) <= FIRST_CACHE ? FEW : STREAMS;
}

/* A row of each stream. */
typedef struct {
    const NUMBER *at[STREAMS];
} Rows;

/* y[s] = rows.at[s] · x; asks for the first lines of the rows that come next, as a stream may end, or begin a page of
   memory, beyond which the processor does not look. */
__attribute__((always_inline))
static inline void streams_times(const int streams, const Rows *rows, const Rows *next, const float *x, float *y,
                                 int64_t cols) {
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

/* Functions of their own, as the addresses of all rows then find place in registers. */
__attribute__((noinline))
static void few(const Rows *rows, const Rows *next, const float *x, float *y, int64_t cols) {
    streams_times(FEW, rows, next, x, y, cols);
}

__attribute__((noinline))
static void many(const Rows *rows, const Rows *next, const float *x, float *y, int64_t cols) {
    streams_times(STREAMS, rows, next, x, y, cols);
}

static void multiply_rows(const Rows *rows, const Rows *next, const float *x, float *y, int64_t cols) {
    (streams_of(cols) == FEW ? few : many)(rows, next, x, y, cols);
}

/* Ask for rows, without using them. */
static void ask_for(const Rows *rows, int64_t cols) {
    for (int64_t c = 0; c < cols; c += LINE)
        for (int s = 0; s < streams_of(cols); s++) __builtin_prefetch(rows->at[s] + c, 0, 1);
}
