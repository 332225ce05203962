/* Rung 4, rows: eight rows at a time. A vector of x is loaded once and used for eight rows, and the eight rows are
   eight streams that the memory serves at once.

   New since simd: the accumulators belong to eight rows instead of one. */
#include "vec.h"
enum { ROWS = 8 };

/* y[0..7] = W[0..7] · x, for eight rows of `cols` columns. */
static void eight_rows(const float *W, const float *x, float *y, int64_t cols) {
    vec acc[ROWS] = {{0}};
    int64_t c = 0;
    for (; c + LANES <= cols; c += LANES) {
        vec xs = load(x + c);
        for (int r = 0; r < ROWS; r++) acc[r] = fma_(load(W + r * cols + c), xs, acc[r]);
    }
    for (int r = 0; r < ROWS; r++) {
        float total = sum(acc[r]);
        for (int64_t i = c; i < cols; i++) total += W[r * cols + i] * x[i];
        y[r] = total;
    }
}

static float dot(const float *w, const float *x, int64_t n) {
    vec acc = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) acc = fma_(load(w + c), load(x + c), acc);
    float total = sum(acc);
    for (; c < n; c++) total += w[c] * x[c];
    return total;
}

void gemv(const float *W, const float *x, float *y, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < (rows + ROWS - 1) / ROWS; group++) {
        int64_t r = group * ROWS;
        if (r + ROWS <= rows) eight_rows(W + r * cols, x, y + r, cols);
        else /* fewer than eight rows are left */
            for (; r < rows; r++) y[r] = dot(W + r * cols, x, cols);
    }
}
