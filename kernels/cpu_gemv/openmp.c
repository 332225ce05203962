/* Rung 2, OpenMP: the rows are shared out among threads. No row needs another, so nothing is locked.

   New since naive: one line. */
void gemv(const float *W, const float *x, float *y, int64_t rows, int64_t cols, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t r = 0; r < rows; r++) {
        float acc = 0;
        for (int64_t c = 0; c < cols; c++) acc += W[r * cols + c] * x[c];
        y[r] = acc;
    }
}
