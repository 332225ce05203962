/* Rung 3, SIMD: one instruction multiplies and adds LANES floats, and four accumulators take turns, so that a
   multiply-add need not wait for the one before it.

   New since openmp: the loop over columns. */
#include "vec.h"

static float dot(const float *w, const float *x, int64_t n) {
    vec acc[4] = {{0}};
    int64_t c = 0;
    for (; c + 4 * LANES <= n; c += 4 * LANES)
        for (int a = 0; a < 4; a++) acc[a] = fma_(load(w + c + a * LANES), load(x + c + a * LANES), acc[a]);
    float total = sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    for (; c < n; c++) total += w[c] * x[c]; /* the last few columns */
    return total;
}

void gemv(const float *W, const float *x, float *y, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) y[r] = dot(W + r * cols, x, cols);
}
