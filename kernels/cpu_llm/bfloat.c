/* y = W x with bfloat16 weights: chapter 02's last rung (kernels/cpu_gemv/half.c) with another conversion.

   W (rows, cols) bfloat16, x (cols,) and y (rows,) float; sums are float. */
#include "bfloat.h"
enum { ROWS = 8, LINE = 64 / sizeof(bfloat) }; /* LINE: weights in a cache line of 64 bytes */

/* y[0..7] = W[0..7] · x, for eight rows of `cols` columns. `next` is where the following eight rows begin. */
static void eight_rows(const bfloat *W, const bfloat *next, const float *x, float *y, int64_t cols) {
    vec acc[ROWS] = {{0}};
    int64_t c = 0;
    for (; c + LINE <= cols; c += LINE) {
        for (int r = 0; r < ROWS; r++) __builtin_prefetch(next + r * cols + c, 0, 1); /* to be read; not into L1 */
        for (int v = 0; v < LINE; v += LANES) {
            vec xs = load(x + c + v);
            for (int r = 0; r < ROWS; r++) acc[r] = fma_(load_bfloat(W + r * cols + c + v), xs, acc[r]);
        }
    }
    for (int r = 0; r < ROWS; r++) {
        float total = sum(acc[r]);
        for (int64_t i = c; i < cols; i++) total += bfloat_to_float(W[r * cols + i]) * x[i];
        y[r] = total;
    }
}

static float dot(const bfloat *w, const float *x, int64_t n) {
    vec acc = {0};
    int64_t c = 0;
    for (; c + LANES <= n; c += LANES) acc = fma_(load_bfloat(w + c), load(x + c), acc);
    float total = sum(acc);
    for (; c < n; c++) total += bfloat_to_float(w[c]) * x[c];
    return total;
}

void gemv(const uint16_t *W, const float *x, float *y, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t group = 0; group < (rows + ROWS - 1) / ROWS; group++) {
        int64_t r = group * ROWS, next = r + 2 * ROWS <= rows ? r + ROWS : r; /* never past the end of W */
        if (r + ROWS <= rows) eight_rows(W + r * cols, W + next * cols, x, y + r, cols);
        else /* fewer than eight rows are left */
            for (; r < rows; r++) y[r] = dot(W + r * cols, x, cols);
    }
}
